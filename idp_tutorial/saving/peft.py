"""Write trained prompts and LoRA matrices in peft's format, and read those that `peft` trained.

Prompt tuning, P-tuning v2 and LoRA exist in both libraries. A file of peft contains the prompt
or the matrices, but not the classification head; a verbalizer has no trained head. Where the
two implementations differ, such as a prompt of an encoder or a prefix with an MLP, the conversion
is refused.
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.task import Task
from idp_tutorial.methods.backbone_edits import revert_backbone
from idp_tutorial.saving.descriptions import tensor_shapes
from idp_tutorial.utils.checks import MissingFileError, UserError, require_packages
from idp_tutorial.utils.durable_files import write_atomically
from idp_tutorial.utils.schemas import Count, Finite, Rule, check_schema

__all__ = ["PEFT_TYPES", "to_peft", "from_peft"]


PEFT_TYPES = {  # method → type of peft
    "prompt-tuning": "PROMPT_TUNING",
    "p-tuning-v2": "PREFIX_TUNING",
    "lora": "LORA",
    "lora-all": "LORA",
}
_ADAPTER_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"
_PROMPT_TENSOR_NAME = "prompt_embeddings"


def _check_peft_compatible(cfg: RunConfig, bb: Backbone) -> None:
    """Check that peft's implementation of a method computes the same."""
    method = cfg.method
    if method not in PEFT_TYPES:
        raise UserError(
            f"method {method!r} cannot be converted to peft, which has no generated or late "
            f"prompts: use {', '.join(map(repr, PEFT_TYPES))}."
        )
    if method in ("prompt-tuning", "p-tuning-v2") and not bb.causal:
        raise UserError(
            f"{method!r} on {bb.family} cannot be converted: for encoders peft inserts a prompt "
            "in front of <s>, and has no prefix of keys and values. Use a decoder."
        )
    if method == "p-tuning-v2" and cfg.get("insertion") not in (None, "kv"):
        raise UserError(
            f"insertion={cfg.get('insertion')!r} cannot be converted: peft has only insertion='kv'."
        )


def _lora_parameters(bb: Backbone) -> dict[str, Tensor]:
    """Return LoRA's parameters under the names that peft saves."""
    return {
        f"base_model.model.{name.replace('.default', '')}": parameter
        for name, parameter in bb.model.named_parameters()
        if ".lora_" in name
    }


def _prompt_tensors(model: PlannedModel) -> list[Tensor]:
    """Return the prompt of each layer in the order of the layers."""
    return [model.plan[layer].source.p for layer in sorted(model.plan)]  # type: ignore[attr-defined]


def _peft_tensors(model: PlannedModel, cfg: RunConfig) -> dict[str, Tensor]:
    if PEFT_TYPES[cfg.method] == "LORA":
        parameters = _lora_parameters(model.backbone)
        return {name: p.detach().cpu().contiguous() for name, p in parameters.items()}
    # a row is one vector: for each layer its keys, then its values
    prompts = [prompt.detach().cpu() for prompt in _prompt_tensors(model)]
    return {_PROMPT_TENSOR_NAME: torch.cat(prompts, 1).contiguous()}


def _build_peft_config(model: PlannedModel, cfg: RunConfig) -> Any:
    from peft import PrefixTuningConfig, PromptTuningConfig

    bb = model.backbone
    common: dict[str, Any] = dict(base_model_name_or_path=bb.name, inference_mode=True)
    if PEFT_TYPES[cfg.method] == "LORA":
        return replace(bb.model.peft_config["default"], **common)
    sizes: dict[str, Any] = dict(
        num_virtual_tokens=cfg.get("prompt_length"),
        token_dim=bb.d,
        num_transformer_submodules=1,
        num_layers=bb.n_layers,
        num_attention_heads=bb.n_heads,
        task_type="CAUSAL_LM",
    )
    if cfg.method == "prompt-tuning":
        return PromptTuningConfig(**sizes, **common)
    return PrefixTuningConfig(encoder_hidden_size=bb.d, prefix_projection=False, **sizes, **common)


def to_peft(
    model: PlannedModel,  # trained model
    cfg: RunConfig,  # config that the model was built with
    folder: Path | str,  # folder to write, created if missing
) -> Path:  # the folder, which `peft.PeftModel.from_pretrained` can read
    """Write a trained prompt or LoRA's matrices as peft does; the head is not written.

    Raises: `UserError` for a method that peft does not have, or implements in another way.
    """
    require_packages("peft")
    _check_peft_compatible(cfg, model.backbone)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary_folder:  # peft does not write atomically
        _build_peft_config(model, cfg).save_pretrained(temporary_folder)
        config = (Path(temporary_folder) / _CONFIG_FILE).read_bytes()
    write_atomically(folder / _CONFIG_FILE, config)
    write_atomically(folder / _ADAPTER_FILE, save(_peft_tensors(model, cfg), {"format": "pt"}))
    return folder


_Unused = Annotated[Any, Rule("false or empty", lambda x: not x)]  # it would change the result


@dataclass
class _AdapterConfig:
    """Schema of the fields of `adapter_config.json` that are used, or must not be."""

    peft_type: Literal["PROMPT_TUNING", "PREFIX_TUNING", "LORA"]
    num_virtual_tokens: Count = 0
    r: Count = 0
    lora_alpha: Finite = 0
    prefix_projection: _Unused = False  # P-tuning v2 has no MLP
    use_rslora: _Unused = False
    use_dora: _Unused = False
    alpha_pattern: _Unused = None
    rank_pattern: _Unused = None


def _read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config of a folder of peft, and its tensors."""
    file = folder / _CONFIG_FILE
    for path in (file, folder / _ADAPTER_FILE):
        if not path.is_file():
            raise MissingFileError(f"there is no {path.name} in {folder}: give a folder of peft.")
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        tensors = load_file(folder / _ADAPTER_FILE)
    except (ValueError, RecursionError, SafetensorError) as e:
        raise UserError(f"{folder} is damaged ({type(e).__name__}): save it again.") from None
    check_schema(_AdapterConfig, saved, file, "train it again with this package")
    n_parameters = sum(tensor.numel() for tensor in tensors.values())
    if max(saved.get("r", 0), saved.get("num_virtual_tokens", 0)) > n_parameters:
        raise UserError(f"{file} has sizes beyond its {n_parameters:,} parameters: save it again.")
    return saved, tensors


def _config_from_peft(peft_config: dict[str, Any], cfg: RunConfig) -> RunConfig:
    """Return `cfg` with the method and the sizes of a config of peft."""
    if peft_config["peft_type"] == "LORA":
        lora = cfg.method if cfg.method in ("lora", "lora-all") else "lora"
        return cfg.with_method(lora, bottleneck=peft_config.get("r", 0))
    methods = {peft_type: method for method, peft_type in PEFT_TYPES.items()}
    t = peft_config.get("num_virtual_tokens", 0)
    return cfg.with_method(methods[peft_config["peft_type"]], prompt_length=t)


def _pair_tensors(
    model: PlannedModel,
    cfg: RunConfig,
    peft_config: dict[str, Any],
    saved: dict[str, Tensor],
    folder: Path | str,
) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter of the model with the tensor of peft that belongs to it.

    Raises: `UserError` for tensors of another model, or another scale of LoRA.
    """
    bb = model.backbone
    if PEFT_TYPES[cfg.method] == "LORA":
        alpha = bb.model.peft_config["default"].lora_alpha
        saved_alpha = peft_config.get("lora_alpha")
        if alpha != saved_alpha:
            raise UserError(
                f"{folder} has alpha={saved_alpha}, but {cfg.method!r} has "
                f"alpha={alpha}, so the predictions would differ: train it again with this package."
            )
        parameters = _lora_parameters(bb)
    else:
        prompts = _prompt_tensors(model)
        parameters = {str(i): prompt for i, prompt in enumerate(prompts)}
        if saved.keys() == {_PROMPT_TENSOR_NAME}:
            chunks = saved[_PROMPT_TENSOR_NAME].chunk(len(prompts), -1)
            saved = {str(i): chunk for i, chunk in enumerate(chunks)}
    if tensor_shapes(parameters) != tensor_shapes(saved):
        raise UserError(
            f"{folder} has other tensors than {cfg.method!r} on {bb.name!r} needs: it belongs to "
            "another model, or changes other matrices."
        )
    return [(parameter, saved[name]) for name, parameter in parameters.items()]


@torch.no_grad()
def from_peft(
    folder: Path | str,  # folder that peft or `to_peft` wrote
    bb: Backbone,  # backbone that it was trained on
    task: Task,  # task of the model
    # config with the options of the head; method and sizes are taken from the folder
    cfg: RunConfig | None = None,
) -> tuple[PlannedModel, RunConfig]:  # a classification head has its initial values
    """Read a prompt or LoRA's matrices that peft trained.

    Raises: `UserError` if it belongs to another model, or was trained with options that differ.
    """
    require_packages("peft")
    peft_config, saved = _read_adapter(Path(folder))
    cfg = _config_from_peft(peft_config, cfg or RunConfig(backbone=bb.name))
    _check_peft_compatible(cfg, bb)
    model = build_model(cfg, bb, task)
    try:
        for parameter, tensor in _pair_tensors(model, cfg, peft_config, saved, folder):
            parameter.copy_(tensor)
    except BaseException:  # leave the caller's backbone as it was
        revert_backbone(bb)
        raise
    return model.eval(), cfg

"""Write trained prompts and LoRA matrices in peft's format.

Prompt tuning, P-tuning v2 and LoRA exist in both libraries. A file of peft contains the prompt
or the matrices, but not the classification head; a verbalizer has no trained head. Where the
two implementations differ, such as a prompt of an encoder or a prefix with an MLP, the conversion
is refused.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.utils.checks import UserError, require_packages
from idp_tutorial.utils.durable_files import write_atomically

PEFT_TYPES = {  # method → type of peft
    "prompt-tuning": "PROMPT_TUNING",
    "p-tuning-v2": "PREFIX_TUNING",
    "lora": "LORA",
    "lora-all": "LORA",
}
_ADAPTER_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"


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


def _peft_tensors(model: PlannedModel, cfg: RunConfig) -> dict[str, Tensor]:
    """Return the trained tensors under the names that peft saves."""
    if PEFT_TYPES[cfg.method] == "LORA":
        tensors = {
            f"base_model.model.{name.replace('.default', '')}": parameter
            for name, parameter in model.backbone.model.named_parameters()
            if ".lora_" in name
        }
    else:  # a row is one vector: for each layer its keys, then its values
        prompts = [model.plan[layer].source.p for layer in sorted(model.plan)]  # type: ignore[attr-defined]
        tensors = {"prompt_embeddings": torch.cat(prompts, 1)}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


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

"""Pretraining of the bundled backbones on raw text: optimizer, loop and checkpoints.

A soft prompt can only steer what a frozen model already knows. A random backbone teaches
nothing about prompting, and a tutorial should not begin with a download. The package therefore
contains a small RoBERTa, `tiny`, which was trained by this loop with the losses of language
modelling; distillation adds what a larger model can teach. What the training achieves is in the
lab: pretraining.

The optimizer is AdamW with float32 master weights, with a linear warm-up and, at the end, a
linear decay to zero.

Half precision doubles the speed of a CPU with bfloat16 instructions, and more on a GPU. But a
weight stored in bfloat16 cannot take a small step. The optimizer therefore keeps
*master weights* in float32, and the model computes with their rounded copies.
"""

import copy
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn

from idp_tutorial.core.dtypes import DTYPES
from idp_tutorial.core.random_numbers import exclusive_random_numbers
from idp_tutorial.training.checkpoint import check_optimizer_state
from idp_tutorial.utils.checks import MissingFileError, Range, UserError
from idp_tutorial.utils.digests import MANIFEST_NAME, require_intact_files, write_manifest
from idp_tutorial.utils.durable_files import folder_lock, move_into_place, write_atomically
from idp_tutorial.utils.records import describe_differences, dump_record
from idp_tutorial.utils.schemas import Count, check_schema, check_structure
from idp_tutorial.utils.tensor_files import list_snapshots, read_last_snapshot, write_snapshot
from results.pretraining.config import PretrainConfig
from results.pretraining.corpus import draw_windows
from results.pretraining.language_modelling import (
    compute_losses,
    create_language_model,
    evaluate_held_out,
)

logger = logging.getLogger(f"idp_tutorial.{__name__}")  # whose messages commands print


class MasterWeightOptimizer:
    """AdamW on float32 master weights, with linear warm-up, a plateau and linear decay to 0.

    Biases and norms (parameters with one dimension) have no weight decay.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],  # modules to train; they are converted to `cfg.dtype`
        cfg: PretrainConfig,  # `lr`, `warmup`, `steps`, `decay_fraction` and `dtype` are used
    ) -> None:
        self.model_parameters = [p for module in modules for p in module.parameters()]
        self.master_parameters = [
            p.detach().clone().requires_grad_() for p in self.model_parameters
        ]
        for module in modules:
            module.to(DTYPES[cfg.dtype])
        matrices = [p for p in self.master_parameters if p.dim() > 1]
        vectors = [p for p in self.master_parameters if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [dict(params=matrices, weight_decay=0.01), dict(params=vectors, weight_decay=0.0)],
            lr=cfg.lr,
            betas=(0.9, 0.98),
            eps=1e-6,
            fused=True,
        )

        def learning_rate_factor(step: int) -> float:
            """Return the factor on the learning rate at a step."""
            warmup = (step + 1) / cfg.warmup
            decay = (cfg.steps - step) / max(1, cfg.decay_fraction * cfg.steps)
            return min(warmup, 1.0, decay)

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate_factor)

    def step(self) -> None:
        """Clip the gradients, update the master weights, and copy them to the model."""
        for parameter, master in zip(self.model_parameters, self.master_parameters):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.master_parameters, 1.0)
        self.optimizer.step()
        self.lr_scheduler.step()
        self.copy_to_model()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the master weights to the model, rounded to its dtype."""
        for parameter, master in zip(self.model_parameters, self.master_parameters):
            parameter.copy_(master)

    @torch.no_grad()
    def copy_from(self, weights: Sequence[Tensor]) -> None:
        """Replace the master weights, and copy them to the model."""
        for master, weight in zip(self.master_parameters, weights, strict=True):
            master.copy_(weight)
        self.copy_to_model()

    def state_dict(self) -> dict:
        """Return the master weights and the states of optimizer and schedule."""
        return dict(
            master_parameters=[master.detach() for master in self.master_parameters],
            optimizer=self.optimizer.state_dict(),
            lr_scheduler=self.lr_scheduler.state_dict(),
        )

    def load_state_dict(self, state: dict) -> None:
        """Restore the state that `state_dict` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self.copy_from(state["master_parameters"])


def _write_log(out: Path, log: list[dict]) -> None:
    write_atomically(out / "log.jsonl", "".join(dump_record(r) + "\n" for r in log).encode())


def write_pretraining_checkpoint(
    out: Path,
    cfg: PretrainConfig,
    masters: MasterWeightOptimizer,
    step: int,
    log: list[dict],
) -> None:
    """Write a checkpoint and `log.jsonl`; the previous checkpoint is kept."""
    content = dict(config=asdict(cfg), optimizer_state=masters.state_dict(), step=step, log=log)
    write_snapshot(out, step, content)
    _write_log(out, log)


_CONTENT_KEYS = ("config", "optimizer_state", "step", "log")  # of every checkpoint
_REMEDY = "delete its checkpoints to start this run again"


@dataclass
class _SavedState:
    """Schema of a saved `MasterWeightOptimizer`."""

    master_parameters: list[Tensor]
    optimizer: dict[str, Any]
    lr_scheduler: dict[str, Any]


@dataclass
class _SavedPretraining:
    """Schema of a checkpoint of pretraining."""

    config: dict[str, Any]
    optimizer_state: _SavedState
    step: Count
    log: list[dict[str, float]]


def _check_state(state: dict[str, Any], masters: MasterWeightOptimizer, source: str) -> None:
    """Check a saved state against the optimizer that continues from it."""
    current = masters.state_dict()
    for name in ("master_parameters", "lr_scheduler"):
        check_structure(state[name], current[name], f"{source}, {name},", _REMEDY)
    check_optimizer_state(state["optimizer"], masters.optimizer, source, _REMEDY)


def load_pretraining_checkpoint(
    out: Path,
    cfg: PretrainConfig,  # of this run
    masters: MasterWeightOptimizer,  # gets the saved weights, moments and schedule
) -> tuple[int, list[dict]]:
    """Return step and log of the last checkpoint after loading it; 0 and [] without one.

    Raises: `UserError` if the checkpoint belongs to a run with another config.
    """
    content = read_last_snapshot(out, _CONTENT_KEYS)
    if content is None:
        return 0, []
    source = f"the checkpoint in {out}"
    check_schema(_SavedPretraining, content, source, _REMEDY)
    differences = describe_differences(content["config"], asdict(cfg))
    if differences:
        raise UserError(
            f"{out} holds another run ({differences}). Use another folder or the same settings."
        )
    _check_state(content["optimizer_state"], masters, source)
    masters.load_state_dict(content["optimizer_state"])
    _write_log(out, content["log"])  # the run may have been killed before it wrote this file
    return content["step"], content["log"]


def load_master_weights(masters: MasterWeightOptimizer, cfg: PretrainConfig) -> None:
    """Copy the weights of the run in `cfg.init_from`, without its optimizer and schedule."""
    content = read_last_snapshot(cfg.init_from, _CONTENT_KEYS)
    if content is None:
        raise MissingFileError(
            f"there is no checkpoint in init_from={cfg.init_from!r}: pass the output folder of "
            "`pretrain` or results/pretraining/run.py, or the folder of a backbone."
        )
    check_schema(
        _SavedPretraining, content, f"the checkpoint in {cfg.init_from}", "use another folder"
    )
    weights = content["optimizer_state"]["master_parameters"]
    if [w.shape for w in weights] != [p.shape for p in masters.master_parameters]:
        raise UserError(
            f"init_from={cfg.init_from!r} is a run of another shape ({content['config']!s:.300}). "
            f"Use the same family, d, n_layers, vocabulary and teacher ({cfg})."
        )
    masters.copy_from(weights)


def find_weights_file(folder: str) -> Path | None:
    """Return the weights in a backbone's folder; None for the folder of a pretraining run."""
    file = Path(folder) / "model.safetensors"
    return file if folder and file.exists() and not list_snapshots(folder) else None


def load_initial_weights(
    model: nn.Module,
    file: Path,  # from `find_weights_file`
    cfg: PretrainConfig,  # for messages
) -> None:
    """Load a backbone's saved weights into a model of the same shape."""
    if (file.parent / MANIFEST_NAME).is_file():
        require_intact_files(file.parent, "Download or save the backbone again.")
    try:
        load_model(model, file)
    except SafetensorError as e:
        raise UserError(f"{file} is damaged ({e}). Download or save the backbone again.") from None
    except RuntimeError as e:  # names or shapes of tensors that differ
        reason = " ".join(str(e).split())
        raise UserError(
            f"init_from={cfg.init_from!r} is a model of another shape ({reason:.300}). Use the "
            f"same family, d, n_layers and vocabulary ({cfg})."
        ) from None


def _create_log_entry(
    step: int,
    cfg: PretrainConfig,
    losses: list[dict[str, Tensor]],  # of the steps since the last evaluation
    seconds: float,  # since the last evaluation
    held_out: dict[str, float],  # from `evaluate_held_out`
) -> dict:
    """Return one line of the log; raise `UserError` if the training loss is not finite."""
    means = {}
    for name in losses[0]:
        values = torch.stack([step_losses[name] for step_losses in losses])
        means[name] = values.float().mean().item()
    if not np.isfinite(means["lm"]):
        raise UserError(
            f"the loss is {means['lm']} at step {step}. Use a lower lr than {cfg.lr} or more "
            "warmup, and another folder, since this one keeps its last checkpoint."
        )
    return dict(
        step=step,
        tokens=step * cfg.tokens_per_step,
        **{name: round(mean, 4) for name, mean in means.items()},
        **{f"held_out_{name}": round(value, 4) for name, value in held_out.items()},
        tokens_per_s=round(len(losses) * cfg.tokens_per_step / seconds),
    )


def _format_log_entry(entry: dict, cfg: PretrainConfig) -> str:
    """Return a line of the log as text, with the estimated remaining time."""
    remaining_tokens = (cfg.steps - entry["step"]) * cfg.tokens_per_step
    minutes = remaining_tokens / max(1, entry["tokens_per_s"]) / 60
    distillation = f"  distil {entry['held_out_distil']:.3f}" if "distil" in entry else ""
    return (
        f"step {entry['step']}/{cfg.steps}  loss {entry['lm']:.3f}  "
        f"held out {entry['held_out_lm']:.3f}  top-1 {entry['held_out_top1']:.3f}{distillation}  "
        f"{entry['tokens_per_s']} tokens/s  {minutes:.0f} min left"
    )


def _initialise(
    tokenizer: Any,
    cfg: PretrainConfig,
    initial_embeddings: Tensor | None,
    distillation_loss: nn.Module | None,
) -> tuple[Any, MasterWeightOptimizer]:
    """Return a model, new or with the weights of a saved backbone, and its optimizer."""
    torch.manual_seed(cfg.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = create_language_model(len(tokenizer), cfg.d, cfg.n_layers, family=cfg.family).to(device)
    if initial_embeddings is not None:
        model.get_input_embeddings().weight.data.copy_(initial_embeddings)
    weights_file = find_weights_file(cfg.init_from)
    if weights_file:
        load_initial_weights(model, weights_file, cfg)
    modules = [model]
    if distillation_loss is not None:
        modules.append(distillation_loss.to(model.device))
    masters = MasterWeightOptimizer(modules, cfg)
    if device == "cuda":
        model.base_model.compile(dynamic=True)  # `compute_losses` calls the base model
    return model, masters


def _train_step(
    model: Any,
    masters: MasterWeightOptimizer,
    stream: np.ndarray,
    tokenizer: Any,
    cfg: PretrainConfig,
    step: int,
    distillation_loss: nn.Module | None,
) -> dict[str, Tensor]:
    """Take one optimizer step on windows that depend on seed and step only; return the losses."""
    rng = np.random.default_rng((cfg.seed, step))
    positions = draw_windows(len(stream) - cfg.held_out_tokens, cfg.tokens_per_step, rng)
    losses = compute_losses(model, stream, positions, rng, tokenizer, distillation_loss)
    (losses["lm"] + cfg.distillation_weight * losses.get("distil", 0.0)).backward()
    masters.step()
    return {name: value.detach() for name, value in losses.items()}


def _start_or_resume(
    out: Path | None, cfg: PretrainConfig, masters: MasterWeightOptimizer
) -> tuple[int, list[dict]]:
    """Return the step and the log of the last checkpoint; 0 and [] for a new run."""
    step, log = load_pretraining_checkpoint(out, cfg, masters) if out else (0, [])
    if not step and cfg.init_from and not find_weights_file(cfg.init_from):
        load_master_weights(masters, cfg)
    return step, log


def check_stream_length(
    n: int,  # token ids of the text
    cfg: PretrainConfig,
) -> None:
    """Raise `UserError` if a text is too short to hold out and to train on."""
    if cfg.held_out_tokens < 64 or n - cfg.held_out_tokens <= 256:
        raise UserError(
            f"the text has {n} ids, of which held_out_tokens={cfg.held_out_tokens} are held out. "
            "At least 64 must be held out, and more than 256 must remain to train on: use more "
            "text or another held_out_tokens."
        )


def _is_bfloat16_emulated(device: torch.device, cfg: PretrainConfig) -> bool:
    """Return whether a run in bfloat16 is on a CPU that has AVX2 and nothing wider."""
    is_on_cpu = device.type == "cpu" and cfg.dtype == "bfloat16"
    return is_on_cpu and torch.backends.cpu.get_cpu_capability() == "AVX2"


@exclusive_random_numbers()
def pretrain(
    stream: np.ndarray,  # token ids `[N]`; the last `cfg.held_out_tokens` are held out
    tokenizer: Any,
    cfg: PretrainConfig,
    out: Path | str | None = None,  # folder for `log.jsonl` and checkpoints, to resume the run
    initial_embeddings: Tensor | None = None,  # initial word embeddings `[V,d]`
    distillation_loss: nn.Module | None = None,  # a `DistillationLoss`, trained with the model
    eval_every: int = 500,  # steps between two evaluations, each of which writes a checkpoint
) -> tuple[Any, list[dict]]:
    """Train a RoBERTa or GPT-2 on raw text; return the model in float32 and the log.

    Runs on the same machine are deterministic, and a run that was killed resumes from `out`.
    """
    Range(1, 10**9, "steps between two checkpoints").check(eval_every, "eval_every")
    check_stream_length(len(stream), cfg)
    out = Path(out) if out else None
    with folder_lock(out):
        model, masters = _initialise(tokenizer, cfg, initial_embeddings, distillation_loss)
        step, log = _start_or_resume(out, cfg, masters)
        if not step and _is_bfloat16_emulated(model.device, cfg):  # a run keeps its dtype
            logger.warning(
                "this processor has no instructions for bfloat16 (it has AVX2): dtype='float32' "
                "is many times faster."
            )
        losses = []
        start_time = time.perf_counter()
        while step < cfg.steps:
            losses.append(
                _train_step(model, masters, stream, tokenizer, cfg, step, distillation_loss)
            )
            step += 1
            if step % eval_every and step != cfg.steps:
                continue
            held_out = evaluate_held_out(
                model, stream, tokenizer, cfg.held_out_tokens, distillation_loss
            )
            log.append(
                _create_log_entry(step, cfg, losses, time.perf_counter() - start_time, held_out)
            )
            logger.info(_format_log_entry(log[-1], cfg))
            if out:
                write_pretraining_checkpoint(out, cfg, masters, step, log)
            losses = []
            start_time = time.perf_counter()
    model = model.float().cpu()
    masters.copy_to_model()
    return model.eval(), log


def save_backbone(
    model: Any,  # model of Transformers; it is not changed
    tokenizer: Any,  # tokenizer of Transformers
    folder: Path | str,  # created if needed
) -> None:
    """Write weights, config, tokenizer and checksums to a folder that `load_backbone` reads.

    The weights are saved in float16.
    """
    folder = Path(folder)
    copied = copy.deepcopy(model).half()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as tmp:
        new = Path(tmp)
        copied.save_pretrained(new)
        tokenizer.save_pretrained(new)
        write_manifest(new)
        # the checksums are moved last, so that a mixture of old and new files is refused
        for file in sorted(new.iterdir(), key=lambda file: file.name == MANIFEST_NAME):
            file.chmod(0o644)
            move_into_place(file, folder / file.name)

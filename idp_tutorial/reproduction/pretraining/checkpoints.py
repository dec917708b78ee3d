"""Checkpoints of pretraining runs, and initial weights from a run or from a saved backbone."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from idp_tutorial.reproduction.pretraining.master_weights import MasterWeightOptimizer
from idp_tutorial.training.checkpoint import check_optimizer_state
from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.durable import (
    MANIFEST_NAME,
    dump_record,
    require_intact_files,
    write_atomically,
)
from idp_tutorial.utils.schemas import Count, check_schema, check_structure
from idp_tutorial.utils.tensor_files import list_snapshots, read_last_snapshot, write_snapshot

__all__ = [
    "write_pretraining_checkpoint",
    "load_pretraining_checkpoint",
    "load_master_weights",
    "find_weights_file",
    "load_initial_weights",
]


def _write_log(out: Path, log: list[dict]) -> None:
    write_atomically(out / "log.jsonl", "".join(dump_record(r) + "\n" for r in log).encode())


def write_pretraining_checkpoint(
    out: Path,
    cfg: Any,  # a `PretrainConfig`
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
    cfg: Any,  # the `PretrainConfig` of this run
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
    saved = content["config"]
    current = asdict(cfg)
    differences = [
        f"{name} was {saved.get(name)!r:.300} and is now {current.get(name)!r:.300}"
        for name in {**saved, **current}
        if saved.get(name) != current.get(name)
    ]
    if differences:
        raise UserError(
            f"{out} holds another run ({', '.join(differences)}). Use another folder or the same "
            "settings."
        )
    _check_state(content["optimizer_state"], masters, source)
    masters.load_state_dict(content["optimizer_state"])
    _write_log(out, content["log"])  # the run may have been killed before it wrote this file
    return content["step"], content["log"]


def load_master_weights(masters: MasterWeightOptimizer, cfg: Any) -> None:
    """Copy the weights of the run in `cfg.init_from`, without its optimizer and schedule."""
    content = read_last_snapshot(cfg.init_from, _CONTENT_KEYS)
    if content is None:
        raise MissingFileError(
            f"there is no checkpoint in init_from={cfg.init_from!r}: pass the output folder of "
            "`pretrain` or idp pretrain, or the folder of a backbone."
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
    cfg: Any,  # a `PretrainConfig`, for messages
) -> None:
    """Load a backbone's saved weights into a model of the same shape."""
    if (file.parent / MANIFEST_NAME).is_file():
        require_intact_files(file.parent, "Download or save the backbone again.")
    try:
        weights = load_file(file)
    except SafetensorError as e:
        raise UserError(f"{file} is damaged ({e}). Download or save the backbone again.") from None
    state = model.state_dict()
    for name, tensor in weights.items():
        if name not in state or state[name].shape != tensor.shape:
            raise _shape_error(f"its {name} is {list(tensor.shape)}", cfg)
    loaded = {state[name].data_ptr() for name in weights}  # tied tensors are stored once
    for name, tensor in state.items():
        if tensor.data_ptr() not in loaded:
            raise _shape_error(f"it has no {name}", cfg)
    model.load_state_dict(weights, strict=False)


def _shape_error(reason: str, cfg: Any) -> UserError:
    return UserError(
        f"init_from={cfg.init_from!r} is a model of another shape ({reason}). Use the same family, "
        f"d, n_layers and vocabulary ({cfg})."
    )

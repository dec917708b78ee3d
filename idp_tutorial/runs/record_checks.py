"""Learning curves and digests for records, and the check whether a record fits a config.

What a run read is stored as digests of the rows, the weights, the word vectors and earlier
prompts, because a folder or file of the same name may have other contents later.
"""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from idp_tutorial.assembly.build import load_config_backbone
from idp_tutorial.assembly.controls import CONTROL_METHODS
from idp_tutorial.core.backbone import backbone_fingerprint
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.task import Task
from idp_tutorial.methods.glove import find_glove_file
from idp_tutorial.training import evaluation
from idp_tutorial.training.examples import encode_for_evaluation
from idp_tutorial.utils.config import RunConfig
from idp_tutorial.utils.durable import compute_digest, file_digest
from idp_tutorial.utils.provenance import SCHEMA_1_DEFAULTS, collect_provenance, upgrade_record
from idp_tutorial.utils.records import config_to_record
from idp_tutorial.utils.tensor_files import PROMPTS_FILE

__all__ = [
    "MAX_EXTRA_LEARNING_RATES",
    "data_digest",
    "input_digests",
    "downsample_losses",
    "split_outputs",
    "provenance_field",
    "describe_lr_selection",
    "matches_config",
    "has_current_weights",
]


def data_digest(
    task: Task,  # with its splits
    include_test: bool = True,  # False: the test split is not read
) -> str:
    """Return a digest of the rows of a task."""
    splits = {s: rows for s, rows in task.splits.items() if include_test or s != "test"}
    return compute_digest(
        json.dumps([s, rows], sort_keys=True).encode() for s, rows in splits.items()
    )


@lru_cache
def _cached_file_digest(file: Path, modified: int, size: int) -> str:
    """Return the digest of a file, computed again only after its time or size has changed."""
    return file_digest(file)[:16]


def input_digests(cfg: RunConfig) -> dict[str, str]:  # keys `glove` and `init_from`; 16 hex digits
    """Return digests of the files that a run reads besides its rows and its backbone.

    A file that the config does not name has no entry.
    """
    prompts = Path(cfg.init_from) / PROMPTS_FILE if cfg.init_from else None
    files = dict(
        glove=find_glove_file(cfg.glove) if cfg.glove else None,
        init_from=prompts if prompts and prompts.is_file() else None,
    )
    digests = {}
    for name, file in files.items():
        if file:
            stat = file.stat()
            digests[name] = _cached_file_digest(file.resolve(), stat.st_mtime_ns, stat.st_size)
    return digests


def downsample_losses(
    losses: list[float],  # one training loss per step
    n_points: int = 50,  # largest number of means to return
) -> list[float]:
    """Return means of the loss over equally many steps each, rounded to four digits."""
    width = max(1, -(-len(losses) // n_points))
    return [float(f"{np.mean(losses[i : i + width]):.4g}") for i in range(0, len(losses), width)]


def split_outputs(
    model: PromptedModel, task: Task, cfg: RunConfig, split: str
) -> tuple:  # logits `[N,C]` or N texts; the N encoded examples
    """Return the outputs of a model for one split of a task, with the encoded examples."""
    examples, _ = encode_for_evaluation(model, task, cfg, task.splits[split])
    device = next(model.parameters()).device
    return evaluation.model_outputs(model, examples, task, 4 * cfg.batch_size, device), examples


def provenance_field(start_time: float) -> dict[str, dict]:  # {'provenance': …}
    """Return the provenance of a run in this process, as an entry for its record."""
    return {"provenance": collect_provenance(start_time, torch.get_num_threads())}


MAX_EXTRA_LEARNING_RATES = 4  # largest number of learning rates that a search adds to its grid


def describe_lr_selection(
    learning_rates: tuple,  # learning rates that are tried; (): the method's three default ones
) -> str:
    """Return the text by which a record states how its learning rate was chosen."""
    if not learning_rates:
        return "best of 3 on validation, seed 0"
    grid = ", ".join(f"{lr:g}" for lr in learning_rates)
    return (
        f"best of {len(learning_rates)} ({grid}; up to {MAX_EXTRA_LEARNING_RATES} more at an edge) "
        "on validation, seed 0"
    )


def _read_same_inputs(record: dict, cfg: RunConfig, task: Task | None) -> bool:
    """Return whether a run read the rows and files of today; older records do not state it."""
    digests = record.get("digests") or {}
    if task:
        allowed = (None, data_digest(task), data_digest(task, include_test=False))
        if digests.get("data") not in allowed:
            return False
    files = {name: digests[name] for name in ("glove", "init_from") if digests.get(name)}
    return not files or files == input_digests(cfg)


def matches_config(
    record: dict,
    cfg: RunConfig,  # `lr=None` fits any learning rate, because it was chosen by a search
    lr_selection: str | None,  # how the learning rate was chosen, as the record states it
    task: Task | None = None,  # with its splits: the record must be of the same rows and files
    **expected_fields,  # further fields of the record and their values
) -> bool:
    """Return whether a record is of a run with this config, on any device."""
    expected = config_to_record(cfg)
    if task:
        expected["split_sizes"] = task.split_sizes()
    expected.update(expected_fields)
    lr = expected.pop("lr")
    for name in ("device", "cache_dir"):  # these change no score
        del expected[name]
    if not record.get("steps") or cfg.method in CONTROL_METHODS:
        del expected["steps"]  # nothing was trained, or it was trained until it converged
    if record.get("lr_selection") != lr_selection or lr not in (None, record["lr"]):
        return False
    record = upgrade_record(record)  # adds fields that an older record lacks
    for name, value in expected.items():
        if record.get(name, SCHEMA_1_DEFAULTS.get(name)) != value:
            return False
    return _read_same_inputs(record, cfg, task)


def has_current_weights(record: dict, cfg: RunConfig) -> bool:
    """Return whether a run used the weights that the backbone of `cfg` has now.

    An older record, which does not state its weights, counts as one that did.
    """
    recorded = (record.get("digests") or {}).get("weights")
    return recorded is None or recorded == backbone_fingerprint(load_config_backbone(cfg))

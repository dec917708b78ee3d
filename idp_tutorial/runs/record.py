"""Records of runs, with everything that is needed to trust a score, and the store that finds them.

The settings of the run come first, under the names of the config's fields. What a run read is
stored as digests of the rows, the weights, the word vectors and earlier prompts, because a
folder or file of the same name may have other contents later.

`RunStore` decides whether what is stored is what a run would compute. Every run that is worth
storing has a *fingerprint*: the fields of the config that can change its result, and the digests of
the weights, rows and files that it reads (`make_fingerprint`). Its record contains the fingerprint,
field by field. So a stored record is the result that is needed if it agrees with the fingerprint;
folders, devices and times play no part. A record that lacks a field of the fingerprint is not the
result, because nobody can tell.

Every record is written as soon as its run ends, and a run that was interrupted is repeated by the
next call.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idp_tutorial.assembly.build import load_config_backbone, weights_dtype
from idp_tutorial.assembly.config import RunConfig, recorded_option
from idp_tutorial.backbones.load import list_backbone_files
from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.data.task import Task
from idp_tutorial.methods.glove import find_glove_file
from idp_tutorial.methods.method_registry import CONTROL_METHODS
from idp_tutorial.training.fit import TrainLog
from idp_tutorial.utils.digests import compute_digest, file_digest
from idp_tutorial.utils.process import process_state
from idp_tutorial.utils.records import (
    SCHEMA_VERSION,
    RecordFields,
    append_record,
    collect_provenance,
    collect_versions,
    config_fingerprint,
    config_to_record,
    read_existing_records,
)
from idp_tutorial.utils.tensor_files import PROMPTS_FILE

_FIELDS = [f.name for f in fields(RecordFields)]


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
        glove=find_glove_file(cfg.get("glove")) if cfg.get("glove") else None,
        init_from=prompts if prompts and prompts.is_file() else None,
    )
    digests = {}
    for name, file in files.items():
        if file:
            stat = file.stat()
            digests[name] = _cached_file_digest(file.resolve(), stat.st_mtime_ns, stat.st_size)
    return digests


# dtype of the weights and state of the files → digest, of the backbones that this process loaded
_BACKBONE_DIGESTS: dict[tuple, str] = {}


def backbone_digest(cfg: RunConfig) -> str:  # 32 hexadecimal digits
    """Return the `backbone_id` of the backbone that a run begins with.

    The backbone is loaded only if its digest is not known to this process, or its files have
    changed since. A backbone of the hub without a full commit hash is always loaded.
    """
    files = []
    for file in list_backbone_files(cfg.backbone):
        stat = file.stat()
        files.append((file.absolute(), stat.st_ino, stat.st_mtime_ns, stat.st_size))
    key = (weights_dtype(cfg), *files)
    digest = _BACKBONE_DIGESTS.get(key)
    if digest is None:
        digest = backbone_id(load_config_backbone(cfg))
        if files:
            _BACKBONE_DIGESTS[key] = digest
    return digest


def run_digests(
    cfg: RunConfig,
    task: Task,  # with its splits
    include_test: bool = True,  # False: the test split is not read
    weights: str | None = None,  # from `backbone_digest`, which is called if it is None
) -> dict[str, str]:
    """Return the digests of everything that a run reads: weights, rows and files."""
    return dict(
        weights=weights or backbone_digest(cfg),
        data=task.digest(include_test),
        **input_digests(cfg),
    )


def make_fingerprint(
    cfg: RunConfig,  # `lr=None`: any learning rate, because the run chooses one
    digests: dict[str, str],  # from `run_digests`
    **conditions: Any,  # further fields of the record that tell two runs apart
) -> dict[str, Any]:
    """Return what determines the result of a run, under the names that its record has.

    These are the fields of the config that can change a result, and the digests of what is read.
    """
    fingerprint = {**config_fingerprint(cfg), "digests": digests, **conditions}
    if cfg.lr is None:
        del fingerprint["lr"]
    if cfg.method in CONTROL_METHODS:  # a control trains until it has converged
        del fingerprint["steps"], fingerprint["eval_every"]
    return json.loads(json.dumps(fingerprint))  # as it is read from a file


def run_key(
    identity: Any,  # a fingerprint, or a list with one, as JSON can represent it
    size: int = 8,  # bytes of the digest
) -> str:  # two hexadecimal digits for each byte
    """Return the key of a run, from which its checkpoints and its logits are named."""
    return compute_digest([json.dumps(identity, sort_keys=True, default=str).encode()], size)


def _downsample_losses(
    losses: list[float],  # one training loss per step
) -> list[float]:
    """Return at most 50 means of the loss over equally many steps each, with four digits."""
    width = max(1, -(-len(losses) // 50))
    return [float(f"{np.mean(losses[i : i + width]):.4g}") for i in range(0, len(losses), width)]


def build_record(
    cfg: RunConfig,
    digests: dict[str, str],  # from `run_digests`
    split_sizes: dict[str, Any],
    start_time: float,  # `time.perf_counter()` at the start of the run, which ends now
    model: PlannedModel | None = None,  # trained; None: the run has no model
    log: TrainLog | None = None,  # of its training; None: nothing was trained
    **values: Any,  # further fields; they replace the fields above
) -> dict[str, Any]:
    """Build the record of a run that has finished or diverged.

    The fields of the config come first; a known field without a value is left out.
    """
    record: dict[str, Any] = dict(
        schema=SCHEMA_VERSION,
        status="done",
        versions=collect_versions(),
        digests=digests,
        split_sizes=split_sizes,
        provenance=collect_provenance(start_time, torch.get_num_threads()),
    )
    if model is not None:
        record |= model.backbone.weights_info
        record |= dict(n_layers=model.backbone.n_layers, params=count_parameters(model))
    if log is not None:
        record |= dict(
            validation=log.validation,
            validation_loss=log.validation_loss,
            steps_done=log.steps,
            ms_per_step=round(log.ms_per_step, 2),
            peak_memory_mb=round(log.peak_memory_mb, 1),
            history=log.history,
            losses=_downsample_losses(log.losses),
        )
        if log.probe:
            record["probe"] = log.probe
    options = config_to_record(cfg)
    record = {**options, **record, **values}
    known = [name for name in _FIELDS if record.get(name) not in (None, "")]
    names = ["schema", "status", *(n for n in options if n not in _FIELDS), *known]
    names += [name for name in record if name not in _FIELDS]
    return {name: record[name] for name in dict.fromkeys(names)}


def format_summary_line(
    record: Mapping[str, Any],  # of a run
) -> str:
    """Return the learning rate, if there is one, and the score of a run as one line."""
    lr = f"lr {record['lr']:.1e}  " if record.get("lr") else ""
    if record["status"] == "diverged":
        return f"{lr}diverged: {record['message']}"
    return f"{lr}{record['metric']} {record['score']:.1f}"


def checkpoint_folder(
    records_file: Path | None,  # JSONL file that gets the record of the run
    fingerprint: Mapping[str, Any],  # from `make_fingerprint`
) -> Path | None:
    """Return the hidden folder of the checkpoints of a run, or None if it has none."""
    if records_file is None or process_state().num_processes > 1:
        return None
    return records_file.with_name(f".{records_file.stem}-checkpoints") / run_key(fingerprint)


def remove_checkpoints(
    folder: Path | None,  # from `checkpoint_folder`
) -> None:
    """Remove the checkpoints of a run whose record is written."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # other runs have checkpoints, or there is no folder
            folder.parent.rmdir()


def _agrees(record: Mapping[str, Any], name: str, value: Any) -> bool:
    """Return whether a record has a value; None stands for the default of an option."""
    if name not in record:
        return False
    recorded = record[name]
    if recorded is None and value is not None and "method" in record:
        recorded = recorded_option(record, name)
    return recorded == value


class RunStore:
    """Records of runs in a JSONL file, which are found again by their fingerprints."""

    def __init__(
        self,
        file: Path | str | None,  # JSONL file; None: records are kept in memory only
        earlier_records: Iterable[dict] = (),  # records of other files, which are not written
    ) -> None:
        self.file = Path(file) if file else None
        self.records: list[dict] = [*earlier_records, *read_existing_records(file)]

    def find(
        self,
        fingerprint: Mapping[str, Any],  # from `make_fingerprint`
    ) -> dict | None:
        """Return the last record that agrees with a fingerprint, or None."""
        for record in reversed(self.records):
            if all(_agrees(record, name, value) for name, value in fingerprint.items()):
                return record
        return None

    def add(self, record: dict) -> dict:
        """Append a record to the file, and return it."""
        if self.file:
            append_record(record, self.file)
        self.records.append(record)
        return record

    def get_or_run(
        self,
        fingerprint: Mapping[str, Any],  # from `make_fingerprint`
        run: Callable[[], dict],  # what to call if nothing is stored
    ) -> dict:
        """Return the stored record of a run; without one, run it and store its record.

        The new record gets the fields of the fingerprint, so that it is found again.
        """
        stored = self.find(fingerprint)
        if stored is not None:
            return stored
        return self.add({**run(), **fingerprint})

"""The logits of runs: one file a comparison, with the digest of each run in its record.

Two methods are compared on the same examples, so the outputs for each example are stored: the
logits of the test split in float32, from which the score can be computed again, and those of the
validation split in float16. The logits of `OUT/NAME.jsonl` are in `OUT/logits/NAME.npz`, whose
members are named `RUN/ARRAY`. A record names its run as `logits/NAME.npz/RUN` and has a digest of
its arrays. The file is replaced as a whole after each run, before the record is written, so a
kill loses the run in progress and no other.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.metrics import QUESTION_METRICS, compute_metric
from idp_tutorial.data.task import Task
from idp_tutorial.runs.record import make_fingerprint, run_key
from idp_tutorial.training import evaluation
from idp_tutorial.training.examples import encode_for_evaluation
from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.digests import compute_digest
from idp_tutorial.utils.durable_files import file_lock, write_atomically
from idp_tutorial.utils.process import process_state

_Arrays = dict[str, np.ndarray]  # name, such as `test` or `test_label`: values


def logits_name(
    cfg: RunConfig,
    task: Task,  # with the splits whose logits are stored
    digests: dict[str, str],  # from `run_digests`
    *identifiers: Any,  # further JSON values that tell two runs apart
) -> str:
    """Return the name of a run in the file of logits: a hash of its config and its inputs."""
    key = run_key([make_fingerprint(cfg, digests), task.digest(), *identifiers], 6)
    return f"{cfg.method}-{cfg.task}-{key}"


def split_outputs(
    model: PlannedModel,
    task: Task,
    cfg: RunConfig,
    split: str,
    outputs: torch.Tensor | list[str] | None = None,  # of `fit`, if it scored this split last
) -> tuple:  # logits `[N,C]` or N texts; the N encoded examples
    """Return the outputs of a model for one split of a task, with the encoded examples."""
    examples = encode_for_evaluation(model, task, cfg, task.splits[split])
    if outputs is None:
        device = next(model.parameters()).device
        batch_size = 4 * cfg.batch_size
        outputs = evaluation.model_outputs(model, examples, task, batch_size, device)
    return outputs, examples


def _read_runs(file: Path) -> dict[str, _Arrays]:  # run: its arrays
    """Return the arrays of all runs of a file."""
    runs: dict[str, _Arrays] = {}
    try:
        with np.load(file) as archive:
            for member in archive.files:
                run, _, name = member.partition("/")
                runs.setdefault(run, {})[name] = archive[member]
    except Exception as e:  # zipfile, zlib and NumPy raise many kinds for damaged bytes
        raise UserError(
            f"{file} is damaged or cannot be read ({type(e).__name__}): restore it, or delete it "
            "and train the runs of its records again."
        ) from e
    return runs


# the last version that was read of each file, and the arrays of its runs
_VERSIONS: dict[Path, tuple[tuple[int, ...], dict[str, _Arrays]]] = {}
_MAX_FILES = 32  # number of files that are kept in memory


def _read_version(file: Path, *version: int) -> dict[str, _Arrays]:
    """Return the arrays of all runs of a file, read again only after the file was replaced."""
    entry = _VERSIONS.pop(file, None)
    if entry is None or entry[0] != version:
        entry = version, _read_runs(file)
    _VERSIONS[file] = entry  # the one used last is at the end
    while len(_VERSIONS) > _MAX_FILES:
        _VERSIONS.pop(next(iter(_VERSIONS)), None)
    return entry[1]


def _digest_arrays(arrays: _Arrays) -> str:
    """Return a digest of names, types, shapes and values (32 hexadecimal digits)."""
    chunks = (
        f"{name} {values.dtype.str} {values.shape} ".encode() + values.tobytes()
        for name, values in sorted(arrays.items())
    )
    return compute_digest(chunks, 16)


def _describe_arrays(file: Path, run: str, arrays: _Arrays) -> dict[str, str]:
    """Return the fields `logits` and `logits_digest` of the record of a run."""
    reference = f"{file.parent.name}/{file.name}/{run}"
    return dict(logits=reference, logits_digest=_digest_arrays(arrays))


def write_run_arrays(
    file: Path,  # `OUT/logits/NAME.npz`, created if needed
    run: str,  # from `logits_name`
    arrays: _Arrays,
) -> dict[str, str]:  # the fields `logits` and `logits_digest` of the record
    """Write the arrays of a run to a file of logits; those of other runs stay."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(file, wait=True):
        runs = {**(_read_runs(file) if file.exists() else {}), run: arrays}
        members: dict[str, Any] = {
            f"{r}/{name}": values for r in runs for name, values in runs[r].items()
        }
        content = io.BytesIO()
        np.savez_compressed(content, **members)
        write_atomically(file, content.getvalue())
    return _describe_arrays(file, run, arrays)


def _to_array(outputs: torch.Tensor | list[str], split: str) -> np.ndarray:
    """Return the test split's logits as float32, others as float16, and texts unchanged."""
    if isinstance(outputs, list):
        return np.array(outputs)
    return outputs.numpy().astype(np.float32 if split == "test" else np.float16)


def save_logits(
    records_file: Path,  # JSONL file of the record
    name: str,  # of the run, from `logits_name`
    outputs: dict[str, tuple],  # split → outputs and examples, as `split_outputs` returns them
    task: Task,  # with the splits of `outputs`
) -> dict[str, str]:  # the fields `logits` and `logits_digest` of the record
    """Write the logits of some splits, with the labels that a comparison needs.

    Of several processes only the main one writes, since the digest in the record is of its logits.
    """
    arrays = {split: _to_array(logits, split) for split, (logits, _) in outputs.items()}
    for split in outputs:
        labels = [row.get("label") for row in task.splits[split]]
        if all(isinstance(label, (int, float)) for label in labels):
            arrays[f"{split}_label"] = np.array(labels)
    records_file = Path(records_file)
    file = records_file.parent / "logits" / f"{records_file.stem}.npz"
    if not process_state().is_main_process:
        return _describe_arrays(file, name, arrays)
    return write_run_arrays(file, name, arrays)


def has_logits(
    record: dict,
    folder: Path | str,  # folder of the records
) -> bool:
    """Return whether a record names logits.

    Raises: `MissingFileError` if their file is missing. Scores alone would give another interval.
    """
    if "logits" not in record:
        return False
    file = (Path(folder) / record["logits"]).parent
    if not file.is_file():
        raise MissingFileError(
            f"{file} is missing: a record names its logits of {Path(record['logits']).name}. Copy "
            f"the folder {file.parent.name!r} to where the records are, or train the run again."
        )
    return True


def load_logits(
    record: dict,
    folder: Path | str,  # folder of the records
) -> _Arrays:  # `SPLIT` `[N,C]` or `[N]` texts, and `SPLIT_label` `[N]` where labels were numbers
    """Return the arrays of a run after they have been compared with their digest.

    Raises: `UserError` for a record without logits, or that names the file if they are damaged.
    """
    if "logits" not in record:
        raise UserError("the record names no logits: train its run again with a file of records.")
    path = Path(folder) / record["logits"]
    file = path.parent.resolve()
    stat = file.stat()
    runs = _read_version(file, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    arrays = runs.get(path.name, {})
    if _digest_arrays(arrays) != record.get("logits_digest"):
        raise UserError(
            f"{path.parent} is damaged: the logits of {path.name} differ from the digest in their "
            "record. Restore the file, or remove the record and train the run again."
        )
    _check_arrays(arrays, path)
    return dict(arrays)


def _check_arrays(arrays: _Arrays, path: Path) -> None:
    """Check that arrays are logits, predicted classes or texts, with a label for each if any."""
    for name, values in arrays.items():
        split = name.removesuffix("_label")
        is_label = split != name
        if is_label:
            fits = values.dtype.kind in "biuf" and values.ndim == 1
        else:  # logits are numbers with a fraction; classes and texts have one dimension
            fits = (values.dtype.kind, values.ndim) in (("f", 2), ("i", 1), ("u", 1), ("U", 1))
        if not fits or (is_label and len(values) != len(arrays.get(split, ()))):
            raise UserError(
                f"array {name!r} of {path.name} in {path.parent} is not logits, but {values.dtype} "
                f"of shape {values.shape}: train the run again."
            )


def majority_vote_score(
    # records of one setting, each with the `folder` of its logits; an odd number avoids ties
    records: list[dict],
) -> float | None:  # in percent
    """Return the test score of the class that most runs predict (IDPG, Table 7).

    In a tie the first class counts. Of a regression, the mean of the predictions is scored. The
    result is None where a record has no logits with labels, and for a metric over groups of rows
    or of probabilities.
    """
    from scipy import stats

    if not records:
        return None
    metric = records[0]["metric"]
    is_over_examples = not {*QUESTION_METRICS, "neg_log_loss"} & {*metric.split("+")}
    folders = [r.get("folder") or "." for r in records]
    if not is_over_examples or not all(map(has_logits, records, folders)):
        return None
    runs = [*map(load_logits, records, folders)]
    logits = [arrays["test"].astype(np.float32) for arrays in runs]
    if not all("test_label" in arrays and arrays["test"].ndim == 2 for arrays in runs):
        return None
    labels = runs[0]["test_label"]
    sizes = [len(values) for values in logits]
    if {*sizes} != {len(labels)}:
        raise UserError(
            f"runs on {records[0]['task']!r} cannot vote, because their test splits have "
            f"{sizes} examples. Give records of one and the same split."
        )
    if logits[0].shape[1] == 1:
        return compute_metric(metric, np.mean(logits, 0)[:, 0], labels)
    votes = [values.argmax(-1) for values in logits]
    return compute_metric(metric, stats.mode(votes).mode, labels)

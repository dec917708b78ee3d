"""Load the splits of a task from a folder or from the Hugging Face hub, and divide them.

A folder `DATA/NAME` has the files `train.jsonl`, `validation.jsonl` and `test.jsonl`, perhaps
compressed, in the columns of this package or of the benchmark. The folders that GLUE and SuperGLUE
distribute can be read as they are. `NAME/k100` is a frozen few-shot set of 100 training rows.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from idp_tutorial.data.few_shot import sample_rows, split_few_shot
from idp_tutorial.data.file_readers import ROW_HINT, detect_format, iterate_lines, iterate_rows
from idp_tutorial.data.rows import (
    check_one_correct_candidate,
    check_row,
    convert_and_check_row,
    convert_benchmark_row,
    group_by_question,
)
from idp_tutorial.data.synthetic import SYNTHETIC_TASKS
from idp_tutorial.data.task import Task
from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.hub_access import offline_if_unreachable, split_revision

__all__ = [
    "SPLIT_NAMES",
    "find_split_files",
    "load_hub_dataset",
    "load_splits_from_folder",
    "load_splits_from_hub",
    "make_splits",
]


# ---- folders

SPLIT_NAMES = {  # split → its names in folders and on the hub
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


def find_split_files(
    folder: Path,
    formats: Sequence[str],  # keys of `FILE_FORMATS`; files of other formats are ignored
) -> dict[str, Path]:  # split → its file
    """Find the files of a folder that contain splits; raise `UserError` for two of one split."""
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and detect_format(p) in formats]
    split_files = {}
    for split, names in SPLIT_NAMES.items():
        matches = [p for p in files if p.name.split(".")[0] in names]
        if len(matches) > 1:
            raise UserError(
                f"{folder} has several files for the split {split!r} "
                f"({', '.join(p.name for p in matches)}): keep one of them."
            )
        if matches:
            split_files[split] = matches[0]
    return split_files


def _has_labels(path: Path) -> bool:
    """Return whether any line of a file has a label other than -1; True for an empty file.

    An empty file is a mistake, which reading it reports.
    """
    lines = [text for _, text in iterate_lines(path) if text.strip()]
    pattern = r'"(?:label\w*|target)"\s*:(?!\s*(-1\b|null))'
    return not lines or any(re.search(pattern, line) for line in lines)


def _find_labelled_files(folder: Path) -> dict[str, Path]:
    """Return the file of each split; a test file without labels is left out with a warning."""
    files = find_split_files(folder, ["jsonl"])
    if "validation" in files and "test" in files and not _has_labels(files["test"]):
        warnings.warn(
            f"{files.pop('test')} has no labels and is ignored. Scores are reported on "
            f"{files['validation'].name}, and a part of the training rows selects the checkpoint.",
            stacklevel=4,
        )
    return files


def _find_task_folder(data: str | Path, name: str) -> Path:
    """Return the folder `data/NAME`, whatever its capitalisation (`BoolQ`)."""
    root = Path(data)
    folder = root / name
    if not folder.is_dir() and root.is_dir():
        names = [p for p in root.iterdir() if p.is_dir() and p.name.lower() == name.lower()]
        folder = min(names, default=folder)
    if folder.is_dir():
        return folder
    if not root.is_dir():
        reason = f"{root} is not a folder"
    elif (root / "train.jsonl").is_file():
        reason = f"{root} is the folder of one task"
    else:
        folders = sorted(p.name for p in root.iterdir() if p.is_dir())
        reason = f"{root} contains {', '.join(folders) or 'no folders'}"
    raise MissingFileError(
        f"there is no folder {folder}: {reason}. "
        f"data= must be the folder that contains {name}/train.jsonl."
    )


def _check_required_files(
    folder: Path, few_shot_folder: Path, files: Mapping[str, Path], is_frozen: bool
) -> None:
    """Raise `MissingFileError` if a training file, or a set's validation file, is missing."""
    required = ("train", "validation") if is_frozen else ("train",)
    missing = [split for split in required if split not in files]
    if not missing:
        return
    sizes = sorted(int(p.name[1:]) for p in folder.glob("k*") if p.name[1:].isdigit())
    hint = ""
    if sizes and not is_frozen:
        hint = f", or use a few-shot set of the folder with shots={' or '.join(map(str, sizes))}"
    names = " and no ".join(f"{split}.jsonl" for split in missing)
    added = "the file" if len(missing) == 1 else "the files"
    raise MissingFileError(
        f"{few_shot_folder if is_frozen else folder} has no {names}: add {added}{hint}."
    )


def _read_task_file(task: Task, path: Path) -> list[dict]:
    """Read and check the rows of one file of JSON lines."""
    rows: list[dict] = []
    for number, (where, record) in enumerate(iterate_rows(path, "jsonl"), 1):
        rows += convert_and_check_row(task, record, number, where)
    if not rows:
        raise UserError(f"{path} has no rows: {ROW_HINT}.")
    if task.grouping == "choose":
        check_one_correct_candidate(rows, str(path))
    return rows


def load_splits_from_folder(
    task: Task,  # the task to load
    data: str | Path,  # the folder that contains a folder with the task's name
    shots: int | None = None,  # size of the few-shot set; None: all training rows
) -> tuple[dict, bool]:  # rows by split, and whether they are a frozen few-shot set
    """Read the splits of a task from `data/NAME/`, or the few-shot set `data/NAME/kSHOTS/`."""
    folder = _find_task_folder(data, task.name)
    files = _find_labelled_files(folder)
    few_shot_folder = folder / f"k{shots}"
    test_file = files.get("test") or files.get("validation")
    if test_file is None:
        raise MissingFileError(
            f"{folder} has neither test.jsonl nor validation.jsonl: add one to report scores on."
        )
    is_frozen = few_shot_folder.is_dir()
    if is_frozen:
        files = {**_find_labelled_files(few_shot_folder), "test": test_file}
    _check_required_files(folder, few_shot_folder, files, is_frozen)
    return {split: _read_task_file(task, path) for split, path in files.items()}, is_frozen


# ---- the hub


def load_hub_dataset(
    name: str,  # name on the hub, perhaps with a revision: `org/name@revision`
    *configuration: str,  # name of the dataset's configuration, if it has several
    failure: str,  # begins the message if the dataset cannot be loaded
    advice: str,  # ends it
) -> Mapping[str, Any]:  # split → `datasets.Dataset`
    """Load a dataset of the Hugging Face hub, from the cache if the hub cannot be reached."""
    import datasets

    name, revision = split_revision(name)
    options = {"revision": revision} if revision else {}
    try:
        with offline_if_unreachable():
            return datasets.load_dataset(name, *configuration, **options)
    except Exception as e:
        raise UserError(f"{failure} ({type(e).__name__}): {advice}.") from e


def _convert_hub_row(task: Task, where: str, record: dict, index: int) -> list[dict]:
    """Convert and check one record of a hub dataset."""
    try:
        rows = convert_benchmark_row(task, record, index)
    except KeyError as e:
        raise UserError(
            f"{where}: no column {e} among {', '.join(record)}. The dataset has changed on the "
            "hub: load the task from a folder with data=DIR."
        ) from e
    except ValueError as e:
        raise UserError(f"{where}: {e}") from e
    return [check_row(task, row, where) for row in rows]


def load_splits_from_hub(
    task: Task,  # a task with a `hub_dataset`
) -> dict:  # rows by split
    """Download the splits of a task from the Hugging Face hub and check their rows."""
    folder = f"the folder that contains {task.name}/train.jsonl"
    if not task.hub_dataset:
        raise UserError(f"task {task.name!r} is not on the hub: pass data=DIR, {folder}.")
    name = "/".join(task.hub_dataset)
    hub_splits = load_hub_dataset(
        *task.hub_dataset,
        failure=f"cannot load {name} from the Hugging Face hub",
        advice=f"connect to the internet, pass data=DIR ({folder}), or use a bundled task: "
        f"{', '.join(SYNTHETIC_TASKS)}",
    )
    splits: dict[str, list[dict]] = {}
    for hub_split, dataset in hub_splits.items():
        split = "validation" if hub_split == "dev" else hub_split.split("_")[0]
        labels = set(dataset[:9].get(task.columns[2], ()))
        if split not in SPLIT_NAMES or labels == {-1}:
            continue  # IMDB's split `unsupervised`, or a split without labels
        rows = splits.setdefault(split, [])
        for i, record in enumerate(dataset.to_list()):
            rows += _convert_hub_row(task, f"{name} {hub_split}, row {i}", record, i)
        if task.grouping == "choose":
            check_one_correct_candidate(rows, f"{name} {hub_split}")
    return splits


# ---- splits of a run


def make_splits(
    task: Task,  # the task that the rows belong to
    raw: dict,  # rows by split, as they were loaded
    shots: int | None,  # number of few-shot training examples; None: all training rows
    split_seed: int,  # seed of the rows that are sampled from train
    stratified: bool = True,  # sample few-shot examples in proportion to the labels?
) -> dict:  # rows of train, validation and test
    """Divide loaded rows into disjoint splits for training, checkpoint selection and reporting."""
    test = raw.get("test") or raw.get("validation")
    if not test or not raw.get("train"):
        raise UserError(
            f"task {task.name!r} needs a train split, and a test or validation split to report the "
            f"score, got {', '.join(raw) or 'no splits'}."
        )
    if shots is not None:
        train, validation = split_few_shot(raw["train"], shots, split_seed, stratified)
    elif raw.get("validation") and raw.get("test"):
        train = raw["train"]
        validation = raw["validation"]
    else:
        n = len(group_by_question(raw["train"]))
        if n < 2:
            raise UserError(
                f"task {task.name!r} has only {n} training row: add rows, or a validation split."
            )
        if task.max_validation_size:
            validation_size = min(task.max_validation_size, n // 5)
        else:
            validation_size = min(1000, n // 10)
        validation, train = sample_rows(raw["train"], max(1, validation_size), split_seed)
    return dict(train=train, validation=validation, test=test)

"""Load the splits of a task from a folder or from the Hugging Face hub, and divide them.

A folder `DATA/NAME` has the files `train.jsonl`, `validation.jsonl` and `test.jsonl`, perhaps
compressed, in the columns of this package or of the benchmark. The folders that GLUE and SuperGLUE
distribute can be read as they are. `NAME/k100` is a frozen few-shot set of 100 training rows.
"""

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from idp_tutorial.data.few_shot import sample_rows, split_few_shot
from idp_tutorial.data.file_readers import ROW_HINT, detect_format, iterate_lines, iterate_rows
from idp_tutorial.data.rows import convert_and_check_rows, group_by_question
from idp_tutorial.data.synthetic import SYNTHETIC_TASKS
from idp_tutorial.data.task import Task
from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.hub_access import offline_if_unreachable, split_revision

_T = TypeVar("_T")

# ---- folders

SPLIT_NAMES = {  # split → its names in folders and on the hub
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


def match_splits(
    items: Mapping[str, _T],  # files or datasets by name, perhaps with an extension
    source: str,  # where they are, for the error message
) -> dict[str, _T]:  # split → its item
    """Find the items whose names are those of a split; raise `UserError` for two of one split."""
    splits = {}
    for split, names in SPLIT_NAMES.items():
        matches = [name for name in items if str(name).split(".")[0] in names]
        if len(matches) > 1:
            raise UserError(
                f"{source} has several tables for the split {split!r} ({', '.join(matches)}): keep "
                "one."
            )
        if matches:
            splits[split] = items[matches[0]]
    return splits


def list_files(
    folder: Path,
    formats: Collection[str],  # of `FILE_FORMATS`; files of other formats are ignored
) -> dict[str, Path]:  # name → path
    """Return the files of a folder that have one of the formats."""
    paths = [p for p in sorted(folder.iterdir()) if p.is_file() and detect_format(p) in formats]
    return {path.name: path for path in paths}


def _has_labels(path: Path) -> bool:
    """Return whether any line of a file has a label other than -1; True for an empty file.

    An empty file is a mistake, which reading it reports.
    """
    lines = [text for _, text in iterate_lines(path) if text.strip()]
    pattern = r'"(?:label\w*|target)"\s*:(?!\s*(-1\b|null))'
    return not lines or any(re.search(pattern, line) for line in lines)


def _find_labelled_files(folder: Path) -> dict[str, Path]:
    """Return the file of each split; a test file without labels is left out with a warning."""
    files = match_splits(list_files(folder, ["jsonl"]), str(folder))
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
    folders = {p.name: p for p in sorted(root.iterdir()) if p.is_dir()} if root.is_dir() else {}
    for folder_name in (name, *folders):
        if folder_name in folders and folder_name.lower() == name.lower():
            return folders[folder_name]
    raise MissingFileError(
        f"data={root} must be a folder that contains {name}/train.jsonl; it contains the folders "
        f"{', '.join(folders) or 'none'}."
    )


def _read_task_file(task: Task, path: Path) -> list[dict]:
    """Read and check the rows of one file of JSON lines."""
    rows = convert_and_check_rows(task, iterate_rows(path, "jsonl"), str(path))
    if not rows:
        raise UserError(f"{path} has no rows: {ROW_HINT}.")
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
    is_frozen = few_shot_folder.is_dir()
    test_file = files.get("test") or files.get("validation")
    if is_frozen:
        files = _find_labelled_files(few_shot_folder) | ({"test": test_file} if test_file else {})
    missing = [] if test_file else ["test.jsonl or validation.jsonl"]
    for split in ("train", "validation") if is_frozen else ("train",):
        if split not in files:
            missing.append(f"{split}.jsonl")
    if missing:
        few_shot = ", ".join(p.name for p in sorted(folder.glob("k*"))) or "none"
        place = few_shot_folder if is_frozen and test_file else folder
        raise MissingFileError(
            f"{place} has no {missing[0]}: add the file "
            f"(few-shot sets of the folder, for shots=: {few_shot})."
        )
    return {split: _read_task_file(task, path) for split, path in files.items()}, is_frozen


# ---- the hub


def load_hub_dataset(
    name: str,  # name on the hub, perhaps with a revision: `org/name@revision`
    *configuration: str,  # name of the dataset's configuration, if it has several
    advice: str,  # ends the message if the dataset cannot be loaded
) -> Mapping[str, Any]:  # split → `datasets.Dataset`
    """Load a dataset of the Hugging Face hub, from the cache if the hub cannot be reached."""
    import datasets

    name, revision = split_revision(name)
    options = {"revision": revision} if revision else {}
    try:
        with offline_if_unreachable():
            return datasets.load_dataset(name, *configuration, **options)
    except Exception as e:
        full_name = "/".join([name, *configuration])
        raise UserError(
            f"cannot load {full_name} from the Hugging Face hub ({type(e).__name__}): {advice}."
        ) from e


def load_splits_from_hub(
    task: Task,  # a task with a `hub_dataset`
) -> dict:  # rows by split
    """Download the splits of a task from the Hugging Face hub and check their rows."""
    advice = f"pass data=DIR, the folder that contains {task.name}/train.jsonl"
    if not task.hub_dataset:
        raise UserError(f"task {task.name!r} is not on the hub: {advice}.")
    hub_splits = load_hub_dataset(
        *task.hub_dataset,
        advice=f"connect to the internet, {advice}, or use a bundled task: "
        f"{', '.join(SYNTHETIC_TASKS)}",
    )
    name = "/".join(task.hub_dataset)
    splits: dict[str, list[dict]] = {}
    for hub_split, dataset in hub_splits.items():
        split = "validation" if hub_split == "dev" else hub_split.split("_")[0]
        labels = set(dataset[:9].get(task.columns[2], ()))
        if split not in SPLIT_NAMES or labels == {-1}:
            continue  # IMDB's split `unsupervised`, or a split without labels
        source = f"{name} {hub_split}"
        records = ((f"{source}, row {i}", record) for i, record in enumerate(dataset.to_list()))
        rows = convert_and_check_rows(task, records, source, is_from_hub=True)
        splits.setdefault(split, []).extend(rows)
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

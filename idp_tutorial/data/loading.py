"""Read and check the rows of a task from a folder or from the Hugging Face hub.

Rows have one format, but they are stored in several. This page reads a user's folder, the
folders that GLUE and SuperGLUE distribute, and the Hugging Face hub. An error names the line
where something is wrong.

A benchmark has its own columns, and sometimes its own label values: SST-2 has a `sentence`,
TREC writes `DESC` where we write 2. The `columns` of a task are therefore format strings
(`'{premise}'`, or `'{word}: {text}'` to join two columns). Where that is not enough,
`convert_row` is a function that converts a line to rows. Both schemas can be read, the
benchmark's and that of this package:
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from idp_tutorial.data.row_readers import ROW_HINT, iterate_lines, parse_json_object
from idp_tutorial.data.rows import check_one_correct_candidate, check_row, require_text
from idp_tutorial.data.task import Task
from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.hub import offline_if_unreachable, split_revision

__all__ = [
    "BUNDLED_TASKS",
    "convert_benchmark_row",
    "convert_and_check_row",
    "read_task_file",
    "load_splits_from_folder",
    "load_splits_from_hub",
]


def convert_benchmark_row(
    task: Task,  # the task that the record belongs to
    record: dict,  # a record with the columns of the benchmark
    line_number: int,  # its number in the file or split
) -> list[dict]:  # rows that are not checked yet
    """Convert a record of the benchmark to rows of this package.

    Raises: `KeyError` with the name of a column that is missing.
    """
    if task.convert_row:
        return task.convert_row(record, line_number)
    first, second, label_column = task.columns
    for column in re.findall(r"{(\w+)}", first + (second if task.pair else "")):
        require_text(record, column)
    row = dict(sentence1=first.format(**record))
    if task.pair:
        row["sentence2"] = second.format(**record)
    label = record[label_column]
    row["label"] = task.hub_labels.index(label) if label in task.hub_labels else label
    return [row]


def convert_and_check_row(
    task: Task,  # the task that the record belongs to
    record: Any,  # a parsed line, in the schema of this package or of the benchmark
    line_number: int,  # its number in the file
    where: str,  # file and line, for error messages
) -> list[dict]:  # checked rows; several where a record is a question with several rows
    """Convert a record in either schema to checked rows."""
    has_row_schema = not isinstance(record, dict) or (
        not task.convert_row and (task.columns[0] == "{sentence1}" or "sentence1" in record)
    )
    rows = [record]
    hint = ""
    if not has_row_schema:
        try:
            rows = convert_benchmark_row(task, record, line_number)
        except KeyError as e:
            hint = f", or the columns of the benchmark, of which {e} is missing"
        except ValueError as e:
            raise UserError(f"{where}: {e}") from e
        except (AttributeError, TypeError) as e:
            raise UserError(
                f"{where}: the line does not have the structure of the benchmark "
                f"{task.name!r} ({e}): use the file as the benchmark distributes it."
            ) from e
    return [check_row(task, row, where, hint) for row in rows]


def read_task_file(
    task: Task,  # the task that the rows belong to
    path: Path,  # a `.jsonl` or `.jsonl.xz` file
) -> list[dict]:  # checked rows
    """Read and check the rows of one file of JSON lines."""
    rows: list[dict] = []
    for line_number, line in iterate_lines(path):
        where = f"{path}, line {line_number}"
        if line.strip():
            record = parse_json_object(line, where)
            rows += convert_and_check_row(task, record, line_number, where)
    if not rows:
        raise UserError(f"{path} has no rows: {ROW_HINT}.")
    if task.grouping == "choose":
        check_one_correct_candidate(rows, str(path))
    return rows


def _has_labels(path: Path) -> bool:
    """Return whether any line of a file has a label other than -1; True for an empty file.

    An empty file is a mistake, which reading it reports.
    """
    lines = [text for _, text in iterate_lines(path) if text.strip()]
    pattern = r'"(?:label\w*|target)"\s*:(?!\s*(-1\b|null))'
    return not lines or any(re.search(pattern, line) for line in lines)


_SPLIT_FILE_NAMES = dict(
    train=("train",),
    validation=("dev", "val", "validation"),  # if a folder has several, the last is used
    test=("test",),
)


def _find_split_files(folder: Path) -> dict[str, Path]:
    """Return the file of each split; a test file without labels is left out with a warning."""
    files = {}
    for split, names in _SPLIT_FILE_NAMES.items():
        for path in [folder / f"{n}{end}" for n in names for end in (".jsonl", ".jsonl.xz")]:
            if path.is_file():
                files[split] = path
    if "validation" in files and "test" in files and not _has_labels(files["test"]):
        warnings.warn(
            f"{files.pop('test')} has no labels and is ignored. Scores are reported on "
            f"{files['validation'].name}, and a part of the training rows selects the checkpoint.",
            stacklevel=2,
        )
    return files


def _find_task_folder(data: str | Path, name: str) -> Path:
    """Return the folder `data/NAME`, whatever its capitalisation (`BoolQ`)."""
    folder = Path(data) / name
    if folder.is_dir() or not folder.parent.is_dir():
        return folder
    matches = [p for p in folder.parent.iterdir() if p.is_dir() and p.name.lower() == name.lower()]
    return min(matches, default=folder)


def _missing_folder_error(folder: Path) -> MissingFileError:
    """Return the error for a task folder that does not exist, with what `data` contains."""
    root = folder.parent
    if not root.is_dir():
        reason = f"{root} is not a folder"
    elif (root / "train.jsonl").is_file():
        reason = f"{root} is the folder of one task"
    else:
        names = sorted(p.name for p in root.iterdir() if p.is_dir())
        reason = f"{root} contains {', '.join(names) or 'no folders'}"
    return MissingFileError(
        f"there is no folder {folder}: {reason}. "
        f"data= must be the folder that contains {folder.name}/train.jsonl."
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


def load_splits_from_folder(
    task: Task,  # the task to load
    data: str | Path,  # the folder that contains a folder with the task's name
    shots: int | None = None,  # size of the few-shot set; None: all training rows
) -> tuple[dict, bool]:  # rows by split, and whether they are a frozen few-shot set
    """Read the splits of a task from `data/NAME/`, or the few-shot set `data/NAME/kSHOTS/`."""
    folder = _find_task_folder(data, task.name)
    if not folder.is_dir():
        raise _missing_folder_error(folder)
    files = _find_split_files(folder)
    few_shot_folder = folder / f"k{shots}"
    test_file = files.get("test") or files.get("validation")
    if test_file is None:
        raise MissingFileError(
            f"{folder} has neither test.jsonl nor validation.jsonl: add one to report scores on."
        )
    is_frozen = few_shot_folder.is_dir()
    if is_frozen:
        files = {**_find_split_files(few_shot_folder), "test": test_file}
    _check_required_files(folder, few_shot_folder, files, is_frozen)
    return {split: read_task_file(task, path) for split, path in files.items()}, is_frozen


BUNDLED_TASKS = (  # the tasks that need no download
    "sentiment",
    "domains",
    "two-domains",
    "two-domains-order",
    "questions",
    "entailment",
    "similarity",
    "in-short",
)


def _convert_hub_row(task: Task, where: str, record: dict, index: int) -> list[dict]:
    """Convert and check one record of a hub dataset."""
    try:
        rows = convert_benchmark_row(task, record, index)
    except KeyError as e:
        raise UserError(
            f"{where}: no column {e} among {', '.join(record)}. The dataset has changed "
            "on the hub: "
            "load the task from a folder with data=DIR."
        ) from e
    except ValueError as e:
        raise UserError(f"{where}: {e}") from e
    return [check_row(task, row, where) for row in rows]


def _download_dataset(task: Task) -> Mapping[str, Any]:
    """Load the hub's dataset of a task, from the cache if the hub cannot be reached."""
    import datasets

    try:
        with offline_if_unreachable():
            name, revision = split_revision(task.hub_dataset[0])
            options = {"revision": revision} if revision else {}
            return datasets.load_dataset(name, *task.hub_dataset[1:], **options)
    except Exception as e:
        raise UserError(
            f"cannot load {'/'.join(task.hub_dataset)} from the Hugging Face hub "
            f"({type(e).__name__}): connect to the internet, pass data=DIR (the folder "
            "that contains "
            f"{task.name}/train.jsonl), or use a bundled task: {', '.join(BUNDLED_TASKS)}."
        ) from e


def load_splits_from_hub(
    task: Task,  # a task with a `hub_dataset`
) -> dict:  # rows by split
    """Download the splits of a task from the Hugging Face hub and check their rows."""
    if not task.hub_dataset:
        raise UserError(
            f"task {task.name!r} is not on the hub: "
            f"pass data=DIR, the folder that contains {task.name}/train.jsonl."
        )
    name = "/".join(task.hub_dataset)
    splits: dict[str, list[dict]] = {}
    for hub_split, dataset in _download_dataset(task).items():
        split = "validation" if hub_split == "dev" else hub_split.split("_")[0]
        labels = set(dataset[:9].get(task.columns[2], ()))
        if split not in ("train", "validation", "test") or labels == {-1}:
            continue  # IMDB's split `unsupervised`, or a split without labels
        rows = splits.setdefault(split, [])
        for i, record in enumerate(dataset.to_list()):
            rows += _convert_hub_row(task, f"{name} {hub_split}, row {i}", record, i)
        if task.grouping == "choose":
            check_one_correct_candidate(rows, f"{name} {hub_split}")
    return splits

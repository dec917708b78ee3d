"""Turn a table, a folder of splits or a hub dataset into a task.

One file is one table. A folder may contain `train`, `validation` and `test` in any of the
formats. A name such as `org/name` is a dataset of the Hugging Face hub, with an optional
revision after `@`.
"""

import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

from idp_tutorial.data.row_readers import detect_format, iterate_rows, iterate_table_rows
from idp_tutorial.data.rows import suggest_delimiter
from idp_tutorial.data.task import Task
from idp_tutorial.data.task_from_rows import hold_out_rows, make_task, parse_label
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.hub import offline_if_unreachable

__all__ = [
    "SPLIT_ALIASES",
    "find_split_sources",
    "resolve_columns",
    "require_nonempty_text",
    "load_table_task",
    "register_table_task",
    "register_table_from_options",
]


SPLIT_ALIASES = dict(
    train=("train",), validation=("validation", "valid", "val", "dev"), test=("test",)
)


def _load_hub_splits(name: str) -> dict[str, Any]:
    """Load the splits of a hub dataset, `org/name` or `org/name@revision`."""
    import datasets

    name, _, revision = name.partition("@")
    try:
        with offline_if_unreachable():
            dataset = datasets.load_dataset(name, revision=revision or None)
    except Exception as e:
        raise UserError(
            f"there is no file or folder {name}, and it cannot be loaded as a dataset of "
            "the Hugging "
            f"Face hub ({type(e).__name__}): correct the name, or connect to the internet."
        ) from None
    return {
        split: dataset[n] for split, names in SPLIT_ALIASES.items() for n in names if n in dataset
    }


def _find_folder_splits(folder: Path) -> dict[str, Path]:
    """Return the file of each split in a folder."""
    files = [p for p in sorted(folder.iterdir()) if detect_format(p) != "auto"]
    sources = {}
    for split, names in SPLIT_ALIASES.items():
        matches = [p for p in files if p.name.split(".")[0] in names]
        if len(matches) > 1:
            raise UserError(
                f"{folder} has several files for the split {split!r} "
                f"({', '.join(p.name for p in matches)}): keep one of them."
            )
        if matches:
            sources[split] = matches[0]
    return sources


def find_split_sources(
    data: str,  # a file, '-' (standard input), a folder, or the name of a hub dataset
) -> dict:  # split → path, or a `datasets.Dataset`
    """Find the file or the dataset that contains each split."""
    path = Path(data)
    sources: dict[str, Any]
    if data == "-" or path.is_file():
        return dict(train=data)
    if path.is_dir():
        sources = _find_folder_splits(path)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", data) and detect_format(data) == "auto":
        sources = _load_hub_splits(data)
    else:
        raise MissingFileError(
            f"there is no file or folder {data}: pass a CSV, TSV, Parquet or JSON-lines "
            "file, a folder "
            "with train.csv, or the name of a hub dataset, org/name."
        )
    if "train" not in sources:
        raise UserError(
            f"{data} has no training rows: "
            "name a file train.csv, train.tsv, train.jsonl or train.parquet."
        )
    return sources


def resolve_columns(
    row: dict,  # a row of the table
    where: str,  # file and line, for error messages
    text: str | None,  # column of the text; None: text, sentence1 or sentence
    text2: str | None,  # column of the second text; None: sentence2 if text is sentence1
    label: str | None,  # column of the label; None: label
) -> tuple:  # names of the columns of the text, the second text (or None) and the label
    """Return the columns of a table; columns with the usual names need not be given."""
    text = text or next((c for c in ("text", "sentence1", "sentence") if c in row), None)
    text2 = text2 or ("sentence2" if text == "sentence1" and "sentence2" in row else None)
    label = label or "label"
    for argument, column in (("text", text), ("text2", text2), ("label", label)):
        if column not in row and (column or argument == "text"):
            hint = suggest_delimiter([*map(str, row)]) or f"pass its name in {argument}="
            raise UserError(
                f"{where}: no column {column or argument!r} among "
                f"{', '.join(map(str, row))}: {hint}."
            )
    roles = dict(text=text, label=label, text2=text2)
    for argument, column in roles.items():
        same = [other for other in roles if other != argument and roles[other] == column]
        if same:
            raise UserError(
                f"{where}: {argument} and {same[0]} are both the column {column!r}: "
                "they must be different columns."
            )
    return text, text2, label


def require_nonempty_text(
    row: dict,  # a row of the table
    column: str,  # name of the column
    where: str,  # file and line, for the error message
) -> str:
    """Return the string in a column; raise `UserError` if it is missing, empty or not a string."""
    text = row.get(column)
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            f"{where}: {column} must be a text that is not empty, got {text!r:.60}: "
            "correct the row or remove it."
        )
    return text


def _read_labelled_rows(
    source: Any, format: str | None, columns: Sequence[str | None], regression: bool
) -> tuple[list[dict], tuple]:
    """Read the rows of a split and its columns; without any label the list of rows is empty."""
    rows = []
    label_names = None
    resolved: tuple = ()
    is_file = isinstance(source, (str, Path))
    where = ("standard input" if source == "-" else source) if is_file else source.split
    table = iterate_rows(source, format) if is_file else iterate_table_rows(source, str(where))
    for row_location, row in table:
        resolved = resolve_columns(row, row_location, *columns)
        text, text2, label_column = resolved
        features = getattr(source, "features", {})
        label_names = label_names or getattr(features.get(label_column), "names", None)
        label = row[label_column]
        if label_names:  # a `ClassLabel`, in which -1 means that the label is missing
            label = None if label in (None, -1) else label_names[label]
        texts = dict(sentence1=require_nonempty_text(row, text, row_location))
        if text2:
            texts["sentence2"] = require_nonempty_text(row, text2, row_location)
        rows.append({**texts, "label": label, "where": row_location})
    if not rows:
        raise UserError(f"{where} has no rows: it must contain at least a few of each class.")
    if all(r["label"] in (None, "", -1, "-1") for r in rows):
        return [], resolved
    for row in rows:
        row["label"] = parse_label(row["label"], row.pop("where"), regression)
    return rows, resolved


def _check_fractions(fractions: dict[str, float]) -> None:
    """Raise `UserError` unless the fractions to hold out leave rows for training."""
    for split, fraction in fractions.items():
        if not (isinstance(fraction, Real) and 0 < fraction < 1):
            raise UserError(
                f"{split} must be a fraction of the rows between 0 and 1, such as 0.1"
                f"{', or 0 for no test split' if split == 'test' else ''}, got {fraction}."
            )
    if sum(fractions.values()) >= 1:
        given = " and ".join(f"{split}={fraction}" for split, fraction in fractions.items())
        raise UserError(f"{given} leave no rows for training: their sum must be below 1.")


def _read_splits(
    data: str, format: str | None, columns: Sequence[str | None], regression: bool
) -> tuple[dict[str, list], tuple]:
    """Read the splits of a table that have labels, and the columns of the last split read."""
    splits = {}
    resolved: tuple = ()
    for split, source in find_split_sources(data).items():
        rows, resolved = _read_labelled_rows(source, format, columns, regression)
        if rows:
            splits[split] = rows
        else:
            warnings.warn(
                f"The {split} rows of {data} have no labels and are ignored.", stacklevel=3
            )
    if "train" not in splits:
        raise UserError(
            f"the rows of {data} have no labels: pass the name of the column in label=."
        )
    n_classes = len({r["label"] for r in splits["train"]})
    n_train = len(splits["train"])
    if not regression and 2 * n_classes > n_train:
        raise UserError(
            f"{data} has {n_classes} classes in {n_train} training rows: check that "
            f"{resolved[2]!r} is "
            "the column of the classes (label=), or pass regression=True if the labels are numbers."
        )
    return splits, resolved


def load_table_task(
    data: str | Path,  # a file, '-' (standard input), a folder, or the name of a hub dataset
    text: str | None = None,  # column of the text; None: text, sentence1 or sentence
    text2: str | None = None,  # column of the second text, for pairs
    label: str | None = None,  # column of the label; None: label
    format: str | None = None,  # key of `FILE_FORMATS`; None: detect it from the file's suffix
    regression: bool = False,  # are the labels numbers, not classes?
    validation: float = 0.1,  # fraction of the rows to hold out if there is no validation split
    # fraction of the rows to hold out if there is no test split; 0: test on the validation rows
    test: float = 0.1,
    seed: int = 0,  # seed of the rows that are held out
) -> tuple[Task, list]:  # the task with its splits, and the names of the splits that were held out
    """Read a table, hold out the splits that it lacks, and define a task with its rows."""
    splits, columns = _read_splits(str(data), format, (text, text2, label), regression)
    fractions = {}
    if test and "test" not in splits:
        fractions["test"] = test
    if "validation" not in splits:
        fractions["validation"] = validation
    _check_fractions(fractions)
    held_out: list[str] = []
    for split, fraction in fractions.items():
        # a fraction is of all rows, and the test rows are already removed
        remaining = 1 - test if held_out == ["test"] else 1
        splits["train"], splits[split] = hold_out_rows(splits["train"], fraction / remaining, seed)
        held_out.append(split)
    splits.setdefault("test", splits["validation"])
    stem = Path(str(data).partition("@")[0]).name.split(".")[0]
    name = re.sub(r"\W+", "-", stem).strip("-") or "stdin"
    templates = tuple("{" + c + "}" if c else c for c in columns[:2])
    return make_task(name, splits, columns=templates + columns[2:]), held_out


def _describe_table_task(task: Task, held_out: Sequence[str]) -> str:
    """Describe the splits and the classes of a table's task in one line."""
    sizes = (f"{len(task.splits[split])} {split}" for split in ("train", "validation", "test"))
    parts = [", ".join(sizes) + " rows"]
    if held_out:
        proportion = ", in proportion to the classes" if task.labels else ""
        parts.append(f"held out at random{proportion}: {' and '.join(sorted(held_out))}")
    if task.splits["test"] == task.splits["validation"]:
        parts.append("no test rows: the validation rows report the score, which is then too high")
    if task.labels:
        names = ", ".join(task.labels[:12]) + (" …" if len(task.labels) > 12 else "")
        parts.append(f"{len(task.labels)} classes: {names}")
    else:
        parts.append("regression")
    return f"{task.name}: {'; '.join(parts)}"


def register_table_task(
    data: str | Path,  # a file, '-' (standard input), a folder, or the name of a hub dataset
    **table_options: Any,  # other arguments of `load_table_task`
) -> tuple[Task, str]:  # the task, and a one-line description of its splits and classes
    """Load the task of a table and add it to `TASKS`."""
    task, held_out = load_table_task(data, **table_options)
    is_registered = task.name in TASKS and not TASKS[task.name].splits
    task = replace(task, name=f"own-{task.name}" if is_registered else task.name)
    TASKS[task.name] = task
    return task, _describe_table_task(task, held_out)


def register_table_from_options(
    options: dict,  # options of a command, by name
    default_task: str = "questions",  # default of the command's option `task`
) -> str:  # the name of the task
    """Add the table that a command's options describe to `TASKS`, and print it to stderr."""
    names = ("text", "text2", "label", "format", "regression", "validation", "test")
    if not options.get("table") or options.get("data"):
        problem = "data is a folder of known tasks" if options.get("data") else "no table is given"
        raise UserError(
            f"{', '.join(names[:-1])} and {names[-1]} describe a table, but {problem}: "
            "pass a table too, such as tickets.csv with text=message and label=topic."
        )
    if options.get("task", default_task) != default_task:
        raise UserError(
            f"task={options['task']} and the table {options['table']} are two tasks: give "
            "one of them."
        )
    table_options = {name: options[name] for name in names if name in options}
    task, description = register_table_task(
        options["table"], **table_options, seed=options.get("split_seed", 0)
    )
    print(description, file=sys.stderr)
    return task.name

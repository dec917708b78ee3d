"""Define a task from the user's own rows: a table, a folder of splits, a dataset.

A table is one file of any format of `data.file_readers`. A folder may contain `train`, `validation`
and `test` in any of the formats, or a dataset that `save_to_disk` saved. A name such as `org/name`
is a dataset of the Hugging Face hub, with an optional revision after `@`. In Python a
`datasets.Dataset` or `DatasetDict` is a table too. Splits that are missing are held out from the
training rows.

Rows are held out in proportion to the classes. A tenth of a class with three rows is less than one
row; a tenth of twenty such classes is six rows. The integer part of each class's quota is
held out, and one row more of the classes with the largest fractional parts, until the total is
right.
(`sklearn.model_selection.train_test_split` refuses a class with one row.)
"""

import json
import math
import random
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from idp_tutorial.data.config import FRACTION_HINT, TableConfig
from idp_tutorial.data.file_readers import detect_format, has_header, iterate_rows
from idp_tutorial.data.rows import (
    convert_label,
    is_empty_text,
    log_skipped,
    refuse_missing,
    require_text,
    require_utf8,
)
from idp_tutorial.data.splits import list_files, load_hub_dataset, match_splits
from idp_tutorial.data.table_checks import (
    RowFaults,
    text_key,
    warn_about_labels,
    warn_about_repeated_texts,
    warn_about_shared_texts,
)
from idp_tutorial.data.task import TEXT_COLUMNS, Task, make_column_templates
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.utils.checks import MissingFileError, Range, UserError, is_number, parse_number
from idp_tutorial.utils.options import check_option_name, declared_options

_MIN_LABEL_RANGE, _MAX_LABEL = 1e-30, 1e30  # of a regression, which is computed in float32

__all__ = [
    "is_saved_dataset",
    "select_splits",
    "resolve_columns",
    "parse_label",
    "parse_labels",
    "check_labels",
    "format_labels",
    "decode_hub_label",
    "sort_class_names",
    "make_task",
    "hold_out_rows",
    "load_table_task",
    "register_table_task",
]


# ---- where the splits are


def is_saved_dataset(
    folder: str | Path,
) -> bool:
    """Return whether a folder holds a dataset that `save_to_disk` of `datasets` saved."""
    names = ("dataset_dict.json", "state.json")
    return any((Path(folder) / name).is_file() for name in names)


def _load_saved_dataset(folder: Path) -> Any:
    """Load a `Dataset` or `DatasetDict` that `save_to_disk` saved."""
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except Exception as e:
        raise UserError(
            f"{folder} cannot be loaded as a saved dataset ({type(e).__name__}): it is damaged or "
            "incomplete; save it again with save_to_disk."
        ) from None


def select_splits(
    data: Any,  # a `datasets.Dataset` or `DatasetDict`, or files by name
    source: str = "the dataset",  # name of the data, for error messages
) -> dict[str, Any]:  # split → its dataset or file
    """Return the splits of a dataset or folder; a dataset without splits is a training split."""
    if not isinstance(data, Mapping):
        return {"train": data}
    splits = match_splits(data, source)
    if "train" not in splits:
        raise UserError(
            f"{source} has no training rows, only {', '.join(map(str, data)) or 'other files'}: "
            "name a split train, or a file train.csv, train.tsv, train.jsonl or train.parquet."
        )
    return splits


def _find_sources(data: Any) -> dict[str, Any]:
    """Return the file of each split as a path, or its dataset."""
    if not isinstance(data, (str, Path)):
        if hasattr(data, "column_names"):
            return select_splits(data)
        raise UserError(
            f"data must be a file, a folder, a name on the hub, or a Dataset or DatasetDict of "
            f"datasets, got {data!r:.60}."
        )
    data = str(data)
    path = Path(data)
    if data == "-" or path.is_file():
        return {"train": data}
    if path.is_dir():
        tables = list_files(path, ["csv", "tsv", "jsonl", "parquet", "xlsx"])
        is_saved = is_saved_dataset(path)
        return select_splits(_load_saved_dataset(path) if is_saved else tables, data)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", data) and detect_format(data) == "auto":
        dataset = load_hub_dataset(
            data,
            advice="correct the name of the dataset, file or folder, or connect to the internet",
        )
        return select_splits(dataset, data)
    raise MissingFileError(
        f"there is no file or folder {data}: pass a CSV, TSV, JSON, Parquet or Excel file, a "
        "folder with train.csv or of save_to_disk, or the name of a hub dataset, org/name."
    )


# ---- texts and labels


def resolve_columns(
    names: Collection,  # names of the columns of a table
    where: str,  # the table, or file and line of a row, for error messages
    text: str | None,  # column of the text; None: text, sentence1 or sentence
    text2: str | None,  # column of the second text; None: sentence2 beside sentence1, or no column
    label: str | None,  # column of the label; None: no column
) -> tuple[str, str | None, str | None]:
    """Return the columns of text, second text and label; raise `UserError` if one is missing."""
    text = text or next((c for c in ("text", "sentence1", "sentence") if c in names), "text")
    text2 = text2 or ("sentence2" if text == "sentence1" and "sentence2" in names else None)
    roles = {"text": text, "label": label, "text2": text2}
    given = {argument: column for argument, column in roles.items() if column}
    for argument, column in given.items():
        if column not in names:
            hint = ", or the separator of the columns in sep=" if len(names) == 1 else ""
            raise UserError(
                f"{where}: no column {column!r} among {', '.join(map(str, names))}: pass its name "
                f"in {argument}={hint}."
            )
    if len({*given.values()}) < len(given):
        raise UserError(f"{where}: {', '.join(given)} must be different columns, got {given}.")
    return text, text2, label


def parse_label(
    value: Any,  # value of the label column
    where: str,  # file and line, for error messages
    regression: bool = False,  # must the label be a number?
) -> str | float:  # the name of a class, or the number of a regression
    """Return a label as a class name or a float; raise `UserError` if it is missing or invalid."""
    value = value.item() if isinstance(value, np.generic) else value
    if is_empty_text(value):
        raise UserError(
            f"{where}: every row needs a label, got {value!r}: add the label or remove the row."
        )
    if regression:
        try:
            number = parse_number(value) if isinstance(value, str) else float(value)
        except (ValueError, TypeError, OverflowError):  # a whole number of 400 digits
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise UserError(
                f"{where}: the label of a regression must be a number, got {value!r:.60}."
            )
        return number
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not isinstance(value, str) and not is_whole:
        raise UserError(
            f"{where}: the label is {value!r:.60}, but a class is a text or a whole number: pass "
            "regression=True for numbers, or multi_label=True for lists of labels."
        )
    return require_utf8(str(value).strip(), f"{where}: the label")


def parse_labels(
    value: Any,  # value of the label column: names joined by |, a list of names, or a JSON list
    where: str,  # file and line, for error messages
) -> list[str]:  # names of labels, each once; [] for an empty value
    """Return the labels of a row that may have several; raise `UserError` if they are invalid."""
    names = value
    if isinstance(value, str):
        names = value.split("|") if value.strip() else []
        if value.lstrip().startswith("["):
            try:
                names = json.loads(value)
            except ValueError:
                names = None
    elif is_number(value) and value == value:
        names = [value]
    elif isinstance(value, np.ndarray):
        names = value.tolist()
    if not isinstance(names, (list, tuple, set)) or any(
        not isinstance(n, (str, int, float)) or not str(n).strip() for n in names
    ):
        raise UserError(
            f"{where}: the labels are {value!r:.60}: write names joined by |, such as "
            "billing|urgent, or a JSON list of names; leave the cell empty for no label."
        )
    return list(dict.fromkeys(str(name).strip() for name in names))


def format_labels(
    names: Sequence[str],  # labels of a row
) -> str:  # as `parse_labels` reads it
    """Return the labels of a row as one text: joined by |, or a JSON list if a name contains |."""
    has_separator = any("|" in name or name.startswith("[") for name in names)
    return json.dumps([*names], ensure_ascii=False) if has_separator else "|".join(names)


def _class_names(label: Any) -> list:
    """Return the class of a row, or its labels if it may have several, as a list."""
    return label if isinstance(label, list) else [label]


def decode_hub_label(
    label: Any,  # value of a row
    feature: Any,  # type of its column in `datasets`; None: not known
) -> Any:  # the name of a class, or a list of names; without a `ClassLabel` the value itself
    """Return the names of a `ClassLabel`, in which -1 means that the label is missing."""
    if names := getattr(feature, "names", None):
        return None if label in (None, -1) else names[label]
    if names := getattr(getattr(feature, "feature", None), "names", None):  # a list of them
        return None if label is None else [names[i] for i in label]
    return label


def _name_source(source: Any) -> str:
    """Return the name of a file or of a dataset, for messages."""
    return str(source if isinstance(source, (str, Path)) else source.split or "dataset")


def _iterate_source(
    source: Any, table: TableConfig, faults: RowFaults
) -> Iterable[tuple[str, dict]]:
    """Return the rows of a file or of a dataset, with their location."""
    reading = {name: getattr(table, name) for name in ("format", "encoding", "sep")}
    if isinstance(source, (str, Path)):
        return iterate_rows(source, **reading, on_fault=partial(faults.add, "row"))
    if given := [name for name, value in reading.items() if value is not None]:
        raise UserError(f"{given[0]} describes a file, and the data is a dataset: leave it out.")
    return ((f"{_name_source(source)}, row {n}", row) for n, row in enumerate(source, 1))


def check_labels(
    labels: Sequence,  # labels of all rows, one for each row
    places: Sequence[str],  # file and line of each row
) -> None:
    """Raise `UserError` that counts missing labels, and for texts beside numbers."""
    missing = [place for place, label in zip(places, labels) if is_empty_text(label)]
    refuse_missing(missing, len(labels), "label", "add the labels or remove these rows")
    is_text = [isinstance(label, str) for label in labels]
    if len({*is_text}) > 1:
        i = is_text.index(not is_text[0])
        raise UserError(
            f"{places[i]}: the label is {labels[i]!r:.40}, but that of {places[0]} is "
            f"{labels[0]!r:.40}: write all labels as texts, or all as numbers."
        )


@dataclass
class _TableRows:
    """The rows of one file or dataset, and what is wrong with the others."""

    rows: list[dict] = field(default_factory=list)  # with texts and a label
    places: list[str] = field(default_factory=list)  # file and line of each row
    columns: tuple = ()  # of the text, the second text and the label
    faults: RowFaults = field(default_factory=RowFaults)

    @property
    def n_rows(self) -> int:
        """The number of rows in the source."""
        return len(self.rows) + len(self.faults.without_text) + sum(self.faults.counts.values())


def _read_texts(source: Any, table: TableConfig) -> _TableRows:
    """Read the rows of a split; their labels are as the source has them."""
    read = _TableRows()
    features = getattr(source, "features", None) or {}
    columns = (table.text, table.text2, table.label or "label")
    is_file = isinstance(source, (str, Path))
    names_columns_once = not is_file or has_header(source, table.format)
    for where, row in _iterate_source(source, table, read.faults):
        place = _name_source(source) if names_columns_once else where
        text, text2, label = read.columns = resolve_columns(row, place, *columns)
        used = [text, text2] if text2 else [text]
        if any(is_empty_text(row[column]) for column in used):
            read.faults.without_text.append(where)
            continue
        try:
            texts = [require_text(row[column], f"{where}: {column}") for column in used]
        except UserError as e:
            read.faults.add("text", e)
            continue
        decoded = decode_hub_label(row[label], features.get(label))
        read.rows.append({**dict(zip(TEXT_COLUMNS, texts)), "label": decoded})
        read.places.append(where)
    return read


def _parse_labels_of_rows(read: _TableRows, table: TableConfig) -> None:
    """Replace the labels of rows by class names or numbers; rows without one are left out."""
    labelled = []
    for row, where in zip(read.rows, read.places):
        if not table.multi_label and is_empty_text(row["label"]):
            read.faults.without_label.append(where)
        else:
            labelled.append((row, where))
    if not table.multi_label and labelled:
        try:
            check_labels([row["label"] for row, _ in labelled], [where for _, where in labelled])
        except UserError as e:
            read.faults.add("label", e)
            labelled = []
    read.rows = []
    for row, where in labelled:
        try:
            if table.multi_label:
                row["label"] = parse_labels(row["label"], where)
            else:
                row["label"] = parse_label(row["label"], where, table.regression)
            read.rows.append(row)
        except UserError as e:
            read.faults.add("label", e)


def _read_source(source: Any, table: TableConfig) -> tuple[list[dict], tuple, str]:
    """Read a split: its rows, its columns, and a message with all of its faults.

    Without any label the list of rows is empty.
    """
    read = _read_texts(source, table)
    faults = read.faults
    n_rows = read.n_rows
    text, text2, _ = read.columns or ("", None, "")
    column = f"column {' or '.join(repr(name) for name in (text, text2) if name)}"
    name = _name_source(source)
    if table.skip_empty:
        log_skipped("skip_empty", faults.without_text, n_rows)
        is_blank = bool(faults.without_text)
        faults.without_text = []
        if not read.rows and is_blank and not faults.counts:
            raise UserError(
                f"{name} has no rows with a text: it must contain at least a few of each class."
            )
    if not read.rows:
        if message := faults.describe(name, n_rows, column):
            return [], read.columns, message
        raise UserError(f"{name} has no rows: it must contain at least a few of each class.")
    if all(row["label"] in (None, "", -1, "-1") for row in read.rows):
        return [], read.columns, faults.describe(name, n_rows, column)
    _parse_labels_of_rows(read, table)
    if table.skip_unlabelled:
        log_skipped("skip_unlabelled", faults.without_label, n_rows)
        faults.without_label = []
    return read.rows, read.columns, faults.describe(name, n_rows, column)


def _read_labelled_rows(
    source: Any,  # a file or a dataset
    table: TableConfig,
) -> tuple[list[dict], tuple]:
    """Read the rows of a split and its columns; without any label the list of rows is empty.

    Raises: `UserError` that names all faults of the rows.
    """
    rows, columns, message = _read_source(source, table)
    if message:
        raise UserError(message)
    return rows, columns


def _read_splits(data: Any, table: TableConfig) -> tuple[dict[str, list], tuple]:
    """Read the splits of a table that have labels, and the columns of the last split read."""
    splits = {}
    columns: tuple = ()
    messages = []
    name = str(data) if isinstance(data, (str, Path)) else "the dataset"
    for split, source in _find_sources(data).items():
        rows, columns, message = _read_source(source, table)
        if message:
            messages.append(message)
        if rows:
            splits[split] = rows
        elif not message:
            warnings.warn(
                f"The {split} rows of {name} have no labels and are ignored.", stacklevel=3
            )
    all_rows = [row for rows in splits.values() for row in rows]
    if messages:
        warn_about_labels(all_rows)
        raise UserError(" ".join(messages))
    warn_about_shared_texts(splits, name)
    if "train" not in splits:
        raise UserError(
            f"the rows of {name} have no labels: pass the name of the column in label=."
        )
    names = [name for row in splits["train"] for name in _class_names(row["label"])]
    n_classes = len({name for name in names if isinstance(name, str)})  # 0 for a regression
    n_train = len(splits["train"])
    if 2 * n_classes > n_train:
        raise UserError(
            f"{name} has {n_classes} classes in {n_train} training rows: check that "
            f"{columns[2]!r} is the column of the classes (label=), or pass regression=True if "
            "the labels are numbers."
        )
    warn_about_labels(all_rows)
    return splits, columns


# ---- a task from rows


def sort_class_names(
    names: Iterable[str],  # class names, perhaps repeated
) -> tuple:
    """Return each class name once, sorted as numbers if all are integers, else as strings."""
    unique = sorted(set(names))
    if all(re.fullmatch(r"-?[0-9]+", name) for name in unique):
        unique.sort(key=int)
    return tuple(unique)


def make_task(
    name: str,  # name of the task
    # rows by split, with `sentence1`, perhaps `sentence2`, and `label` as returned by `parse_label`
    # or, for several labels of a row, by `parse_labels`
    splits: dict,
    labels: tuple | None = None,  # class names in index order; None: those of the training rows
    **fields: Any,  # other fields of `Task`
) -> Task:  # the task with its splits
    """Define a classification task with labels as indices, or a regression task, from rows.

    Where a row may have several labels, they become an indicator for each label of the task.
    """
    train = splits["train"]
    values = [r["label"] for r in train]
    pair = "sentence2" in train[0]
    if isinstance(values[0], float):
        low = min(values)
        high = max(values)
        if high > low and not (high - low > _MIN_LABEL_RANGE and max(-low, high) < _MAX_LABEL):
            raise UserError(
                f"the labels of {name} are between {low:g} and {high:g}, but the model computes in "
                "float32: use another unit, such as labels divided by their standard deviation."
            )
        label_range = (low, high if high > low else low + 1)
        fields = dict(metric="pearson+spearman", label_range=label_range) | fields
        return Task(name, pair=pair, splits=splits, **fields)
    multi_label = isinstance(values[0], list)
    labels = labels or sort_class_names(name for value in values for name in _class_names(value))
    if len(labels) < 2:
        only = repr(labels[0]) if labels else "none"
        raise UserError(
            f"the training rows have only the class {only}, but at least two are needed: "
            "add rows of another class, or choose another column of labels."
        )
    if multi_label:
        fields = dict(metric="micro_f1", multi_label=True) | fields
    task = Task(name, labels, pair=pair, **fields)
    numbered = {}
    for split, rows in splits.items():
        labels_of_split = [convert_label(task, row["label"], f"{split} rows") for row in rows]
        numbered[split] = [{**row, "label": i} for row, i in zip(rows, labels_of_split)]
    return replace(task, splits=numbered)


# ---- rows that are held out


def _compute_quotas(class_sizes: list[int], fraction: float) -> list[int]:
    """Return how many rows of each class are held out, by largest remainders.

    At least one row is held out in total, and at least one row of every class is left.
    """
    exact = [fraction * size for size in class_sizes]
    limits = [size - 1 for size in class_sizes]
    quotas = [min(int(e), limit) for e, limit in zip(exact, limits)]
    total = max(1, round(sum(exact)))
    by_remainder = sorted(range(len(quotas)), key=lambda i: quotas[i] - exact[i])
    for _ in range(2):  # the second pass replaces the rows of classes that are at their limit
        for i in by_remainder:
            if sum(quotas) < total and quotas[i] < limits[i]:
                quotas[i] += 1
    return quotas


def _hold_out_units(
    units: list[list[dict]], fraction: float, rng: random.Random
) -> tuple[list, list]:
    """Sample a stratified part of groups of rows; a group belongs to the class of its first row."""
    by_class: dict[Any, list[list[dict]]] = {}
    for unit in units:
        label = unit[0].get("label")
        key = None if isinstance(label, (float, list)) else label
        by_class.setdefault(key, []).append(unit)
    classes = [*by_class.values()]
    for members in classes:
        rng.shuffle(members)
    quotas = _compute_quotas([sum(map(len, c)) for c in classes], fraction)
    sampled: list[dict] = []
    rest: list[dict] = []
    for quota, members in zip(quotas, classes):
        n_taken = 0
        for unit in members:
            if n_taken + len(unit) <= quota:
                n_taken += len(unit)
                sampled += unit
            else:
                rest += unit
    return rest, sampled


def hold_out_rows(
    rows: list,  # rows, perhaps with a `label`: a class, a float, or a list of classes
    fraction: float,  # fraction of the rows to hold out, above 0 and below 1
    seed: int = 0,  # seed of the sample
    # hold rows with equal texts out together? (not if no row could be held out otherwise)
    group_duplicates: bool = True,
) -> tuple[list, list]:  # the remaining rows, the rows that are held out
    """Sample a stratified part of the rows; at least one row of every class remains."""
    Range(0, 1, FRACTION_HINT, True, True).check(fraction, "validation")
    rest: list[dict] = []
    sampled: list[dict] = []
    if group_duplicates:
        by_text: dict[Any, list[dict]] = {}
        for i, row in enumerate(rows):
            by_text.setdefault(text_key(row) or i, []).append(row)
        rng = random.Random(seed)
        rest, sampled = _hold_out_units([*by_text.values()], fraction, rng)
    if not sampled:
        rng = random.Random(seed)
        rest, sampled = _hold_out_units([[row] for row in rows], fraction, rng)
    if not sampled:
        classes = {None if isinstance(r.get("label"), float) else str(r.get("label")) for r in rows}
        raise UserError(
            f"no row can be held out for validation from {len(rows)} rows of {len(classes)} "
            "classes: give more rows, or a validation set."
        )
    rng.shuffle(sampled)
    rng.shuffle(rest)
    return rest, sampled


# ---- a table as a task


def load_table_task(
    # a file, '-' (standard input), a folder, the name of a hub dataset, or a `datasets.Dataset` or
    # `DatasetDict`
    data: Any,
    seed: int = 0,  # seed of the rows that are held out
    **options: Any,  # fields of `TableConfig`: the columns, the format, and how splits are held out
) -> tuple[Task, list]:  # the task with its splits, and the names of the splits that were held out
    """Read a table, hold out the splits that it lacks, and define a task with its rows.

    Raises: `UserError` for an option that is not valid, and for data that cannot be read.
    """
    for name in options:
        check_option_name(name, declared_options(TableConfig))
    table = TableConfig(**options)
    splits, columns = _read_splits(data, table)
    fractions = {}
    if table.test and "test" not in splits:
        fractions["test"] = table.test
    if "validation" not in splits:
        fractions["validation"] = table.validation
    if sum(fractions.values()) >= 1:
        given = " and ".join(f"{split}={fraction}" for split, fraction in fractions.items())
        raise UserError(f"{given} leave no rows for training: their sum must be below 1.")
    if fractions:
        name = str(data) if isinstance(data, (str, Path)) else "the dataset"
        warn_about_repeated_texts(splits["train"], name, table.group_duplicates)
    remaining = 1.0  # a fraction is of all rows, and the test rows are removed first
    for split, fraction in fractions.items():
        splits["train"], splits[split] = hold_out_rows(
            splits["train"], fraction / remaining, seed, table.group_duplicates
        )
        remaining -= fraction
    splits.setdefault("test", splits["validation"])
    task = make_task(_name_table_task(data), splits, columns=make_column_templates(*columns))
    return task, list(fractions)


def _name_table_task(data: Any) -> str:
    """Return the name of a task: that of its file, folder or dataset."""
    if not isinstance(data, (str, Path)):
        first = next(iter(data.values())) if isinstance(data, Mapping) else data
        return re.sub(r"\W+", "-", getattr(first.info, "dataset_name", None) or "dataset")
    stem = Path(str(data).partition("@")[0]).name.split(".")[0]
    return re.sub(r"\W+", "-", stem).strip("-") or "stdin"


def _describe_table_task(task: Task, held_out: Sequence[str]) -> str:
    """Describe the splits and the classes of a table's task in one line."""
    sizes = (f"{len(task.splits[split])} {split}" for split in ("train", "validation", "test"))
    parts = [", ".join(sizes) + " rows"]
    if held_out:
        is_stratified = task.labels and not task.multi_label
        proportion = ", in proportion to the classes" if is_stratified else ""
        parts.append(f"held out at random{proportion}: {' and '.join(sorted(held_out))}")
    if task.splits["test"] == task.splits["validation"]:
        parts.append("no test rows: the validation rows report the score, which is then too high")
    if task.labels:
        names = ", ".join(task.labels[:12]) + (" …" if len(task.labels) > 12 else "")
        kind = "labels, any number in a row" if task.multi_label else "classes"
        parts.append(f"{len(task.labels)} {kind}: {names}")
    else:
        parts.append("regression")
    return f"{task.name}: {'; '.join(parts)}"


def register_table_task(
    data: Any,  # as for `load_table_task`
    **options: Any,  # other arguments of `load_table_task`
) -> tuple[Task, str]:  # the task, and a one-line description of its splits and classes
    """Load the task of a table and add it to `TASKS`."""
    task, held_out = load_table_task(data, **options)
    is_registered = task.name in TASKS and not TASKS[task.name].splits
    task = replace(task, name=f"own-{task.name}" if is_registered else task.name)
    TASKS[task.name] = task
    return task, _describe_table_task(task, held_out)

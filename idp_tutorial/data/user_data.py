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
import logging
import math
import random
import re
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

from idp_tutorial.data.file_readers import (
    describe_file,
    detect_format,
    iterate_rows,
    suggest_delimiter,
)
from idp_tutorial.data.rows import (
    describe_places,
    is_empty_text,
    refuse_empty_texts,
    require_nonempty_text,
    require_utf8,
)
from idp_tutorial.data.splits import SPLIT_NAMES, find_split_files, load_hub_dataset
from idp_tutorial.data.task import TEXT_COLUMNS, Task, make_column_templates
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.utils.checks import MissingFileError, UserError, parse_number

MIN_LABEL_RANGE, MAX_LABEL = 1e-30, 1e30  # of a regression, which is computed in float32

__all__ = [
    "is_saved_dataset",
    "select_splits",
    "find_text_column",
    "parse_label",
    "parse_labels",
    "format_labels",
    "decode_hub_label",
    "sort_class_names",
    "make_task",
    "hold_out_rows",
    "load_table_task",
    "register_table_task",
]


logger = logging.getLogger(__name__)


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
    data: Any,  # a `datasets.Dataset` or `DatasetDict`
) -> dict[str, Any]:  # split → its dataset
    """Return the splits of a dataset; a dataset without splits is a training split."""
    if not isinstance(data, Mapping):
        return {"train": data}
    splits = {}
    for split, names in SPLIT_NAMES.items():
        matches = [name for name in names if name in data]
        if len(matches) > 1:
            raise UserError(
                f"the dataset has several splits for {split!r} ({', '.join(matches)}): keep one of "
                "them."
            )
        if matches:
            splits[split] = data[matches[0]]
    if "train" not in splits:
        raise UserError(
            f"the dataset has the splits {', '.join(map(str, data)) or 'none'}, but a split "
            "'train' is needed: rename one of them, or pass one split."
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
    sources: dict[str, Any]
    if data == "-" or path.is_file():
        return {"train": data}
    if path.is_dir() and is_saved_dataset(path):
        return select_splits(_load_saved_dataset(path))
    if path.is_dir():
        sources = {**find_split_files(path, ["csv", "tsv", "jsonl", "parquet", "xlsx"])}
    elif re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", data) and detect_format(data) == "auto":
        dataset = load_hub_dataset(
            data,
            failure=f"there is no file or folder {data.partition('@')[0]}, and it cannot be loaded "
            "as a dataset of the Hugging Face hub",
            advice="correct the name, or connect to the internet",
        )
        return select_splits(dataset)
    else:
        raise MissingFileError(
            f"there is no file or folder {data}: pass a CSV, TSV, JSON, Parquet or Excel file, a "
            "folder with train.csv or of save_to_disk, or the name of a hub dataset, org/name."
        )
    if "train" not in sources:
        raise UserError(
            f"{data} has no training rows: "
            "name a file train.csv, train.tsv, train.jsonl or train.parquet."
        )
    return sources


# ---- texts and labels


def find_text_column(
    names: Container[str],  # names of the columns of a table
) -> str | None:  # None: no column has a usual name
    """Return the column of texts by its usual name."""
    return next((name for name in ("text", "sentence1", "sentence") if name in names), None)


def _resolve_columns(
    row: dict, where: str, text: str | None, text2: str | None, label: str | None
) -> tuple:
    """Return the columns of text, second text (or None) and label; None: the usual names."""
    text = text or find_text_column(row)
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


def parse_label(
    value: Any,  # value of the label column
    where: str,  # file and line, for error messages
    regression: bool = False,  # must the label be a number?
) -> str | float:  # the name of a class, or the number of a regression
    """Return a label as a class name or a float; raise `UserError` if it is missing or invalid."""
    value = value.item() if type(value).__module__ == "numpy" and value.ndim == 0 else value
    if isinstance(value, (list, tuple, set, dict)):
        raise UserError(
            f"{where}: the label is {value!r:.60}. If a row may have several labels, pass "
            "multi_label=True."
        )
    # NaN, with which pandas marks a missing value, does not equal itself
    if value is None or value != value or not str(value).strip():
        raise UserError(
            f"{where}: every row needs a label, got {value!r}: add the label or remove the row."
        )
    if not regression:
        if isinstance(value, float) and not value.is_integer():
            raise UserError(
                f"{where}: the label is {value!r}, a number with a fraction: pass regression=True, "
                "or write the names of classes as texts."
            )
        return require_utf8(str(value).strip(), f"{where}: the label")
    try:
        number = parse_number(value) if isinstance(value, str) else float(value)
    except (ValueError, TypeError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        hint = " with a decimal point" if re.fullmatch(r"-?\d+,\d+", str(value).strip()) else ""
        raise UserError(
            f"{where}: the label of a regression must be a number{hint}, got {value!r:.60}."
        )
    return number


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
    elif isinstance(value, (int, float)) and value == value:
        names = [value]
    is_list = isinstance(names, (list, tuple, set)) or hasattr(names, "tolist")
    if not is_list or any(
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
    if isinstance(source, (str, Path)):
        return describe_file(source)
    return str(getattr(source, "split", None) or "dataset")


def _iterate_source(source: Any, reading: Mapping[str, Any]) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a file or of a dataset, with their location."""
    if isinstance(source, (str, Path)):
        yield from iterate_rows(source, **reading)
    else:
        given = [name for name, value in reading.items() if value is not None]
        if given:
            raise UserError(
                f"{given[0]} describes a file, and the data is a dataset: leave it out."
            )
        for n, row in enumerate(source, 1):
            yield f"{_name_source(source)}, row {n}", row


def _refuse_missing_labels(rows: Sequence[dict], places: Sequence[str]) -> None:
    """Raise `UserError` that counts the rows without a label, and for labels of mixed types."""
    values = [row["label"] for row in rows]
    missing = [w for w, v in zip(places, values) if v is None or v != v or not str(v).strip()]
    if len(missing) > 1:
        raise UserError(
            f"{len(missing)} of {len(rows)} rows have no label ({describe_places(missing)}), and "
            "every row needs a label: add the labels or remove these rows."
        )
    is_text = [isinstance(value, str) for value in values]
    if any(is_text) and not all(is_text) and not missing:
        i = is_text.index(not is_text[0])
        raise UserError(
            f"{places[i]}: the label is {values[i]!r:.40}, but that of {places[0]} is "
            f"{values[0]!r:.40}: write all labels as texts, or all as numbers."
        )


def _parse_all_labels(
    rows: Sequence[dict], places: Sequence[str], regression: bool, multi_label: bool
) -> None:
    """Replace the label of each row by its class name, number or list of names."""
    if not multi_label:
        _refuse_missing_labels(rows, places)
    for row, where in zip(rows, places):
        if multi_label:
            row["label"] = parse_labels(row["label"], where)
        else:
            row["label"] = parse_label(row["label"], where, regression)


def _read_labelled_rows(
    source: Any,
    reading: Mapping[str, Any],  # arguments of `iterate_rows`
    columns: Sequence[str | None],
    regression: bool,
    skip_empty: bool = False,
    multi_label: bool = False,
) -> tuple[list[dict], tuple]:
    """Read the rows of a split and its columns; without any label the list of rows is empty."""
    rows = []
    places = []
    empty: dict[str, list[str]] = {}  # column: places of its empty texts
    resolved: tuple = ()
    n_rows = 0
    features = getattr(source, "features", None) or {}
    for where, row in _iterate_source(source, reading):
        n_rows += 1
        resolved = _resolve_columns(row, where, *columns)
        text, text2, label_column = resolved
        used = [text, text2] if text2 else [text]
        empty_column = next((c for c in used if is_empty_text(row.get(c))), None)
        if empty_column:
            empty.setdefault(empty_column, []).append(where)
            continue
        values = [require_nonempty_text(row, column, where) for column in used]
        texts = dict(zip(TEXT_COLUMNS, values))
        label = decode_hub_label(row[label_column], features.get(label_column))
        rows.append({**texts, "label": label})
        places.append(where)
    n_empty = sum(map(len, empty.values()))
    if not skip_empty:
        for column, empty_places in empty.items():
            refuse_empty_texts(empty_places, n_rows, f"column {column!r}")
    elif n_empty:
        logger.warning(
            "%s: skip_empty left out %d of %d rows", _name_source(source), n_empty, n_rows
        )
    if not rows:
        raise UserError(
            f"{_name_source(source)} has no rows{' with a text' if n_empty else ''}: it must "
            "contain at least a few of each class."
        )
    if all(row["label"] in (None, "", -1, "-1") for row in rows):
        return [], resolved
    _parse_all_labels(rows, places, regression, multi_label)
    return rows, resolved


def _read_splits(
    data: Any,
    reading: Mapping[str, Any],
    columns: Sequence[str | None],
    regression: bool,
    skip_empty: bool,
    multi_label: bool,
) -> tuple[dict[str, list], tuple]:
    """Read the splits of a table that have labels, and the columns of the last split read."""
    splits = {}
    resolved: tuple = ()
    name = data if isinstance(data, (str, Path)) else "the dataset"
    for split, source in _find_sources(data).items():
        rows, resolved = _read_labelled_rows(
            source, reading, columns, regression, skip_empty, multi_label
        )
        if rows:
            splits[split] = rows
        else:
            warnings.warn(
                f"The {split} rows of {name} have no labels and are ignored.", stacklevel=3
            )
    if "train" not in splits:
        raise UserError(
            f"the rows of {name} have no labels: pass the name of the column in label=."
        )
    n_classes = len({name for r in splits["train"] for name in _class_names(r["label"])})
    n_train = len(splits["train"])
    if not regression and 2 * n_classes > n_train:
        raise UserError(
            f"{name} has {n_classes} classes in {n_train} training rows: check that "
            f"{resolved[2]!r} is the column of the classes (label=), or pass regression=True if "
            "the labels are numbers."
        )
    return splits, resolved


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
        if high > low and not (high - low > MIN_LABEL_RANGE and max(-low, high) < MAX_LABEL):
            raise UserError(
                f"the labels of {name} are between {low:g} and {high:g}. The model computes in "
                f"float32, so it needs labels below {MAX_LABEL:g} whose range is larger than "
                f"{MIN_LABEL_RANGE:g}: use another unit, for example divide the labels by their "
                "standard deviation."
            )
        label_range = (low, high if high > low else low + 1)
        return Task(
            name,
            metric="pearson+spearman",
            pair=pair,
            label_range=label_range,
            splits=splits,
            **fields,
        )
    multi_label = isinstance(values[0], list)
    labels = labels or sort_class_names(name for value in values for name in _class_names(value))
    if len(labels) < 2:
        only = repr(labels[0]) if labels else "none"
        raise UserError(
            f"the training rows have only the class {only}, but at least two are needed: "
            "add rows of another class, or choose another column of labels."
        )
    index = {label: i for i, label in enumerate(labels)}

    def number(row: dict) -> dict:
        """Return a row with the index of its class, or an indicator for each label."""
        label = row["label"]
        is_true = [int(name in label) for name in labels] if multi_label else index[label]
        return {**row, "label": is_true}

    numbered = {}
    for split, rows in splits.items():
        names = [name for r in rows for name in _class_names(r["label"])]
        if unknown := [name for name in names if name not in index]:
            raise UserError(
                f"the {split} rows have the class {unknown[0]!r}, which the training rows do not "
                "have: add training rows of this class, or remove its rows."
            )
        numbered[split] = [number(row) for row in rows]
    if multi_label:
        fields = dict(metric="micro_f1", multi_label=True) | fields
    return Task(name, labels, pair=pair, splits=numbered, **fields)


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


def hold_out_rows(
    rows: list,  # rows with a `label`: a class, a float, or a list of classes
    fraction: float,  # fraction of the rows to hold out, above 0 and below 1
    seed: int = 0,  # seed of the sample
) -> tuple[list, list]:  # the remaining rows, the rows that are held out
    """Sample a stratified part of the rows; at least one row of every class remains."""
    _check_fractions({"validation": fraction})
    rng = random.Random(seed)
    by_class: dict[Any, list] = {}
    for row in rows:
        key = None if isinstance(row["label"], (float, list)) else row["label"]
        by_class.setdefault(key, []).append(row)
    classes = [*by_class.values()]
    for members in classes:
        rng.shuffle(members)
    quotas = _compute_quotas([len(c) for c in classes], fraction)
    sampled = [row for quota, c in zip(quotas, classes) for row in c[:quota]]
    rest = [row for quota, c in zip(quotas, classes) for row in c[quota:]]
    if not sampled:
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
    text: str | None = None,  # column of the text; None: text, sentence1 or sentence
    text2: str | None = None,  # column of the second text, for pairs
    label: str | None = None,  # column of the label; None: label
    format: str | None = None,  # key of `FILE_FORMATS`; None: detect it from the file's suffix
    regression: bool = False,  # are the labels numbers, not classes?
    # may a row have several labels? A cell has names joined by |, or a list of names
    multi_label: bool = False,
    validation: float = 0.1,  # fraction of the rows to hold out if there is no validation split
    # fraction of the rows to hold out if there is no test split; 0: test on the validation rows
    test: float = 0.1,
    seed: int = 0,  # seed of the rows that are held out
    encoding: str | None = None,  # encoding of a text file; None: UTF-8
    sep: str | None = None,  # separator of the cells of CSV and TSV; None: that of the header
    skip_empty: bool = False,  # leave out rows without a text, and log how many they are
) -> tuple[Task, list]:  # the task with its splits, and the names of the splits that were held out
    """Read a table, hold out the splits that it lacks, and define a task with its rows."""
    if regression and multi_label:
        raise UserError(
            "regression and multi_label exclude each other: labels are either numbers or names."
        )
    reading = dict(format=format, encoding=encoding, sep=sep)
    splits, columns = _read_splits(
        data, reading, (text, text2, label), regression, skip_empty, multi_label
    )
    fractions = {}
    if test and "test" not in splits:
        fractions["test"] = test
    if "validation" not in splits:
        fractions["validation"] = validation
    _check_fractions(fractions)
    remaining = 1.0  # a fraction is of all rows, and the test rows are removed first
    for split, fraction in fractions.items():
        splits["train"], splits[split] = hold_out_rows(splits["train"], fraction / remaining, seed)
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
        if not task.multi_label and any("|" in name for name in task.labels):
            parts.append("names with | are one class each: for several labels pass multi_label")
    else:
        parts.append("regression")
    return f"{task.name}: {'; '.join(parts)}"


def register_table_task(
    data: Any,  # as for `load_table_task`
    **table_options: Any,  # other arguments of `load_table_task`
) -> tuple[Task, str]:  # the task, and a one-line description of its splits and classes
    """Load the task of a table and add it to `TASKS`."""
    task, held_out = load_table_task(data, **table_options)
    is_registered = task.name in TASKS and not TASKS[task.name].splits
    task = replace(task, name=f"own-{task.name}" if is_registered else task.name)
    TASKS[task.name] = task
    return task, _describe_table_task(task, held_out)

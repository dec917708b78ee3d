"""Define a task from the user's own rows: a table, a folder of splits, a dataset.

A table is one file of any format of `data.file_readers`. A folder may contain `train`, `validation`
and `test` in any of the formats, or a dataset that `save_to_disk` saved. A name such as `org/name`
is a dataset of the Hugging Face hub, with an optional revision after `@`. In Python a
`datasets.Dataset` or `DatasetDict`, a data frame and a list of dictionaries are tables too. Splits
that are missing are held out from the training rows.

`resolve_columns` finds the columns, and `iterate_texts` reads the texts, for training, prediction
and estimators alike.

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
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from idp_tutorial.data.config import FRACTION_HINT, TableConfig, TextConfig
from idp_tutorial.data.file_readers import (
    detect_format,
    has_header,
    iterate_rows,
    warn_about_unused,
)
from idp_tutorial.data.rows import convert_label, is_empty_text, require_text, require_utf8
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
            f"{folder} cannot be loaded as a saved dataset ({type(e).__name__}): save it again."
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
            "name a split train, or a file train.csv."
        )
    return splits


def _find_sources(data: Any) -> dict[str, Any]:
    """Return the file of each split as a path, or its dataset."""
    if not isinstance(data, (str, Path)):
        return select_splits(data)
    data = str(data)
    path = Path(data)
    if data == "-" or path.is_file():
        return {"train": data}
    if path.is_dir():
        tables = list_files(path, ["csv", "tsv", "jsonl", "parquet", "xlsx"])
        is_saved = is_saved_dataset(path)
        return select_splits(_load_saved_dataset(path) if is_saved else tables, data)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", data) and detect_format(data) == "auto":
        advice = "correct the name of the dataset, file or folder, or connect to the internet"
        return select_splits(load_hub_dataset(data, advice=advice), data)
    raise MissingFileError(
        f"there is no file or folder {data}: pass a CSV, TSV, JSON, Parquet or Excel file, a "
        "folder with train.csv or of save_to_disk, or the name of a hub dataset, org/name."
    )


# ---- columns


# the usual names of the columns of texts and second texts
_USUAL_COLUMNS = (("text", "text2"), TEXT_COLUMNS, ("sentence", None))


def resolve_columns(
    names: Collection,  # names of the columns of a table
    where: str,  # the table, or file and line of a row, for error messages
    given: TextConfig,  # the columns that were named, if any
    trained: Sequence[str | None] = (None, None, None),  # columns that a model was trained on
    pair: bool | None = None,  # is there a second text? None: if its column is found
    with_label: bool = False,  # is a column of labels needed?
    label_optional: bool = False,  # may that column be missing?
    n_positional: int = 0,  # a table without usual names has texts in so many columns at most
) -> tuple[str | None, ...]:  # the column of the text is never None
    """Return the columns of text, second text and label; raise `UserError` if one is missing.

    A column that is not named has the name of training, or a usual one.
    """
    text, text2, label = given.text, given.text2, given.label
    usual = [tuple(trained[:2]), *_USUAL_COLUMNS]
    others = [name for name in names if name != (label or "label")]
    is_named = text or text2 or label or any(name in names for name, _ in usual)
    if not is_named and 0 < len(others) <= n_positional:
        usual = [(*others, None)[:2]]
    if text is None:
        text = next((name for name, _ in usual if name in names), "text")
    if pair is not False and text2 is None:
        beside = (name for first, name in usual if first == text and name in names)
        text2 = next(beside, "sentence2" if pair else None)
    if with_label:
        label = label or (trained[2] if trained[2] in names else "label")
        with_label = label in names or not label_optional
    roles = dict(text=text, label=label if with_label else None, text2=text2)
    used = {argument: column for argument, column in roles.items() if column is not None}
    for argument, column in used.items():
        if column not in names:
            hint = ", or the separator of the columns in sep=" if len(names) == 1 else ""
            raise UserError(
                f"{where}: no column {column!r} among {', '.join(map(str, names))}: pass its name "
                f"in {argument}={hint}."
            )
    if len({*used.values()}) < len(used):
        raise UserError(f"{where}: {', '.join(used)} must be different columns, got {used}.")
    return text, text2, roles["label"]


def iterate_texts(
    records: Iterable[tuple[str, Mapping]],  # each with its location
    faults: RowFaults,  # is told of the rows that cannot be used
    given: TextConfig,  # the columns that were named, if any
    names_columns_once: bool = True,  # are the columns of the first record those of all?
    allow_empty: bool = False,  # accept a text of spaces or of no character
    **resolving: Any,  # other arguments of `resolve_columns`
) -> Iterator[tuple[str, Mapping, dict]]:
    """Yield the location of each record that can be used, itself, and its texts as a row.

    With `with_label` the row has the `label` too, as it is in the record.
    """
    columns = None
    for where, record in records:
        faults.n_rows += 1
        try:
            if not (columns and names_columns_once):
                place = faults.source if names_columns_once else where
                resolved = resolve_columns(record, place, given, **resolving)
                if columns and (columns[1] is None) != (resolved[1] is None):
                    raise UserError(f"{where}: give each row a second text, or no row.")
                faults.columns = columns = resolved
            *texts, label = columns
            named = {role: c for role, c in zip(TEXT_COLUMNS, texts) if c is not None}
            row = {role: record.get(column) for role, column in named.items()}
            if not allow_empty and any(map(is_empty_text, row.values())):
                faults.missing["text"].append(where)
                continue
            for role, column in named.items():
                row[role] = str(require_text(row[role], f"{where}: {column}", allow_empty))
        except UserError as e:
            if names_columns_once and not columns:
                raise
            faults.add("text", e)
            continue
        yield where, record, row if label is None else {**row, "label": record.get(label)}


# ---- texts and labels


def parse_label(
    value: Any,  # value of the label column
    where: str,  # file and line, for error messages
    regression: bool = False,  # must the label be a number?
    # is it any number of labels: names joined by |, a list of names, or a JSON list?
    multi_label: bool = False,
) -> Any:  # the name of a class, the number of a regression, or a list of names, each once
    """Return the label of a row; raise `UserError` if it is missing or invalid."""
    value = value.item() if isinstance(value, np.generic) else value
    if multi_label:
        return _parse_labels(value, where)
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
    # a data frame with a missing label has whole numbers as floats
    name = str(int(value)) if isinstance(value, float) else str(value).strip()
    return require_utf8(name, f"{where}: the label")


def _is_unlabelled(label: Any) -> bool:
    """Return whether a label is missing, or -1, which `datasets` has for it."""
    is_scalar = isinstance(label, (int, float, str, np.number))
    return is_empty_text(label) or (is_scalar and label in (-1, "-1"))


def _parse_labels(value: Any, where: str) -> list[str]:
    """Return the labels of a row that may have several; [] for an empty value."""
    names = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, str):
        names = value.split("|") if value.strip() else []
        if value.lstrip().startswith("["):
            try:
                names = json.loads(value)
            except ValueError:
                names = None
    elif is_number(value) and value == value:
        names = [value]
    is_list = isinstance(names, (list, tuple, set))
    if not is_list or not all(isinstance(n, (str, int, float)) and str(n).strip() for n in names):
        raise UserError(
            f"{where}: the labels are {value!r:.60}: write names joined by |, such as "
            "billing|urgent, or a JSON list of names; leave the cell empty for no label."
        )
    return list(dict.fromkeys(str(name).strip() for name in names))


def format_labels(
    names: Sequence[str],  # labels of a row
) -> str:  # as `parse_label` reads it
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


def check_labels(
    labels: Sequence,  # labels of all rows, one for each row
    places: Sequence[str],  # file and line of each row
) -> None:
    """Raise `UserError` for texts beside numbers."""
    is_text = [isinstance(label, str) for label in labels]
    if len({*is_text}) > 1:
        i = is_text.index(not is_text[0])
        raise UserError(
            f"{places[i]}: the label is {labels[i]!r:.40}, but that of {places[0]} is "
            f"{labels[0]!r:.40}: write all labels as texts, or all as numbers."
        )


# ---- the rows of a table


def iterate_records(
    data: Any,  # a `datasets.Dataset`, a data frame, dictionaries, texts, or pairs of texts
) -> Iterator[dict]:
    """Yield the rows of a table in memory, with the names of a `ClassLabel`.

    Texts and pairs of texts get the names `sentence1` and `sentence2`.
    """
    features = (hasattr(data, "column_names") and data.features) or {}
    n_texts = 0  # 1, or 2 for pairs
    if hasattr(data, "columns"):  # a data frame
        names = [*data.columns]
        if repeated := sorted({str(name) for name in names if names.count(name) > 1}):
            raise UserError(f"several columns are named {repeated[0]!r}: give each its own name.")
        data = [dict(zip(names, row)) for row in zip(*(data[name] for name in names))]
    for i, record in enumerate(data):
        if isinstance(record, Mapping):
            yield {name: decode_hub_label(v, features.get(name)) for name, v in record.items()}
            continue
        texts = [*record] if isinstance(record, (list, tuple, np.ndarray)) else [record]
        n_texts = n_texts or len(texts)
        if len(texts) != n_texts or n_texts not in (1, 2):
            raise UserError(
                f"row {i} is {record!r:.60}, but all rows must be texts, or all pairs of texts."
            )
        yield dict(zip(TEXT_COLUMNS, texts))


def _read_source(
    source: Any, table: TableConfig, label_optional: bool = False
) -> tuple[list[dict], RowFaults]:
    """Read a split: its rows, and the faults of the others.

    Without any label the list of rows is empty.
    """
    is_file = isinstance(source, (str, Path))
    split = getattr(source, "split", None) if hasattr(source, "column_names") else None
    faults = RowFaults(str(source if is_file else split or "dataset"))
    reading = {name: getattr(table, name) for name in ("format", "encoding", "sep")}
    records: Iterable[tuple[str, Mapping]]
    if is_file:
        records = iterate_rows(source, **reading, on_fault=partial(faults.add, "row"))
    else:
        warn_about_unused(reading, (), "a dataset, which is no file")
        numbered = enumerate(iterate_records(source), 1)
        records = ((f"{faults.source}, row {n}", record) for n, record in numbered)
    once = not is_file or has_header(source, table.format)
    resolving = dict(with_label=True, label_optional=label_optional)
    texts = iterate_texts(records, faults, table, once, **resolving)
    read = [(where, row) for where, _, row in texts]
    if table.skip_empty:
        faults.skip("text", "skip_empty")
    if not read and not faults.describe():
        raise UserError(f"{faults.source} has no rows with a text: write a few of each class.")
    if all(_is_unlabelled(row.get("label")) for _, row in read):
        return [], faults
    first = None
    rows = []
    for where, row in read:
        label = row["label"]
        try:
            if not table.multi_label:
                if is_empty_text(label):
                    faults.missing["label"].append(where)
                    continue
                first = first or (where, label)
                check_labels([first[1], label], [first[0], where])
            row["label"] = parse_label(label, where, table.regression, table.multi_label)
            rows.append(row)
        except UserError as e:
            faults.add("label", e)
    if table.skip_unlabelled:
        faults.skip("label", "skip_unlabelled")
    return rows, faults


def _read_splits(data: Any, table: TableConfig) -> tuple[dict[str, list], Sequence]:
    """Read the splits of a table that have labels, and the columns of the training split."""
    splits = {}
    columns: Sequence = ()
    messages = []
    name = _name_data(data)
    for split, source in _find_sources(data).items():
        rows, faults = _read_source(source, table, label_optional=split != "train")
        if split == "train":
            columns = faults.columns
        if message := faults.describe():
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
        raise UserError(f"the rows of {name} have no labels: name their column in label=.")
    classes = {name for row in splits["train"] for name in _class_names(row["label"])}
    n_train = len(splits["train"])
    if not table.regression and 2 * len(classes) > n_train:
        raise UserError(
            f"{name} has {len(classes)} classes in {n_train} training rows: check their column, "
            f"label={columns[2]!r}, or pass regression=True if they are numbers."
        )
    warn_about_labels(all_rows)
    return splits, columns


def _name_data(data: Any) -> str:
    """Return the name of a table for messages."""
    return str(data) if isinstance(data, (str, Path)) else "the dataset"


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
    # or, for several labels of a row, lists of names
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
    by_class: dict[Any, list[list[dict]]] = defaultdict(list)
    for unit in units:
        label = unit[0].get("label")
        by_class[None if isinstance(label, (float, list)) else label].append(unit)
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
    by_text: dict[Any, list[dict]] = defaultdict(list)
    for i, row in enumerate(rows):
        by_text[text_key(row) or i].append(row)
    single = [[row] for row in rows]
    for units in ([*by_text.values()], single) if group_duplicates else (single,):
        rng = random.Random(seed)
        rest, sampled = _hold_out_units(units, fraction, rng)
        if sampled:
            rng.shuffle(sampled)
            rng.shuffle(rest)
            return rest, sampled
    n_classes = len({str(row.get("label")) for row in rows})
    raise UserError(
        f"no row can be held out from {len(rows)} rows of {n_classes} classes: give more rows, or "
        "a validation set."
    )


# ---- a table as a task


def load_table_task(
    # a file, '-' (standard input), a folder, the name of a hub dataset, a `datasets.Dataset` or
    # `DatasetDict`, a data frame, or a list of dictionaries
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
        warn_about_repeated_texts(splits["train"], _name_data(data), table.group_duplicates)
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
        name = getattr(getattr(first, "info", None), "dataset_name", None)
        return re.sub(r"\W+", "-", name or "dataset")
    path = Path(data) if Path(data).exists() else Path(str(data).partition("@")[0])
    stem = path.name.split(".")[0]
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

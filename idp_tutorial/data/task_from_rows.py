"""Hold out validation rows, parse labels and define a task from labelled rows.

A tenth of a class with three rows is less than one row; a tenth of twenty such classes is six
rows. Each class gives the integer part of its quota, and the classes with the largest
fractional parts give one row more, until the total is right.
"""

import math
import random
import re
from collections.abc import Iterable
from typing import Any

from idp_tutorial.data.task import Task
from idp_tutorial.utils.checks import UserError

__all__ = ["MULTILABEL_HINT", "hold_out_rows", "parse_label", "sort_class_names", "make_task"]


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


def hold_out_rows(
    rows: list,  # rows with a `label`: a class, or a float
    fraction: float,  # fraction of the rows to hold out, above 0 and below 1
    seed: int = 0,  # seed of the sample
) -> tuple[list, list]:  # the remaining rows, the rows that are held out
    """Sample a stratified part of the rows; at least one row of every class remains."""
    if not 0 < fraction < 1:
        raise UserError(
            "validation must be a fraction of the rows between 0 and 1, such as 0.1, got "
            f"{fraction}."
        )
    rng = random.Random(seed)
    by_class: dict[Any, list] = {}
    for row in rows:
        key = None if isinstance(row["label"], float) else row["label"]
        by_class.setdefault(key, []).append(row)
    classes = [*by_class.values()]
    for members in classes:
        rng.shuffle(members)
    quotas = _compute_quotas([len(c) for c in classes], fraction)
    sampled = [row for quota, c in zip(quotas, classes) for row in c[:quota]]
    rest = [row for quota, c in zip(quotas, classes) for row in c[quota:]]
    if not sampled:
        raise UserError(
            f"no row can be held out for validation from {len(rows)} rows of "
            f"{len(classes)} classes: "
            "give more rows, or a validation set."
        )
    rng.shuffle(sampled)
    rng.shuffle(rest)
    return rest, sampled


MULTILABEL_HINT = (
    "not supported, because a head predicts one class for each row. Define a yes-or-no "
    "task for each "
    "label instead, and train them together (MultiTaskModel)"
)


def parse_label(
    value: Any,  # value of the label column
    where: str,  # file and line, for error messages
    regression: bool = False,  # must the label be a number?
) -> str | float:  # the name of a class, or the number of a regression
    """Return a label as a class name or a float; raise `UserError` if it is missing or invalid."""
    if isinstance(value, (list, tuple, set, dict)):
        raise UserError(
            f"{where}: the label is {value!r:.60}. Several labels for one row are "
            f"{MULTILABEL_HINT}."
        )
    # NaN, with which pandas marks a missing value, does not equal itself
    if value is None or value != value or not str(value).strip():
        raise UserError(
            f"{where}: every row needs a label, got {value!r}: add the label or remove the row."
        )
    if not regression:
        return str(value).strip()
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise UserError(f"{where}: the label of a regression must be a number, got {value!r}.")
    return number


def sort_class_names(
    names: Iterable[str],  # class names, perhaps repeated
) -> tuple:
    """Return each class name once, sorted as numbers if all are integers, else as strings."""
    unique = sorted(set(names))
    if all(re.fullmatch(r"-?\d+", name) for name in unique):
        unique.sort(key=int)
    return tuple(unique)


def make_task(
    name: str,  # name of the task
    # rows by split, with `sentence1`, perhaps `sentence2`, and `label` as returned by `parse_label`
    splits: dict,
    labels: tuple | None = None,  # class names in index order; None: those of the training rows
    **fields: Any,  # other fields of `Task`
) -> Task:  # the task with its splits
    """Define a classification task with labels as indices, or a regression task, from rows."""
    train = splits["train"]
    values = [r["label"] for r in train]
    pair = "sentence2" in train[0]
    if isinstance(values[0], float):
        low = min(values)
        high = max(values)
        label_range = (low, high if high > low else low + 1)
        return Task(
            name,
            metric="pearson+spearman",
            pair=pair,
            label_range=label_range,
            splits=splits,
            **fields,
        )
    labels = labels or sort_class_names(values)
    if len(labels) < 2:
        raise UserError(
            f"the training rows have only the class {labels[0]!r}, but at least two are "
            f"needed: add "
            "rows of another class, or choose another column of labels."
        )
    index = {label: i for i, label in enumerate(labels)}
    numbered = {}
    for split, rows in splits.items():
        if unknown := [r["label"] for r in rows if r["label"] not in index]:
            raise UserError(
                f"the {split} rows have the class {unknown[0]!r}, which the training rows "
                "do not have: "
                "add training rows of this class, or remove its rows."
            )
        numbered[split] = [{**r, "label": index[r["label"]]} for r in rows]
    return Task(name, labels, pair=pair, splits=numbered, **fields)

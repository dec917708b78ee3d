"""Problems of a table of texts: all of them in one run, each with a count and two examples.

A row that cannot be used is an error, and the table is refused after all of its rows have been
read. What a table may have, but what is seldom meant, is a warning: classes whose names differ by
case only, equal texts with different labels, and texts that are in two splits, which make a score
too high.
"""

import logging
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from idp_tutorial.data.rows import describe_missing
from idp_tutorial.utils.checks import UserError

__all__ = [
    "RowFaults",
    "text_key",
    "warn_about_labels",
    "warn_about_repeated_texts",
    "warn_about_shared_texts",
]

logger = logging.getLogger(__name__)

_KINDS = {  # kind of fault: what is said of several rows
    "row": "rows cannot be read",
    "text": "rows have a text that is not valid",
    "label": "rows have a label that is not valid",
}


class RowFaults:
    """The faults of the rows of a table, which are collected while it is read."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}  # kind: number of rows
        self.examples: dict[str, list[str]] = {}  # kind: messages of the first two rows
        self.without_text: list[str] = []  # places of the rows
        self.without_label: list[str] = []

    def add(self, kind: str, error: UserError) -> None:
        """Add the error of a row; `kind` is 'row', 'text' or 'label'."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        examples = self.examples.setdefault(kind, [])
        if len(examples) < 2:
            examples.append(str(error))

    def describe(
        self,
        source: str,  # name of the table
        n_rows: int,  # number of rows that were read, those with faults included
        column: str,  # the columns of texts, in words
    ) -> str:  # '' if there are no faults
        """Return a message that names all kinds of faults, each with a count and two examples."""
        parts = [
            describe_missing(
                self.without_text,
                n_rows,
                f"text in {column}",
                "write the texts, or leave these rows out with skip_empty",
            ),
            describe_missing(
                self.without_label,
                n_rows,
                "label",
                "add the labels or remove these rows, or leave them out with skip_unlabelled",
            ),
        ]
        for kind, messages in self.examples.items():
            examples = " ".join(messages)
            many = f"{self.counts[kind]} of {n_rows} {_KINDS[kind]}. {examples}"
            parts.append(examples if self.counts[kind] == 1 else many)
        problems = [part for part in parts if part]
        if len(problems) < 2:
            return "".join(problems)
        numbered = " ".join(f"({n}) {problem}" for n, problem in enumerate(problems, 1))
        return f"{source} has {len(problems)} kinds of problems: {numbered}"


def text_key(row: Mapping) -> tuple:
    """Return what is equal for rows with the same texts, whatever spaces are around them."""
    return tuple(str(row[c]).strip() for c in ("sentence1", "sentence2") if c in row)


def _count(n: int, one: str, many: str) -> str:
    """Return a number with the words that follow it."""
    return f"{n} {one if n == 1 else many}"


def _quote(text: Any) -> str:
    """Return a short text in quotation marks."""
    return f"{str(text)[:60]!r}"


def _names_of(label: Any) -> Iterable[str]:
    names = label if isinstance(label, list) else [label]
    return (name for name in names if isinstance(name, str))


def _warn_about_similar_names(counts: Mapping[str, int]) -> None:
    """Log classes whose names differ only by case, spaces or Unicode form."""
    similar: dict[str, list[str]] = {}
    for name in counts:
        key = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        similar.setdefault(key, []).append(name)
    groups = [names for names in similar.values() if len(names) > 1]
    if groups:
        described = "; ".join(
            " and ".join(f"{_quote(name)} ({counts[name]} rows)" for name in names)
            for names in groups[:2]
        )
        logger.warning(
            "%d classes have names that differ only by case, spaces or Unicode form: %s%s. They "
            "are classes of their own: write the names alike if they mean the same",
            sum(map(len, groups)),
            described,
            " …" if len(groups) > 2 else "",
        )


def _warn_about_contradictions(rows: Sequence[Mapping]) -> None:
    """Log texts that have two labels."""
    labels: dict[tuple, set[str]] = {}
    for row in rows:
        labels.setdefault(text_key(row), set()).add(str(row["label"]))
    contradictory = [(key, names) for key, names in labels.items() if len(names) > 1]
    if contradictory:
        examples = "; ".join(
            f"{_quote(key[0])} is {' and '.join(sorted(map(_quote, names)))}"
            for key, names in contradictory[:2]
        )
        logger.warning(
            "%s several labels in different rows (%s): keep one label for each text",
            _count(len(contradictory), "text has", "texts have"),
            examples,
        )


def warn_about_repeated_texts(
    rows: Sequence[Mapping],  # rows of which some are held out
    source: str,  # name of the table
    stay_together: bool,  # are rows with equal texts held out together?
) -> None:
    """Log rows whose text an earlier row has."""
    seen: set[tuple] = set()
    repeated = []
    for row in rows:
        key = text_key(row)
        if key in seen:
            repeated.append(key)
        seen.add(key)
    if repeated:
        logger.warning(
            "%d of %d rows of %s repeat the text of another row (%s): %s",
            *(len(repeated), len(rows), source),
            ", ".join(_quote(key[0]) for key in dict.fromkeys(repeated[:2])),
            "equal texts stay in the same split"
            if stay_together
            else "equal texts may be in two splits, so that the score is too high",
        )


def warn_about_labels(
    rows: Sequence[Mapping],  # of all splits, with `sentence1` and the `label` as in the table
) -> None:
    """Log classes with one row, classes with similar names, and texts with several labels."""
    counts: dict[str, int] = {}
    for row in rows:
        for name in _names_of(row["label"]):
            counts[name] = counts.get(name, 0) + 1
    _warn_about_similar_names(counts)
    single = [name for name, count in counts.items() if count == 1]
    if single and len(counts) > 2:
        logger.warning(
            "%s one row (%s), which can be trained or tested, not both",
            _count(len(single), "class has", "classes have"),
            ", ".join(map(_quote, single[:2])),
        )
    _warn_about_contradictions(rows)


def warn_about_shared_texts(
    splits: Mapping[str, Sequence[Mapping]],  # split: its rows
    source: str,  # name of the table, for messages
) -> None:
    """Log texts that are in two splits.

    Raises: `UserError` if a split is the same as another one.
    """
    keys = {split: [*map(text_key, rows)] for split, rows in splits.items()}
    for split, other in (("validation", "train"), ("test", "train"), ("test", "validation")):
        if split not in keys or other not in keys:
            continue
        other_name = "training" if other == "train" else other
        if sorted(keys[split]) == sorted(keys[other]):
            raise UserError(
                f"the {split} rows of {source} are the {other_name} rows again, so a score would "
                f"say nothing about new texts: leave the {split} split out, and a part of the "
                "training rows is held out."
            )
        texts = set(keys[other])
        shared = [key for key in keys[split] if key in texts]
        if shared:
            logger.warning(
                "%d of %d %s texts of %s are %s texts too (%s): remove them from one split, since "
                "the score says less about new texts",
                *(len(shared), len(keys[split]), split, source),
                other_name,
                ", ".join(_quote(key[0]) for key in shared[:2]),
            )

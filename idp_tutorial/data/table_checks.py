"""Problems of a table of texts: all of them in one run, each with a count and two examples.

A row that cannot be used is an error, and the table is refused after all of its rows have been
read. What a table may have, but what is seldom meant, is a warning: classes whose names differ by
case only, equal texts with different labels, and texts that are in two splits, which make a score
too high.
"""

import logging
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from idp_tutorial.data.task import TEXT_COLUMNS
from idp_tutorial.utils.checks import UserError

logger = logging.getLogger(__name__)

_KINDS = {  # kind of fault: what is said of several rows
    "row": "rows cannot be read",
    "text": "rows have a text that is not valid",
    "label": "rows have a label that is not valid",
}
_ADVICE = {  # what a row may lack: what can be done
    "text": "write the texts or remove these rows (skip_empty of fit and of commands does)",
    "label": "add the labels or remove these rows (skip_unlabelled does)",
}


def _name_first(places: Sequence[str]) -> str:
    """Return the first places, such as 'tickets.csv, line 5, line 17, line 300 …'."""
    first, *others = places[:5]
    parts = [first, *(place.rpartition(", ")[2] for place in others)]
    return ", ".join(parts) + (" …" if len(places) > 5 else "")


@dataclass
class RowFaults:
    """The faults of the rows of a table, which are collected while it is read."""

    source: str  # name of the table
    texts: str = ""  # where the texts are, in words; '': in the columns
    columns: Sequence[str | None] = ()  # of texts, second texts and labels, once they are known
    n_rows: int = 0  # number of rows that were read, those with faults included
    # kind of fault, 'row', 'text' or 'label': the messages of two rows, and '' for each other one
    messages: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    # 'text' or 'label': places of the rows that lack it
    missing: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, kind: str, error: UserError) -> None:
        """Add the error of a row."""
        self.n_rows += kind == "row"  # the reader does not yield it
        self.messages[kind].append(str(error) if len(self.messages[kind]) < 2 else "")

    def skip(self, kind: str, option: str) -> None:
        """Log how many rows an option leaves out, which are no faults then."""
        if places := self.missing.pop(kind, []):
            logger.warning(
                "%s left out %d of %d rows (%s)",
                *(option, len(places), self.n_rows, _name_first(places)),
            )

    def describe(self) -> str:  # '' if there are no faults
        """Return a message that names all kinds of faults, each with a count and two examples."""
        problems = []
        columns = " or ".join(repr(name) for name in self.columns[:2] if name is not None)
        texts = self.texts or f"column {columns}"
        for kind, places in self.missing.items():
            value = f"text in {texts}" if kind == "text" else kind
            rows = f"{len(places)} of {self.n_rows} rows {'has' if len(places) == 1 else 'have'}"
            problems.append(f"{rows} no {value} ({_name_first(places)}): {_ADVICE[kind]}.")
        for kind, messages in self.messages.items():
            many = f"{len(messages)} of {self.n_rows} {_KINDS[kind]}. "
            problems.append((many if len(messages) > 1 else "") + " ".join(messages[:2]))
        if len(problems) < 2:
            return "".join(problems)
        numbered = " ".join(f"({n}) {problem}" for n, problem in enumerate(problems, 1))
        return f"{self.source} has {len(problems)} kinds of problems: {numbered}"

    def refuse(self) -> None:
        """Raise `UserError` that names all faults, if there are any."""
        if message := self.describe():
            raise UserError(message)


def text_key(row: Mapping) -> tuple:
    """Return what is equal for rows with the same texts, whatever spaces are around them."""
    return tuple(str(row[c]).strip() for c in TEXT_COLUMNS if c in row)


def _quote(texts: Iterable[Any], separator: str = ", ") -> str:
    """Return short texts in quotation marks."""
    return separator.join(f"{str(text)[:60]!r}" for text in texts)


def warn_about_repeated_texts(
    rows: Sequence[Mapping],  # rows of which some are held out
    source: str,  # name of the table
    stay_together: bool,  # are rows with equal texts held out together?
) -> None:
    """Log rows whose text an earlier row has."""
    counts = Counter(map(text_key, rows))
    repeated = [key[0] for key, count in counts.items() if count > 1]
    if repeated:
        logger.warning(
            "%d of %d rows of %s repeat the text of another row (%s): %s",
            *(len(rows) - len(counts), len(rows), source, _quote(repeated[:2])),
            "equal texts stay in the same split"
            if stay_together
            else "equal texts may be in two splits, so that the score is too high",
        )


def warn_about_labels(
    rows: Sequence[Mapping],  # of all splits, with `sentence1` and the `label` as in the table
) -> None:
    """Log classes with one row, classes with similar names, and texts with several labels."""
    labels = [row["label"] for row in rows if not isinstance(row["label"], float)]
    counts = Counter(n for label in labels for n in (label if isinstance(label, list) else [label]))
    similar: dict[str, list[str]] = defaultdict(list)
    for name in counts:
        key = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        similar[key].append(f"{_quote([name])} ({counts[name]} rows)")
    if groups := [names for names in similar.values() if len(names) > 1]:
        logger.warning(
            "%d classes have names that differ only by case, spaces or Unicode form (%s%s): write "
            "the names alike if they mean the same",
            sum(map(len, groups)),
            "; ".join(" and ".join(names) for names in groups[:2]),
            " …" if len(groups) > 2 else "",
        )
    single = [name for name, count in counts.items() if count == 1]
    if single and len(counts) > 2:
        logger.warning(
            "%d %s one row (%s), which can be trained or tested, not both",
            *(len(single), "class has" if len(single) == 1 else "classes have"),
            _quote(single[:2]),
        )
    labels_of: dict[tuple, set[str]] = defaultdict(set)
    for row in rows:
        labels_of[text_key(row)].add(str(row["label"]))
    several = [
        f"{_quote(key[:1])} is {_quote(sorted(names), ' and ')}"
        for key, names in labels_of.items()
        if len(names) > 1
    ]
    if several:
        logger.warning(
            "%d %s several labels in different rows (%s): keep one label for each text",
            *(len(several), "text has" if len(several) == 1 else "texts have"),
            "; ".join(several[:2]),
        )


def warn_about_shared_texts(
    splits: Mapping[str, Sequence[Mapping]],  # split: its rows
    source: str,  # name of the table, for messages
) -> None:
    """Log texts that are in two splits.

    Raises: `UserError` if a split is the same as another one.
    """
    names = dict(train="training", validation="validation", test="test")
    keys = {split: [*map(text_key, splits[split])] for split in names if split in splits}
    for other, split in combinations(keys, 2):
        if sorted(keys[split]) == sorted(keys[other]):
            raise UserError(
                f"the {split} rows of {source} are the {names[other]} rows again: leave the "
                f"{split} split out, and a part of the training rows is held out."
            )
        texts = {*keys[other]}
        if shared := [key[0] for key in keys[split] if key in texts]:
            logger.warning(
                "%d of %d %s texts of %s are %s texts too (%s): remove them from one split, since "
                "the score says less about new texts",
                *(len(shared), len(keys[split]), split, source, names[other], _quote(shared[:2])),
            )

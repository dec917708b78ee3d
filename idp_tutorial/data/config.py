"""The options of a table of texts, which the commands and `load_table_task` read."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from idp_tutorial.utils.checks import Range, UserError
from idp_tutorial.utils.options import check_options

FRACTION_HINT = "a fraction of the rows, such as 0.1"
_TEST_HINT = f"{FRACTION_HINT}, or 0 for none"


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Options that say how a file of texts is read."""

    option_group: ClassVar[str] = "your own texts"

    # column of the texts (default: to predict, that of training; else text, sentence1 or sentence)
    text: str | None = None
    # column of the second texts, for pairs (default: text2 beside text, sentence2 beside sentence1)
    text2: str | None = None
    label: str | None = None  # column of the labels (default: label)
    # csv, tsv, jsonl, parquet, xlsx, lines or auto (default: by the extension of the file)
    format: str | None = None
    encoding: str | None = None  # encoding of the file, such as cp1252 (default: UTF-8)
    # separator of the columns, such as ';' or tab (default: that of the first line)
    sep: str | None = None
    skip_empty: bool = False  # leave out rows without a text, and say how many

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class TableConfig(TextConfig):
    """Options that describe a table of labelled texts."""

    skip_unlabelled: bool = False  # leave out rows without a label, and say how many
    # rows with equal texts are held out together; False: they are held out one by one, so that
    # training texts may be tested
    group_duplicates: bool = True
    regression: bool = False  # the labels are numbers, not classes
    # a row may have several labels: names joined by | in a cell, or a JSON list of names
    multi_label: bool = False
    # fraction of the rows for validation, if there is no such split
    validation: Annotated[float, Range(0, 1, FRACTION_HINT, True, True)] = 0.1
    # fraction of the rows for testing, if there is no such split; 0: none
    test: Annotated[float, Range(0, 1, _TEST_HINT, False, True)] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.regression and self.multi_label:
            raise UserError(
                "regression and multi_label exclude each other: labels are either numbers or names."
            )

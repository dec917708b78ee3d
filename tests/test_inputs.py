"""What is accepted as a text and as a label is the same in every way in, as docs/data.md says."""

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from datasets import Dataset

from idp_tutorial.cli.predict import read_texts
from idp_tutorial.data.config import TableConfig, TextConfig
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.data.user_data import _read_source
from idp_tutorial.estimator import PromptClassifier, PromptRegressor, convert_to_rows
from idp_tutorial.serving.server import parse_request
from idp_tutorial.utils.checks import UserError

PAGE = (Path(__file__).resolve().parents[1] / "docs/data.md").read_text(encoding="utf-8")
TABLE_FILES = ("a.csv", "a.tsv", "a.jsonl", "a.json", "a.parquet")


def read_page(heading):
    """Return the rows of the table below a heading: its first cell, and the second one."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.M)
    return dict(cells[1:])


# ---- ways in


def write(file, row):
    """Write a row to a file, or return False if the format cannot express it."""
    if file.suffix in (".csv", ".tsv"):
        if not all(isinstance(value, str) for value in row.values()):
            return False
        with open(file, "w", newline="", encoding="utf-8", errors="surrogatepass") as opened:
            table = csv.writer(opened, delimiter="," if file.suffix == ".csv" else "\t")
            table.writerows([row.keys(), row.values()])
    elif file.suffix == ".parquet":
        try:
            Dataset.from_list([row]).to_parquet(file)
        except UnicodeEncodeError:  # a lone surrogate
            return False
    else:
        try:
            text = json.dumps([row] if file.suffix == ".json" else row)
        except TypeError:  # bytes
            return False
        file.write_text(text)
    return True


def read_table(source, regression=False):
    rows, faults = _read_source(source, TableConfig(regression=regression))
    faults.refuse()
    if not rows:
        raise UserError("no row has a label")
    return rows[0]


def ask_server(value):
    model = SimpleNamespace(
        task_names=["mood"], task_models={"mood": SimpleNamespace(task=TASKS["sentiment"])}
    )
    try:
        body = json.dumps({"text": [value]}).encode()
    except TypeError:
        return None
    return parse_request(body, model, 1)[0][0]["sentence1"]


def read_text(way, value, folder):
    """Return a text as it is read in one way, or None if the way cannot express it."""
    row = dict(text=value, label="a")
    if way in TABLE_FILES:
        return read_table(folder / way)["sentence1"] if write(folder / way, row) else None
    if way == "idp predict":
        if not write(folder / "a.jsonl", row):
            return None
        rows = read_texts(str(folder / "a.jsonl"), TASKS["sentiment"], TextConfig())
        return next(rows)[1]["sentence1"]
    if way == "Dataset":
        try:
            dataset = Dataset.from_list([row])
        except UnicodeEncodeError:
            return None
        return read_table(dataset)["sentence1"]
    if way == "server":
        return ask_server(value)
    X = [value] if way == "list" else pd.DataFrame(dict(text=pd.Series([value], dtype=object)))
    return convert_to_rows(X)[0]["sentence1"]


TEXTS = [  # first cell of the page's table, value
    ("a text in any script", "naïve – “雨”"),
    ("`NA`, `null`, `1e5`", "NA"),
    ("`NA`, `null`, `1e5`", "null"),
    ("`NA`, `null`, `1e5`", "1e5"),
    ("a text with spaces around it", "  tea "),
    ("a text with line breaks", "tea\nand rain\n"),
    ("an empty text, or spaces only", ""),
    ("an empty text, or spaces only", " \t"),
    ("a missing value: None, null, NaN", None),
    ("a number or a Boolean", 3),
    ("a number or a Boolean", 2.5),
    ("a number or a Boolean", True),
    ("an object or bytes", {"a": 1}),
    ("an object or bytes", b"tea"),
    ("a NUL character", "tea\0"),
    ("a lone surrogate (half of a UTF-16 pair)", "tea \ud800"),
]


@pytest.mark.parametrize(
    "way", [*TABLE_FILES, "idp predict", "Dataset", "list", "data frame", "server"]
)
@pytest.mark.parametrize("kind,value", TEXTS, ids=lambda v: ascii(v)[:30])
def test_a_text_is_accepted_in_every_way_or_in_none(kind, value, way, tmp_path):
    if read_page("Texts")[kind].startswith("yes"):
        assert read_text(way, value, tmp_path) == value
        return
    try:
        assert read_text(way, value, tmp_path) is None  # it cannot be expressed
    except UserError as error:
        assert not isinstance(error, UnicodeError)


LABELS = [  # first cell of the page's table, value, the label that is read
    ("a text", "billing", "billing"),
    ("a whole number or a Boolean", 3, "3"),
    ("a whole number or a Boolean", True, "True"),
    ("a non-integer number", 2.5, None),
    ("an empty text, or spaces only", " ", None),
    ("a missing value: None, null, NaN", None, None),
    ("several labels in a list", ["a", "b"], None),
    ("a NUL character", "a\0", None),
    ("a lone surrogate (half of a UTF-16 pair)", "a\udfff", None),
]
NUMBERS = [
    *(
        ("regression: a number, or its digits as a text: `2.5`, `-3`, `1e-3`", *pair)
        for pair in ((2.5, 2.5), ("2.5", 2.5), (-3, -3.0), (" 1e-3", 0.001))
    ),
    *(
        ("regression: `2,5`, `1_0`, digits of other scripts, `inf`, NaN", value, None)
        for value in ("2,5", "1_0", "١٢", "２", "inf", "nan")
    ),
    *(("regression: a Boolean, or another text", value, None) for value in (True, "x", " ")),
]


def read_label(way, value, folder, regression):
    row = dict(text="tea", label=value)
    if way in TABLE_FILES:
        if not write(folder / way, row):
            return None
        return read_table(folder / way, regression)["label"]
    if way == "Dataset":
        try:
            return read_table(Dataset.from_list([row]), regression)["label"]
        except UnicodeEncodeError:
            return None
    if regression:
        return PromptRegressor()._validate_labels([value, value], True)[0]
    return PromptClassifier()._validate_labels([value, value], True)[0]


@pytest.mark.parametrize("way", [*TABLE_FILES, "Dataset", "list"])
@pytest.mark.parametrize("kind,value,expected", LABELS + NUMBERS, ids=lambda v: ascii(v)[:30])
def test_a_label_is_accepted_in_every_way_or_in_none(kind, value, expected, way, tmp_path):
    regression = kind.startswith("regression")
    assert read_page("Labels")[kind].startswith("no") == (expected is None)
    if way == "list" and isinstance(value, list):
        expected = value  # estimators train several labels
    try:
        label = read_label(way, value, tmp_path, regression)
    except ValueError:
        assert expected is None
        return
    is_text_file = way in ("a.csv", "a.tsv")
    assert label == expected or (label is None and is_text_file and not isinstance(value, str))


def test_texts_and_numbers_in_one_column_are_refused(tmp_path):
    assert read_page("Labels")["texts and numbers in one column"] == "no"
    rows = [dict(text="tea", label="3"), dict(text="rain", label=3)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"line 2: the label is 3, but that of .*line 1 is '3'"):
        read_table(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="label 1: the label is 3, but that of label 0"):
        PromptClassifier()._validate_labels(["3", 3], True)


def test_missing_values_of_numpy_and_pandas_are_missing():
    for missing in (np.nan, pd.NA, None, np.float32("nan")):
        with pytest.raises(ValueError, match=r"1 of 2 rows has no text in X \(row 1\)"):
            convert_to_rows(["tea", missing])


def test_every_row_of_the_page_is_tested():
    tested = {kind for kind, *_ in LABELS + NUMBERS} | {"texts and numbers in one column"}
    assert {*read_page("Texts")} == {kind for kind, _ in TEXTS}
    assert {*read_page("Labels")} == tested


TWELVE = [f"text number {i}" for i in range(12)]


@pytest.mark.parametrize("factor", [1e-300, 1e300])
def test_labels_that_float32_cannot_hold_are_refused(factor):
    with pytest.raises(UserError, match="labels of own are between .* use another unit"):
        PromptRegressor("lpt-npg", steps=1).fit(TWELVE, [factor * i for i in range(12)])


MASK = np.arange(12) == 3
ODD_COLLECTIONS = {  # id: (X, y, message)
    "masked labels": (TWELVE, np.ma.array([0, 1] * 6, mask=MASK), "y must be .* got MaskedArray"),
    "masked texts": (np.ma.array(TWELVE, mask=MASK), [0, 1] * 6, "X must be .* got MaskedArray"),
    "one text": (np.array("a text"), [1], "X must be .* got ndarray"),
    "one label": (TWELVE, np.array(1), "y must be .* got ndarray"),
    "sparse features": (
        scipy.sparse.csr_matrix(np.eye(12)),
        [0, 1] * 6,
        "X must be .* got csr_matrix",
    ),
    "sparse labels": (TWELVE, scipy.sparse.csr_matrix([0, 1] * 6), "y must be .* got csr_matrix"),
}


@pytest.mark.parametrize("case", ODD_COLLECTIONS)
def test_odd_arrays_are_named(case):
    X, y, message = ODD_COLLECTIONS[case]
    with pytest.raises(UserError, match=message):
        PromptClassifier("lpt-npg", steps=1).fit(X, y)


@pytest.mark.parametrize("name", ["../../evil.txt", "/evil.txt", "a/b", ".."])
def test_a_pickle_cannot_name_a_file_outside_of_its_folder(name, tmp_path):
    clf = PromptClassifier("lpt-npg")
    state = {**clf.__getstate__(), "saved_": {name: b"x"}}
    with pytest.raises(UserError, match="named without folders"):
        clf.__setstate__(state)
    assert not (tmp_path.parent / "evil.txt").exists()

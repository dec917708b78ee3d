"""Row readers: encodings, tables, lines, and the messages for invalid input."""

import gzip
import io
import json
import lzma
import sys
from dataclasses import replace

import pytest
from datasets import Dataset

from idp_tutorial.data.reading import (
    detect_format,
    iterate_lines,
    iterate_rows,
    parse_json_object,
)
from idp_tutorial.data.rows import check_row, convert_and_check_row
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.methods.glove import read_glove

MINE = Task("mine", labels=("no", "yes"))
WANT = [dict(message="NA", topic="1e5"), dict(message='a "b", c\nd', topic="null")]


def rows(*a, **kw):
    return [row for _, row in iterate_rows(*a, **kw)]


# --- one table in every shape

CSV = 'message,topic\nNA,1e5\n"a ""b"", c\nd",null\n'
SHAPES = {
    "a.csv": CSV.encode(),
    "mark.csv": b"\xef\xbb\xbf" + CSV.encode(),
    "crlf.csv": CSV.replace("\n", "\r\n").encode(),
    "a.tsv": b'message\ttopic\nNA\t1e5\n"a ""b"", c\nd"\tnull\n',
    "a.csv.gz": gzip.compress(CSV.encode()),
    "a.csv.xz": lzma.compress(CSV.encode()),
    "a.JSONL": "\n".join(map(json.dumps, WANT)).encode(),
    "mark.jsonl": b"\xef\xbb\xbf" + "\n\n".join(map(json.dumps, WANT)).encode(),
}


@pytest.mark.parametrize("name", SHAPES)
def test_cells_are_not_converted(name, tmp_path):
    (tmp_path / name).write_bytes(SHAPES[name])
    got = rows(tmp_path / name)
    assert [{k: v.replace("\r", "") for k, v in r.items()} for r in got] == WANT


def test_a_parquet_file(tmp_path):
    Dataset.from_list(WANT).to_parquet(tmp_path / "a.parquet")
    assert [*iterate_rows(tmp_path / "a.parquet")][1] == (f"{tmp_path}/a.parquet, row 2", WANT[1])
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="b.parquet cannot be read as Parquet"):
        rows(tmp_path / "b.parquet")
    with pytest.raises(FileNotFoundError, match="there is no file .*c.parquet: check the path"):
        rows(tmp_path / "c.parquet")
    Dataset.from_list([dict(sentence1=f"text {i} of many") for i in range(2000)]).to_parquet(
        tmp_path / "d.parquet"
    )
    whole = bytearray((tmp_path / "d.parquet").read_bytes())
    whole[100:3000] = bytes(2900)  # the footer with the locations of the columns is valid
    (tmp_path / "d.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match="d.parquet cannot be read as Parquet"):
        rows(tmp_path / "d.parquet")


def test_lines_and_standard_input(tmp_path, monkeypatch):
    f = tmp_path / "a.txt"
    f.write_bytes(b'\xef\xbb\xbf{"sentence1": "b"}\n\n {x}, a set\n')
    assert rows(f, "lines") == [dict(sentence1='{"sentence1": "b"}'), dict(sentence1="{x}, a set")]
    with pytest.raises(ValueError, match="a.txt, line 3 is not valid JSON .* use format='lines'"):
        rows(f)
    for stdin in (io.StringIO("a\tb\n"), io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\tb\n"))):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert rows("-", pair=True) == [dict(sentence1="a", sentence2="b")]


def test_formats():
    formats = [
        detect_format(p)
        for p in ("a.CSV", "b/c.tsv.gz", "x.ndjson", "-", "a.txt", "a.b/c", "v1.2.parquet")
    ]
    assert (
        formats == ["csv", "tsv", "jsonl", "auto", "auto", "auto", "parquet"]
        and detect_format("a.csv", "lines") == "lines"
    )


@pytest.mark.parametrize(
    "name,data,words",
    [
        (
            "a.csv",
            "a,b\nné,1\n".encode("latin-1"),
            r"a.csv, line 2: byte 2 is 0xe9, which is not valid UTF-8 \(.* Latin-1",
        ),
        ("a.csv", b"a,b\n1,2,3\n", "line 2: 3 cells, but the header has 2 columns"),
        ("a.csv", b"", "line 1 has the columns"),
        ("a.csv", b"a,a\n", "names each column once"),
        ("a.csv", b'a,b\n"x"y,2\n', "line 2: .*double quotes"),
        (
            "a.csv",
            b"message;topic\nwell, no;b\n",
            r"line 2: 2 cells, .*message;topic\): its columns seem .* by ';': use",
        ),
        (
            "a.csv",
            b'message;topic\n"well, no";b\n',
            "line 2: .*its columns seem to be separated by ';': use commas",
        ),
        ("a.tsv", b"message,topic\nno,b\tc\n", "line 2: 2 cells, .* by ',': use tabs"),
        (
            "a.csv",
            b"a,b\r1,2\r",
            r"a.csv has lines that end in .r: save it with .n",
        ),
        ("a.txt", b"who ?\rwhere ?", "a.txt has lines that end in"),
        ("a.txt", "a".encode("utf-16"), "is encoded as UTF-16: save it as UTF-8"),
        ("a.txt", "ab".encode("utf-16-le"), "line 1 contains a NUL"),
        (
            "a.jsonl",
            b'{"a": 1, "a": 2}',
            "line 1 is not valid JSON .the key 'a' appears more than once",
        ),
        ("a.jsonl", b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        ("a.jsonl", b"3", "is not a row"),
        ("a.jsonl", b"[" * 100_000, "is not valid JSON"),
        ("a.jsonl", b'{"a": "\\udfff"}', "lone surrogate"),
        ("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        ("a.csv.xz", lzma.compress(b"a\n1\n")[:-9], "cannot be decompressed"),
        ("a.csv.gz", b"a,b\n", "cannot be decompressed"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_invalid_input_is_rejected_with_its_line(name, data, words, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=words):
        rows(tmp_path / name)


def test_last_line_may_have_no_line_ending(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'a,b\r\n"1\r",2')
    (tmp_path / "b.txt").write_bytes(b"who ?\r")
    assert rows(tmp_path / "a.csv") == [dict(a="1\r", b="2")] and rows(tmp_path / "b.txt") == [
        dict(sentence1="who ?")
    ]


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        rows(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file nowhere"):
        rows("nowhere")


# --- values that are not texts: null, lists, numbers …

NOT_TEXTS = [None, 3, 2.5, True, [], ["a"], {"a": 1}]
FOREIGN = {
    "mnli": dict(premise="a", hypothesis="b", label=0),
    "boolq": dict(question="a", passage="b", label=1),
    "copa": dict(premise="a", choice1="b", choice2="c", question="cause", label=0),
    "multirc": dict(
        paragraph="a", question="b", answer="c", label=1, idx=dict(paragraph=0, question=0)
    ),
    "wic": dict(
        word="a", sentence1="a", sentence2="a", start1=0, end1=1, start2=0, end2=1, label=1
    ),
}
TEXTS = [
    (name, c)
    for name, r in FOREIGN.items()
    for c, v in r.items()
    if isinstance(v, str) and v != "cause"
]


@pytest.mark.parametrize("name,column", TEXTS)
@pytest.mark.parametrize("value", NOT_TEXTS, ids=repr)
def test_benchmark_columns_must_be_texts(name, column, value):
    assert convert_and_check_row(TASKS[name], FOREIGN[name], 1, "f, line 1")
    with pytest.raises(ValueError, match="f, line 7: "):
        convert_and_check_row(TASKS[name], FOREIGN[name] | {column: value}, 7, "f, line 7")


@pytest.mark.parametrize("value", NOT_TEXTS, ids=repr)
def test_row_columns_must_be_texts(value):
    with pytest.raises(ValueError, match="f, line 7: "):
        check_row(MINE, dict(sentence1=value, label=0), "f, line 7")


# --- labels


@pytest.mark.parametrize("y,index", [(1, 0), (3, 2), ("1", 0), ("3", 2)])
def test_an_integer_label_is_a_class_name_if_the_names_are_integers(y, index):
    task = Task("stars", labels=("1", "2", "3"))
    assert check_row(task, dict(sentence1="a", label=y), "f")["label"] == index
    with pytest.raises(
        ValueError, match=r"label must be an index .* a class name \(1, 2, 3\) .* got 0"
    ):
        check_row(task, dict(sentence1="a", label=0), "f")
    assert check_row(MINE, dict(sentence1="a", label=1), "f")["label"] == 1


def test_labels_are_a_tuple_of_names():
    for field in (
        dict(labels="billing"),
        dict(labels=("a", "b"), label_words="AB"),
        dict(labels=(1, 2)),
    ):
        with pytest.raises(ValueError, match="must be a tuple of strings"):
            Task("t", **field)
    with pytest.raises(ValueError, match="labels must all be different"):
        Task("t", labels=("a", "b", "a"))
    assert Task("t", labels=["a", "b"]) == Task("t", labels=("a", "b"))


def test_regression_labels_must_be_finite_numbers():
    stsb = replace(TASKS["stsb"])
    for y in (True, float("nan"), "3", None):
        with pytest.raises(ValueError):
            check_row(stsb, dict(sentence1="a", sentence2="b", label=y), "f")


def test_a_test_file_without_labels_is_ignored_with_a_warning(tmp_path):
    (tmp_path / "mine").mkdir()
    for split, label in (("train", 1), ("validation", 0), ("test", -1)):
        lines = [json.dumps(dict(sentence1=f"{split} {i}", label=label)) for i in range(20)]
        (tmp_path / "mine" / f"{split}.jsonl").write_text("\n".join(lines))
    with pytest.warns(
        UserWarning,
        match="test.jsonl has no labels and is ignored. Scores are reported on validation.jsonl",
    ):
        task = load_task(MINE, tmp_path)
    assert {r["sentence1"].split()[0] for r in task.splits["test"]} == {"validation"}


# --- word vectors


def test_word_vectors_are_checked(tmp_path):
    def read(data):
        (tmp_path / "v.txt").write_bytes(data)
        return read_glove(tmp_path / "v.txt")

    index, v = read(b"\xef\xbb\xbfthe 1 2\n. . 3 4\nat name@x.com 5 6\n")
    assert [*index] == ["the", ". .", "at name@x.com"] and v.tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match="line 2: .* are not 2 numbers"):
        read(b"the 1 2\na 1_0 3\n")
    with pytest.raises(ValueError, match="line 2 has more numbers than the 2 of line 1"):
        read(b"the 1 2\na 1 2 3\n")
    assert json.loads(json.dumps(parse_json_object('{"a": 1}', "f"))) == {"a": 1}


def test_lines_have_a_maximum_length(tmp_path, monkeypatch):
    """A device that never ends a line does not fill the memory."""
    monkeypatch.setattr("idp_tutorial.data.reading._MAX_LINE_BYTES", 8)
    file = tmp_path / "x.txt"
    file.write_bytes(b"short\n1234567\n")
    assert [text for _, text in iterate_lines(file)] == ["short\n", "1234567\n"]
    file.write_bytes(b"short\n12345678\n")
    with pytest.raises(ValueError, match="line 2 is longer than 8 bytes: pass a text file"):
        list(iterate_lines(file))

"""Files of rows: encodings, formats, and messages with the line."""

import gzip
import io
import json
import lzma
import sys

import pytest
from datasets import Dataset

from idp_tutorial.data.reading import (
    detect_format,
    iterate_lines,
    iterate_rows,
)

WANT = [dict(message="NA", topic="1e5"), dict(message='a "b", c\nd', topic="null")]


def read_rows(*a, **kw):
    return [row for _, row in iterate_rows(*a, **kw)]


# ---- one table in every format


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
    got = read_rows(tmp_path / name)
    assert [{k: v.replace("\r", "") for k, v in r.items()} for r in got] == WANT


def test_parquet_rows_are_read_and_damage_is_reported(tmp_path):
    Dataset.from_list(WANT).to_parquet(tmp_path / "a.parquet")
    assert [*iterate_rows(tmp_path / "a.parquet")][1] == (f"{tmp_path}/a.parquet, row 2", WANT[1])
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="b.parquet cannot be read as Parquet"):
        read_rows(tmp_path / "b.parquet")
    with pytest.raises(FileNotFoundError, match="there is no file .*c.parquet: check the path"):
        read_rows(tmp_path / "c.parquet")
    Dataset.from_list([dict(sentence1=f"text {i} of many") for i in range(2000)]).to_parquet(
        tmp_path / "d.parquet"
    )
    whole = bytearray((tmp_path / "d.parquet").read_bytes())
    whole[100:3000] = bytes(2900)  # the footer with the locations of the columns is valid
    (tmp_path / "d.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match="d.parquet cannot be read as Parquet"):
        read_rows(tmp_path / "d.parquet")


def test_lines_are_read_from_files_and_standard_input(tmp_path, monkeypatch):
    f = tmp_path / "a.txt"
    f.write_bytes(b'\xef\xbb\xbf{"sentence1": "b"}\n\n {x}, a set\n')
    assert read_rows(f, "lines") == [
        dict(sentence1='{"sentence1": "b"}'),
        dict(sentence1="{x}, a set"),
    ]
    with pytest.raises(ValueError, match="a.txt, line 3 is not valid JSON .* use format='lines'"):
        read_rows(f)
    for stdin in (io.StringIO("a\tb\n"), io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\tb\n"))):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert read_rows("-", pair=True) == [dict(sentence1="a", sentence2="b")]


def test_the_format_is_that_of_the_suffix():
    formats = [
        detect_format(p)
        for p in ("a.CSV", "b/c.tsv.gz", "x.ndjson", "-", "a.txt", "a.b/c", "v1.2.parquet")
    ]
    assert (
        formats == ["csv", "tsv", "jsonl", "auto", "auto", "auto", "parquet"]
        and detect_format("a.csv", "lines") == "lines"
    )
    with pytest.raises(ValueError, match="format must be .* got 'xls'"):
        detect_format("a.xls", "xls")


# ---- invalid files


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
        ("a.csv", b'a,b\n"1,2\n', "line 2: unexpected end of data"),
        ("a.csv", b"a,b\n1\n", "line 2: 1 cells, but the header has 2 columns"),
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
        read_rows(tmp_path / name)


def test_last_line_may_have_no_line_ending(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'a,b\r\n"1\r",2')
    (tmp_path / "b.txt").write_bytes(b"who ?\r")
    assert read_rows(tmp_path / "a.csv") == [dict(a="1\r", b="2")] and read_rows(
        tmp_path / "b.txt"
    ) == [dict(sentence1="who ?")]


def test_a_folder_is_not_a_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        read_rows(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file nowhere"):
        read_rows("nowhere")


def test_lines_have_a_maximum_length(tmp_path, monkeypatch):
    """A device that never ends a line does not fill the memory."""
    monkeypatch.setattr("idp_tutorial.data.reading._MAX_LINE_BYTES", 8)
    file = tmp_path / "x.txt"
    file.write_bytes(b"short\n1234567\n")
    assert [text for _, text in iterate_lines(file)] == ["short\n", "1234567\n"]
    file.write_bytes(b"short\n12345678\n")
    with pytest.raises(ValueError, match="line 2 is longer than 8 bytes: pass a text file"):
        list(iterate_lines(file))

"""Files of rows: encodings, formats, and messages with the line."""

import gzip
import io
import json
import lzma
import sys

import pytest
from datasets import Dataset

from idp_tutorial.data.file_readers import (
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
    with pytest.raises(ValueError, match="b.parquet cannot be read as parquet"):
        read_rows(tmp_path / "b.parquet")
    with pytest.raises(FileNotFoundError, match="c.parquet"):
        read_rows(tmp_path / "c.parquet")
    Dataset.from_list([dict(sentence1=f"text {i} of many") for i in range(2000)]).to_parquet(
        tmp_path / "d.parquet"
    )
    whole = bytearray((tmp_path / "d.parquet").read_bytes())
    whole[100:3000] = bytes(2900)  # the footer with the locations of the columns is valid
    (tmp_path / "d.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match="d.parquet cannot be read as parquet"):
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
    stdin = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfa\tb\n"))
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
            "line 2 is not a text in utf-8: pass encoding=",
        ),
        ("a.csv", b"a,b\n1,2,3\n", "line 2: 3 cells, but the header has 2 columns"),
        ("a.csv", b"", "the header must name each column once"),
        ("a.csv", b"a,a\n", "the header must name each column once"),
        ("a.csv", b'a,b\n"1,2\n', "line 2: unexpected end of data"),
        ("a.csv", b"a,b\n1\n", "line 2: 1 cells, but the header has 2 columns"),
        ("a.csv", b'a,b\n"x"y,2\n', "line 2: .*double quotes"),
        ("a.txt", "a".encode("utf-16"), "line 1 is not a text in utf-8: .* encoding='utf-16'"),
        ("a.txt", "ab".encode("utf-16-le"), "line 1 is not a text in utf-8"),
        ("a.csv", b"PK\x03\x04\x14\0", "give another format its extension"),
        ("a.csv", gzip.compress(b"a\n1\n", mtime=0), "give another format its extension"),
        ("a.jsonl", b'{"a": 1, "a": 2}', "line 1 is not valid JSON .a key appears more than once"),
        ("a.jsonl", b"3", "is not an object"),
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


# ---- other encodings and separators

EXCEL_CSV = "message;topic\r\nthe café – \u201copen\u201d;1,5\r\nno, thanks;2\r\n"
EXCEL_ROWS = [
    dict(message="the café – \u201copen\u201d", topic="1,5"),
    dict(message="no, thanks", topic="2"),
]


def test_a_table_of_excel_is_read_with_its_encoding(tmp_path, caplog):
    file = tmp_path / "excel.csv"
    file.write_bytes(EXCEL_CSV.encode("cp1252"))
    with pytest.raises(ValueError, match="line 2 is not a text in utf-8: .*'cp1252'"):
        read_rows(file)
    caplog.clear()
    assert read_rows(file, encoding="cp1252") == EXCEL_ROWS
    (line,) = caplog.messages
    assert line.startswith(f"{file}: columns are separated by ';'") and "\n" not in line
    caplog.clear()
    assert read_rows(file, encoding="windows-1252", sep=";") == EXCEL_ROWS and not caplog.messages


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig", "UTF8", "cp1252"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_text_in_any_encoding_is_read(encoding, suffix, tmp_path):
    data = EXCEL_CSV.encode(encoding)
    compress = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    (tmp_path / f"a.csv{suffix}").write_bytes(compress(data))
    assert read_rows(tmp_path / f"a.csv{suffix}", encoding=encoding) == EXCEL_ROWS


def test_standard_input_has_an_encoding_and_stays_open(monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO("né\n".encode("cp1252")))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert read_rows("-", encoding="cp1252") == [dict(sentence1="né")] and not stdin.buffer.closed


@pytest.mark.parametrize(
    "name,data,options,words",
    [
        ("a.csv", b"a,b\n1,2\n", dict(encoding="cp-none"), "with encoding='cp-none' .unknown"),
        ("a.csv", b"a,b\n1,2\n", dict(encoding="base64"), "with encoding='base64' .*not a text"),
        ("a.csv", b"a,b\n\x81,2\n", dict(encoding="cp1252"), "line 2 is not a text in cp1252"),
        ("a.csv", b"a,b\n1,2\n", dict(sep=";;"), "sep must be one character, .* got ';;'"),
        ("a.csv", b"a,b\n1,2\n", dict(sep="a"), "sep must be one character"),
        ("a.csv", b"a;b\n1,2;3\n", dict(sep=","), "line 2: 2 cells, .* as sep="),
    ],
)
def test_an_invalid_encoding_or_separator_is_refused(name, data, options, words, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=words):
        read_rows(tmp_path / name, **options)


@pytest.mark.parametrize(
    "name,header,delimiter",
    [
        ("a.csv", "x,y", ","),
        ("a.csv", "x;y", ";"),
        ("a.csv", "x\ty", "\t"),
        ("a.csv", "x|y", "|"),
        ("a.csv", '"a,b";"c,d"', ";"),
        ("a.tsv", "x,y", ","),
        ("a.tsv", "x\ty", "\t"),
        ("a.csv", "text", None),
    ],
)
def test_the_separator_is_that_of_the_header(name, header, delimiter, tmp_path, caplog):
    cells = ["1", "2"] if delimiter else ["1"]
    (tmp_path / name).write_text(f"{header}\n{(delimiter or ',').join(cells)}\n")
    (row,) = read_rows(tmp_path / name)
    assert [*row.values()] == cells
    default = "\t" if name.endswith("tsv") else ","
    assert len(caplog.messages) == (delimiter not in (default, None))


@pytest.mark.parametrize("name,option", [("a.jsonl", "sep"), ("a.parquet", "encoding")])
def test_an_option_without_effect_is_a_warning(name, option, tmp_path, caplog):
    if name == "a.jsonl":
        (tmp_path / name).write_text("{}")
    else:
        Dataset.from_list([{"a": 1}]).to_parquet(tmp_path / name)
    assert len(read_rows(tmp_path / name, **{option: ";"})) == 1
    assert f"{option}: no effect for a file of format {name[2:]}" in caplog.messages


def test_the_separator_can_be_called_tab(tmp_path):
    (tmp_path / "tab.csv").write_text("a\tb\n1\t2\n")
    assert read_rows(tmp_path / "tab.csv", sep="tab") == [dict(a="1", b="2")]


def test_lines_may_end_in_carriage_returns(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a,b\r1,2\r")
    assert [*iterate_rows(tmp_path / "a.csv")] == [
        (f"{tmp_path}/a.csv, line 2", dict(a="1", b="2"))
    ]


# ---- JSON arrays and Excel


def test_a_json_array_is_a_table(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(WANT, indent=1))
    assert read_rows(tmp_path / "a.json") == WANT
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(WANT))
    assert [where for where, _ in iterate_rows(tmp_path / "a.jsonl")][1].endswith("a.jsonl, row 2")
    for text, words in (
        ('[{"a": 1, "a": 2}]', "a key appears more than once"),
        ('[{"a": 1}, 3]', "row 2: 3 is not an object"),
        ('[{"a": 1}', "a.json is not valid JSON"),
        ('[{"a": "\\udfff"}]', "lone surrogate"),
        ('{"a": 1}\n[{"a": 1}]', "line 2: .* is not an object"),
        ("[] x", "is not valid JSON"),
    ):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_rows(tmp_path / "a.json")


def test_an_excel_sheet_is_a_table(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in [("message", "topic", None), ("NA", 15, None), ("café – x", 2.5, None), (None,) * 3]:
        book.active.append(row)
    book.active.append(("last", True))
    book.create_sheet("other")
    book.save(tmp_path / "a.xlsx")
    assert [*iterate_rows(tmp_path / "a.xlsx")] == [
        (f"{tmp_path}/a.xlsx, row 2", dict(message="NA", topic="15")),
        (f"{tmp_path}/a.xlsx, row 3", dict(message="café – x", topic="2.5")),
        (f"{tmp_path}/a.xlsx, row 5", dict(message="last", topic="True")),
    ]
    for header in (("text", " label ", "text"), ()):  # twice the same name; an empty sheet
        book = openpyxl.Workbook()
        book.active.append(header)
        book.save(tmp_path / "b.xlsx")
        with pytest.raises(ValueError, match="row 1: the header must name each column once"):
            read_rows(tmp_path / "b.xlsx")
    (tmp_path / "b.xlsx").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match="b.xlsx cannot be read as xlsx"):
        read_rows(tmp_path / "b.xlsx")
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "none.xlsx")


def test_an_excel_file_without_its_package_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(ValueError, match="a.xlsx: .*[Ii]mport openpyxl.* pip"):
        read_rows(tmp_path / "a.xlsx")


def test_last_line_may_have_no_line_ending(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'a,b\r\n"1\r",2')
    (tmp_path / "b.txt").write_bytes(b"who ?\r")
    assert read_rows(tmp_path / "a.csv") == [dict(a="1\r", b="2")] and read_rows(
        tmp_path / "b.txt"
    ) == [dict(sentence1="who ?")]


def test_lines_have_a_maximum_length(tmp_path, monkeypatch):
    """A device that never ends a line does not fill the memory."""
    monkeypatch.setattr("idp_tutorial.data.file_readers._MAX_LINE_LENGTH", 8)
    file = tmp_path / "x.txt"
    file.write_bytes(b"short\n1234567\n")
    assert [text for _, text in iterate_lines(file)] == ["short\n", "1234567\n"]
    file.write_bytes(b"short\n12345678\n")
    with pytest.raises(ValueError, match="line 2 is longer than 8 characters: pass a text file"):
        list(iterate_lines(file))

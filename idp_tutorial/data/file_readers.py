"""Read rows from CSV, TSV, JSON, Parquet, Excel and plain-text files.

`iterate_rows` yields the rows of a file, in any columns, each with its location. Messages need the
location; it is not part of the row.

CSV is parsed by Python's `csv` in strict mode. `pandas` accepts a row with too few cells and a
misplaced quotation mark, and `datasets` converts `NA` and `1e5`; neither reports the line of a row.
JSON is parsed line by line, because `datasets` accepts repeated keys. Both read in constant memory;
a JSON array and an Excel sheet are read whole.

Files are UTF-8, unless an encoding is given. The separator of a table is a comma or a tab; if the
header has none, and another usual separator instead, that one is used, and a log line says so.
"""

import csv
import gzip
import importlib.util
import json
import logging
import lzma
import re
import sys
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import IO, Any

from idp_tutorial.data.rows import require_utf8
from idp_tutorial.utils.checks import MissingFileError, UserError, check_choice

__all__ = [
    "ROW_HINT",
    "FILE_FORMATS",
    "describe_file",
    "iterate_lines",
    "parse_json",
    "parse_json_object",
    "detect_format",
    "iterate_rows",
]

logger = logging.getLogger(__name__)


# ---- lines

# maximum length of a line: a hundred times that of a book, so that a device such as /dev/zero,
# which never ends a line, does not fill the memory
_MAX_LINE_LENGTH = 2**26


def describe_file(
    path: str | Path,  # a file, or '-'
) -> str:
    """Return the name of a file for messages."""
    return "standard input" if path == "-" else str(path)


@contextmanager
def _open_text(path: str | Path, encoding: str) -> Iterator[IO[str]]:
    """Open a file, decompressed; bytes that cannot be decoded become lone surrogates."""
    options: dict[str, Any] = dict(encoding=encoding, errors="surrogateescape", newline="\n")
    if path == "-" and sys.stdin is None:
        raise UserError("standard input is closed: pass a file, or pipe the texts in.")
    if path == "-" and hasattr(sys.stdin, "buffer"):
        text_file = TextIOWrapper(sys.stdin.buffer, **options)
        try:
            yield text_file
        finally:
            text_file.detach()  # so that standard input stays open
    elif path == "-":
        yield sys.stdin  # replaced by another stream of text
    else:
        openers: dict[str, Callable] = {".xz": lzma.open, ".gz": gzip.open}
        with openers.get(Path(path).suffix, open)(path, "rt", **options) as file:
            yield file


_FIRST_BYTES = {  # what a file that is not text begins with: what it is, and what to do
    b"PK\x03\x04": "a ZIP archive, as Excel files are: give an Excel file the extension .xlsx, or "
    "save its sheet as CSV UTF-8",
    b"\xd0\xcf\x11\xe0": "an old Excel file (.xls): save it as .xlsx or as CSV UTF-8",
    b"PAR1": "a Parquet file: give it the extension .parquet, or pass format='parquet'",
    b"\x1f\x8b": "compressed: give it the extension .gz",
    b"\xfd7zXZ": "compressed: give it the extension .xz",
    BOM_UTF16_LE: "encoded as UTF-16: pass encoding='utf-16', or save it as UTF-8",
    BOM_UTF16_BE: "encoded as UTF-16: pass encoding='utf-16', or save it as UTF-8",
}


def _check_line(text: str, line_number: int, where: str, encoding: str | None) -> str:
    """Return a line without a byte order mark; raise `UserError` for bytes that are not text."""
    if line_number == 1 and encoding is None:
        first_bytes = text[:9].encode(errors="surrogateescape")
        for signature, advice in _FIRST_BYTES.items():
            if first_bytes.startswith(signature):
                raise UserError(f"{where} is {advice}.")
    if "\0" in text:
        raise UserError(
            f"{where}, line {line_number} contains a NUL character: if the file is UTF-16, pass "
            "encoding='utf-16-le', or save it as UTF-8."
        )
    try:
        text.encode()
    except UnicodeEncodeError as e:  # a byte that was not decoded is a lone surrogate
        n_bytes = len(text[: e.start].encode(encoding or "utf-8"))
        raise UserError(
            f"{where}, line {line_number}: byte {n_bytes + 1} is "
            f"{ord(text[e.start]) - 0xDC00:#04x}, which is not valid {encoding or 'UTF-8'}: if the "
            "file was saved by Excel or on Windows in Western Europe, pass encoding='cp1252' "
            "(which includes Latin-1); otherwise pass its encoding, such as encoding='cp1250', or "
            "save it as UTF-8."
        ) from None
    is_whole_file = line_number == 1 and not text.endswith("\n")
    if is_whole_file and "\r" in text.rstrip():
        raise UserError(f"{where} has lines that end in \\r: save it with \\n as the line ending.")
    # concatenated files have byte order marks in the middle
    return text.removeprefix("\ufeff")


def _check_encoding(encoding: str) -> None:
    """Raise `UserError` unless Python knows an encoding of text by this name."""
    try:
        "a".encode(encoding)
    except (LookupError, ValueError):
        raise UserError(
            f"encoding must be the name of a text encoding, such as 'cp1252' or 'utf-16', got "
            f"{encoding!r:.40}."
        ) from None


def iterate_lines(
    path: str | Path,  # a file, perhaps compressed (`.xz`, `.gz`); '-': standard input
    encoding: str | None = None,  # name of its encoding, such as 'cp1252'; None: UTF-8
) -> Iterator[tuple[int, str]]:  # line number from 1, and the line
    """Yield the lines of a file; raise `UserError` if it cannot be read or decoded."""
    where = describe_file(path)
    if encoding is not None:
        _check_encoding(encoding)
    line_number = 0
    try:
        with _open_text(path, encoding or "utf-8") as file:
            while text := file.readline(_MAX_LINE_LENGTH + 1):
                line_number += 1
                if len(text) > _MAX_LINE_LENGTH:
                    raise UserError(
                        f"{where}, line {line_number} is longer than {_MAX_LINE_LENGTH:,} "
                        "characters: pass a text file with one example a line."
                    )
                yield line_number, _check_line(text, line_number, where, encoding)
    except UnicodeError as e:  # such as half a character of UTF-16
        raise UserError(
            f"{where} is not {encoding} ({e}, after line {line_number}): pass the encoding of the "
            "file, or leave it out for UTF-8."
        ) from None
    except FileNotFoundError:
        raise MissingFileError(f"there is no file {where}: check the path.") from None
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as e:
        raise UserError(
            f"{where} cannot be decompressed ({e}): it is damaged; create or download it again."
        ) from None
    except BrokenPipeError:
        raise
    except OSError as e:
        raise UserError(
            f"{where} cannot be read ({e.strerror}): pass a file that this user may read."
        ) from None


# ---- JSON

ROW_HINT = 'each line must be an object such as {"sentence1": "…", "label": 0}'


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict:
    """Convert key-value pairs to a dictionary; raise `UserError` for a key that is repeated."""
    names = [name for name, _ in pairs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"the key {repeated[0]!r} appears more than once")
    return dict(pairs)


def _reject_json_constant(name: str) -> None:
    """Raise `UserError` for NaN and infinities, which JSON does not have."""
    raise UserError(f"{name} is not a JSON number")


def parse_json(
    text: str,  # one JSON document
    where: str,  # its location, for error messages
    hint: str,  # advice that ends an error message
) -> Any:
    """Parse JSON strictly: no duplicate keys, no NaN, no lone surrogates."""
    try:
        value = json.loads(
            text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_json_constant
        )
        decoded = json.dumps(value, ensure_ascii=False) if r"\ud" in text.lower() else ""
    except (ValueError, RecursionError) as e:
        raise UserError(
            f"{where} is not valid JSON ({str(e)[:200] or 'nested too deeply'}): {hint}."
        ) from None
    require_utf8(decoded, where)
    return value


def _check_json_row(row: Any, where: str, hint: str) -> dict:
    if not isinstance(row, dict):
        shown = json.dumps(row, ensure_ascii=False)[:60]
        raise UserError(f"{where}: {shown!r} is not an object: {hint}.")
    return row


def parse_json_object(
    text: str,  # one JSON document
    where: str,  # file and line, for error messages
    hint: str = ROW_HINT,  # advice that ends an error message
) -> dict:
    """Parse a JSON object strictly, as `parse_json` does."""
    return _check_json_row(parse_json(text, where, hint), where, hint)


def _read_json_array(lines: Iterator[tuple[int, str]], where: str) -> Iterator[tuple[str, dict]]:
    """Yield (file and number, row) of a file that is one JSON array of objects."""
    hint = 'the file must be an array of objects such as [{"sentence1": "…", "label": 0}]'
    for n, row in enumerate(parse_json("".join(text for _, text in lines), where, hint), 1):
        yield f"{where}, row {n}", _check_json_row(row, f"{where}, row {n}", hint)


def _read_json_rows(lines: Iterator[tuple[int, str]], where: str) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a file of JSON lines, or of a file that is one JSON array."""
    is_first = True
    for line_number, text in lines:
        if is_first and text.lstrip().startswith("["):
            yield from _read_json_array(chain([(line_number, text)], lines), where)
        elif text.strip():
            is_first = False
            line_location = f"{where}, line {line_number}"
            yield line_location, parse_json_object(text, line_location)


# ---- CSV and TSV


_DELIMITERS = ";\t|,"
_DELIMITER_NAMES = {"tab": "\t", r"\t": "\t"}  # a tab is hard to type in a shell


def _check_delimiter(sep: str) -> str:
    """Return the character that `sep` names."""
    sep = _DELIMITER_NAMES.get(sep, sep)
    if not isinstance(sep, str) or len(sep) != 1 or sep in '"\r\n\0\ufeff' or sep.isalnum():
        raise UserError(
            "sep must be one character that separates cells, such as ';' or 'tab', got "
            f"{sep!r:.40}."
        )
    return sep


def _detect_delimiter(first_line: str, default: str, where: str) -> str:
    """Return the separator of a header; it is logged if it is not the one of the format."""
    unquoted = re.sub(r'"[^"]*"', "", first_line)
    if default in unquoted:
        return default
    delimiter = max(_DELIMITERS, key=unquoted.count)
    if delimiter not in unquoted:
        return default
    logger.warning(
        "%s: columns are separated by %r, as in its first line (sep= names another character)",
        where,
        delimiter,
    )
    return delimiter


def _check_header(cells: Sequence[str], where: str) -> list[str]:
    """Return the column names of a table, which must be different."""
    header = [name.strip() for name in cells]
    if not any(header) or len(set(header)) < len(header):
        raise UserError(
            f"{where} has the columns {header!s:.200}: the first line must be a header that names "
            "each column once."
        )
    return header


def _read_csv(
    lines: Iterator[tuple[int, str]], where: str, default_delimiter: str, sep: str | None
) -> Iterator[tuple[str, dict]]:
    """Yield (file and line, row) of a CSV or TSV table with a header; cells stay strings."""
    csv.field_size_limit(2**31 - 1)  # a cell may be as long as a book
    first_line = next(lines, (1, ""))[1]
    n_skipped = 0
    declared = re.fullmatch(r"sep=(.)\s*", first_line)  # the line that Excel reads
    if declared and sep is None:
        sep = declared[1]
        n_skipped = 1
        first_line = next(lines, (2, ""))[1]
    delimiter = sep or _detect_delimiter(first_line, default_delimiter, where)
    texts = chain([first_line] if first_line else [], (text for _, text in lines))
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    header: list[str] = []

    def locate() -> str:
        """Return the file and the current line, for messages."""
        return f"{where}, line {reader.line_num + n_skipped}"

    def fail(problem: str) -> UserError:
        """Return the error for a row that cannot be read."""
        return UserError(
            f"{locate()}: {problem}: put a text that contains the separator {delimiter!r} or a "
            "line break in double quotes, and double the quotation marks inside it, or pass "
            "another separator as sep=."
        )

    try:
        header = _check_header(next(reader, []), f"{where}, line {1 + n_skipped}")
        for cells in reader:
            if cells and len(cells) != len(header):
                columns = f"{len(header)} columns ({', '.join(header)[:80]})"
                raise fail(f"{len(cells)} cells, but the header has {columns}")
            if cells:
                yield locate(), dict(zip(header, cells))
    except csv.Error as e:
        raise fail(str(e)) from None


# ---- Excel


def _read_excel(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield (file and row, row) of the first sheet of an Excel file; cells are strings."""
    if importlib.util.find_spec("openpyxl") is None:
        raise UserError(
            f"{path}: reading an Excel file needs openpyxl: pip install openpyxl, or save the "
            "sheet as CSV UTF-8."
        )
    import pandas

    with pandas.ExcelFile(path, engine="openpyxl") as book:
        first, *others = book.sheet_names
        if others:
            logger.warning("%s has %d sheets: %r, the first, is read", path, 1 + len(others), first)
        cells = book.parse(0, header=None, dtype=str, na_filter=False).to_numpy()
    if not len(cells):
        raise UserError(f"{path} has an empty first sheet: put a header and rows into it.")
    columns = [i for i in range(cells.shape[1]) if any(str(c).strip() for c in cells[:, i])]
    header = _check_header([str(cells[0][i]) for i in columns], f"{path}, row 1")
    for n, row in enumerate(cells[1:], 2):
        if any(str(cell).strip() for cell in row):
            yield f"{path}, row {n}", {name: str(row[i]) for name, i in zip(header, columns)}


# ---- Parquet


def _read_parquet(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield (file and row number, row) of a Parquet file."""
    import datasets

    table = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    for n, row in enumerate(table, 1):
        yield f"{path}, row {n}", row


# ---- rows of one file

FILE_FORMATS = {  # format → what a line of the file contains
    "csv": "cells separated by commas; the first line names the columns",
    "tsv": "cells separated by tabs; the first line names the columns",
    "jsonl": "a JSON object; or the file is an array of objects",
    "parquet": "a table with named columns, not lines",
    "xlsx": "the first sheet of an Excel file, whose first row names the columns",
    "lines": "a text, or two texts separated by a tab",
    "auto": "a text, or a JSON object if it begins with {",
}
_FORMAT_BY_SUFFIX = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".xlsx": "xlsx",
    ".xlsm": "xlsx",
}


def detect_format(
    path: str | Path,  # a file, or '-'
    format: str | None = None,  # key of `FILE_FORMATS`; None: detect it from the file's suffix
) -> str:  # key of `FILE_FORMATS`
    """Return the format of a file: the one that is given, or that of the file's suffix."""
    if format:
        return check_choice(format, FILE_FORMATS, "format")
    suffixes = [s.lower() for s in Path(path).suffixes]
    if suffixes and suffixes[-1] in (".xz", ".gz"):
        suffixes.pop()
    return _FORMAT_BY_SUFFIX.get(suffixes[-1], "auto") if suffixes else "auto"


_BINARY_READERS = {"parquet": _read_parquet, "xlsx": _read_excel}


def _read_binary_file(path: str | Path, format: str) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a file that is not text; raise `UserError` if it cannot be read."""
    if not Path(path).exists():
        raise MissingFileError(f"there is no file {path}: check the path.")
    try:
        yield from _BINARY_READERS[format](path)
    except UserError:
        raise
    except Exception as e:
        raise UserError(
            f"{path} cannot be read as {format} ({type(e).__name__}): it is damaged, has a "
            "password, or has another format."
        ) from None


def _parse_line(text: str, where: str, format: str, pair: bool) -> dict:
    """Parse a line of the formats `lines` and `auto`."""
    if format == "auto" and text.lstrip().startswith("{"):
        hint = f"{ROW_HINT}; for texts that begin with {{ use format='lines'"
        return parse_json_object(text, where, hint)
    texts = text.strip("\r\n").split("\t") if pair else [text.strip()]
    if len(texts) > 2:
        raise UserError(
            f"{where}: {len(texts)} columns, but a pair has two: "
            "separate the two texts by one tab, or use JSON."
        )
    return dict(zip(("sentence1", "sentence2"), texts))


def iterate_rows(
    path: str | Path,  # a file; '-': standard input
    format: str | None = None,  # key of `FILE_FORMATS`; None: detect it from the file's suffix
    pair: bool = False,  # do plain lines contain two sentences, separated by a tab?
    encoding: str | None = None,  # name of the encoding of a text file; None: UTF-8
    sep: str | None = None,  # separator of the cells of CSV and TSV; None: that of the header
) -> Iterator[tuple[str, dict]]:  # file and line, and the row
    """Yield the rows of a file one at a time, with their location; empty lines are skipped."""
    format = detect_format(path, format)
    where = describe_file(path)
    readable = {
        "encoding": [f for f in FILE_FORMATS if f not in _BINARY_READERS],
        "sep": ["csv", "tsv"],
    }
    for name, value in (("encoding", encoding), ("sep", sep)):
        if value is not None and format not in readable[name]:
            raise UserError(
                f"{name}={value!r} applies only to {', '.join(readable[name])}, and {where} is "
                f"{format}: leave it out."
            )
    if format in _BINARY_READERS:
        yield from _read_binary_file(path, format)
        return
    if sep is not None:
        sep = _check_delimiter(sep)
    lines = iterate_lines(path, encoding)
    if format in ("csv", "tsv"):
        yield from _read_csv(lines, where, "," if format == "csv" else "\t", sep)
    elif format == "jsonl":
        yield from _read_json_rows(lines, where)
    else:
        for line_number, text in lines:
            if text.strip():
                line_location = f"{where}, line {line_number}"
                yield line_location, _parse_line(text, line_location, format, pair)

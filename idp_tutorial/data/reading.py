"""Read rows from CSV, TSV, JSON-lines, Parquet and plain-text files.

`iterate_rows` yields the rows of a file, in any columns, each with its location. Messages need the
location; it is not part of the row.

CSV is parsed by Python's `csv` in strict mode. `pandas` accepts a row with too few cells and a
misplaced quotation mark, and `datasets` converts `NA` and `1e5`; neither reports the line of a row.
JSON is parsed line by line, because `datasets` accepts repeated keys. Both read in constant memory.
"""

import csv
import gzip
import json
import lzma
import sys
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from idp_tutorial.utils.checks import MissingFileError, UserError, check_choice

__all__ = [
    "ROW_HINT",
    "FILE_FORMATS",
    "describe_file",
    "iterate_lines",
    "parse_json_object",
    "suggest_delimiter",
    "detect_format",
    "iterate_rows",
]


# ---- lines

# maximum length of a line: a hundred times that of a book, so that a device such as /dev/zero,
# which never ends a line, does not fill the memory
_MAX_LINE_BYTES = 2**26


def describe_file(
    path: str | Path,  # a file, or '-'
) -> str:
    """Return the name of a file for messages."""
    return "standard input" if path == "-" else str(path)


def _open_binary(path: str | Path) -> AbstractContextManager[IO]:
    """Open a file in binary mode, decompressed; '-' is standard input."""
    if path == "-":
        if sys.stdin is None:
            raise UserError("standard input is closed: pass a file, or pipe the texts in.")
        return nullcontext(getattr(sys.stdin, "buffer", sys.stdin))
    openers: dict[str, Callable] = {".xz": lzma.open, ".gz": gzip.open}
    return openers.get(Path(path).suffix, open)(path, "rb")


def _decode_line(line: bytes, line_number: int, where: str) -> str:
    """Decode one line of UTF-8; raise `UserError` for another encoding."""
    if line_number == 1 and line.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise UserError(f"{where} is encoded as UTF-16: save it as UTF-8.")
    try:
        # concatenated files have byte order marks in the middle
        text = line.removeprefix(BOM_UTF8).decode()
    except UnicodeDecodeError as e:
        raise UserError(
            f"{where}, line {line_number}: byte {e.start + 1} is {line[e.start]:#04x}, which is "
            "not valid UTF-8 (perhaps the file is Latin-1): convert the file, for example with "
            "iconv -f LATIN1 -t UTF-8."
        ) from None
    if "\0" in text:
        raise UserError(
            f"{where}, line {line_number} contains a NUL character (perhaps the file is UTF-16): "
            "save it as UTF-8."
        )
    is_whole_file = line_number == 1 and not text.endswith("\n")
    if is_whole_file and "\r" in text.rstrip():
        raise UserError(f"{where} has lines that end in \\r: save it with \\n as the line ending.")
    return text


def _read_lines(file: IO, where: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of an open file; raise `UserError` for one that is too long."""
    line_number = 0
    while line := file.readline(_MAX_LINE_BYTES + 1):
        line_number += 1
        if len(line) > _MAX_LINE_BYTES:
            raise UserError(
                f"{where}, line {line_number} is longer than {_MAX_LINE_BYTES:,} bytes: "
                "pass a text file with one example a line."
            )
        if isinstance(line, str):  # standard input that was replaced by a text stream
            yield line_number, line.removeprefix("\ufeff")
        else:
            yield line_number, _decode_line(line, line_number, where)


def iterate_lines(
    path: str | Path,  # a file, perhaps compressed (`.xz`, `.gz`); '-': standard input
) -> Iterator[tuple[int, str]]:  # line number from 1, and the line
    """Yield the lines of a file; raise `UserError` if it cannot be read or is not UTF-8."""
    where = describe_file(path)
    try:
        with _open_binary(path) as file:
            yield from _read_lines(file, where)
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


def parse_json_object(
    text: str,  # one JSON document
    where: str,  # file and line, for error messages
    hint: str = ROW_HINT,  # advice that ends an error message
) -> dict:
    """Parse a JSON object strictly: no duplicate keys, no NaN, no lone surrogates."""
    try:
        row = json.loads(
            text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_json_constant
        )
        if r"\ud" in text.lower():
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{where} contains a lone surrogate (\\ud800 to \\udfff), which is half a character: "
            "write the text again as UTF-8."
        ) from None
    except (ValueError, RecursionError) as e:
        raise UserError(
            f"{where} is not valid JSON ({e or 'nested too deeply'}): {hint}."
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: {text.strip()[:60]!r} is not a row: {hint}.")
    return row


# ---- CSV and TSV


def suggest_delimiter(
    columns: Sequence[str],  # column names of a header
    delimiter: str = ",",  # the delimiter that was expected
) -> str:  # advice without a full stop; '' if the delimiter seems to be right
    """Return advice if a header has one column because its delimiter is another character."""
    if len(columns) != 1:
        return ""
    candidates = [c for c in ";\t|," if c != delimiter and c in columns[0]]
    if not candidates:
        return ""
    expected = "commas" if delimiter == "," else "tabs"
    return f"its columns seem to be separated by {candidates[0]!r}: use {expected}"


def _read_csv(
    lines: Iterator[tuple[int, str]], where: str, delimiter: str
) -> Iterator[tuple[str, dict]]:
    """Yield (file and line, row) of a CSV or TSV table with a header; cells stay strings."""
    csv.field_size_limit(2**31 - 1)  # a cell may be as long as a book
    reader = csv.reader((text for _, text in lines), delimiter=delimiter, strict=True)
    header: list[str] = []

    def fail(problem: str) -> UserError:
        advice = suggest_delimiter(header, delimiter) or (
            "put a text that contains a separator or a line break in double quotes, and double "
            "the quotation marks inside it"
        )
        return UserError(f"{where}, line {reader.line_num}: {problem}: {advice}.")

    try:
        header = [name.strip() for name in next(reader, [])]
        if not any(header) or len(set(header)) < len(header):
            raise UserError(
                f"{where}, line 1 has the columns {header}: the first line must be a header that "
                "names each column once."
            )
        for cells in reader:
            if cells and len(cells) != len(header):
                columns = f"{len(header)} columns ({', '.join(header)[:80]})"
                raise fail(f"{len(cells)} cells, but the header has {columns}")
            if cells:
                yield f"{where}, line {reader.line_num}", dict(zip(header, cells))
    except csv.Error as e:
        raise fail(str(e)) from None


# ---- rows of one file

FILE_FORMATS = {  # format → what a line of the file contains
    "csv": "cells separated by commas; the first line names the columns",
    "tsv": "cells separated by tabs; the first line names the columns",
    "jsonl": "a JSON object",
    "parquet": "a table with named columns, not lines",
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


def _read_parquet(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield (file and row number, row) of a Parquet file."""
    import datasets

    if not Path(path).exists():
        raise MissingFileError(f"there is no file {path}: check the path.")
    try:
        table = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True
        )
        for n, row in enumerate(table, 1):
            yield f"{path}, row {n}", row
    except Exception as e:
        raise UserError(
            f"{path} cannot be read as Parquet ({type(e).__name__}): it is damaged, or has another "
            "format."
        ) from None


def _parse_line(text: str, where: str, format: str, pair: bool) -> dict:
    """Parse a line of the formats `jsonl`, `lines` and `auto`."""
    if format == "jsonl":
        return parse_json_object(text, where)
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
) -> Iterator[tuple[str, dict]]:  # file and line, and the row
    """Yield the rows of a file one at a time, with their location; empty lines are skipped."""
    format = detect_format(path, format)
    where = describe_file(path)
    if format == "parquet":
        yield from _read_parquet(path)
    elif format in ("csv", "tsv"):
        yield from _read_csv(iterate_lines(path), where, "," if format == "csv" else "\t")
    else:
        for line_number, text in iterate_lines(path):
            if text.strip():
                line_location = f"{where}, line {line_number}"
                yield line_location, _parse_line(text, line_location, format, pair)

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
import json
import logging
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import TextIOWrapper
from itertools import chain, dropwhile
from pathlib import Path
from typing import IO, Any

from idp_tutorial.data.rows import is_utf8, require_utf8
from idp_tutorial.data.task import TEXT_COLUMNS
from idp_tutorial.utils.checks import UserError, check_choice

logger = logging.getLogger(__name__)


@dataclass
class TableDialect:
    """Dialect of a table: what its first lines say, and the names of its columns."""

    delimiter: str = ","
    line_end: str = "\n"
    has_byte_order_mark: bool = False
    has_separator_line: bool = False  # the first line is sep=; as Excel writes it
    header: list[str] = field(default_factory=list)


# ---- lines

# maximum length of a line: a hundred times that of a book, so that a device such as /dev/zero,
# which never ends a line, does not fill the memory
_MAX_LINE_LENGTH = 2**26


@contextmanager
def _open_text(path: str | Path, encoding: str) -> Iterator[IO[str]]:
    """Open a file, decompressed; bytes that cannot be decoded become lone surrogates."""
    # newline="" keeps line breaks as they are, which the cells of a CSV file may contain
    options: dict[str, Any] = dict(encoding=encoding, errors="surrogateescape", newline="")
    if path == "-":
        if sys.stdin is None:
            raise UserError("standard input is closed: pass a file, or pipe the texts in.")
        if not hasattr(sys.stdin, "buffer"):  # replaced by another stream of text
            yield sys.stdin
            return
        text_file = TextIOWrapper(sys.stdin.buffer, **options)
        try:
            yield text_file
        finally:
            text_file.detach()  # so that standard input stays open
    else:
        openers: dict[str, Callable] = {".xz": lzma.open, ".gz": gzip.open}
        with openers.get(Path(path).suffix, open)(path, "rt", **options) as file:
            yield file


def iterate_lines(
    path: str | Path,  # a file, perhaps compressed (`.xz`, `.gz`); '-': standard input
    encoding: str | None = None,  # name of its encoding, such as 'cp1252'; None: UTF-8
    dialect: TableDialect | None = None,  # is told of a byte order mark
) -> Iterator[tuple[int, str]]:  # line number from 1, and the line
    """Yield the lines of a file; raise `UserError` if it cannot be decoded."""
    where = _name_file(path)
    encoding = encoding or "utf-8"
    line_number = 0
    try:
        with _open_text(path, encoding) as file:
            while text := file.readline(_MAX_LINE_LENGTH + 1):
                line_number += 1
                if len(text) > _MAX_LINE_LENGTH:
                    raise UserError(
                        f"{where}, line {line_number} is longer than {_MAX_LINE_LENGTH:,} "
                        "characters: pass a text file with one example a line."
                    )
                if not is_utf8(text):
                    raise UserError(
                        f"{where}, line {line_number} is not a text in {encoding}: pass "
                        "encoding='utf-16', 'cp1252', …, or give another format its extension."
                    )
                if dialect and line_number == 1:
                    dialect.has_byte_order_mark = text.startswith("\ufeff")
                # concatenated files have byte order marks in the middle
                yield line_number, text.removeprefix("\ufeff")
    except (LookupError, UnicodeError) as e:  # an unknown encoding, or half a character of UTF-16
        raise UserError(
            f"{where} cannot be read with encoding={encoding!r:.40} ({e}): pass the name of its "
            "encoding, such as 'cp1252' or 'utf-16', or leave it out for UTF-8."
        ) from None
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as e:
        raise UserError(
            f"{where} cannot be decompressed ({e}): it is damaged; create or download it again."
        ) from None


def _name_file(path: str | Path) -> str:
    """Return the name of a file for messages."""
    return "standard input" if path == "-" else str(path)


# is called with the error of a row that cannot be read, and raises it or returns
_OnFault = Callable[[UserError], None]


def _raise(error: UserError) -> None:
    raise error


def _read_lines(
    lines: Iterable[tuple[int, str]],
    where: str,
    parse: Callable[[str, str], dict],  # of a line and its location
    on_fault: _OnFault,
) -> Iterator[tuple[str, dict]]:
    """Yield a row for each line that is not empty."""
    for line_number, text in lines:
        if text.strip():
            place = f"{where}, line {line_number}"
            try:
                row = parse(text, place)
            except UserError as e:
                on_fault(e)
            else:
                yield place, row


def _parse_line(text: str, where: str, format: str, pair: bool) -> dict:
    """Parse a line of the formats `lines` and `auto`."""
    if format == "auto" and text.lstrip().startswith("{"):
        hint = f"{ROW_HINT}; for texts that begin with {{ use format='lines'"
        return parse_json_object(text, where, hint)
    texts = text.strip("\r\n").split("\t") if pair else [text.strip()]
    if len(texts) != 1 + pair:
        raise UserError(
            f"{where}: {len(texts)} columns, but a pair has two: give two texts separated by a "
            "tab, or use JSON."
        )
    return dict(zip(TEXT_COLUMNS, texts))


# ---- JSON

ROW_HINT = 'each line must be an object such as {"sentence1": "…", "label": 0}'


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict:
    """Convert key-value pairs to a dictionary; raise `ValueError` for a key that is repeated."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key appears more than once")
    return dict(pairs)


def _parse_json(text: str, where: str, hint: str) -> Any:
    """Parse JSON strictly: no duplicate keys, no lone surrogates."""
    try:
        value = json.loads(text, object_pairs_hook=_reject_duplicate_keys)
        decoded = json.dumps(value, ensure_ascii=False) if r"\ud" in text.lower() else ""
    except (ValueError, RecursionError) as e:
        raise UserError(f"{where} is not valid JSON ({e!s:.200}): {hint}.") from None
    require_utf8(decoded, where)
    return value


def _require_object(row: Any, where: str, hint: str) -> dict:
    """Return a row of JSON if it is an object; raise `UserError` with a hint if not."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: {row!r:.60} is not an object: {hint}.")
    return row


def parse_json_object(
    text: str,  # one JSON document
    where: str,  # file and line, for error messages
    hint: str = ROW_HINT,  # advice that ends an error message
) -> dict:
    """Parse a JSON object strictly: no duplicate keys, no lone surrogates."""
    return _require_object(_parse_json(text, where, hint), where, hint)


def _read_json_rows(
    lines: Iterator[tuple[int, str]], where: str, on_fault: _OnFault
) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a file of JSON lines, or of a file that is one JSON array."""
    lines = dropwhile(lambda line: not line[1].strip(), lines)
    first = next(lines, (1, ""))
    if not first[1].lstrip().startswith("["):
        yield from _read_lines(chain([first], lines), where, parse_json_object, on_fault)
        return
    hint = 'the file must be an array of objects such as [{"sentence1": "…", "label": 0}]'
    array = _parse_json("".join([first[1], *(text for _, text in lines)]), where, hint)
    for n, row in enumerate(array, 1):
        yield f"{where}, row {n}", _require_object(row, f"{where}, row {n}", hint)


# ---- CSV and TSV


def _detect_delimiter(first_line: str, default: str, where: str) -> str:
    """Return the separator of a header; it is logged if it is not the one of the format."""
    unquoted = re.sub(r'"[^"]*"', "", first_line)
    delimiter = max(";\t|,", key=unquoted.count)
    if default in unquoted or delimiter not in unquoted:
        return default
    logger.warning(
        "%s: columns are separated by %r, as in its first line (sep= names another character)",
        where,
        delimiter,
    )
    return delimiter


def _parse_header(cells: list[str], where: str) -> list[str]:
    """Return the names of the columns; raise `UserError` unless they differ."""
    names = [name.strip() for name in cells]
    if not any(names) or len({*names}) < len(names):
        raise UserError(
            f"{where}: the header must name each column once, got {names!s:.200}: rename the "
            "columns, or pass another separator as sep=."
        )
    return names


_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*', re.IGNORECASE)  # as Excel writes and reads it


def _read_csv(
    lines: Iterator[tuple[int, str]],
    where: str,
    default_delimiter: str,
    sep: str | None,
    dialect: TableDialect,  # is told how the table is written
    on_fault: _OnFault,
) -> Iterator[tuple[str, dict]]:
    """Yield (file and line, row) of a CSV or TSV table with a header; cells stay strings."""
    csv.field_size_limit(2**31 - 1)  # a cell may be as long as a book
    first_line = next(lines, (1, ""))[1]
    dialect.line_end = "\r\n" if first_line.endswith("\r\n") else "\n"
    if named := _SEPARATOR_LINE.fullmatch(first_line):
        dialect.has_separator_line = True
        first_line = next(lines, (2, ""))[1]
        sep = sep or named[1]
    dialect.delimiter = sep or _detect_delimiter(first_line, default_delimiter, where)
    texts = chain([first_line] if first_line else [], (text for _, text in lines))
    reader = csv.reader(texts, delimiter=dialect.delimiter, strict=True)

    def place() -> str:
        """Return the file and the number of the line that was read last."""
        return f"{where}, line {max(1, reader.line_num) + dialect.has_separator_line}"

    def report(reason: str) -> None:
        """Report the line that was read last."""
        error = UserError(
            f"{place()}: {reason}: put a text with {dialect.delimiter!r} or a line break in double "
            "quotes, double the quotation marks inside it, or pass another separator as sep=."
        )
        on_fault(error)

    try:
        header = dialect.header = _parse_header(next(reader, []), place())
        for cells in reader:
            if cells and len(cells) != len(header):
                columns = f"{len(header)} columns ({', '.join(header)[:80]})"
                report(f"{len(cells)} cells, but the header has {columns}")
            elif cells:
                yield place(), dict(zip(header, cells))
    except csv.Error as e:  # where the next row begins is not known
        report(str(e))


# ---- Excel and Parquet


def _read_excel(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield (file and row, row) of the first sheet of an Excel file; cells are strings."""
    import pandas

    table = pandas.read_excel(path, engine="openpyxl", dtype=str, na_filter=False, header=None)
    table = table.astype(str)
    is_used = [bool(table[column].str.strip().any()) for column in table]
    rows = table.loc[:, is_used].to_numpy().tolist()
    header = _parse_header(rows[0] if rows else [], f"{path}, row 1")
    for n, cells in enumerate(rows[1:], 2):
        if any(cell.strip() for cell in cells):
            yield f"{path}, row {n}", dict(zip(header, cells))


def _read_parquet(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield (file and row number, row) of a Parquet file."""
    import datasets

    table = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    for n, row in enumerate(table, 1):
        yield f"{path}, row {n}", row


_BINARY_READERS = {"parquet": _read_parquet, "xlsx": _read_excel}


def _read_binary_file(path: str | Path, format: str) -> Iterator[tuple[str, dict]]:
    """Yield the rows of a file that is not text; raise `UserError` if it cannot be read."""
    with open(path, "rb"):  # raises the error of the operating system
        pass
    try:
        yield from _BINARY_READERS[format](path)
    except UserError:
        raise
    except ImportError as e:  # pandas names the package that is missing
        raise UserError(f"{path}: {e}") from None
    except Exception as e:
        raise UserError(
            f"{path} cannot be read as {format} ({type(e).__name__}): it is damaged, has a "
            "password, or has another format."
        ) from None


# ---- rows of one file

# of `lines`, a line is a text, or two texts separated by a tab; of `auto`, also a JSON object
FILE_FORMATS = ("csv", "tsv", "jsonl", "parquet", "xlsx", "lines", "auto")
_FORMAT_BY_SUFFIX = {
    **{f".{name}": name for name in FILE_FORMATS[:5]},
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".xlsm": "xlsx",
}


def detect_format(
    path: str | Path,  # a file, or '-'
    format: str | None = None,  # one of `FILE_FORMATS`; None: detect it from the file's suffix
) -> str:  # one of `FILE_FORMATS`
    """Return the format of a file: the one that is given, or that of the file's suffix."""
    if format:
        return check_choice(format, FILE_FORMATS, "format")
    suffixes = [s.lower() for s in Path(path).suffixes]
    if suffixes and suffixes[-1] in (".xz", ".gz"):
        suffixes.pop()
    return _FORMAT_BY_SUFFIX.get(suffixes[-1], "auto") if suffixes else "auto"


def has_header(
    path: str | Path,  # a file, or '-'
    format: str | None = None,  # as for `detect_format`
) -> bool:
    """Return whether the columns of a file have their names once, and not in each row."""
    return detect_format(path, format) in ("csv", "tsv", "parquet", "xlsx")


def warn_about_unused(
    options: Mapping[str, Any],  # options of a file; those that are None were not given
    used: Collection[str],  # names of the options that have an effect
    source: str,  # what is read
) -> None:
    """Log the options that were given and have no effect."""
    if names := [name for name, value in options.items() if value is not None and name not in used]:
        logger.warning("%s: no effect for %s", ", ".join(names), source)


def iterate_rows(
    path: str | Path,  # a file; '-': standard input
    format: str | None = None,  # one of `FILE_FORMATS`; None: detect it from the file's suffix
    pair: bool = False,  # do plain lines contain two sentences, separated by a tab?
    encoding: str | None = None,  # name of the encoding of a text file; None: UTF-8
    sep: str | None = None,  # separator of the cells of CSV and TSV; None: that of the header
    dialect: TableDialect | None = None,  # is told how a CSV or TSV table is written
    # is called with the error of each row that cannot be read, which is then left out; by default
    # the first error is raised
    on_fault: Callable[[UserError], None] = _raise,
) -> Iterator[tuple[str, dict]]:  # file and line, and the row
    """Yield the rows of a file one at a time, with their location; empty lines are skipped."""
    format = detect_format(path, format)
    where = _name_file(path)
    used = {"encoding"} if format not in _BINARY_READERS else set()
    used |= {"sep"} if format in ("csv", "tsv") else set()
    warn_about_unused(dict(encoding=encoding, sep=sep), used, f"a file of format {format}")
    if format in _BINARY_READERS:
        yield from _read_binary_file(path, format)
        return
    dialect = dialect or TableDialect()
    lines = iterate_lines(path, encoding, dialect)
    if format in ("csv", "tsv"):
        sep = "\t" if sep in ("tab", r"\t") else sep  # a tab is hard to type in a shell
        if sep is not None and (len(sep) != 1 or sep in '"\r\n\0\ufeff' or sep.isalnum()):
            raise UserError(f"sep must be one character, such as ';' or 'tab', got {sep!r:.40}.")
        default = "," if format == "csv" else "\t"
        yield from _read_csv(lines, where, default, sep, dialect, on_fault)
    elif format == "jsonl":
        yield from _read_json_rows(lines, where, on_fault)
    else:
        yield from _read_lines(
            lines, where, partial(_parse_line, format=format, pair=pair), on_fault
        )

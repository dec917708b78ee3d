"""Read rows from files, folders and the Hugging Face hub.

Formats: CSV, TSV, JSON lines, Parquet, and plain text with one example a line. `iterate_rows`
yields the rows of one file, in any columns, each with its location. Messages need the location; it
is not part of the row. `load_splits_from_folder` and `load_splits_from_hub` read and check the
splits of a task of `data.tasks`. A table of the user becomes a task in `data.user_data`.

CSV is parsed by Python's `csv` in strict mode. `pandas` accepts a row with too few cells and a
misplaced quotation mark, and `datasets` converts `NA` and `1e5`; neither reports the line of a row.
JSON is parsed line by line, because `datasets` accepts repeated keys. Both read in constant memory.
"""

import csv
import gzip
import json
import lzma
import re
import sys
import warnings
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from idp_tutorial.data.rows import (
    check_one_correct_candidate,
    check_row,
    convert_and_check_row,
    convert_benchmark_row,
)
from idp_tutorial.data.synthetic import SYNTHETIC_TASKS
from idp_tutorial.data.task import Task
from idp_tutorial.utils.checks import MissingFileError, UserError, check_choice
from idp_tutorial.utils.hub import offline_if_unreachable, split_revision

__all__ = [
    "FILE_FORMATS",
    "SPLIT_NAMES",
    "describe_file",
    "iterate_lines",
    "parse_json_object",
    "suggest_delimiter",
    "detect_format",
    "iterate_rows",
    "find_split_files",
    "load_hub_dataset",
    "load_splits_from_folder",
    "load_splits_from_hub",
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

_ROW_HINT = 'each line must be an object such as {"sentence1": "…", "label": 0}'


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
    hint: str = _ROW_HINT,  # advice that ends an error message
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
        hint = f"{_ROW_HINT}; for texts that begin with {{ use format='lines'"
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


# ---- splits in a folder

SPLIT_NAMES = {  # split → its names in folders and on the hub
    "train": ("train",),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}


def find_split_files(
    folder: Path,
    formats: Sequence[str],  # keys of `FILE_FORMATS`; files of other formats are ignored
) -> dict[str, Path]:  # split → its file
    """Find the files of a folder that contain splits; raise `UserError` for two of one split."""
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and detect_format(p) in formats]
    split_files = {}
    for split, names in SPLIT_NAMES.items():
        matches = [p for p in files if p.name.split(".")[0] in names]
        if len(matches) > 1:
            raise UserError(
                f"{folder} has several files for the split {split!r} "
                f"({', '.join(p.name for p in matches)}): keep one of them."
            )
        if matches:
            split_files[split] = matches[0]
    return split_files


def _has_labels(path: Path) -> bool:
    """Return whether any line of a file has a label other than -1; True for an empty file.

    An empty file is a mistake, which reading it reports.
    """
    lines = [text for _, text in iterate_lines(path) if text.strip()]
    pattern = r'"(?:label\w*|target)"\s*:(?!\s*(-1\b|null))'
    return not lines or any(re.search(pattern, line) for line in lines)


def _find_labelled_files(folder: Path) -> dict[str, Path]:
    """Return the file of each split; a test file without labels is left out with a warning."""
    files = find_split_files(folder, ["jsonl"])
    if "validation" in files and "test" in files and not _has_labels(files["test"]):
        warnings.warn(
            f"{files.pop('test')} has no labels and is ignored. Scores are reported on "
            f"{files['validation'].name}, and a part of the training rows selects the checkpoint.",
            stacklevel=2,
        )
    return files


def _find_task_folder(data: str | Path, name: str) -> Path:
    """Return the folder `data/NAME`, whatever its capitalisation (`BoolQ`)."""
    root = Path(data)
    folder = root / name
    if not folder.is_dir() and root.is_dir():
        names = [p for p in root.iterdir() if p.is_dir() and p.name.lower() == name.lower()]
        folder = min(names, default=folder)
    if folder.is_dir():
        return folder
    if not root.is_dir():
        reason = f"{root} is not a folder"
    elif (root / "train.jsonl").is_file():
        reason = f"{root} is the folder of one task"
    else:
        folders = sorted(p.name for p in root.iterdir() if p.is_dir())
        reason = f"{root} contains {', '.join(folders) or 'no folders'}"
    raise MissingFileError(
        f"there is no folder {folder}: {reason}. "
        f"data= must be the folder that contains {name}/train.jsonl."
    )


def _check_required_files(
    folder: Path, few_shot_folder: Path, files: Mapping[str, Path], is_frozen: bool
) -> None:
    """Raise `MissingFileError` if a training file, or a set's validation file, is missing."""
    required = ("train", "validation") if is_frozen else ("train",)
    missing = [split for split in required if split not in files]
    if not missing:
        return
    sizes = sorted(int(p.name[1:]) for p in folder.glob("k*") if p.name[1:].isdigit())
    hint = ""
    if sizes and not is_frozen:
        hint = f", or use a few-shot set of the folder with shots={' or '.join(map(str, sizes))}"
    names = " and no ".join(f"{split}.jsonl" for split in missing)
    added = "the file" if len(missing) == 1 else "the files"
    raise MissingFileError(
        f"{few_shot_folder if is_frozen else folder} has no {names}: add {added}{hint}."
    )


def _read_task_file(task: Task, path: Path) -> list[dict]:
    """Read and check the rows of one file of JSON lines."""
    rows: list[dict] = []
    for number, (where, record) in enumerate(iterate_rows(path, "jsonl"), 1):
        rows += convert_and_check_row(task, record, number, where)
    if not rows:
        raise UserError(f"{path} has no rows: {_ROW_HINT}.")
    if task.grouping == "choose":
        check_one_correct_candidate(rows, str(path))
    return rows


def load_splits_from_folder(
    task: Task,  # the task to load
    data: str | Path,  # the folder that contains a folder with the task's name
    shots: int | None = None,  # size of the few-shot set; None: all training rows
) -> tuple[dict, bool]:  # rows by split, and whether they are a frozen few-shot set
    """Read the splits of a task from `data/NAME/`, or the few-shot set `data/NAME/kSHOTS/`.

    The folders that GLUE and SuperGLUE distribute can be read as they are.
    """
    folder = _find_task_folder(data, task.name)
    files = _find_labelled_files(folder)
    few_shot_folder = folder / f"k{shots}"
    test_file = files.get("test") or files.get("validation")
    if test_file is None:
        raise MissingFileError(
            f"{folder} has neither test.jsonl nor validation.jsonl: add one to report scores on."
        )
    is_frozen = few_shot_folder.is_dir()
    if is_frozen:
        files = {**_find_labelled_files(few_shot_folder), "test": test_file}
    _check_required_files(folder, few_shot_folder, files, is_frozen)
    return {split: _read_task_file(task, path) for split, path in files.items()}, is_frozen


# ---- splits on the hub


def load_hub_dataset(
    name: str,  # name on the hub, perhaps with a revision: `org/name@revision`
    *configuration: str,  # name of the dataset's configuration, if it has several
    failure: str,  # begins the message if the dataset cannot be loaded
    advice: str,  # ends it
) -> Mapping[str, Any]:  # split → `datasets.Dataset`
    """Load a dataset of the Hugging Face hub, from the cache if the hub cannot be reached."""
    import datasets

    name, revision = split_revision(name)
    options = {"revision": revision} if revision else {}
    try:
        with offline_if_unreachable():
            return datasets.load_dataset(name, *configuration, **options)
    except Exception as e:
        raise UserError(f"{failure} ({type(e).__name__}): {advice}.") from e


def _convert_hub_row(task: Task, where: str, record: dict, index: int) -> list[dict]:
    """Convert and check one record of a hub dataset."""
    try:
        rows = convert_benchmark_row(task, record, index)
    except KeyError as e:
        raise UserError(
            f"{where}: no column {e} among {', '.join(record)}. The dataset has changed on the "
            "hub: load the task from a folder with data=DIR."
        ) from e
    except ValueError as e:
        raise UserError(f"{where}: {e}") from e
    return [check_row(task, row, where) for row in rows]


def load_splits_from_hub(
    task: Task,  # a task with a `hub_dataset`
) -> dict:  # rows by split
    """Download the splits of a task from the Hugging Face hub and check their rows."""
    folder = f"the folder that contains {task.name}/train.jsonl"
    if not task.hub_dataset:
        raise UserError(f"task {task.name!r} is not on the hub: pass data=DIR, {folder}.")
    name = "/".join(task.hub_dataset)
    hub_splits = load_hub_dataset(
        *task.hub_dataset,
        failure=f"cannot load {name} from the Hugging Face hub",
        advice=f"connect to the internet, pass data=DIR ({folder}), or use a bundled task: "
        f"{', '.join(SYNTHETIC_TASKS)}",
    )
    splits: dict[str, list[dict]] = {}
    for hub_split, dataset in hub_splits.items():
        split = "validation" if hub_split == "dev" else hub_split.split("_")[0]
        labels = set(dataset[:9].get(task.columns[2], ()))
        if split not in SPLIT_NAMES or labels == {-1}:
            continue  # IMDB's split `unsupervised`, or a split without labels
        rows = splits.setdefault(split, [])
        for i, record in enumerate(dataset.to_list()):
            rows += _convert_hub_row(task, f"{name} {hub_split}, row {i}", record, i)
        if task.grouping == "choose":
            check_one_correct_candidate(rows, f"{name} {hub_split}")
    return splits

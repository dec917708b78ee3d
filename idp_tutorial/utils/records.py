"""Records of runs as lines of JSON: how they are written, read and selected.

The settings of the run come first, under the names of its options.
"""

import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.durable import (  # noqa: F401 (other modules import them from here)
    append_line,
    compute_digest,
    dump_record,
    folder_lock,
    load_record,
    repair_last_line,
    write_atomically,
)
from idp_tutorial.utils.process_state import process_state

__all__ = [
    "SCHEMA_VERSION",
    "RECORDED_PACKAGES",
    "config_to_record",
    "config_fingerprint",
    "describe_differences",
    "collect_versions",
    "append_record",
    "read_records",
    "parse_conditions",
    "read_existing_records",
]


SCHEMA_VERSION = 3


class _Config(Protocol):
    """The config of a run, or the options of several runs."""

    def to_dict(self) -> dict[str, Any]:
        """Return all options by name."""
        ...


_FILE_OPTIONS = ("data", "glove", "init_from")  # files and folders
# options that name a place or a device; the contents of the files are compared by their digests
_PLACES = (*_FILE_OPTIONS, "device", "cache_dir")
_WITHOUT_EFFECT = (*_PLACES, "gradient_checkpointing")  # options that do not change a result


def config_to_record(cfg: _Config | Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run for its record; files and folders are stored by name only."""
    options = dict(cfg) if isinstance(cfg, Mapping) else cfg.to_dict()
    options["cache_dir"] = None
    if options.get("metric") is None:  # a record has the metric of its task under this name
        options.pop("metric", None)
    for name in _FILE_OPTIONS:
        if options.get(name):
            options[name] = Path(options[name]).name
    # a name on the hub contains a slash, too, and is stored as it is
    if "backbone" in options and Path(options["backbone"]).is_dir():
        options["backbone"] = Path(options["backbone"]).name
    return options


def config_fingerprint(cfg: _Config | Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that can change its result.

    The names of the task and of the backbone are among them, because tables list runs by them.
    """
    return {name: v for name, v in config_to_record(cfg).items() if name not in _WITHOUT_EFFECT}


def describe_differences(
    saved: Mapping[str, Any],  # fingerprint of a stored result
    current: Mapping[str, Any],  # fingerprint of the result that is needed
) -> str:  # such as 'seed was 0 and is now 1'; '' if they are equal
    """Describe the differences between two fingerprints."""
    saved, current = json.loads(json.dumps([saved, current]))  # a tuple is stored as a list
    return ", ".join(
        f"{name} was {saved.get(name)!r} and is now {current.get(name)!r}"
        for name in {**saved, **current}
        if saved.get(name) != current.get(name)
    )


RECORDED_PACKAGES = ("idp_tutorial", "torch", "transformers", "accelerate")


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def collect_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that scores depend on."""
    packages = {package: _package_version(package) for package in RECORDED_PACKAGES}
    return dict(python=platform.python_version(), **packages)


def append_record(record: dict, file: Path | str) -> None:
    """Append a record to a JSONL file; of several processes only the main process writes."""
    if process_state().is_main_process:
        append_line(Path(file), dump_record(record))


def _check_schema(record: dict) -> dict:
    """Return a record; raise `UserError` for the record of a run that has another schema."""
    is_run = "method" in record and "seed" in record
    if is_run and record.get("schema") != SCHEMA_VERSION:
        raise UserError(
            f"its schema is {record.get('schema', 1)}, and this version reads schema "
            f"{SCHEMA_VERSION} only"
        )
    return record


def _read_lines(paths: Iterable[Path | str]) -> list[dict]:
    records = []
    for path in map(Path, paths):
        if not path.is_file():
            raise MissingFileError(
                f"{path} does not exist: a comparison writes its records to OUT/compare.jsonl."
            )
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                records.append(_check_schema(load_record(line.decode())))
            except ValueError as e:
                raise UserError(
                    f"{path}, line {number} is not a record ({e}): remove the line, or create "
                    "the file again."
                ) from None
    return records


def read_records(
    *paths: Path | str,  # JSONL files
) -> list[dict]:
    """Return all records of some files.

    Raises: `UserError` for a missing file, a line that is not a record, or another schema.
    """
    return _read_lines(paths)


def parse_conditions(
    text: str,  # such as 'layer=3,4 shots=100'
) -> dict[str, list[str]]:  # field: its allowed values, as strings
    """Return the conditions that select records."""
    conditions = {}
    for word in text.split():
        name, _, values = word.partition("=")
        if not (name and values):
            raise UserError(
                f"{text!r}: {word!r} is not a condition: write NAME=VALUE, such as layer=3,4."
            )
        conditions[name] = values.split(",")
    return conditions


def read_existing_records(
    file: Path | str | None,  # JSONL file; None or a missing file: no records
) -> list[dict]:
    """Return the records of a file so far; an incomplete last line is removed from the file."""
    if file is None or not Path(file).exists():
        return []
    file = Path(file)
    if not file.read_bytes().endswith(b"\n"):
        with folder_lock(file.parent, file.name + "-end", wait=True):  # against `append_line`
            repair_last_line(file)
    return _read_lines([file])

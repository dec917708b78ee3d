"""Records of runs as lines of JSON: how they are written, read and selected.

The settings of the run come first, under the names of its options.
"""

import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

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
from idp_tutorial.utils.schemas import Count, Finite, check_schema

__all__ = [
    "SCHEMA_VERSION",
    "RECORDED_PACKAGES",
    "config_to_record",
    "config_fingerprint",
    "describe_differences",
    "collect_versions",
    "append_record",
    "check_record",
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
        f"{name} was {saved.get(name)!r:.300} and is now {current.get(name)!r:.300}"
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


class _LogitsName:
    expected = "the name of logits beside the file, such as logits/NAME.npz/RUN"
    pattern = re.compile(r"[^/\\\0]+/[^/\\\0]+\.npz/[^/\\\0]+")

    def accepts(self, value: Any) -> bool:
        return bool(self.pattern.fullmatch(value)) and ".." not in value.split("/")


@dataclass
class _RunFields:
    """Schema of the record of a run: the fields that tables, comparisons and model cards read."""

    schema: Literal[3]
    status: Literal["done", "diverged"]
    method: str
    seed: Count
    task: str
    backbone: str
    head: str = ""
    data: str | None = None
    glove: str | None = None
    init_from: str | None = None
    cache_dir: str | None = None
    device: str = ""
    gradient_checkpointing: bool = False
    metric: str | None = None
    message: str = ""
    score: Finite | None = None
    scores: dict[str, Finite | None] | None = None
    validation: Finite | None = None
    validation_loss: float | None = None
    lr: Finite | None = None
    head_lr: Finite | None = None
    steps: Count | None = None
    steps_done: Count | None = None
    shots: Count | None = None
    split_seed: Count | None = None
    layer: int | None = None
    prompt_length: Count | None = None
    n_layers: Count | None = None
    params: dict[str, Count] | None = None
    digests: dict[str, str] = field(default_factory=dict)
    split_sizes: dict[str, Count | dict[str, Count]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, str | float | bool | None] = field(default_factory=dict)
    lr_selection: str = ""
    checkpoint_selection: str = ""
    seconds: Finite = 0.0
    tuning_seconds: Finite = 0.0
    ms_per_step: float = 0.0
    peak_memory_mb: float = 0.0
    history: list[tuple[Count, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    learning_rates_tried: list[tuple[Finite, float | str]] = field(default_factory=list)
    lr_at_grid_edge: bool = False
    logits: Annotated[str, _LogitsName()] = ""
    logits_digest: str = ""
    primary: str = ""
    target: str = ""
    setting: str = ""
    label_map: list[int] | None = None
    majority_score: Finite | None = None
    source_score: Finite | None = None
    stage_learning_rate: Finite | None = None


def check_record(
    record: dict,
    must_be_run: bool = False,  # also refuse records of other things, such as timings
) -> dict:  # `record`
    """Return a record; raise `UserError` for the record of a run that has another schema."""
    if not must_be_run and not ("method" in record and "seed" in record):
        return record
    if record.get("schema") != SCHEMA_VERSION:
        raise UserError(
            f"its schema is {record.get('schema', 1)!s:.40}, and this version reads schema "
            f"{SCHEMA_VERSION} only"
        )
    check_schema(_RunFields, record, "it", "create it again")
    if record["status"] == "diverged" and "message" not in record:
        raise UserError("it is of a run that diverged, and has no message: create it again")
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
                records.append(check_record(load_record(line.decode())))
            except ValueError as e:
                raise UserError(
                    f"{path}, line {number} is not a record ({str(e).rstrip('.')}): remove the "
                    "line, or create "
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

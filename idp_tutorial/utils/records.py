"""Records of runs as lines of JSON: how they are written, read and selected, and their provenance.

The settings of the run come first, under the names of its options. A line contains its digest.

A record says which code made it, with which command and on which machine: the commit and
whether it was clean, the processor, the GPU if one was used, the number of threads, the start time
and the seconds. A machine is named by its processor and GPU only, a file by its last path
component.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from idp_tutorial.utils.checks import MissingFileError, UserError
from idp_tutorial.utils.digests import compute_digest
from idp_tutorial.utils.durable_files import (
    append_line,
    complete_lines,
    refuse_pipe,
)
from idp_tutorial.utils.process import process_state
from idp_tutorial.utils.schemas import Count, Finite, Rule, check_type

_DIGEST_PATTERN = re.compile(r"[0-9a-f]{16}")


def dump_record(record: dict) -> str:
    """Return a record as a line of JSON that contains its digest."""
    text = json.dumps(record)
    return json.dumps({**json.loads(text), "digest": compute_digest([text.encode()])})


def load_record(line: str) -> dict:
    """Return the record in a line of JSON, without its digest.

    Raises: `ValueError` for a line that is not an object, or that was changed after it was written.
    """
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()
    except RecursionError:
        raise UserError("its brackets are nested too deeply") from None
    if not isinstance(record, dict):
        raise UserError(f"it is not a JSON object but {str(record)[:40]!r}")
    stored = record.pop("digest", None)
    text = json.dumps(record)
    # a record without digest is accepted, unless the damage is in the key 'digest' itself
    is_key_damaged = stored is None and any(
        isinstance(v, str) and _DIGEST_PATTERN.fullmatch(v) for v in record.values()
    )
    is_changed = stored is not None and stored != compute_digest([text.encode()])
    if is_key_damaged or is_changed:
        raise UserError("its digest does not match: the line was changed after it was written")
    return record


SCHEMA_VERSION: Literal[3] = 3


# digest of a backbone in records of earlier versions → its `backbone_id`
_RENEWED_DIGESTS = {
    "2ef68a2e3294e2e3": "ef707222edbe1bd8bc3de77781da4146",  # tiny float32
    "6dedf37e899f4ee4": "874f0f25047b1b581c630e3d3f321adf",  # tiny bfloat16
    "9f6251c137c87847": "5342f6458bd7055676cbbf239550a410",  # tiny int8
    "a0d7f070bb26b4a1": "6b41d0b22e504983bd510c46d803fcff",  # tiny-gpt2 float32
    "27fae7946fda1e86": "32a66b5efb3c199366d74c2fb74d2b8a",  # tiny-gpt2 bfloat16
    "078c0d63f8a1405d": "654b6f0b02a00c789e3ec4afd58e03ee",  # tiny-gpt2 int8
    "6f0f486a55d07bb8": "3dc7c801ac1e3857575a0b161d30f4f9",  # minilm float32
    "f18ab670f5f20866": "0f7be6d2adbe3a45b297dd5757054fd3",  # minilm bfloat16
    "b9956c0fe772aa42": "27007565cdefce7ac073630aeaa3fb54",  # minilm int8
    "1da000382578c8a0": "4979488c5ef985baff495bbf24fc488b",  # smollm2 float32
    "7c368cf058b82d3f": "63c9fbe2a5cd1d37124df1f46932ddd2",  # smollm2 bfloat16
    "5ff337678749ccc6": "9c7eee5e6244eee240df980e6e1545d1",  # smollm2 int8
    "7932db613b2eef92": "3cf84a2dac8e0ffd97321b74a0096c68",  # mpnet float32
    "35159d04a5238746": "0d03f7bfca4c4241aa453710483b4393",  # mpnet bfloat16
    "0a6653d1c0e6e75f": "b49c9b4d1397938ad91d4e86f880ff47",  # mpnet int8
    # converted by transformers 5.17, whose tokenizer has another end token and adds BOS to a text
    "ad3a1dcf8216abc2": "1f6ce6b1343dbaeda38988d343ff6d1a",  # smollm2 float32
    "abe1f37e710878ef": "fc692858586b3633d12a5c0d30c30146",  # smollm2 bfloat16
}


def renew_digests(digests: Any) -> Any:
    """Return the digests of a record with the backbone's present identity, if it is known."""
    weights = digests.get("weights") if isinstance(digests, dict) else None
    if not isinstance(weights, str) or weights not in _RENEWED_DIGESTS:
        return digests
    return {**digests, "weights": _RENEWED_DIGESTS[weights]}


_FILE_OPTIONS = ("data", "glove", "init_from")  # files and folders
# options that name a place or a device; the contents of the files are compared by their digests
_PLACES = (*_FILE_OPTIONS, "device", "cache_dir")
_WITHOUT_EFFECT = (*_PLACES, "gradient_checkpointing")  # options that do not change a result


def config_to_record(
    cfg: Any,  # a `RunConfig`, `RunOptions`, or a mapping of options
) -> dict[str, Any]:
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


def config_fingerprint(
    cfg: Any,  # a `RunConfig`, `RunOptions`, or a mapping of options
) -> dict[str, Any]:
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


_LOGITS_NAME = re.compile(r"[^/\\\0]+/[^/\\\0]+\.npz/[^/\\\0]+")


def _is_logits_name(text: str) -> bool:
    return bool(_LOGITS_NAME.fullmatch(text)) and ".." not in text.split("/")


_LogitsName = Annotated[
    str, Rule("the name of logits beside the file, such as logits/NAME.npz/RUN", _is_logits_name)
]


@dataclass(kw_only=True)
class RecordFields:
    """Fields of the record of a run besides its config: what was read, and the results."""

    schema: Literal[3]
    status: Literal["done", "diverged"]
    # digests of `weights`, `data`, and perhaps `glove` and `init_from`
    digests: dict[str, str] = field(default_factory=dict)
    # number of rows of each split
    split_sizes: dict[str, Count | dict[str, Count]] = field(default_factory=dict)
    message: str = ""  # why the run diverged
    metric: str | None = None  # main metric of the task
    score: Finite | None = None  # on the test split, in percent
    scores: dict[str, Finite | None] | None = None  # all metrics on the test split
    validation: Finite | None = None  # score of the best evaluation on the validation split
    validation_loss: float | None = None  # loss of that evaluation
    checkpoint_selection: str = ""  # how the checkpoint was chosen
    n_layers: Count | None = None
    params: dict[str, Count] | None = None  # trained parameters of prompt, head and backbone
    versions: dict[str, str] = field(default_factory=dict)
    # code, command, machine and time
    provenance: dict[str, str | float | bool | None] = field(default_factory=dict)


@dataclass(kw_only=True)
class _RunFields(RecordFields):
    """Schema of the record of a run: the fields that tables, comparisons and model cards read."""

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
    lr: Finite | None = None
    head_lr: Finite | None = None
    steps: Count | None = None
    steps_done: Count | None = None
    shots: Count | None = None
    split_seed: Count | None = None
    layer: int | None = None
    prompt_length: Count | None = None
    lr_selection: str = ""
    seconds: Finite = 0.0
    tuning_seconds: Finite = 0.0
    ms_per_step: float = 0.0
    peak_memory_mb: float = 0.0
    history: list[tuple[Count, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    learning_rates_tried: list[tuple[Finite, float | str]] = field(default_factory=list)
    lr_at_grid_edge: bool = False
    logits: _LogitsName = ""
    logits_digest: str = ""
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
    check_type(_RunFields, record, "")
    if record["status"] == "diverged" and "message" not in record:
        raise UserError("it is of a run that diverged, and has no message")
    if "lr_selection" in record and "lr" not in record:
        raise UserError("it says how its lr was chosen, and has no lr")
    return record


def _parse_records(data: bytes, path: Path) -> list[dict]:
    """Return the records in the content of a file, whose path is for messages."""
    records = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record = check_record(load_record(line.decode()))
            if "digests" in record:
                record["digests"] = renew_digests(record["digests"])
            records.append(record)
        except ValueError as e:
            raise UserError(
                f"{path}, line {number} is not a record ({str(e).rstrip('.')}): remove the line, "
                "or create the file again."
            ) from None
    return records


def read_records(
    *paths: Path | str,  # JSONL files
    # leave out runs without logits, such as those that only served to choose a learning rate
    with_logits: bool = False,
) -> list[dict]:
    """Return all records of some files, or only those whose logits are stored.

    Raises: `UserError` for a missing file, a line that is not a record, or another schema.
    """
    records = []
    for path in map(Path, paths):
        if not path.is_file():
            raise MissingFileError(f"{path} does not exist: give OUT/compare.jsonl.")
        records += _parse_records(path.read_bytes(), path)
    return [r for r in records if "logits" in r] if with_logits else records


def parse_conditions(
    text: str,  # such as 'layer=3,4 shots=100'
) -> dict[str, list[str]]:  # field: its allowed values, as strings
    """Return the conditions that select records."""
    conditions = {}
    for word in text.split():
        name, _, values = word.partition("=")
        if not (name and values):
            raise UserError(f"{word!r} is not a condition: write NAME=VALUE, such as layer=3,4.")
        conditions[name] = values.split(",")
    return conditions


def select_records(
    records: Iterable[dict],
    conditions: Mapping[str, Collection[str]],  # from `parse_conditions`
) -> list[dict]:
    """Return the records whose fields have one of the allowed values."""
    return [r for r in records if all(str(r.get(k)) in v for k, v in conditions.items())]


def read_existing_records(
    file: Path | str | None,  # JSONL file; None or a missing file: no records
) -> list[dict]:
    """Return the records of a file so far, without a last line that is incomplete."""
    if file is None or not Path(file).exists():
        return []
    return _parse_records(complete_lines(refuse_pipe(Path(file)).read_bytes()), Path(file))


@cache
def git_state() -> dict:  # `commit` and `worktree_clean`; both are None outside of a repository
    """Return the commit of the package, and whether its files are unchanged since."""
    folder = str(files("idp_tutorial"))

    def run_git(*arguments: str) -> str:
        """Return the output of a git command in the folder of the package."""
        command = ["git", *arguments]
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=20, check=True
        )
        return result.stdout.strip()

    try:
        # fails for a package that is installed inside a repository which does not track it
        run_git("ls-files", "--error-unmatch", "__init__.py")
        commit = run_git("rev-parse", "HEAD")
        return dict(commit=commit, worktree_clean=not run_git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return dict(commit=None, worktree_clean=None)


@cache
def processor_name() -> str:
    """Return the name of the processor, or its architecture if the name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(l.split(":", 1)[1].strip() for l in lines if l.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _shorten_paths(argument: str) -> str:
    """Return an argument with only the last component of a path, also in `--data=PATH`."""
    option, equals, value = "", "", argument
    if argument.startswith("--"):
        option, equals, value = argument.rpartition("=")
    return option + equals + (Path(value).name if os.sep in value else value)


def format_command_line() -> str:
    """Return the command line of this process, with only the last component of each path."""
    return " ".join(_shorten_paths(argument) for argument in sys.argv)


def gpu_name() -> str | None:
    """Return the name of the GPU that this process has used, or None."""
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else None


def collect_provenance(
    start_time: float,  # `time.perf_counter()` when the run started
    threads: int,  # number of threads that the run used
) -> dict:
    """Return the code, command, processor, start time and seconds of a run, for its record."""
    seconds = time.perf_counter() - start_time  # a change of the clock does not change it
    return dict(
        command=format_command_line(),
        **git_state(),
        processor=processor_name(),
        **({"gpu": gpu} if (gpu := gpu_name()) else {}),
        threads=threads,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds)),
        seconds=round(seconds, 1),
    )

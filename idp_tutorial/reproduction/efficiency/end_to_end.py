"""Whole commands beside those of `peft` and Transformers, from start to exit.

A step that is faster is only a part of what a user waits for: libraries are imported, weights read,
texts encoded, models evaluated and files written, too. So each command is a process of its own, and
its time is that of the clock, from its start to its exit. The commands of a round run one after the
other, all on the same files, and rounds are repeated. Other work on the machine lengthens these
times, so it should have none; the load before the measurement is in the records, and so are the
seconds that each process spent on the processor.

Training is one epoch with the same examples, batch size, learning rate, schedule and number of
evaluations: one on the validation split, and one on the test split. Neither side writes
checkpoints, and both save what they trained. For answers, the pipeline gets the backbone with an
untrained head, and this package the model that it trained last, whose prompts are further
positions. Both write each text with its class.
"""

import csv
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from idp_tutorial.backbones.load import find_local_backbone, silence_transformers
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import read_records

__all__ = [
    "DEFAULT_SIZES",
    "END_TO_END_METHODS",
    "EndToEndSizes",
    "EndToEndSettings",
    "default_backbone",
    "measure_end_to_end",
    "warn_if_busy",
]


END_TO_END_METHODS = ("prompt-tuning", "lora", "lpt-npg")
PEFT_METHODS = ("prompt-tuning", "lora")  # those that the script for `peft` knows
_SCRIPTS = "idp_tutorial.reproduction.efficiency"


class EndToEndSizes(NamedTuple):
    """Numbers of texts; those of TREC by default."""

    train: int = 4952
    validation: int = 500
    test: int = 500
    predict: int = 3600  # texts of mixed length to predict


DEFAULT_SIZES = EndToEndSizes()


@dataclass(frozen=True)
class EndToEndSettings:
    """Settings that all commands of a measurement share."""

    backbone: str  # name or folder of pretrained weights
    methods: Sequence[str] = END_TO_END_METHODS
    data: str | None = None  # folder of tasks with TREC; None: the bundled task `questions`
    batch_size: int = 32
    max_len: int = 128  # tokens of a text; longer ones are cut
    device: Literal["auto", "cpu"] = "auto"
    threads: int | None = None  # of the processor; None: the choice of PyTorch
    sizes: EndToEndSizes = DEFAULT_SIZES  # `predict` also with `data`

    @property
    def task_name(self) -> str:
        """Name of the task that the methods are trained on."""
        return "trec" if self.data else "questions"


@dataclass
class _Command:
    """A command to time, and what its record says."""

    name: str  # such as 'idp train'
    arguments: list[str]  # of the Python interpreter; {round} is the number of the round
    baseline: str | None  # name of the command whose time is divided by that of this one
    details: dict[str, Any]  # further fields of its record
    out: str | None = None  # folder with the record of the score, with {round}
    seconds: list[float] = field(default_factory=list)  # one number a round
    cpu_seconds: list[float] = field(default_factory=list)  # of all threads, one number a round


def default_backbone() -> str:
    """Return 'minilm' if its weights are on this machine, else 'tiny'."""
    return "minilm" if find_local_backbone("minilm") else "tiny"


def warn_if_busy(
    report: Callable[[str], object],  # receives the warning
) -> float | None:  # processes that waited for a core in the last minute; None: unknown
    """Return the load of the machine, and report it if it would disturb a measurement."""
    if not hasattr(os, "getloadavg"):
        return None
    load = os.getloadavg()[0]
    if load > 0.3:
        report(
            f"this machine is busy (load {load:.1f}): the times will be too long. Measure when "
            "nothing else runs."
        )
    return load


def _write_csv(file: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with open(file, "w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow(columns)
        writer.writerows(rows)


def _load_splits(settings: EndToEndSettings) -> tuple[Task, dict[str, list[dict]]]:
    if settings.data:
        task = load_task(settings.task_name, settings.data)
        return task, task.splits
    task = TASKS[settings.task_name]
    sizes = settings.sizes._asdict()
    splits = ("train", "validation", "test")
    return task, {s: make_rows(settings.task_name, s, n=sizes[s]) for s in splits}


def _mix_lengths(texts: Sequence[str], n: int) -> list[str]:
    """Return `n` texts of 1, 1, 2, 4, 8 and 16 of the given ones, in a random order."""
    rng = random.Random(0)
    counts = (1, 1, 2, 4, 8, 16)
    mixed = [" ".join(rng.choices(texts, k=counts[i % len(counts)])) for i in range(n)]
    rng.shuffle(mixed)
    return mixed


def _write_inputs(settings: EndToEndSettings, folder: Path) -> dict[str, int]:
    """Write the splits of the task and the texts to predict; return their numbers of rows."""
    task, splits = _load_splits(settings)
    (folder / "task").mkdir()
    for split, rows in splits.items():
        labelled = [(row["sentence1"], task.labels[row["label"]]) for row in rows]
        _write_csv(folder / "task" / f"{split}.csv", ("text", "label"), labelled)
    texts = _mix_lengths([row["sentence1"] for row in splits["train"]], settings.sizes.predict)
    _write_csv(folder / "texts.csv", ("text",), [[text] for text in texts])
    sizes = {split: len(rows) for split, rows in splits.items()}
    return {**sizes, "predict": len(texts)}


def _save_classifier(settings: EndToEndSettings, n_labels: int, folder: Path) -> None:
    """Save the backbone with a new classification head, for the pipeline."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with silence_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        path = _backbone_folder(settings.backbone)
        model = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=n_labels, trust_remote_code=False
        )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path, trust_remote_code=False).save_pretrained(folder)


def _backbone_folder(name: str) -> str:
    return str(find_local_backbone(name) or name)


def _format_options(**options: Any) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _training_commands(settings: EndToEndSettings, folder: Path) -> list[_Command]:
    """Return `idp train` for each method, and the script for `peft` where it has the method."""
    commands = []
    for method in settings.methods:
        lr = METHODS[method].default_learning_rate
        details = dict(method=method, lr=lr)
        common = dict(
            method=method,
            lr=lr,
            batch_size=settings.batch_size,
            max_len=settings.max_len,
            device=settings.device,
        )
        idp_folder = str(folder / f"{method}-{{round}}")
        arguments = ["-m", "idp_tutorial.cli.main", "train", str(folder / "task")]
        arguments += _format_options(text="text", label="label", backbone=settings.backbone)
        arguments += _format_options(**common, epochs=1, evaluations=1, save_every=0)
        arguments += _format_options(out=idp_folder)
        has_peft = method in PEFT_METHODS
        baseline = "peft + Trainer" if has_peft else None
        commands.append(_Command("idp train", arguments, baseline, details, idp_folder))
        if has_peft:
            peft_folder = str(folder / f"peft-{method}-{{round}}")
            options = METHODS[method].options
            length = options["prompt_length"].default if "prompt_length" in options else 0
            arguments = ["-m", f"{_SCRIPTS}.peft_script"]
            backbone = _backbone_folder(settings.backbone)
            arguments += _format_options(data=folder / "task", backbone=backbone, **common)
            arguments += _format_options(prompt_length=length, out=peft_folder)
            commands.append(_Command("peft + Trainer", arguments, None, details, peft_folder))
    return commands


def _answering_commands(settings: EndToEndSettings, folder: Path) -> list[_Command]:
    """Return `idp predict` and the script for `pipeline`, in float32 and in bfloat16."""
    commands = []
    method = settings.methods[-1]
    texts = folder / "texts.csv"
    for dtype in ("float32", "bfloat16"):
        common = dict(texts=texts, device=settings.device, dtype=dtype)
        arguments = ["-m", "idp_tutorial.cli.main", "predict"]
        arguments += _format_options(
            model=folder / f"{method}-0",
            text="text",
            out=folder / f"idp-{dtype}.csv",
            **common,
        )
        details: dict[str, Any] = dict(method=method, dtype=dtype)
        commands.append(_Command("idp predict", arguments, "pipeline", details))
        arguments = ["-m", f"{_SCRIPTS}.pipeline_script"]
        arguments += _format_options(
            model=folder / "classifier",
            out=folder / f"pipeline-{dtype}.csv",
            max_len=settings.max_len,
            **common,
        )
        commands.append(_Command("pipeline", arguments, None, dict(dtype=dtype)))
    return commands


def _run_command(command: _Command, round_index: int, threads: int | None) -> None:
    """Run a command in a new process and add its seconds.

    Raises: `RuntimeError` with the end of its error output if it fails.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    if threads:
        environment |= dict(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    arguments = [word.replace("{round}", str(round_index)) for word in command.arguments]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start_time = time.perf_counter()
    result = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )
    command.seconds.append(time.perf_counter() - start_time)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    command.cpu_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    if result.returncode:
        raise RuntimeError(f"{command.name} {command.details} failed:\n{result.stderr[-2000:]}")


def _read_column(file: Path, column: str) -> list[str]:
    with open(file, newline="", encoding="utf-8") as f:
        return [row[column] for row in csv.DictReader(f)]


def _share_of_equal_answers(folder: Path, name: str, dtype: str) -> float:
    """Return the percentage of texts that get the class that float32 gives."""
    exact = _read_column(folder / f"{name}-float32.csv", "prediction")
    answers = _read_column(folder / f"{name}-{dtype}.csv", "prediction")
    return 100 * sum(a == b for a, b in zip(answers, exact, strict=True)) / len(exact)


def _find_baseline(command: _Command, commands: Sequence[_Command]) -> _Command | None:
    """Return the baseline of a command, with the same method and dtype where both have one."""
    for other in commands:
        shared = command.details.keys() & other.details.keys()
        same = all(command.details[name] == other.details[name] for name in shared)
        if other.name == command.baseline and same:
            return other
    return None


def _make_record(command: _Command, commands: Sequence[_Command]) -> dict[str, Any]:
    baseline = _find_baseline(command, commands)
    ratio = None
    if baseline:
        ratio = median(b / s for b, s in zip(baseline.seconds, command.seconds))
    return dict(
        name=command.name,
        **command.details,
        seconds_min=round(min(command.seconds), 2),
        seconds_median=round(median(command.seconds), 2),
        cpu_seconds=round(median(command.cpu_seconds), 2),
        ratio=ratio and round(ratio, 3),
        baseline=command.baseline,
        seconds=[round(s, 2) for s in command.seconds],
    )


def _run_in_turns(
    commands: Sequence[_Command],
    repeats: int,
    threads: int | None,
    report: Callable[[str], object],
) -> None:
    for round_index in range(repeats):
        for command in commands:
            _run_command(command, round_index, threads)
            words = [command.name, *(str(v) for v in command.details.values())]
            report(
                f"round {round_index + 1} of {repeats}: {' '.join(words)}, "
                f"{command.seconds[-1]:.1f} s"
            )


def measure_end_to_end(
    settings: EndToEndSettings,
    folder: Path,  # an empty folder for all files
    repeats: int = 3,  # rounds
    report: Callable[[str], object] = print,  # receives one line of progress at a time
) -> Iterator[list[dict]]:  # records of training, then those of answering
    """Time training and answering as whole commands, beside `peft` and `pipeline`, in turns.

    Raises: `UserError` for a backbone whose weights are not on this machine.
    """
    path = _backbone_folder(settings.backbone)
    if not Path(path).is_dir():
        raise UserError(
            f"backbone={settings.backbone!r} has no weights on this machine, and whole commands "
            "are timed with trained ones: give 'tiny', 'minilm', or a folder."
        )
    sizes = _write_inputs(settings, folder)
    n_labels = len(set(_read_column(folder / "task" / "train.csv", "label")))
    _save_classifier(settings, n_labels, folder / "classifier")
    common = dict(task=settings.task_name, sizes=sizes)
    training = _training_commands(settings, folder)
    _run_in_turns(training, repeats, settings.threads, report)
    records = []
    for command in training:
        out = str(command.out).replace("{round}", "0")
        score = read_records(Path(out) / "record.jsonl")[0]["score"]
        records.append(
            dict(part="training", **common, **_make_record(command, training), score=score)
        )
    yield records
    answering = _answering_commands(settings, folder)
    _run_in_turns(answering, repeats, settings.threads, report)
    records = []
    for command in answering:
        prefix = "idp" if command.name == "idp predict" else "pipeline"
        equal = _share_of_equal_answers(folder, prefix, command.details["dtype"])
        record = dict(part="answering", **common, **_make_record(command, answering))
        as_it_comes = next(c for c in answering if c.name == "pipeline")  # in float32
        over = [b / s for b, s in zip(as_it_comes.seconds, command.seconds)]
        records.append({**record, "over_pipeline": round(median(over), 3), "as_float32": equal})
    yield records

"""Whole commands beside those of `peft` and Transformers, from start to exit.

A step that is faster is only a part of what a user waits for: libraries are imported, weights read,
texts encoded, models evaluated and files written, too. So each command is a process of its own, and
its time is that of the clock, from its start to its exit. The commands of a round run one after the
other, all on the same files, and rounds are repeated. Other work on the machine lengthens these
times, so it should have none; the load before the measurement is in the records.

Training is one epoch with the same examples, batch size, learning rate, schedule and number of
evaluations: one on the validation split, and one on the test split. `idp train` leaves out the
controls that it scores by default, since the other side has none. Neither side writes
checkpoints, and both save what they trained. For answers, the pipeline gets the backbone with an
untrained head, and this package the model that it trained last, whose prompts are further
positions. Both write each text with its class.
"""

import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from idp_tutorial.assembly.config import RunOptions
from idp_tutorial.backbones.load import find_local_backbone, silence_transformers
from idp_tutorial.core.random_numbers import forked_random_numbers
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import processor_name, read_records

logger = logging.getLogger(f"idp_tutorial.{__name__}")  # whose messages commands print


END_TO_END_METHODS = ("prompt-tuning", "lora", "lpt-npg")
_PEFT_METHODS = ("prompt-tuning", "lora")  # those that the script for `peft` knows
_SCRIPTS = [str(Path(__file__).with_name("other_scripts.py"))]
_MAIN = ["-m", "idp_tutorial.cli.main"]
SIZES = dict(train=4952, validation=500, test=500)  # texts of `questions`, as many as in TREC
N_ANSWERS = 3600  # texts of mixed length to predict


@dataclass
class _Command:
    """A command to time, and what its record says."""

    name: str  # such as 'idp train'
    program: list[str]  # what Python runs
    arguments: list[str]
    fields: dict[str, Any]  # further fields of its record
    out: Path  # folder or file that it writes
    baseline: "_Command | None" = None  # the time of which is divided by that of this one
    seconds: list[float] = field(default_factory=list)  # one number a round

    def run(self, threads: int | None) -> None:
        """Run the command in a new process and add its seconds.

        Raises: `RuntimeError` with the end of its error output if it fails.
        """
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
        if threads:
            environment |= dict(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        shutil.rmtree(self.out, ignore_errors=True)  # a run that is complete is not repeated
        command = [sys.executable, *self.program, *self.arguments]
        start_time = time.perf_counter()
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.seconds.append(time.perf_counter() - start_time)
        if result.returncode:
            raise RuntimeError(f"{self.name} {self.fields} failed:\n{result.stderr[-2000:]}")

    def speed_up_over(self, other: "_Command") -> float:
        """Return the median ratio of another command's time to this one's, in the same round."""
        return round(median(b / s for b, s in zip(other.seconds, self.seconds)), 3)

    def record(self) -> dict[str, Any]:
        """Return the record of the times."""
        return dict(
            name=self.name,
            **self.fields,
            seconds_min=round(min(self.seconds), 2),
            seconds_median=round(median(self.seconds), 2),
            ratio=self.speed_up_over(self.baseline) if self.baseline else None,
            baseline=self.baseline and self.baseline.name,
            seconds=[round(s, 2) for s in self.seconds],
        )


def measure_load() -> float | None:  # None: unknown
    """Return the number of processes that waited for a core in the last minute; warn if busy."""
    if not hasattr(os, "getloadavg"):
        return None
    load = os.getloadavg()[0]
    if load > 0.3:
        logger.info(
            f"this machine is busy (load {load:.1f}): the times will be too long. Measure when "
            "nothing else runs."
        )
    return load


def _mix_lengths(texts: Sequence[str], n: int) -> list[str]:
    """Return `n` texts of 1, 1, 2, 4, 8 and 16 of the given ones, in a random order."""
    rng = random.Random(0)
    counts = (1, 1, 2, 4, 8, 16)
    mixed = [" ".join(rng.choices(texts, k=counts[i % len(counts)])) for i in range(n)]
    rng.shuffle(mixed)
    return mixed


def write_inputs(data: str | None, folder: Path, n_answers: int = N_ANSWERS) -> dict[str, Any]:
    """Write the splits of the task and the texts to predict; return their task and sizes."""
    task = load_task("trec", data) if data else TASKS["questions"]
    splits = task.splits
    if not data:
        splits = {split: make_rows(task.name, split, n=n) for split, n in SIZES.items()}
    (folder / "task").mkdir()
    for split, rows in splits.items():
        labelled = [(row["sentence1"], task.labels[row["label"]]) for row in rows]
        table = pd.DataFrame(labelled, columns=["text", "label"])
        table.to_csv(folder / "task" / f"{split}.csv", index=False)
    texts = _mix_lengths([row["sentence1"] for row in splits["train"]], n_answers)
    pd.DataFrame(dict(text=texts)).to_csv(folder / "texts.csv", index=False)
    sizes = {split: len(rows) for split, rows in splits.items()}
    return dict(task=task.name, sizes={**sizes, "predict": len(texts)})


def _save_classifier(path: str, labels: Sequence[str], folder: Path) -> None:
    """Save a backbone with a new classification head, for the pipeline."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with silence_transformers(), forked_random_numbers(0, []):
        model = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=len(labels), trust_remote_code=False
        )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path, trust_remote_code=False).save_pretrained(folder)


def _format_options(**options: Any) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def _training_commands(
    base: RunOptions, methods: Sequence[str], path: str, folder: Path
) -> list[_Command]:
    """Return `idp train` for each method, and the script for `peft` where it has the method."""
    commands = []
    for method in methods:
        lr = METHODS[method].default_learning_rate
        fields = dict(method=method, lr=lr)
        common = dict(
            **fields,
            batch_size=base.batch_size,
            max_len=base.max_len,
            device=base.device,
        )
        out = folder / method
        arguments = [str(folder / "task"), *_format_options(text="text", label="label", **common)]
        arguments += _format_options(backbone=base.backbone, out=out)
        # the other side scores no controls
        arguments += [*_format_options(epochs=1, evaluations=1, save_every=0), "--no_controls"]
        idp = _Command("idp train", _MAIN, ["train", *arguments], fields, out)
        commands.append(idp)
        if method in _PEFT_METHODS:
            out = folder / f"peft-{method}"
            options = METHODS[method].options
            length = options["prompt_length"].default if "prompt_length" in options else 0
            arguments = _format_options(data=folder / "task", backbone=path, out=out, **common)
            arguments += _format_options(prompt_length=length)
            idp.baseline = _Command("peft + Trainer", _SCRIPTS, arguments, fields, out)
            commands.append(idp.baseline)
    return commands


def _answering_commands(base: RunOptions, method: str, folder: Path) -> list[_Command]:
    """Return `idp predict` and the script for `pipeline`, in float32 and in bfloat16."""
    commands = []
    for dtype in ("float32", "bfloat16"):
        texts = folder / "texts.csv"
        common = dict(device=base.device, dtype=dtype)
        out = folder / f"pipeline-{dtype}.csv"
        arguments = _format_options(data=texts, backbone=folder / "classifier", out=out, **common)
        arguments += _format_options(max_len=base.max_len)
        pipeline = _Command("pipeline", _SCRIPTS, arguments, dict(dtype=dtype), out)
        out = folder / f"idp-{dtype}.csv"
        arguments = _format_options(
            texts=texts, model=folder / method, text="text", out=out, **common
        )
        fields = dict(method=method, dtype=dtype)
        idp = _Command("idp predict", _MAIN, ["predict", *arguments], fields, out, pipeline)
        commands += [idp, pipeline]
    return commands


def _read_predictions(file: Path) -> pd.Series:
    return pd.read_csv(file, dtype=str, keep_default_na=False)["prediction"]


def _run_in_turns(commands: Sequence[_Command], repeats: int, threads: int | None) -> None:
    for i in range(repeats):
        for command in commands:
            command.run(threads)
            words = " ".join([command.name, *map(str, command.fields.values())])
            logger.info(f"round {i + 1} of {repeats}: {words}, {command.seconds[-1]:.1f} s")


def measure_end_to_end(
    base: RunOptions,  # its backbone, data, batch size, length of a text and device are used
    methods: Sequence[str],  # names of `END_TO_END_METHODS`; the last one also predicts
    repeats: int = 3,  # rounds
    threads: int | None = None,  # of the processor; None: the choice of PyTorch
) -> Iterator[dict]:  # records of training, then those of answering
    """Time training and answering as whole commands, beside `peft` and `pipeline`, in turns.

    Raises: `UserError` for a backbone whose weights are not on this machine.
    """
    path = str(find_local_backbone(base.backbone) or base.backbone)
    if not Path(path).is_dir():
        raise UserError(
            f"backbone={base.backbone!r} has no weights on this machine, and whole commands "
            "are timed with trained ones: give 'tiny', 'minilm', or a folder."
        )
    machine = dict(processor=processor_name(), load_before=measure_load())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        common = dict(max_len=base.max_len, **machine, **write_inputs(base.data, folder))
        training = _training_commands(base, methods, path, folder)
        _run_in_turns(training, repeats, threads)
        for command in training:
            score = read_records(command.out / "record.jsonl")[0]["score"]
            yield dict(part="training", **common, **command.record(), score=score)
        labels = pd.read_csv(folder / "task" / "train.csv", dtype=str)["label"].unique()
        _save_classifier(path, labels, folder / "classifier")
        answering = _answering_commands(base, methods[-1], folder)
        _run_in_turns(answering, repeats, threads)
        for command in answering:
            exact = next(c for c in answering if c.name == command.name)  # in float32
            as_usual = next(c for c in answering if c.name == "pipeline")
            is_equal = _read_predictions(command.out) == _read_predictions(exact.out)
            yield dict(
                part="answering",
                **common,
                **command.record(),
                over_pipeline=command.speed_up_over(as_usual),
                as_float32=100 * float(is_equal.mean()),
            )

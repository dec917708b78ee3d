"""Measure how the time of a whole command divides among its parts.

    python results/speed/share.py --backbone minilm --out results/speed/share.jsonl

A thread looks every few milliseconds at what the main thread of the command does, and counts the
part that the stack of calls belongs to; the time before its first look is the start of Python. The
commands are those of `end_to_end.py`: one epoch of training with three methods, and the classes
of 3,600 texts of mixed length. A record has the seconds of each part, and `frozen`, the share of
the passes through the frozen layers, forward and backward. Measure on an idle machine.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":  # `results` is beside this file's folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from results.speed.end_to_end import (
    END_TO_END_METHODS,
    N_ANSWERS,
    measure_load,
    write_inputs,
)

INTERVAL = 0.004  # seconds from one look to the next
START = "start of Python and imports"
LAYERS = "frozen layers, forward"
BACKWARD = "backward pass"
# part: (end of a file's path, names of functions or none for all); the innermost call that is
# listed decides, and of a call the first line
RULES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (START, "<frozen importlib._bootstrap>", ()),
    (BACKWARD, "torch/autograd/__init__.py", ("backward",)),
    (BACKWARD, "torch/autograd/graph.py", ("_engine_run_backward",)),
    ("optimizer", "torch/optim/", ()),
    ("prompts and generators", "idp_tutorial/methods/", ("forward",)),
    ("heads and loss", "idp_tutorial/core/heads.py", ()),
    (LAYERS, "idp_tutorial/families/", ()),
    (LAYERS, "idp_tutorial/core/backbone.py", ("run_layer", "embed", "compute_keys_values")),
    (LAYERS, "transformers/models/", ("forward",)),
    ("tokenizing", "transformers/tokenization", ()),
    ("tokenizing", "idp_tutorial/data/encoding.py", ("encode_texts", "encode_rows", "encode")),
    ("batches", "idp_tutorial/data/encoding.py", ()),
    ("reading texts", "idp_tutorial/data/", ()),
    ("reading the backbone", "idp_tutorial/backbones/", ()),
    ("writing", "idp_tutorial/saving/", ()),
    ("writing", "idp_tutorial/utils/durable_files.py", ()),
    ("writing", "idp_tutorial/utils/records.py", ()),
    ("writing", "idp_tutorial/runs/report.py", ()),
    ("scikit-learn", "sklearn/", ()),
    ("scikit-learn", "idp_tutorial/assembly/probe.py", ("fit_best_probe",)),  # in threads
)


def name_part(frame: FrameType | None) -> str:
    """Return the part of a command that a stack of calls belongs to."""
    while frame is not None:
        file = frame.f_code.co_filename.replace(os.sep, "/")
        for part, place, functions in RULES:
            if place in file and (not functions or frame.f_code.co_name in functions):
                return part
        frame = frame.f_back
    return "other"


def watch(main_thread: int, counts: Counter[str], done: threading.Event) -> None:
    """Count what a thread does, until `done` is set."""
    while not done.wait(INTERVAL):
        counts[name_part(sys._current_frames().get(main_thread))] += 1


def run_watched(arguments: Sequence[str], started: float, out: Path) -> None:
    """Run a command in this process and write the seconds of its parts."""
    before = time.time() - started
    counts: Counter[str] = Counter()
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(threading.get_ident(), counts, done))
    watcher.start()
    watched_from = time.time()
    try:
        from idp_tutorial.cli.main import main

        main([*arguments])
    finally:
        seconds = time.time() - watched_from
        done.set()
        watcher.join()
        n_looks = max(1, counts.total())
        parts = {part: seconds * n / n_looks for part, n in counts.items()}
        parts[START] = parts.get(START, 0.0) + before
        out.write_text(json.dumps(parts), encoding="utf-8")


def measure(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a command in a process of its own; return its seconds, by part."""
    out = folder / "parts.json"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    program = [sys.executable, __file__, "--watch", str(out), str(time.time()), *arguments]
    result = subprocess.run(program, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{arguments} failed:\n{result.stderr[-2000:]}")
    parts = json.loads(out.read_text(encoding="utf-8"))
    seconds = sum(parts.values())
    frozen = parts.get(LAYERS, 0.0) + parts.get(BACKWARD, 0.0)
    return dict(
        seconds=round(seconds, 2),
        frozen=round(frozen / seconds, 3),
        parts={part: round(s, 2) for part, s in sorted(parts.items(), key=lambda p: -p[1])},
    )


def main() -> None:
    """Measure the commands with one backbone and write a record for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--methods", nargs="+", default=END_TO_END_METHODS)
    parser.add_argument("--data", help="folder of tasks, for TREC (default: synthetic questions)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--texts", type=int, default=N_ANSWERS, help="number of texts to predict")
    parser.add_argument("--commands", nargs="+", default=("train", "predict", "compare"))
    parser.add_argument("--out", type=Path, help="file of the records")
    args = parser.parse_args()
    load = measure_load()
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        inputs = write_inputs(args.data, folder, args.texts)
        shared = ["--backbone", args.backbone]
        commands = {}
        for method in args.methods:
            options = ["--method", method, "--epochs", str(args.epochs), "--evaluations", "1"]
            out = ["--out", str(folder / method)]
            commands["idp train", method] = [
                *("train", str(folder / "task"), *shared, *options, *out),
            ]
        texts = ["--texts", str(folder / "texts.csv"), "--out", str(folder / "answers.csv")]
        model = ["--model", str(folder / args.methods[-1])]
        commands["idp predict", args.methods[-1]] = ["predict", *model, *texts]
        compared = ["--methods", "majority,words,probe,prompt-tuning,lpt-npg,lora"]
        length = ["--steps", "100", "--out", str(folder / "compare")]
        table = str(folder / "task")
        commands["idp compare", "six methods"] = ["compare", table, *shared, *compared, *length]
        for (name, method), arguments in commands.items():
            if arguments[0] not in args.commands:
                continue
            measured = measure(arguments, folder)
            record = dict(name=name, method=method, backbone=args.backbone, load=load)
            record |= inputs | dict(epochs=args.epochs) | measured
            print(json.dumps(record), flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
        shutil.rmtree(folder / "compare", ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        run_watched(sys.argv[4:], float(sys.argv[3]), Path(sys.argv[2]))
    else:
        main()

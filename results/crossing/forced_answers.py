"""Measure whether a prompt before a layer can make the frozen model give an answer at all.

    python results/crossing/forced_answers.py

A static prompt is trained to make the model give one answer for *every* text, once for each class.
The share of the test texts that get this answer says what the layers above the prompt can pass on:
a prompt that knew the label could not do better. The records are in `forced-answers.jsonl`, and a
second call trains what is missing.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.experiment import Experiment

FILE = Path(__file__).parent / "forced-answers.jsonl"
LEARNING_RATES = (0.03, 0.3, 3.0)
STEPS = 300
PLACES = [("tiny-gpt2", 7), ("tiny-gpt2", 4), ("tiny", 7), ("tiny", 4)]


def with_one_label(task: Task, label: int) -> Task:
    """Return the task with the same label for all texts."""
    splits = {name: [row | {"label": label} for row in rows] for name, rows in task.splits.items()}
    return replace(task, splits=splits)


def score_forced_answer(task: Task, backbone: str, layer: int, label: int) -> float:
    """Return the share of the test texts (%) that get the answer, at the best of three rates.

    The rate is chosen by validation, whose labels are the answer, too.
    """
    best = (-1.0, 0.0)
    for lr in LEARNING_RATES:
        cfg = RunConfig(
            "lpt",
            task=task.name,
            backbone=backbone,
            head="verbalizer",
            layer=layer,
            prompt_length=10,
            lr=lr,
            steps=STEPS,
            batch_size=16,
            eval_every=STEPS // 3,
            cache="both",
        )
        experiment = Experiment(cfg, with_one_label(task, label))
        record = experiment.score(*experiment.fit())
        best = max(best, (record["validation"], record["score"]))
    return best[1]


def main() -> None:
    """Train the missing answers, and print the mean over the classes for each place."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", default="questions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    records = [json.loads(line) for line in lines]
    task = load_task(args.task)
    for backbone, layer in PLACES:
        scores = []
        for label, name in enumerate(task.labels):
            key = dict(task=args.task, backbone=backbone, layer=layer, answer=name)
            shares = [r["forced"] for r in records if key.items() <= r.items()]
            if not shares:
                shares = [score_forced_answer(task, backbone, layer, label)]
                with FILE.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(key | dict(forced=shares[0])) + "\n")
            scores.append(shares[0])
        each = ", ".join(f"{score:.0f}" for score in scores)
        print(f"{backbone:10} layer {layer}: {mean(scores):5.1f} %  ({each})", flush=True)


if __name__ == "__main__":
    main()

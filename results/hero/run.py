"""Train the three models of the picture on the front page, and store what they predict.

    python results/hero/run.py

The options are those of `results/what_a_prompt_adds/two-domains-tiny.jsonl`, whose scores of five
seeds the picture shows: 300 steps of 32 examples on `two-domains` with the bundled model, and the
learning rate that was the best of three on validation. `results/hero/runs.jsonl` has one line for
each run; a second call continues.
"""

import json
from pathlib import Path
from typing import Any

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.training.evaluation import predict

FILE = Path(__file__).with_name("runs.jsonl")
LEARNING_RATES = {"head-only": 1e-1, "s-idpg-phm": 1e-2, "prompt-tuning": 1e-1}
SEEDS = (0,)
OPTIONS: dict[str, dict[str, Any]] = {
    "s-idpg-phm": dict(standardise=True),  # the sentence vectors of the bundled model are small
}
SENTENCES = (
    "The soda was cold.",
    "The soup was cold.",
    "The soda was warm.",
    "The soup was warm.",
)
TASK = load_task("two-domains")


def train(method: str, lr: float, seed: int) -> dict[str, Any]:
    """Train one model and return its settings, accuracies and predictions."""
    cfg = RunConfig(
        method,
        backbone="tiny",
        lr=lr,
        seed=seed,
        steps=300,
        batch_size=32,
        eval_every=75,
        cache="both",
        **OPTIONS.get(method, {}),
    )
    experiment = Experiment(cfg, TASK)
    model, log = experiment.fit()
    record = experiment.score(model, log).to_dict()
    rows = [dict(sentence1=sentence) for sentence in SENTENCES]
    predictions = predict(model, TASK, experiment.cfg, rows)
    names = ("method", "task", "backbone", "pooling", "position", "lr", "seed", "steps")
    details = {name: record.get(name) for name in (*names, "batch_size", "score", "validation")}
    labels = [prediction["label"] for prediction in predictions]
    version = record["versions"]["idp_tutorial"]
    return details | dict(predictions=dict(zip(SENTENCES, labels)), idp_tutorial=version)


def train_once(method: str, lr: float, seed: int) -> dict[str, Any]:
    """Return the stored run, or train it and store it."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    for run in map(json.loads, lines):
        if (run["method"], run["lr"], run["seed"]) == (method, lr, seed):
            return run
    run = train(method, lr, seed)
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run) + "\n")
    print(method, lr, seed, run["validation"], run["score"], run["predictions"], flush=True)
    return run


def main() -> None:
    """Train all models."""
    for method, lr in LEARNING_RATES.items():
        for seed in SEEDS:
            train_once(method, lr, seed)


if __name__ == "__main__":
    main()

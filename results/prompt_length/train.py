"""Train static prompts of several lengths at the input of the bundled model.

    python results/prompt_length/train.py

Label words and no trained head, so that only the prompt learns: how much does its length change?
The task is `questions`, the learning rate the best of five in `results/crossing` (ten vectors, 600
steps). The records are in `runs.jsonl`; a second call continues.
"""

import json
from pathlib import Path

import torch

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.experiment import Experiment

FILE = Path(__file__).parent / "runs.jsonl"
LENGTHS = (1, 5, 20, 50)
SEEDS = 3


def make_config(prompt_length: int, seed: int) -> RunConfig:
    """Return the config of one run."""
    return RunConfig(
        "lpt",
        task="questions",
        backbone="tiny",
        head="verbalizer",
        layer=0,
        prompt_length=prompt_length,
        lr=0.3,
        seed=seed,
        steps=300,
        batch_size=16,
        eval_every=100,
    )


def read_runs() -> list[dict]:
    """Return the stored runs."""
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    return [json.loads(line) for line in lines]


def main() -> None:
    """Train what is not stored yet."""
    torch.set_num_threads(1)
    done = {(run["prompt_length"], run["seed"]) for run in read_runs()}
    for seed in range(SEEDS):
        for length in LENGTHS:
            if (length, seed) in done:
                continue
            experiment = Experiment(make_config(length, seed), load_task("questions"))
            model, log = experiment.fit()
            record = experiment.score(model, log)
            run = dict(prompt_length=length, seed=seed, parameters=record["params"]["prompt"])
            run |= dict(validation=record["validation"], score=record["score"])
            with FILE.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            print(run, flush=True)


if __name__ == "__main__":
    main()

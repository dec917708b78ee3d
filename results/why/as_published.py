"""Train methods as their papers did, on MiniLM, and choose the learning rate from the paper's.

    python results/why/as_published.py --data FOLDER --workers 4

IDPG's prompt tuning, S-IDPG and M-IDPG: 500 examples of Subj, the authors' sample, 50 epochs, a
head of two layers on `<s>`, the optimiser of their scripts. ID-SPAM and its prompt tuning: all of
MRPC, 10 epochs (one of the values that the paper searches), a linear head on `<s>`. Seed 0 tries
the learning rates of the paper and no others; the best on validation is used with seeds 0 to 4.
Two controls follow: the most frequent class, and a linear probe of the frozen model. Records are
appended to `results/why/as-published.jsonl`; a second call continues.
"""

import argparse
import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.data.tasks import load_task
from idp_tutorial.reproduction.papers.protocols import plan_table_runs, select_paper_learning_rates
from idp_tutorial.runs.compare import run_seeds
from idp_tutorial.runs.record import RunStore
from idp_tutorial.utils.records import read_existing_records

FILE = Path(__file__).parent / "as-published.jsonl"
SEEDS = 5
CONTROLS = ("majority", "probe")
RUNS = (  # published table, method, task, training examples, epochs in place of the plan's
    ("id-spam-2", "id-spam", "mrpc", None, 10.0),
    ("id-spam-2", "prompt-tuning", "mrpc", None, 10.0),
    ("idpg-3", "m-idpg-phm", "subj", 500, None),
    ("idpg-3", "s-idpg-phm", "subj", 500, None),
    ("idpg-3", "prompt-tuning", "subj", 500, None),
)


def paper_config(run: tuple, data: str | None) -> RunConfig:
    """Return the config of a run as its paper trained it."""
    table, method, task, shots, epochs = run
    planned = plan_table_runs(table, "full", "minilm", data, [method], [task])
    (cfg,) = [c for c in planned if c.shots == shots]
    # `resolve_epochs` keeps the ratio of steps to `eval_every`: one evaluation an epoch
    return replace(cfg, epochs=epochs, steps=int(epochs)) if epochs else cfg


def selection(run: tuple) -> str:
    """Return how the learning rate of a run is chosen, for its records."""
    n = len(select_paper_learning_rates(run[0], run[1]))
    return f"best of {n} (the paper's) on validation, seed 0"


def train(run: tuple, data: str, lr: float, seed: int, file: Path) -> None:
    """Train one learning rate with one seed, unless its record is in the file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cfg = paper_config(run, data)
    task = load_task(cfg.task, data, cfg.shots)
    cfg = cfg.resolve_epochs(len(task.splits["train"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    store = RunStore(file)
    # `run_seeds` counts from seed 0, whose record is stored
    run_seeds(replace(cfg, lr=lr), task, selection(run), seed + 1, store, table=run[0])


def best_learning_rate(run: tuple, file: Path) -> float:
    """Return the learning rate with the best validation score of seed 0."""
    scores = {
        r["lr"]: r["validation"]
        for r in read_existing_records(file)
        if (r["table"], r["method"], r["seed"], r["status"]) == (*run[:2], 0, "done")
    }
    return max(scores, key=lambda lr: scores[lr])


def run_controls(data: str, file: Path) -> None:
    """Score the controls on the task of each table."""
    store = RunStore(file)
    for table, task_name, shots in dict.fromkeys((run[0], *run[2:4]) for run in RUNS):
        for cfg in plan_table_runs(table, "full", "minilm", data, [*CONTROLS], [task_name]):
            if cfg.shots == shots:
                task = load_task(task_name, data, shots)
                cfg = cfg.resolve_epochs(len(task.splits["train"]))
                run_seeds(cfg, task, "none", 1, store, table=table)


def main() -> None:
    """Run all learning rates with seed 0, then the best one with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folder of tasks: DATA/TASK/train.jsonl …")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        searches = [
            pool.submit(train, run, args.data, lr, 0, FILE)
            for run in RUNS
            for lr in select_paper_learning_rates(run[0], run[1])
        ]
        for search in searches:
            search.result()
        rest = [
            pool.submit(train, run, args.data, best_learning_rate(run, FILE), SEEDS - 1, FILE)
            for run in RUNS
        ]
        for future in rest:
            future.result()
    run_controls(args.data, FILE)


if __name__ == "__main__":
    main()

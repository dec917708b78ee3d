"""Run the factorial of initial head, head's learning rate and method that PLAN.md describes.

    python results/why/head_factorial.py --data FOLDER --task trec --steps 310

Each run is appended to `results/why/head-TASK-STEPS.jsonl`; a second call continues.
"""

import argparse
from pathlib import Path
from statistics import mean

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.compare import run_seeds
from idp_tutorial.runs.store import RunStore

METHODS = ("prompt-tuning", "lpt-npg", "m-idpg-phm", "s-idpg-phm", "lpt")
LEARNING_RATES = (3e-3, 1e-2, 3e-2, 1e-1)
HEAD_LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
SELECTION = "best of 4 (equal for all methods) on validation, seeds 0 and 1"
HERE = Path(__file__).parent


def run_cell(store: RunStore, task, common: dict, method: str, head_lr: float | None) -> None:
    """Train one method at four learning rates with two seeds, then at the best with five."""
    rates = HEAD_LEARNING_RATES if method == "head-only" else LEARNING_RATES
    scores = {}
    if method in (
        "s-idpg-phm",
        "m-idpg-phm",
        "lpt-npg",
    ):  # the sentence vectors of MiniLM are small
        common = {**common, "standardise": True}
    for lr in rates:
        cfg = RunConfig(method, lr=lr, head_lr=head_lr, **common)
        records = run_seeds(cfg, task, SELECTION, 2, store)
        validation = [r["validation"] for r in records if r["status"] == "done"]
        if len(validation) == 2:
            scores[lr] = mean(validation)
    best = max(scores, key=lambda lr: scores[lr])
    run_seeds(RunConfig(method, lr=best, head_lr=head_lr, **common), task, SELECTION, 5, store)


def main() -> None:
    """Run all cells of a task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder of tasks: DATA/TASK/train.jsonl …")
    parser.add_argument("--task", default="trec")
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--steps", type=int, default=310)
    parser.add_argument("--cache", help="folder of cached states (default: the user's cache)")
    args = parser.parse_args()
    task = load_task(args.task, args.data)
    store = RunStore(HERE / f"head-{args.task}-{args.steps}.jsonl")
    common = dict(
        backbone=args.backbone,
        data=args.data,
        task=args.task,
        steps=args.steps,
        batch_size=16,
        eval_every=args.steps // 5,
        precision="bf16",
        cache="both",
        cache_dir=args.cache,
    )
    for head_init in ("random", "probe"):
        run_cell(store, task, {**common, "head_init": head_init}, "head-only", None)
    for method in METHODS:
        for head_init in ("random", "probe"):
            for head_lr in (1e-3, None):
                run_cell(store, task, {**common, "head_init": head_init}, method, head_lr)


if __name__ == "__main__":
    main()

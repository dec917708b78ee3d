"""Train heads, prompts, LoRA, all parameters and a side network longer than the course does.

    python results/why/toy.py
    python results/why/toy.py --methods lpt --learning-rates 0.003 0.01
    python results/why/toy.py --task two-domains-order --methods head-only,lpt --seeds 3

The static prompts of the course train for at most 300 steps. Here each gets 3,000 steps of 16
examples and six learning rates, of which the best on validation with seed 0 is used with five seeds
(`--seeds`). Learning rates that are given as an option train three seeds each. Each run is appended
to `results/why/toy-TASK-BACKBONE.jsonl`; a second call continues.
"""

import argparse
import logging
from pathlib import Path

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.compare import run_seeds
from idp_tutorial.runs.record import RunStore

HERE = Path(__file__).parent
STATIC = (0.03, 0.1, 0.3, 1.0, 3.0, 9.0)
LOWER_STATIC = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # `lpt` chose .03, the lowest of STATIC
SMALL = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
METHODS: dict[str, tuple] = {  # method: learning rates
    "head-only": (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    "fine-tuning": SMALL,
    "lora": SMALL,
    "prompt-tuning": LOWER_STATIC,
    "lpt": STATIC,
    "lpt-npg": SMALL,
    "p-tuning-v2": LOWER_STATIC,
    "s-idpg-phm": SMALL,
    "side-network": SMALL,
}


def main() -> None:
    """Run all methods on one task and backbone."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", default="two-domains")
    parser.add_argument("--backbone", default="tiny")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--learning-rates", type=float, nargs="+")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    task = load_task(args.task)
    store = RunStore(HERE / f"toy-{args.task}-{args.backbone}.jsonl")
    for method in args.methods.split(","):
        rates = METHODS[method]
        options = dict(
            backbone=args.backbone,
            steps=args.steps,
            batch_size=16,
            eval_every=args.steps // 10,
            cache="both",
        )
        if method in ("s-idpg-phm", "lpt-npg"):  # the vectors that they read are small in `tiny`
            options["standardise"] = True
        for lr in args.learning_rates or ():
            run_seeds(RunConfig(method, lr=lr, **options), task, "all are reported", 3, store)
        if args.learning_rates:
            continue
        selection = f"best of {len(rates)} on validation, seed 0"
        scores = {}
        for lr in rates:
            (record,) = run_seeds(RunConfig(method, lr=lr, **options), task, selection, 1, store)
            if record["status"] == "done":
                scores[lr] = record["validation"]
        best = max(scores, key=lambda lr: scores[lr])
        run_seeds(RunConfig(method, lr=best, **options), task, selection, args.seeds, store)


if __name__ == "__main__":
    main()

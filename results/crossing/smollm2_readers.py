"""Measure who reads in SmolLM2: train the chosen prompts of TREC and Subj again, and look inside.

    python -m results.crossing.smollm2_readers --data FOLDER --task trec
    python -m results.crossing.smollm2_readers --data FOLDER --task subj --shots 1000

`results/why/factorial.py layers` stores scores and not the prompts. So the static prompt and NPG
are trained again before one layer, at the learning rates that validation chose there, and
`crossing.measure_readers` measures them as it does on the small models. The lines are in
`readers-TASK-smollm2-600.jsonl`; a second call measures what is missing.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.experiment import Experiment
from results.crossing.crossing import measure_readers
from results.depth.who_reads import read_depth_records, select_chosen_runs
from results.why import factorial

HERE = Path(__file__).parent
METHODS = ("lpt-npg", "lpt")


def main() -> None:
    """Train and measure the prompts of a task that are not measured yet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True, help="folder of tasks: DATA/TASK/train.jsonl …")
    parser.add_argument("--task", default="trec")
    parser.add_argument("--shots", type=int)
    parser.add_argument("--layer", type=int, default=29)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--cache", help="folder of cached states")
    args = parser.parse_args()
    args.name, args.backbone, args.out = "layers", "smollm2", HERE.parent / "why"
    torch.set_num_threads(1)
    task = load_task(args.task, args.data, args.shots)
    chosen = select_chosen_runs(read_depth_records(factorial.records_file(args)))
    file = HERE / f"readers-{args.task}-smollm2-{args.steps}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    measured = [json.loads(line) for line in lines]
    for method in METHODS:
        for seed, run in chosen[method, args.layer].items():
            key = dict(method=method, layer=args.layer, lr=run["lr"], seed=seed)
            if any(key.items() <= line.items() for line in measured):
                continue
            cfg = factorial.cell_config(args, (method, "random", None, args.layer))
            experiment = Experiment(replace(cfg, lr=run["lr"], seed=seed), task)
            model, _ = experiment.fit()
            result = key | measure_readers(model, experiment.task, experiment.cfg)
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(result) + "\n")
            print(result, "stored score:", run["score"], flush=True)


if __name__ == "__main__":
    main()

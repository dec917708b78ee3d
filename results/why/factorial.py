"""Run the factorials of PLAN.md: initial head × learning rate of the head × method.

    python results/why/factorial.py head --data FOLDER --task trec --steps 310
    python results/why/factorial.py task --data FOLDER --task cr --workers 8
    python results/why/factorial.py readout --data FOLDER --task trec
    python results/why/factorial.py confirmation --data FOLDER --task trec

Each run is appended to `results/why/NAME-TASK-STEPS.jsonl`; a second call continues. A process
runs one cell at a time and stores it in a folder of its own; the parts are joined at the end, and
at the start of the next call.
"""

import argparse
import logging
import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.runs.compare import run_seeds
from idp_tutorial.runs.logits import has_logits, load_logits, write_run_arrays
from idp_tutorial.runs.record import RunStore
from idp_tutorial.utils.records import read_existing_records

HERE = Path(__file__).parent
HEAD_LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
FINE_TUNING_LEARNING_RATES = (5e-5, 1.5e-4, 5e-4)
TUNING_SEEDS, SEEDS = 2, 5
PROMPT_LENGTH = 5
HEAD_METHODS = ("prompt-tuning", "lpt-npg", "m-idpg-phm", "s-idpg-phm", "lpt")
FACTORIALS: dict[str, dict[str, Any]] = {
    "head": dict(
        methods=HEAD_METHODS,
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1),
        head_learning_rates=(1e-3, None),
    ),
    "task": dict(
        methods=("prompt-tuning", "m-idpg-phm", "s-idpg-phm", "p-tuning-v2"),
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
        head_learning_rates=(None,),
        shots=1000,
    ),
    "readout": dict(  # the head reads the first token, IDPG's generators the mean of the words
        methods=HEAD_METHODS,
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1),
        head_learning_rates=(None,),
        initial_heads=("probe",),
        pooling="cls",
        sentence_pooling="mean",
    ),
    "first-token-1000": dict(  # `readout` on IDPG's frozen draws of 1,000 examples
        methods=HEAD_METHODS,
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
        head_learning_rates=(None,),
        initial_heads=("probe",),
        pooling="cls",
        sentence_pooling="mean",
        shots=1000,
    ),
    "late-1000": dict(  # the late prompts that `task` lacks, at the mean of the words
        methods=("lpt-npg", "lpt"),
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
        head_learning_rates=(None,),
        initial_heads=("probe",),
        shots=1000,
    ),
    "confirmation": dict(  # `readout` with new seeds, at the learning rates that it selected
        methods=HEAD_METHODS,
        head_learning_rates=(None,),
        initial_heads=("probe",),
        pooling="cls",
        sentence_pooling="mean",
    ),
    "first-layer": dict(  # LPT's static prompt before the first layer: `readout` has the middle one
        methods=("lpt",),
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1),
        head_learning_rates=(None,),
        initial_heads=("probe",),
        pooling="cls",
        layer=0,
        seeds=10,  # as many as `readout` and `confirmation` together
    ),
    "edges": dict(  # below and above the learning rates of `readout`, which chose .003 and .1
        methods=("lpt-npg", "lpt"),
        learning_rates=(1e-3, 3e-1),
        head_learning_rates=(None,),
        initial_heads=("probe",),
        pooling="cls",
        sentence_pooling="mean",
    ),
    "same-readout": dict(  # as in the paper: IDPG's generators read the first token, too
        methods=("m-idpg-phm", "s-idpg-phm"),
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1),
        head_learning_rates=(None,),
        initial_heads=("probe",),
        pooling="cls",
    ),
}
Cell = tuple[str, str, float | None]  # method, `head_init`, `head_lr`


def list_cells(name: str) -> Iterator[Cell]:
    """Yield the cells of a factorial; None as `head_lr` is the learning rate of the prompt."""
    initial_heads = FACTORIALS[name].get("initial_heads", ("random", "probe"))
    # `readout` and `task` have the head alone
    if name not in ("first-layer", "same-readout", "late-1000", "edges"):
        for head_init in initial_heads:
            yield "head-only", head_init, None
    if name == "task":  # the upper end of what a prompt can gain
        yield "fine-tuning", "random", None
    for method in FACTORIALS[name]["methods"]:
        for head_init in initial_heads:
            for head_lr in FACTORIALS[name]["head_learning_rates"]:
                yield method, head_init, head_lr


def run_cell(store: RunStore, name: str, task: Task, common: dict, cell: Cell) -> None:
    """Train one method at each learning rate with two seeds, then at the best with five.

    A confirmation trains five new seeds at the learning rate that `readout` selected.
    """
    method, head_init, head_lr = cell
    options = {**common, "head_init": head_init, "head_lr": head_lr}
    rates = FACTORIALS[name].get("learning_rates", ())
    if method == "head-only":
        rates = HEAD_LEARNING_RATES
    elif method == "fine-tuning":
        rates = FINE_TUNING_LEARNING_RATES
        options |= dict(cache="none", cache_dir=None, precision="no")
    else:
        options["prompt_length"] = PROMPT_LENGTH
    if "standardise" in ALL_METHODS[method].options:  # MiniLM's sentence vectors are small
        options["standardise"] = True
    if "sentence_pooling" in ALL_METHODS[method].options:
        options["sentence_pooling"] = FACTORIALS[name].get("sentence_pooling")
    if method == "p-tuning-v2":
        options["insertion"] = "add"
    if "layer" in FACTORIALS[name]:
        options["layer"] = FACTORIALS[name]["layer"]
    if name == "confirmation":
        file = HERE / f"readout-{task.name}-{common['steps']}.jsonl"
        records = [r for r in read_existing_records(file) if r["method"] == method]
        (best,) = {r["lr"] for r in records if "logits" in r}
        cfg = RunConfig(method, lr=best, **options)
        run_seeds(cfg, task, f"selected in {file.name}", SEEDS, store, first_seed=SEEDS)
        return
    selection = f"best of {len(rates)} (equal for all methods) on validation, seeds 0 and 1"
    scores = {}
    for lr in rates:
        records = run_seeds(
            RunConfig(method, lr=lr, **options), task, selection, TUNING_SEEDS, store
        )
        validation = [r["validation"] for r in records if r["status"] == "done"]
        if len(validation) == TUNING_SEEDS:
            scores[lr] = mean(validation)
    best = max(scores, key=lambda lr: scores[lr])
    seeds = FACTORIALS[name].get("seeds", SEEDS)
    run_seeds(RunConfig(method, lr=best, **options), task, selection, seeds, store)


def records_file(args: argparse.Namespace) -> Path:
    """Return the file of a task's records."""
    return args.out / f"{args.name}-{args.task}-{args.steps}.jsonl"


def run_in_process(args: argparse.Namespace, cell: Cell, file: Path) -> None:
    """Run one cell, whose records go to a file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    task = load_task(args.task, args.data, FACTORIALS[args.name].get("shots"))
    common = dict(
        backbone=args.backbone,
        data=args.data,
        shots=FACTORIALS[args.name].get("shots"),
        pooling=FACTORIALS[args.name].get("pooling", "mean"),
        steps=args.steps,
        batch_size=16,
        eval_every=args.steps // 5,
        precision=args.precision,
        cache="both",
        cache_dir=args.cache,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    run_cell(RunStore(file), args.name, task, common, cell)


def join_parts(file: Path) -> None:
    """Move the records and logits of all parts to the file of the task.

    Logits of runs that only served to choose a learning rate are left out.
    """
    parts = sorted(file.with_suffix("").glob("*/*.jsonl"))
    store = RunStore(file)
    for part in parts:
        records = read_existing_records(part)
        final_rates = {r["lr"] for r in records if r["seed"] >= TUNING_SEEDS}
        for record in records:
            if record["lr"] in final_rates and has_logits(record, part.parent):
                run = record["logits"].rpartition("/")[2]
                arrays = load_logits(record, part.parent)
                logits_file = file.parent / "logits" / f"{file.stem}.npz"
                record |= write_run_arrays(logits_file, run, arrays)
            else:
                record = {k: v for k, v in record.items() if not k.startswith("logits")}
            store.add(record)
    shutil.rmtree(file.with_suffix(""), ignore_errors=True)


def is_complete(name: str, cell: Cell, records: list[dict]) -> bool:
    """Return whether the joined records have all seeds of a cell at its final learning rate."""
    seeds = {
        r["seed"]
        for r in records
        if (r["method"], r["head_init"], r["head_lr"]) == cell and "logits" in r
    }
    return len(seeds) == FACTORIALS[name].get("seeds", SEEDS)


def main() -> None:
    """Run all cells of a factorial on one task."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=FACTORIALS)
    parser.add_argument("--data", required=True, help="folder of tasks: DATA/TASK/train.jsonl …")
    parser.add_argument("--task", default="trec")
    parser.add_argument("--backbone", default="minilm")
    parser.add_argument("--steps", type=int, default=310)
    parser.add_argument("--methods", nargs="+", help="names of methods (default: all)")
    parser.add_argument("--initial-heads", nargs="+", help="'random', 'probe' (default: both)")
    parser.add_argument("--precision", default="bf16", help="of training: 'bf16', or 'no'")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--cache", help="folder of cached states (default: the user's cache)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the records")
    args = parser.parse_args()
    file = records_file(args)
    join_parts(file)
    cells = [
        (method, head_init, head_lr)
        for method, head_init, head_lr in list_cells(args.name)
        if (not args.methods or method in args.methods)
        and (not args.initial_heads or head_init in args.initial_heads)
    ]
    done = read_existing_records(file)
    cells = [cell for cell in cells if not is_complete(args.name, cell, done)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        folder = file.with_suffix("")
        runs = [
            pool.submit(run_in_process, args, cell, folder / "-".join(map(str, cell)) / file.name)
            for cell in cells
        ]
        for run in runs:
            run.result()
    join_parts(file)


if __name__ == "__main__":
    main()

"""Run the factorials of PLAN.md: initial head × learning rate of the head × method.

    python results/why/factorial.py head --data FOLDER --task trec --steps 310
    python results/why/factorial.py task --data FOLDER --task cr --workers 8
    python results/why/factorial.py readout --data FOLDER --task trec
    python results/why/factorial.py confirmation --data FOLDER --task trec

    python results/why/factorial.py layers --data FOLDER --task trec --steps 600 --workers 8

The records of a task are written to `results/why/NAME-TASK-STEPS.jsonl`. A process runs one
learning rate of a cell at a time and stores it in a folder of its own, where a second call finds
it; the parts are joined when all runs are done.
"""

import argparse
import logging
import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.reproduction.papers.claim_runs import steps_to_95_percent
from idp_tutorial.runs.compare import run_seeds
from idp_tutorial.runs.logits import has_logits, load_logits, write_run_arrays
from idp_tutorial.runs.record import RunStore
from idp_tutorial.utils.records import read_existing_records

HERE = Path(__file__).parent
HEAD_LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
FINE_TUNING_LEARNING_RATES = (5e-5, 1.5e-4, 5e-4)
TUNING_SEEDS, SEEDS = 2, 5
PROMPT_LENGTH = 5
STATIC_LEARNING_RATES = (0.03, 0.1, 0.3, 1.0, 3.0)
NPG_LEARNING_RATES = (0.0007, 0.002, 0.007, 0.02, 0.06)
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
    "layers": dict(  # LPT's figures 2 and 4 on a language model, with LPT's numbers of vectors
        backbone="smollm2",
        head="verbalizer",
        dtype="bfloat16",
        methods=("lpt", "lpt-npg"),
        learning_rates=dict(lpt=STATIC_LEARNING_RATES, **{"lpt-npg": NPG_LEARNING_RATES}),
        head_learning_rates=(None,),
        initial_heads=("random",),  # the verbalizer has none
        prompt_lengths=dict(lpt=20, **{"lpt-npg": 5}),
        layers={"lpt": (15, 0, 29, 24), "lpt-npg": (15, 29, 24)},
    ),
}
Cell = tuple[str, str, float | None, int | None]  # method, `head_init`, `head_lr`, layer


def list_cells(name: str) -> Iterator[Cell]:
    """Yield the cells of a factorial; None as `head_lr` is the learning rate of the prompt."""
    factorial = FACTORIALS[name]
    initial_heads = factorial.get("initial_heads", ("random", "probe"))
    # `readout` and `task` have the head alone, and the verbalizer has no head to train
    if name not in ("first-layer", "same-readout", "late-1000", "edges", "layers"):
        for head_init in initial_heads:
            yield "head-only", head_init, None, None
    if name in ("task", "layers"):  # the upper end of what a prompt can gain
        yield "fine-tuning", "random", None, None
    layers = factorial.get("layers", {})
    for method in factorial["methods"]:
        for layer in layers.get(method, (factorial.get("layer"),)):
            for head_init in initial_heads:
                for head_lr in factorial["head_learning_rates"]:
                    yield method, head_init, head_lr, layer


def list_learning_rates(name: str, cell: Cell, task: str, steps: int) -> tuple[float, ...]:
    """Return the learning rates of a cell; for a confirmation, the one that `readout` selected."""
    method = cell[0]
    if name == "confirmation":
        file = HERE / f"readout-{task}-{steps}.jsonl"
        records = [r for r in read_existing_records(file) if r["method"] == method]
        (best,) = {r["lr"] for r in records if "logits" in r}
        return (best,)
    if method == "head-only":
        return HEAD_LEARNING_RATES
    if method == "fine-tuning":
        return FINE_TUNING_LEARNING_RATES
    rates = FACTORIALS[name]["learning_rates"]
    return rates[method] if isinstance(rates, dict) else rates


def cell_config(args: argparse.Namespace, cell: Cell) -> RunConfig:
    """Return the config of a cell, without a learning rate."""
    factorial = FACTORIALS[args.name]
    method, head_init, head_lr, layer = cell
    options: dict[str, Any] = dict(
        backbone=factorial.get("backbone", args.backbone),
        data=args.data,
        shots=factorial.get("shots"),
        pooling=factorial.get("pooling", "mean"),
        head=factorial.get("head", "classification"),
        dtype=factorial.get("dtype", "float32"),
        steps=args.steps,
        batch_size=16,
        eval_every=args.steps // 5,
        precision=args.precision,
        cache="both",
        cache_dir=args.cache,
        head_init=head_init,
        head_lr=head_lr,
    )
    if method == "fine-tuning":
        options |= dict(cache="none", cache_dir=None, precision="no", dtype="float32")
    elif method != "head-only":
        options["prompt_length"] = factorial.get("prompt_lengths", {}).get(method, PROMPT_LENGTH)
    if "standardise" in ALL_METHODS[method].options:  # MiniLM's sentence vectors are small
        options["standardise"] = True
    if "sentence_pooling" in ALL_METHODS[method].options:
        options["sentence_pooling"] = factorial.get("sentence_pooling")
    if method == "p-tuning-v2":
        options["insertion"] = "add"
    if layer is not None:
        options["layer"] = layer
    return RunConfig(method, **options)


def records_file(args: argparse.Namespace) -> Path:
    """Return the file of a task's records."""
    return args.out / f"{args.name}-{args.task}-{args.steps}.jsonl"


def cell_folder(args: argparse.Namespace, cell: Cell) -> Path:
    """Return the folder of a cell's parts."""
    return records_file(args).with_suffix("") / "-".join(map(str, cell))


def run_part(
    args: argparse.Namespace, cell: Cell, lr: float, first_seed: int, seeds: int
) -> list[dict]:
    """Train a cell at one learning rate with some seeds, and return the records."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    file = records_file(args)
    n_rates = len(list_learning_rates(args.name, cell, args.task, args.steps))
    selection = f"best of {n_rates} (equal for all methods) on validation, seeds 0 and 1"
    if args.name == "confirmation":
        selection = f"selected in readout-{args.task}-{args.steps}.jsonl"
    elif cell[0] in ("head-only", "fine-tuning"):
        selection = f"best of {n_rates} on validation, seeds 0 and 1"
    part = cell_folder(args, cell) / f"{lr}-{first_seed}" / file.name
    part.parent.mkdir(parents=True, exist_ok=True)
    task = load_task(args.task, args.data, FACTORIALS[args.name].get("shots"))
    cfg = replace(cell_config(args, cell), lr=lr)
    return run_seeds(cfg, task, selection, seeds, RunStore(part), first_seed=first_seed)


def run_cells(pool: Executor, args: argparse.Namespace, cells: list[Cell]) -> None:
    """Train each cell at every learning rate with two seeds, then at the best with five (or ten).

    A confirmation trains five new seeds at the learning rate that `readout` selected.
    """
    seeds = FACTORIALS[args.name].get("seeds", SEEDS)
    first_seed = TUNING_SEEDS
    rates = {cell: list_learning_rates(args.name, cell, args.task, args.steps) for cell in cells}
    tuning = {}
    if args.name == "confirmation":
        first_seed, seeds = SEEDS, 2 * SEEDS
    else:
        for cell in cells:
            tuning[cell] = [
                pool.submit(run_part, args, cell, lr, 0, TUNING_SEEDS) for lr in rates[cell]
            ]
    last_runs = []
    for cell in cells:
        (best, *_) = rates[cell]
        if tuning:
            tried = dict(zip(rates[cell], (run.result() for run in tuning[cell]), strict=True))
            scores = {
                lr: mean(r["validation"] for r in records)
                for lr, records in tried.items()
                if len(records) == TUNING_SEEDS and all(r["status"] == "done" for r in records)
            }
            best = max(scores, key=lambda lr: scores[lr])
        for seed in range(first_seed, seeds):
            last_runs.append(pool.submit(run_part, args, cell, best, seed, 1))
    for run in last_runs:
        run.result()


def join_parts(args: argparse.Namespace) -> None:
    """Move the records and logits of all parts to the file of the task.

    Logits of runs that only served to choose a learning rate are left out.
    """
    file = records_file(args)
    store = RunStore(file)
    for folder in sorted(file.with_suffix("").glob("*")):
        parts = [(part, read_existing_records(part)) for part in sorted(folder.glob("*/*.jsonl"))]
        final_rates = {
            r["lr"] for _, records in parts for r in records if r["seed"] >= TUNING_SEEDS
        }
        for part, records in parts:
            for record in records:
                if record["lr"] in final_rates and has_logits(record, part.parent):
                    run = record["logits"].rpartition("/")[2]
                    arrays = load_logits(record, part.parent)
                    logits_file = file.parent / "logits" / f"{file.stem}.npz"
                    record |= write_run_arrays(logits_file, run, arrays)
                    record["steps_to_95_percent"] = steps_to_95_percent(record["history"])
                else:
                    record = {k: v for k, v in record.items() if not k.startswith("logits")}
                store.add(record)
    shutil.rmtree(file.with_suffix(""), ignore_errors=True)


def is_complete(name: str, cell: Cell, records: list[dict]) -> bool:
    """Return whether the joined records have all seeds of a cell at its final learning rate."""
    seeds = {
        r["seed"]
        for r in records
        if (r["method"], r["head_init"], r["head_lr"], r.get("layer")) == cell and "logits" in r
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
    parser.add_argument("--layers", type=int, nargs="+", help="layers of `layers` (default: all)")
    parser.add_argument("--precision", default="bf16", help="of training: 'bf16', or 'no'")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--cache", help="folder of cached states (default: the user's cache)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the records")
    args = parser.parse_args()
    done = read_existing_records(records_file(args))
    cells = [
        cell
        for cell in list_cells(args.name)
        if (not args.methods or cell[0] in args.methods)
        and (not args.initial_heads or cell[1] in args.initial_heads)
        and (not args.layers or cell[3] in args.layers)
        and not is_complete(args.name, cell, done)
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        run_cells(pool, args, cells)
    join_parts(args)


if __name__ == "__main__":
    main()

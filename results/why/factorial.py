"""Run the factorials of PLAN.md: initial head × learning rate of the head × method.

    python results/why/factorial.py head --data FOLDER --task trec --steps 310
    python results/why/factorial.py task --data FOLDER --task cr --workers 8
    python results/why/factorial.py readout --data FOLDER --task trec
    python results/why/factorial.py confirmation --data FOLDER --task trec

    python results/why/factorial.py layers --data FOLDER --task trec --steps 600 --workers 8

The records of a task are written to `results/why/NAME-TASK-STEPS.jsonl`. A *cell* is a method with
an initial head, a learning rate of the head and a layer. A process trains a cell at one learning
rate with the first two seeds, or with one of the other seeds at the best learning rate, and stores
the runs in a folder of their own, where a second call finds them. When all cells of a call are
done, their runs are moved to the file of the task.
"""

import argparse
import logging
import multiprocessing
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.runs.compare import run_seeds
from idp_tutorial.runs.logits import has_logits, load_logits, write_run_arrays
from idp_tutorial.runs.record import RunStore
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.durable_files import file_lock
from idp_tutorial.utils.records import read_existing_records

HERE = Path(__file__).parent
HEAD_LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
FINE_TUNING_LEARNING_RATES = (5e-5, 1.5e-4, 5e-4)
TUNING_SEEDS, SEEDS = 2, 5
PROMPT_LENGTH = 5
N_EVALUATIONS = 5
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
        fine_tuning=True,
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
        head_alone=False,
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
        head_alone=False,
    ),
    "id-spam": dict(  # ID-SPAM in the setting of `readout`, with as many seeds as `first-layer`
        methods=("id-spam", "id-spam-mean"),
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1),
        head_learning_rates=(None,),
        initial_heads=("probe",),
        pooling="cls",
        seeds=10,
        head_alone=False,
    ),
    "edges": dict(  # below and above the learning rates of `readout`, which chose .003 and .1
        methods=("lpt-npg", "lpt"),
        learning_rates=(1e-3, 3e-1),
        head_learning_rates=(None,),
        initial_heads=("probe",),
        pooling="cls",
        sentence_pooling="mean",
        head_alone=False,
    ),
    "same-readout": dict(  # as in the paper: IDPG's generators read the first token, too
        methods=("m-idpg-phm", "s-idpg-phm"),
        learning_rates=(3e-3, 1e-2, 3e-2, 1e-1),
        head_learning_rates=(None,),
        initial_heads=("probe",),
        pooling="cls",
        head_alone=False,
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
        layers={"lpt": (15, 0, 29, 24, 27), "lpt-npg": (15, 29, 24, 27)},
        fine_tuning=True,
        head_alone=False,  # the verbalizer has no head to train
    ),
}
Cell = tuple[str, str, float | None, int | None]  # method, `head_init`, `head_lr`, layer


def list_cells(name: str) -> Iterator[Cell]:
    """Yield the cells of a factorial; None as `head_lr` is the learning rate of the prompt."""
    factorial = FACTORIALS[name]
    initial_heads = factorial.get("initial_heads", ("random", "probe"))
    if factorial.get("head_alone", True):
        for head_init in initial_heads:
            yield "head-only", head_init, None, None
    if factorial.get("fine_tuning"):  # the upper end of what a prompt can gain
        yield "fine-tuning", "random", None, None
    layers = factorial.get("layers", {})
    for method in factorial["methods"]:
        for layer in layers.get(method, (factorial.get("layer"),)):
            for head_init in initial_heads:
                for head_lr in factorial["head_learning_rates"]:
                    yield method, head_init, head_lr, layer


def list_learning_rates(args: argparse.Namespace, cell: Cell) -> tuple[float, ...]:
    """Return the learning rates of a cell; for a confirmation, the one that `readout` selected.

    Raises: `UserError` if the records of `readout` do not have one selected learning rate.
    """
    method = cell[0]
    if args.name == "confirmation":
        file = args.out / f"readout-{args.task}-{args.steps}.jsonl"
        records = [r for r in read_existing_records(file) if r["method"] == method]
        selected = {r["lr"] for r in records if "logits" in r}
        if len(selected) != 1:
            raise UserError(
                f"{file} has {len(selected)} selected learning rates of {method}, and one is "
                f"needed: run factorial.py readout --task {args.task} --steps {args.steps} first."
            )
        return tuple(selected)
    if method == "head-only":
        return HEAD_LEARNING_RATES
    if method == "fine-tuning":
        return FINE_TUNING_LEARNING_RATES
    rates = FACTORIALS[args.name]["learning_rates"]
    return rates[method] if isinstance(rates, dict) else rates


def describe_selection(args: argparse.Namespace, cell: Cell, n_rates: int) -> str:
    """Return how the learning rate of a cell is chosen, as the records say it."""
    if args.name == "confirmation":
        return f"selected in readout-{args.task}-{args.steps}.jsonl"
    equal = "" if cell[0] in ("head-only", "fine-tuning") else " (equal for all methods)"
    return f"best of {n_rates}{equal} on validation, seeds 0 and 1"


def cell_config(args: argparse.Namespace, cell: Cell) -> RunConfig:
    """Return the config of a cell, without a learning rate."""
    factorial = FACTORIALS[args.name]
    method, head_init, head_lr, layer = cell
    options: dict[str, Any] = dict(
        backbone=factorial.get("backbone", args.backbone),
        data=args.data,
        shots=factorial.get("shots", args.shots),
        pooling=factorial.get("pooling", "mean"),
        head=factorial.get("head", "classification"),
        dtype=factorial.get("dtype", "float32"),
        steps=args.steps,
        batch_size=16,
        eval_every=args.steps // N_EVALUATIONS,
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
    sample = f"-k{args.shots}" if args.shots else ""
    return args.out / f"{args.name}-{args.task}{sample}-{args.steps}.jsonl"


def cell_folder(args: argparse.Namespace, cell: Cell) -> Path:
    """Return the folder of a cell's parts."""
    return records_file(args).with_suffix("") / "-".join(map(str, cell))


def run_part(
    args: argparse.Namespace,
    cell: Cell,
    lr: float,
    first_seed: int,
    seeds: int,  # number of seeds
    selection: str,  # of `describe_selection`
) -> list[dict]:
    """Train a cell at one learning rate with some seeds, and return the records."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    part_file = cell_folder(args, cell) / f"{lr}-{first_seed}" / records_file(args).name
    part_file.parent.mkdir(parents=True, exist_ok=True)
    task = load_task(args.task, args.data, FACTORIALS[args.name].get("shots", args.shots))
    cfg = replace(cell_config(args, cell), lr=lr)
    return run_seeds(cfg, task, selection, seeds, RunStore(part_file), first_seed=first_seed)


def choose_learning_rate(tried: dict[float, list[dict]]) -> float | None:
    """Return the learning rate with the best mean validation score; None if all diverged.

    A learning rate with a run that diverged is left out.
    """
    scores = {
        lr: mean(r["validation"] for r in records)
        for lr, records in tried.items()
        if len(records) == TUNING_SEEDS and all(r["status"] == "done" for r in records)
    }
    return max(scores, key=lambda lr: scores[lr]) if scores else None


def run_cells(pool: Executor, args: argparse.Namespace, cells: list[Cell]) -> None:
    """Train each cell at every learning rate with two seeds, then at the best with five (or ten).

    A confirmation trains five new seeds at the learning rate that `readout` selected. Raises:
    `UserError` if a cell diverged at every learning rate, when the other cells are done.
    """
    rates = {cell: list_learning_rates(args, cell) for cell in cells}
    selections = {cell: describe_selection(args, cell, len(rates[cell])) for cell in cells}
    is_confirmation = args.name == "confirmation"
    end_seed = 2 * SEEDS if is_confirmation else FACTORIALS[args.name].get("seeds", SEEDS)
    final_seeds = range(SEEDS if is_confirmation else TUNING_SEEDS, end_seed)
    tuning = {
        cell: {
            lr: pool.submit(run_part, args, cell, lr, 0, TUNING_SEEDS, selections[cell])
            for lr in rates[cell]
        }
        for cell in ([] if is_confirmation else cells)
    }
    final_runs = []
    diverged = []
    for cell in cells:
        best: float | None = rates[cell][0]
        if not is_confirmation:
            best = choose_learning_rate({lr: run.result() for lr, run in tuning[cell].items()})
        if best is None:
            diverged.append(cell)
            continue
        final_runs += [
            pool.submit(run_part, args, cell, best, seed, 1, selections[cell])
            for seed in final_seeds
        ]
    for run in final_runs:
        run.result()
    if diverged:
        raise UserError(f"{diverged} diverged at every learning rate: add lower ones.")


def run_key(record: dict) -> tuple:
    """Return what tells a run of a factorial from the others."""
    return (*record_cell(record), record["lr"], record["seed"])


def record_cell(record: dict) -> Cell:
    """Return the cell of a record."""
    return record["method"], record["head_init"], record["head_lr"], record.get("layer")


def join_parts(args: argparse.Namespace, cells: list[Cell]) -> None:
    """Move the records and logits of cells to the file of the task.

    Logits of runs that only served to choose a learning rate are left out. After an interruption,
    a record that is in the file already is not stored again.
    """
    file = records_file(args)
    store = RunStore(file)
    stored = {run_key(record) for record in read_existing_records(file)}
    for cell in cells:
        folder = cell_folder(args, cell)
        parts = [(part, read_existing_records(part)) for part in sorted(folder.glob("*/*.jsonl"))]
        final_rates = {
            r["lr"] for _, records in parts for r in records if r["seed"] >= TUNING_SEEDS
        }
        for part, records in parts:
            for record in records:
                if run_key(record) in stored:
                    continue
                if record["lr"] in final_rates and has_logits(record, part.parent):
                    run = record["logits"].rpartition("/")[2]
                    arrays = load_logits(record, part.parent)
                    logits_file = file.parent / "logits" / f"{file.stem}.npz"
                    record |= write_run_arrays(logits_file, run, arrays)
                    record["steps_to_95_percent"] = steps_to_95_percent(record["history"])
                else:
                    record = {k: v for k, v in record.items() if not k.startswith("logits")}
                store.add(record)
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # cells that were not trained by this call
        file.with_suffix("").rmdir()


def is_complete(name: str, cell: Cell, records: list[dict]) -> bool:
    """Return whether the joined records have all seeds of a cell at its final learning rate.

    A run that diverged counts.
    """
    seeds: dict[float, set[int]] = {}
    for record in records:
        if record_cell(record) == cell:
            seeds.setdefault(record["lr"], set()).add(record["seed"])
    n_seeds = FACTORIALS[name].get("seeds", SEEDS)
    return max(map(len, seeds.values()), default=0) == n_seeds


def select_cells(args: argparse.Namespace, records: list[dict]) -> list[Cell]:
    """Return the cells of a call that are not complete.

    Raises: `UserError` if the options match no cell, or the records are of another backbone or
    precision.
    """
    known = list(list_cells(args.name))
    cells = [
        cell
        for cell in known
        if (not args.methods or cell[0] in args.methods)
        and (not args.initial_heads or cell[1] in args.initial_heads)
        and (not args.layers or cell[3] in args.layers)
    ]
    if not cells:
        raise UserError(f"no cell of {args.name} has these options. Its cells are {known}.")
    for record in records:
        if record_cell(record) not in cells:
            continue
        cfg = cell_config(args, record_cell(record))
        for name in ("backbone", "precision"):
            if record[name] != getattr(cfg, name):
                raise UserError(
                    f"{records_file(args)} has runs with {name} {record[name]!r}, and this call "
                    f"has {getattr(cfg, name)!r}: use the same, or another folder --out."
                )
    return [cell for cell in cells if not is_complete(args.name, cell, records)]


def steps_to_95_percent(history: list[tuple[int, float]]) -> int:
    """Return the step of the first evaluation that reaches 95 % of the best score."""
    best = max(score for _, score in history)
    return next(step for step, score in history if score >= 0.95 * best)


def main() -> None:
    """Run all cells of a factorial on one task."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=FACTORIALS)
    parser.add_argument("--data", required=True, help="folder of tasks: DATA/TASK/train.jsonl …")
    parser.add_argument("--task", default="trec")
    parser.add_argument("--shots", type=int, help="training texts (default: the factorial's)")
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
    if args.steps < N_EVALUATIONS:
        parser.error(f"--steps must be at least {N_EVALUATIONS}, got {args.steps}")
    try:
        with file_lock(records_file(args).with_suffix("")):
            cells = select_cells(args, read_existing_records(records_file(args)))
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
                run_cells(pool, args, cells)
            join_parts(args, cells)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

"""Choose a learning rate on the validation split and store it.

A comparison is fair only if every method has a suitable learning rate. Each method tries the
same number of learning rates, on the validation split alone.

Only the model with the best validation score is scored on the test split, so the run that chose
the learning rate is also the run of seed 0. A learning rate at which training diverges counts
as tried. Where all of them diverge, `search_learning_rate` returns a record that says so, and
`tune_learning_rate` raises an error.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.runs.experiment import make_diverged_record, make_record, train_model
from idp_tutorial.runs.record_checks import (
    MAX_EXTRA_LEARNING_RATES,
    describe_lr_selection,
    has_current_weights,
    matches_config,
    provenance_field,
)
from idp_tutorial.utils.checks import DivergenceError
from idp_tutorial.utils.config import RunConfig
from idp_tutorial.utils.durable import folder_lock
from idp_tutorial.utils.records import append_record, read_existing_records

__all__ = [
    "extend_learning_rate_grid",
    "search_learning_rate",
    "tune_learning_rate",
    "choose_learning_rate",
    "choose_head_learning_rate",
]


_TrainedRun = tuple[PromptedModel, dict, Task, RunConfig]  # model, training log, task and config


def extend_learning_rate_grid(
    lr: float,  # the best learning rate so far
    learning_rates: Iterable[float],  # all learning rates that were tried
) -> list[float]:  # one learning rate, or none
    """Return the next learning rate beyond the grid if `lr` is its smallest or largest value."""
    ascending = sorted(set(learning_rates))
    if len(ascending) < 2 or lr not in (ascending[0], ascending[-1]):
        return []
    if lr == ascending[-1]:
        following = lr * ascending[-1] / ascending[-2]
    else:
        following = lr * ascending[0] / ascending[1]
    return [float(f"{following:.3g}")]


def _train_each_learning_rate(
    cfg: RunConfig,
    task: Task,
    learning_rates: Iterable[float],
    report: Callable[[str], object],
    max_extra: int,
) -> tuple[_TrainedRun | None, list[tuple]]:  # the best run; each learning rate and its score
    """Train with every learning rate; extend the grid while its best value is at an edge."""
    best: _TrainedRun | None = None
    best_lr = 0.0
    tried: list[tuple] = []
    grid = [*learning_rates]
    max_tried = len(grid) + max_extra
    for lr in grid:  # the loop also visits what is appended below
        lr_cfg = replace(cfg, lr=lr)
        try:
            model, log = train_model(lr_cfg, task)
        except FloatingPointError:
            tried.append((lr, "diverged"))
            report(f"{cfg.method:16} lr {lr:.1e}  diverged")
        else:
            tried.append((lr, round(log["validation"], 2)))
            report(f"{cfg.method:16} lr {lr:.1e}  validation {log['validation']:.1f}")
            if best is None or log["validation"] > best[1]["validation"]:
                best = model, log, task, lr_cfg
                best_lr = lr
        if best and len(tried) == len(grid) < max_tried:
            grid += extend_learning_rate_grid(best_lr, grid)
    return best, tried


def search_learning_rate(
    cfg: RunConfig,  # its `lr` is ignored
    task: Task,
    learning_rates: Iterable[float],  # learning rates to try
    report: Callable[[str], object] = lambda message: None,
    score_test: bool = False,  # score the best model on the test split
    records_file: Path | None = None,  # file of the record; logits are stored beside it
    # number of learning rates that may be added to the grid while its best value is at an edge
    max_extra_learning_rates: int = 0,
) -> dict:  # the record of the run with the best validation score
    """Return the record of the learning rate that is best on the validation split.

    The seed is `cfg.seed`. Where every learning rate diverges, the record's `status` is 'diverged'.
    """
    start_time = time.time()
    best, tried = _train_each_learning_rate(
        cfg, task, learning_rates, report, max_extra_learning_rates
    )
    all_lrs = [lr for lr, _ in tried]
    best_cfg = best[-1] if best else replace(cfg, lr=None)
    record = None
    error: Exception | str = (
        f"{cfg.method!r} diverged on {task.name!r} with every learning rate of {all_lrs}: a lower "
        "lr usually fixes it"
    )
    if best:
        try:
            record = make_record(*best, score_test, records_file)
        except FloatingPointError as e:  # the outputs on the test split are not finite
            error = e
    if record is None:
        diverged = make_diverged_record(best_cfg, task, error, start_time, score_test)
        return {**diverged, "learning_rates_tried": tried}
    return {
        **record,
        "learning_rates_tried": tried,
        # a better learning rate may lie outside the grid
        "lr_at_grid_edge": len(tried) > 2 and record["lr"] in (min(all_lrs), max(all_lrs)),
        **provenance_field(start_time),
    }


def tune_learning_rate(
    cfg: RunConfig,  # its `lr` is ignored
    task: Task,
    learning_rates: Iterable[float],  # learning rates to try
    *search_args: Any,  # further arguments of `search_learning_rate`
    **search_kwargs: Any,  # further arguments of `search_learning_rate`
) -> dict:  # the record of the run with the best validation score
    """Return the record of the learning rate that is best on the validation split.

    Raises: `DivergenceError` if training diverges with every learning rate.
    """
    record = search_learning_rate(cfg, task, learning_rates, *search_args, **search_kwargs)
    if record.get("status") == "diverged":
        raise DivergenceError(record["message"])
    return record


def _load_or_search(
    file: Path | None,  # file of stored choices
    cfg: RunConfig,
    learning_rates: Sequence[float],
    lr_selection: str,
    task: Task,
    report: Callable[[str], object],
    max_extra_learning_rates: int = 0,
) -> dict:
    """Return the record of an earlier choice from `file`; if it is missing, search and store it."""
    record = None
    for stored in read_existing_records(file):
        if matches_config(stored, cfg, lr_selection, task) and has_current_weights(stored, cfg):
            record = stored
            break
    if record is None:
        record = search_learning_rate(
            cfg, task, learning_rates, report, max_extra_learning_rates=max_extra_learning_rates
        )
        record["lr_selection"] = lr_selection
        if file:
            append_record(record, file)
    if record.get("status") == "diverged":
        raise DivergenceError(record["message"])
    return record


def choose_learning_rate(
    cfg: RunConfig,  # its `lr` is ignored
    learning_rates: tuple,  # learning rates to try; extended while the best is at an edge
    folder: Path | str,  # the choice is stored in its `rates.jsonl`
    report: Callable[[str], object] = print,
) -> tuple[RunConfig, dict]:  # `cfg` with the learning rate; fields for the record of the run
    """Return the config with the best learning rate on validation; read an earlier choice if any.

    Raises: `DivergenceError` if training diverges with every learning rate.
    """
    from accelerate import PartialState

    task = load_task(cfg.task, cfg.data, cfg.shots, cfg.split_seed, cfg.stratified)
    cfg = cfg.resolve_epochs(len(task.splits["train"]))
    with folder_lock(folder if PartialState().is_main_process else None):
        record = _load_or_search(
            Path(folder) / "rates.jsonl",
            cfg,
            learning_rates,
            describe_lr_selection(learning_rates),
            task,
            report,
            MAX_EXTRA_LEARNING_RATES,
        )
    fields = ("learning_rates_tried", "lr_at_grid_edge", "lr_selection")
    return replace(cfg, lr=record["lr"]), {name: record[name] for name in fields}


def choose_head_learning_rate(
    cfg: RunConfig,
    task: Task,
    report: Callable[[str], object] = lambda message: None,
    records_file: Path | None = None,  # the choice is stored beside it, in `head-rate.jsonl`
) -> float | None:  # None for a verbalizer, which has no trained head
    """Return the learning rate at which a head without a prompt is best on the validation split.

    Raises: `DivergenceError` if training diverges with every learning rate.
    """
    if cfg.head == "verbalizer":
        return None
    head_cfg = replace(cfg, method="head-only", lr=None, head_lr=None, seed=0)
    file = Path(records_file).with_name("head-rate.jsonl") if records_file else None
    learning_rates = METHODS["head-only"].learning_rates
    record = _load_or_search(
        file, head_cfg, learning_rates, describe_lr_selection(()), task, report
    )
    return record["lr"]

"""Choose a learning rate on the validation split and store it.

A comparison is fair only if every method has a suitable learning rate. Each method tries the
same number of learning rates, on the validation split alone.

Only the model with the best validation score is scored on the test split, so the run that chose
the learning rate is also the run of seed 0. A learning rate at which training diverges counts
as tried. Where all of them diverge, the record of the search says so.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from idp_tutorial.assembly.config import RunConfig, RunOptions
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_config_task
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.record import (
    RunStore,
    checkpoint_folder,
    make_fingerprint,
    remove_checkpoints,
    run_digests,
)
from idp_tutorial.training.early_stopping import find_best_evaluation
from idp_tutorial.training.fit import TrainLog
from idp_tutorial.utils.checks import DivergenceError
from idp_tutorial.utils.durable_files import folder_lock
from idp_tutorial.utils.process import process_state

logger = logging.getLogger(__name__)


MAX_EXTRA_LEARNING_RATES = 4  # largest number of learning rates that a search adds to its grid


def describe_lr_selection(
    learning_rates: tuple,  # learning rates that are tried; (): the method's three default ones
    given_lr: float | None = None,  # None: none is given
    is_searched: bool = True,  # False: the method's default is used
) -> str:
    """Return the text by which a record states how its learning rate was chosen."""
    if given_lr:
        return "given"
    if not is_searched:
        return "default"
    if not learning_rates:
        return "best of 3 on validation, seed 0"
    grid = ", ".join(f"{lr:g}" for lr in learning_rates)
    return (
        f"best of {len(learning_rates)} ({grid}; up to {MAX_EXTRA_LEARNING_RATES} more at an edge) "
        "on validation, seed 0"
    )


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


@dataclass
class LearningRateTrials:
    """Learning rates that were tried, and what the best of them trained."""

    tried: list[tuple[float, float | str]] = field(default_factory=list)  # with validation score
    lr: float | None = None  # the best one; None: every learning rate diverged
    trained: Any = None  # what `train` returned for the best one
    log: TrainLog | None = None  # its log
    error: str = ""  # message of the last learning rate that diverged

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates that were tried, in the order of the trials."""
        return [lr for lr, _ in self.tried]

    @property
    def is_best_at_edge(self) -> bool:
        """True if a better learning rate may lie outside the grid."""
        edges = (min(self.learning_rates), max(self.learning_rates))
        return len(self.tried) > 2 and self.lr in edges


def _is_better(log: TrainLog, best: TrainLog) -> bool:
    """Return whether a training is better on the validation split than the best one before it."""
    evaluations = [(0, best.validation), (0, log.validation)]
    return find_best_evaluation(evaluations, [best.validation_loss, log.validation_loss]) == 1


def try_learning_rates(
    # function of a learning rate that trains, and returns anything and the log of the training
    train: Callable[[float], tuple[Any, TrainLog]],
    learning_rates: Iterable[float],  # learning rates to try
    max_extra: int = 0,  # number that may be added while the best one is at an edge of the grid
    title: str | None = None,  # text before each message about a learning rate; None: no messages
) -> LearningRateTrials:
    """Train with every learning rate, and keep what is best on the validation split.

    The validation loss decides between equal scores.
    """
    trials = LearningRateTrials()
    grid = [*learning_rates]
    max_tried = len(grid) + max_extra
    for lr in grid:  # the loop also visits what is appended below
        try:
            trained, log = train(lr)
        except FloatingPointError as e:
            trials.error = str(e)
            trials.tried.append((lr, "diverged"))
            outcome = "diverged"
        else:
            trials.tried.append((lr, round(log.validation, 2)))
            outcome = f"validation {log.validation:.1f}"
            if trials.log is None or _is_better(log, trials.log):
                trials.lr = lr
                trials.trained = trained
                trials.log = log
        if title is not None:
            logger.info(f"{title} lr {lr:.1e}  {outcome}")
        if trials.lr and len(trials.tried) == len(grid) < max_tried:
            grid += extend_learning_rate_grid(trials.lr, grid)
    return trials


def train_at_learning_rate(
    cfg: RunConfig,  # its `lr` is ignored
    task: Task,
    lr: float,
    checkpoint_dir: Path | None = None,  # folder of checkpoints
    **fit_options: Any,  # further arguments of `Experiment.fit`
) -> tuple[tuple[Experiment, PlannedModel], TrainLog]:
    """Train a model with a learning rate, for `try_learning_rates`."""
    experiment = Experiment(replace(cfg, lr=lr), task)
    model, log = experiment.fit(checkpoint_dir, **fit_options)
    return (experiment, model), log


def search_learning_rate(
    cfg: RunConfig,  # its `lr` is ignored
    task: Task,
    # learning rates to try, and more while the best one is at an edge; (): those of the method
    learning_rates: tuple = (),
    score_test: bool = False,  # score the best model on the test split
    records_file: Path | None = None,  # file of the record; logits are stored beside it
    checkpoint_dir: Path | None = None,  # folder for checkpoints, to resume a killed search
) -> dict:  # the record of the run with the best validation score
    """Return the record of the learning rate that is best on the validation split.

    The seed is `cfg.seed`. Where every learning rate diverges, the record's `status` is 'diverged'.
    """
    start_time = time.perf_counter()

    def train(lr: float) -> tuple[tuple[Experiment, PlannedModel], TrainLog]:
        """Train with a learning rate, whose checkpoints are in a folder of their own."""
        folder = checkpoint_dir and checkpoint_dir / f"lr-{lr:g}"
        return train_at_learning_rate(cfg, task, lr, folder)

    max_extra = MAX_EXTRA_LEARNING_RATES if learning_rates else 0
    learning_rates = learning_rates or ALL_METHODS[cfg.method].learning_rates
    trials = try_learning_rates(train, learning_rates, max_extra, f"{cfg.method:16}")
    error: Exception | str = (
        f"{cfg.method!r} diverged on {task.name!r} with every learning rate of "
        f"{trials.learning_rates}: a lower lr usually fixes it"
    )
    experiment = Experiment(replace(cfg, lr=trials.lr), task)
    if trials.trained:
        experiment, model = trials.trained
        experiment.start_time = start_time
        try:
            record = experiment.score(model, trials.log, score_test, records_file)
        except FloatingPointError as e:  # the outputs on the test split are not finite
            error = e
        else:
            return record | dict(
                learning_rates_tried=trials.tried, lr_at_grid_edge=trials.is_best_at_edge
            )
    experiment.start_time = start_time
    return experiment.record_divergence(
        error, score_test, lr=trials.lr, learning_rates_tried=trials.tried
    )


def _load_or_search(
    file: Path | None,  # file of stored choices
    cfg: RunConfig,  # its `lr` is ignored
    task: Task,
    learning_rates: tuple,  # as of `search_learning_rate`
) -> dict:
    """Return the record of an earlier choice from `file`; if it is missing, search and store it."""
    digests = run_digests(cfg, task, include_test=False)
    lr_selection = describe_lr_selection(learning_rates)
    fingerprint = make_fingerprint(replace(cfg, lr=None), digests, lr_selection=lr_selection)
    folder = checkpoint_folder(file, fingerprint)
    record = RunStore(file).get_or_run(
        fingerprint, lambda: search_learning_rate(cfg, task, learning_rates, checkpoint_dir=folder)
    )
    remove_checkpoints(folder)
    if record["status"] == "diverged":
        raise DivergenceError(record["message"])
    return record


def choose_learning_rate(
    cfg: RunConfig,  # its `lr` is ignored
    learning_rates: tuple,  # learning rates to try; extended while the best is at an edge
    folder: Path | str,  # the choice is stored in its `rates.jsonl`
) -> tuple[RunConfig, dict]:  # `cfg` with the learning rate; fields for the record of the run
    """Return the config with the best learning rate on validation; read an earlier choice if any.

    Raises: `DivergenceError` if training diverges with every learning rate.
    """
    task = load_config_task(cfg)
    task = task.with_metric(cfg.metric)
    cfg = cfg.resolve_epochs(len(task.splits["train"]))
    with folder_lock(folder if process_state().is_main_process else None):
        record = _load_or_search(Path(folder) / "rates.jsonl", cfg, task, learning_rates)
    names = ("learning_rates_tried", "lr_at_grid_edge", "lr_selection")
    return replace(cfg, lr=record["lr"]), {name: record[name] for name in names}


def choose_head_learning_rate(
    cfg: RunOptions,
    task: Task,
    records_file: Path | None = None,  # the choice is stored beside it, in `head-rate.jsonl`
) -> float | None:  # None for a verbalizer, which has no trained head
    """Return the learning rate at which a head without a prompt is best on the validation split.

    Raises: `DivergenceError` if training diverges with every learning rate.
    """
    if cfg.head == "verbalizer":
        return None
    task = task.with_metric(cfg.metric)
    head_cfg = cfg.with_method("head-only", lr=None, head_lr=None, seed=0)
    file = Path(records_file).with_name("head-rate.jsonl") if records_file else None
    return _load_or_search(file, head_cfg, task, ())["lr"]

"""The command `idp compare`: train a set of methods on one task, and advise which to use.

The command checks everything it is given before it starts, explains a mistake in one line, and
leaves either a complete result or none. It calls the same functions as the notebooks.

`compare_and_write` checks, trains and writes; the command reads options and prints. Libraries
that take seconds to import are imported inside the functions, so that `--help` answers at once;
only modules of commands do so.
"""

import logging
import sys
import time
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from idp_tutorial.cli.commands import ComparisonOptions, TableOptions, command, split_names
from idp_tutorial.runs.defaults import DEFAULT_EVALUATIONS, DEFAULT_METHODS, DEFAULT_OPTIONS
from idp_tutorial.utils.checks import Range, require_packages
from idp_tutorial.utils.process import MessageHandler, handle_messages


class Progress(MessageHandler):
    """Handler that prints messages with the number of finished runs and the estimated time left."""

    def __init__(
        self,
        n_runs: int,  # number of runs
        note: str = "",  # line above the first message; a command that is refused prints one line
    ) -> None:
        super().__init__(sys.stderr)
        self.setLevel(logging.DEBUG)  # stored runs are reported at this level
        self.n_runs = n_runs
        self.note = note
        self.n_stored = 0  # runs whose records were read
        self.n_trained = 0
        self.start_time = time.monotonic()

    def _format_status(self) -> str:
        seconds = time.monotonic() - self.start_time
        remaining = ""
        n_done = self.n_stored + self.n_trained
        if self.n_trained and n_done < self.n_runs:
            seconds_left = seconds / self.n_trained * (self.n_runs - n_done)
            remaining = f", about {seconds_left:.0f} s left"
        return f"[{n_done} of {self.n_runs} runs, {seconds:.0f} s{remaining}]"

    def emit(self, record: logging.LogRecord) -> None:
        """Count the runs that `run_seeds` reports; print all but the stored ones."""
        run_status = getattr(record, "run_status", None)
        self.n_stored += run_status == "stored"
        self.n_trained += run_status == "trained"
        if record.levelno >= logging.INFO:
            if self.note:
                print(self.note, file=sys.stderr)
                self.note = ""
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the message with the status."""
        return f"{record.getMessage()}{getattr(record, 'cost', '')}  {self._format_status()}"


def _print_report(results: Any, base: Any, out: str) -> None:
    """Print the table of results and sentences that summarise it."""
    from idp_tutorial.runs.tables import format_table

    table = results.table
    shots = f", shots={base.shots}" if base.shots else ""
    length = f"{table.steps.min():.0f} steps"
    print(
        f"\n{base.task}{shots} on {base.backbone}, {base.head} head, {length} of "
        f"{base.batch_size}; best checkpoint on validation, reported on test\n"
    )
    print(f"{format_table(table)}\n")
    print(results.advice.sentence)
    if "lr_at_grid_edge" in table and table["lr_at_grid_edge"].eq(True).any():
        print(
            "* the best learning rate is the smallest or largest that was tried: a better one may "
            "lie beyond it, see learning_rates"
        )
    print(f"\nwritten: {out}/compare.jsonl, compare.csv, compare.png, report/report.md")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(TableOptions, ComparisonOptions):
    """Options of `idp compare`."""

    option_group: ClassVar[str] = "this command"

    # comma-separated, or 'all' of `METHODS`; the first three read no prompt
    methods: str = ",".join(DEFAULT_METHODS)
    # number of seeds: 0 … seeds-1; three or more show the standard deviation
    seeds: Annotated[int, Range(1, 10**6)] = 1
    # with shots: number of few-shot samples, each trained with all seeds; LPT uses four
    split_seeds: int = 1
    # evaluations on the validation split in a run; the best one is kept
    evaluations: Annotated[int, Range(0, 10**9)] = DEFAULT_EVALUATIONS
    # time for all runs: fewer steps where it does not suffice; 0: no limit (default: 5 for each
    # seed, and no limit with steps or epochs)
    minutes: Annotated[float, Range(0, 10**6)] | None = None
    out: str = "runs/compare"  # folder for compare.jsonl, .csv, .png and the folder report


@command(
    CompareOptions,
    run_options=None,
    excluded=("seed", "eval_every"),
    task="two-domains",
    backbone="auto",
    **DEFAULT_OPTIONS,
)
def compare_command(options: CompareOptions, base: Any) -> None:
    """Train methods on one task; print scores (mean ± std over seeds), parameters, time and memory.

    idp compare tickets.csv --text message --label topic --methods head-only,lpt-npg,fine-tuning
    """
    grid = options.learning_rate_grid(base.lr)
    require_packages("matplotlib", "tabulate")
    from idp_tutorial.data.tasks import TASKS
    from idp_tutorial.methods.all_methods import methods_with_head
    from idp_tutorial.runs.compare import choose_backbone, compare_and_write

    reason = ""
    if base.backbone == "auto":
        is_own_task = base.task in TASKS and bool(TASKS[base.task].splits)  # of a table
        name, reason = choose_backbone(is_own_task)
        base = replace(base, backbone=name)
    is_all = options.methods == "all"
    methods = methods_with_head(base.head) if is_all else split_names(options.methods)
    options.refuse_unread(methods, base, allow_controls=True)
    n_runs = len(methods) * options.seeds * max(1, options.split_seeds)
    with handle_messages(Progress(n_runs, reason)):
        results = compare_and_write(
            methods,
            base,
            options.seeds,
            options.tune or bool(grid),
            options.out,
            options.tune_head_first,
            grid,
            options.split_seeds,
            options.minutes,
        )
    _print_report(results, base, options.out)

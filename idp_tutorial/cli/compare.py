"""The command `idp_compare`: train a set of methods on one task and print one table.

The command checks everything it is given before it starts, explains a mistake in one line, and
leaves either a complete result or none. It calls the same functions as the notebooks.

`compare_and_write` checks, trains and writes; the command reads options and prints. Libraries
that take seconds to import are imported inside the functions, so that `--help` answers at once;
only modules of commands do so.
"""

import sys
import time
from threading import Event, Thread
from typing import Any

from idp_tutorial.cli.command_line import Inherited, command, config_from_options, split_names
from idp_tutorial.cli.option_values import parse_learning_rates
from idp_tutorial.utils.checks import require_packages

__all__ = ["Progress", "idp_compare"]


class Progress:
    """Messages on stderr with the estimated time left; at least one a minute."""

    def __init__(
        self,
        n_runs: int,  # number of runs
        interval: float = 55.0,  # seconds without a message after which one is printed
    ) -> None:
        self.n_runs = n_runs
        self.interval = interval
        self.n_done = 0
        self.start_time = time.monotonic()
        self.stop_event = Event()
        self.last_print_time = self.start_time

    def _format_status(self) -> str:
        seconds = time.monotonic() - self.start_time
        remaining = ""
        if 0 < self.n_done < self.n_runs:
            seconds_left = seconds / self.n_done * (self.n_runs - self.n_done)
            remaining = f", about {seconds_left:.0f} s left"
        return f"[{self.n_done} of {self.n_runs} runs, {seconds:.0f} s{remaining}]"

    def __call__(self, line: str) -> None:
        """Print a line with the status; a line with 'seed' counts as a finished run."""
        self.n_done += "seed " in line  # runs that choose a learning rate are not counted
        self.last_print_time = time.monotonic()
        print(f"{line}  {self._format_status()}", file=sys.stderr, flush=True)

    def _print_when_silent(self) -> None:
        while True:
            wait = max(0.1, self.last_print_time + self.interval - time.monotonic())
            if self.stop_event.wait(wait):
                return
            if time.monotonic() - self.last_print_time >= self.interval:
                self(" … training")

    def __enter__(self) -> "Progress":
        self.thread = Thread(target=self._print_when_silent, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_event.set()
        self.thread.join()


def _print_report(table: Any, base: Any, out: str, primary: str | None) -> None:
    """Print the table of results and sentences that summarise it."""
    from idp_tutorial.runs.conclusions import describe_primary_contrast, summarise_comparison
    from idp_tutorial.runs.tables import format_table
    from idp_tutorial.utils.records import read_records

    shots = f", shots={base.shots}" if base.shots else ""
    length = f"{base.epochs:g} epochs" if base.epochs else f"{base.steps} steps"
    print(
        f"\n{base.task}{shots} on {base.backbone}, {base.head} head, {length} of "
        f"{base.batch_size}; best checkpoint on validation, reported on test\n"
    )
    print(f"{format_table(table)}\n")
    if primary:
        print(describe_primary_contrast(read_records(f"{out}/compare.jsonl"), primary, out))
    print(summarise_comparison(table))
    if "lr_at_grid_edge" in table and table["lr_at_grid_edge"].eq(True).any():
        print(
            "* the best learning rate is the smallest or largest that was tried: a better one may "
            "lie beyond it, see --learning_rates"
        )
    print(f"\nwritten: {out}/compare.jsonl, compare.csv, compare.png")


@command
def idp_compare(
    *,
    table: Inherited,
    text: Inherited,
    text2: Inherited,
    label: Inherited,
    format: Inherited,
    regression: Inherited,
    validation: Inherited,
    test: Inherited,
    task: str = "two-domains",  # a task of `TASKS`, bundled or in the folder --data
    # comma-separated, or 'all' of `METHODS`; the first three are controls without a prompt
    methods: str = "majority,probe,side-network,head-only,prompt-tuning,s-idpg-phm,lpt-npg,id-spam",
    backbone: Inherited,
    data: Inherited,
    shots: Inherited,
    split_seed: Inherited,
    stratified: Inherited,
    seeds: int = 1,  # number of seeds: 0 … seeds-1; three or more show the standard deviation
    # with --shots: number of few-shot samples, each trained with all seeds; LPT uses four
    split_seeds: int = 1,
    steps: int = 240,  # optimizer steps of a run
    batch_size: Inherited,
    max_len: Inherited,
    prompt_length: int = 5,  # number of prompt vectors
    layer: Inherited,
    position: Inherited,
    head: Inherited,
    template: Inherited,
    loss_vocab: Inherited,
    # input of the classification head and IDPG's M(x): 'mean' over the words, or 'cls' (the papers)
    pooling: str = "mean",
    bottleneck: Inherited,
    prompt_dropout: Inherited,
    dropout_below_prompt: Inherited,
    epochs: Inherited,
    warmup: Inherited,
    weight_decay: Inherited,
    clip: Inherited,
    patience: Inherited,
    sentence_pooling: Inherited,
    parameter_sharing: Inherited,
    generator_input: Inherited,
    insertion: Inherited,
    generator: Inherited,
    exclude_last_token: Inherited,
    attention_input: Inherited,
    prompt_relu: Inherited,
    init_std: Inherited,
    sentence_dropout: Inherited,
    generator_dropout: Inherited,
    glove_noise: Inherited,
    two_layer_head: Inherited,
    head_init: Inherited,
    schedule: Inherited,
    beta2: Inherited,
    eps: Inherited,
    no_decay_on_bias_and_norm: Inherited,
    lr: float | None = None,  # one learning rate for all methods (default: each method's own)
    head_lr: Inherited,
    learning_rates: Inherited,
    tune: Inherited,
    tune_head_first: Inherited,
    # the contrast that counts, named before the runs, such as 'lpt-npg - prompt-tuning'
    primary: str | None = None,
    evaluations: int = 4,  # evaluations on the validation split in a run; the best one is kept
    # states of frozen layers, computed once and kept on disk: 'sentence' (M(x)), 'hidden' (below
    # the prompt) or 'both'
    cache: str = "none",
    standardise: Inherited,
    glove: Inherited,
    precision: Inherited,
    dtype: Inherited,
    device: Inherited,
    out: str = "runs/compare",  # folder for compare.jsonl, compare.csv and compare.png
) -> None:
    """Train methods on one task; print scores (mean ± std over seeds), parameters, time and memory.

    idp_compare tickets.csv --text message --label topic --methods head-only,lpt-npg,fine-tuning
    """
    base = config_from_options(locals(), "two-domains")
    grid = parse_learning_rates(locals())
    require_packages("matplotlib")
    import matplotlib

    from idp_tutorial.assembly.options import refuse_unread_options
    from idp_tutorial.methods.registry import methods_with_head
    from idp_tutorial.runs.compare import compare_and_write

    matplotlib.use("Agg")
    selected = methods_with_head(head) if methods == "all" else split_names(methods)
    refuse_unread_options(
        selected, base, 5, learning_rates=learning_rates, tune=tune, tune_head_first=tune_head_first
    )
    with Progress(len(set(selected)) * seeds * max(1, split_seeds)) as report:
        results = compare_and_write(
            selected,
            base,
            seeds,
            tune or bool(grid),
            out,
            report,
            tune_head_first,
            grid,
            primary,
            split_seeds,
        )
    _print_report(results, base, out, primary)

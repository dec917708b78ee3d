"""The command `idp reproduce`: run a published table or figure and compare the scores.

`idp reproduce --table lpt-2 --scale small --data FOLDER` trains the runs of LPT's Table 2 that
are missing on a small backbone, and prints both scores. For a figure that is not a table of
scores it runs the experiment that decides the figure's claim.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Annotated, Any, Literal

from idp_tutorial.cli.commands import (
    CommandOptions,
    command,
    parse_numbers,
    refuse_given,
    split_names,
)
from idp_tutorial.utils.checks import Range, check_writable_folder
from idp_tutorial.utils.process import handle_messages

__all__ = ["ReproduceOptions", "reproduce_command"]


def figure_options(options: "ReproduceOptions", data: str | None) -> Any:
    """Return the options that all runs of a figure share."""
    from idp_tutorial.assembly.config import RunOptions
    from idp_tutorial.methods.all_methods import METHODS
    from idp_tutorial.reproduction.analysis.paper_figures import FIGURE_EXPERIMENTS
    from idp_tutorial.reproduction.papers.protocols import (
        build_paper_config,
        paper_method_fields,
        select_paper_learning_rates,
    )

    table = options.table
    method, tasks, _ = FIGURE_EXPERIMENTS[table]
    steps = options.steps or 200
    short: dict[str, Any] = dict(steps=steps, eval_every=max(1, steps // 10), epochs=None)
    if options.scale == "full" and method:
        backbone = options.backbone or "roberta-large"
        fields = paper_method_fields(method, table)
        cfg = build_paper_config(table, method, tasks[0], "full", None, backbone, **fields)
        default = METHODS[method].default_learning_rate or 1.0
        grid = select_paper_learning_rates(table, method)
        nearest = min(grid, key=lambda lr: abs(log(lr / default)))
        cfg = replace(cfg, data=data, lr=nearest)
        return replace(cfg, **short) if options.steps else cfg
    backbone = options.backbone or ("roberta-large" if options.scale == "full" else "minilm")
    general: dict[str, Any] = dict(
        backbone=backbone, data=data, batch_size=16, prompt_length=5, standardise=True
    )
    return RunOptions(**general, **short)


def _reproduce_figure(options: "ReproduceOptions", data: str | None) -> None:
    """Run the experiment of a figure, and print its measurements for each seed."""
    from idp_tutorial.reproduction.analysis.paper_figures import (
        FIGURE_SEEDS,
        plan_figure_runs,
        reproduce_figure,
    )

    base = figure_options(options, data)
    seeds = options.seeds or FIGURE_SEEDS
    if options.plan:
        _print_plan(plan_figure_runs(options.table, base, seeds))
        return
    check_writable_folder(options.out)
    scale = "-full" if options.scale == "full" else ""
    file = Path(options.out) / f"{options.table}{scale}.jsonl"
    for r in reproduce_figure(options.table, base, seeds, file):
        measurements = [f"{name} {value:.3f}" for name, value in r["measurements"].items()]
        print("  ".join([r["task"], f"seed {r['seed']}", *measurements]))
    print(f"\nwritten: {file}")


def _print_plan(runs: Iterable[Any]) -> None:
    """Print the settings of the runs of a table."""
    for cfg in runs:
        length = f"{cfg.epochs:g} epochs" if cfg.epochs else f"{cfg.steps} steps"
        shots = f"shots={cfg.shots}  split_seed={cfg.split_seed}"
        print(f"{cfg.backbone:14} {cfg.task:6} {shots}  {cfg.head:14} {length:12} {cfg.method}")


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(CommandOptions):
    """Options of `idp reproduce`."""

    # a table or figure: idpg-1 … idpg-f9, lpt-1 … lpt-f6, id-spam-2 … id-spam-16
    table: str = "lpt-2"
    # 'small': a small backbone, four tasks; 'full': the paper's backbone and budget, one point of
    # its search space with all its learning rates (a figure: with one of them)
    scale: Literal["small", "full"] = "small"
    # (default: the paper's; for 'small': smollm2 for LPT, else minilm)
    backbone: str | None = None
    methods: str | None = None  # some of the methods of the table and of the controls
    tasks: str | None = None  # some of the tasks of the table, comma-separated
    # optimizer steps of a run (default: 200; for 'full': the paper's); a few test the whole table
    steps: Annotated[int, Range(1, 10**9)] | None = None
    # number of seeds (default: 2 if the table has several few-shot samples; else 5)
    seeds: Annotated[int, Range(1, 10**6)] | None = None
    # learning rates that every method tries, comma-separated; more if the best is an end (default:
    # the method's own; for 'full': the paper's)
    learning_rates: str | None = None
    # folder for TABLE-SCALE.jsonl; runs that the file contains are not repeated
    out: str = "runs/reproduce"
    plan: bool = False  # print the runs and stop


@command(ReproduceOptions, run_options=("data", "glove"))
def reproduce_command(options: ReproduceOptions, base: Any) -> None:
    """Run a published table, or continue it, and print its scores beside the published ones.

    idp reproduce --table lpt-2 --scale small --data FOLDER
    """
    from idp_tutorial.reproduction.analysis.paper_figures import FIGURE_EXPERIMENTS
    from idp_tutorial.reproduction.papers.protocols import describe_search_space, plan_table_runs
    from idp_tutorial.reproduction.papers.reproduce import reproduce_table

    table = options.table
    if table in FIGURE_EXPERIMENTS:
        unused = "methods tasks learning_rates glove"
        refuse_given(options, unused, f"by the figure {table}", base)
        _reproduce_figure(options, base.data)
        return
    methods = split_names(options.methods) if options.methods else None
    tasks = split_names(options.tasks) if options.tasks else None
    settings = (table, options.scale, options.backbone, base.data)
    glove = base.get("glove")
    if options.plan:
        _print_plan(plan_table_runs(*settings, methods, tasks, glove))
        if options.scale == "full":
            print(f"\n{describe_search_space(table)}")
        return
    with handle_messages():
        results = reproduce_table(
            *settings,
            options.seeds,
            options.out,
            methods,
            tasks,
            tuple(parse_numbers(options.learning_rates, "learning_rates", float)),
            options.steps,
            glove,
        )
    print("\n" + results.dropna(subset="our mean").round(1).to_string(index=False))
    print(f"\nwritten: {options.out}/{table}-{options.scale}.jsonl")

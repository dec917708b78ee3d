"""Run the experiment behind a figure of the papers, and print its measurements for each seed.

    python -m results.figures.run --figure lpt-f6 --scale full --data FOLDER

These figures are no tables of scores, which `idp reproduce` runs. After an interruption the same
call continues.
"""

import sys
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Annotated, Any, Literal

from idp_tutorial.cli.commands import CommandOptions, command
from idp_tutorial.utils.checks import Range, check_writable_folder


@dataclass(frozen=True, kw_only=True)
class FiguresOptions(CommandOptions):
    """Options of this script."""

    # LPT's Figure 6, or IDPG's Figure 4, 5 or 8
    figure: Literal["lpt-f6", "idpg-f4", "idpg-f5", "idpg-f8"] = "lpt-f6"
    # 'small': a small backbone; 'full': the paper's backbone and budget, one of its learning rates
    scale: Literal["small", "full"] = "small"
    backbone: str | None = None  # (default: minilm; for 'full': roberta-large)
    # optimizer steps of a run (default: 200; for 'full': the paper's)
    steps: Annotated[int, Range(1, 10**9)] | None = None
    seeds: Annotated[int, Range(1, 10**6)] | None = None  # number of seeds (default: 5)
    # folder for FIGURE.jsonl or FIGURE-full.jsonl; runs that the file contains are not repeated
    out: str = "runs/reproduce"
    plan: bool = False  # print the runs and stop


def figure_options(options: FiguresOptions, data: str | None) -> Any:
    """Return the options that all runs of a figure share."""
    from idp_tutorial.assembly.config import RunOptions
    from idp_tutorial.methods.all_methods import METHODS
    from idp_tutorial.reproduction.papers.protocols import (
        build_paper_config,
        paper_method_fields,
        select_paper_learning_rates,
    )
    from results.figures.paper_figures import FIGURE_EXPERIMENTS

    figure = options.figure
    method, tasks, _ = FIGURE_EXPERIMENTS[figure]
    steps = options.steps or 200
    short: dict[str, Any] = dict(steps=steps, eval_every=max(1, steps // 10), epochs=None)
    if options.scale == "full" and method:
        backbone = options.backbone or "roberta-large"
        fields = paper_method_fields(method, figure)
        cfg = build_paper_config(figure, method, tasks[0], "full", None, backbone, **fields)
        default = METHODS[method].default_learning_rate or 1.0
        grid = select_paper_learning_rates(figure, method)
        nearest = min(grid, key=lambda lr: abs(log(lr / default)))
        cfg = replace(cfg, data=data, lr=nearest)
        return replace(cfg, **short) if options.steps else cfg
    backbone = options.backbone or ("roberta-large" if options.scale == "full" else "minilm")
    general: dict[str, Any] = dict(
        backbone=backbone, data=data, batch_size=16, prompt_length=5, standardise=True
    )
    return RunOptions(**general, **short)


@command(FiguresOptions, run_options=("data",))
def figures_command(options: FiguresOptions, base: Any) -> None:
    """Run the experiment behind a figure, or continue it, and print its measurements.

    python -m results.figures.run --figure lpt-f6 --scale full --data FOLDER
    """
    from idp_tutorial.cli.reproduce import print_plan
    from results.figures.paper_figures import FIGURE_SEEDS, plan_figure_runs, reproduce_figure

    shared = figure_options(options, base.data)
    seeds = options.seeds or FIGURE_SEEDS
    if options.plan:
        print_plan(plan_figure_runs(options.figure, shared, seeds))
        return
    check_writable_folder(options.out)
    scale = "-full" if options.scale == "full" else ""
    file = Path(options.out) / f"{options.figure}{scale}.jsonl"
    for r in reproduce_figure(options.figure, shared, seeds, file):
        measurements = [f"{name} {value:.3f}" for name, value in r["measurements"].items()]
        print("  ".join([r["task"], f"seed {r['seed']}", *measurements]))
    print(f"\nwritten: {file}")


if __name__ == "__main__":
    figures_command.main(sys.argv[1:])

"""The command `idp reproduce`: run a published table and compare the scores.

`idp reproduce --table lpt-2 --scale small --data FOLDER` trains the runs of LPT's Table 2 that
are missing on a small backbone, and prints both scores.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from idp_tutorial.cli.commands import CommandOptions, command, parse_numbers, split_names
from idp_tutorial.utils.checks import Range
from idp_tutorial.utils.process import handle_messages


def print_plan(
    runs: Iterable[Any],  # of `RunConfig`
) -> None:
    """Print the settings of the runs of a table."""
    for cfg in runs:
        length = f"{cfg.epochs:g} epochs" if cfg.epochs else f"{cfg.steps} steps"
        shots = f"shots={cfg.shots}  split_seed={cfg.split_seed}"
        print(f"{cfg.backbone:14} {cfg.task:6} {shots}  {cfg.head:14} {length:12} {cfg.method}")


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(CommandOptions):
    """Options of `idp reproduce`."""

    # a table or figure of scores: idpg-1 … idpg-f9, lpt-1 … lpt-10, id-spam-2 … id-spam-16
    table: str = "lpt-2"
    # 'small': a small backbone, four tasks; 'full': the paper's backbone and budget, one point of
    # its search space with all its learning rates
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
    from idp_tutorial.reproduction.papers.protocols import describe_search_space, plan_table_runs
    from idp_tutorial.reproduction.papers.reproduce import reproduce_table

    table = options.table
    methods = split_names(options.methods) if options.methods else None
    tasks = split_names(options.tasks) if options.tasks else None
    settings = (table, options.scale, options.backbone, base.data)
    glove = base.get("glove")
    if options.plan:
        print_plan(plan_table_runs(*settings, methods, tasks, glove))
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

"""Train late prompts at every layer of one model, with all seeds.

    python -m results.depth.sweep --task questions --methods lpt,lpt-npg --layers 2,4,6

The script first chooses a layer without training, which is cheap; then it trains at every
layer, so that the choice can be judged. All options are checked before the learning rate of the
head is searched. After a kill the same call continues the sweep.
"""

import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from idp_tutorial.cli.commands import (
    ComparisonOptions,
    TableOptions,
    command,
    parse_numbers,
    refuse_given,
    split_names,
)
from idp_tutorial.utils.checks import DivergenceError, require_packages
from idp_tutorial.utils.process import handle_messages
from results.depth.probe_config import ProbeConfig


def _validate(
    methods: list[str], base: Any, layers: list[int] | None, options: "SweepOptions"
) -> Any:
    """Check everything that can be checked before training, and return the task."""
    from idp_tutorial.data.task import require_classes
    from idp_tutorial.data.tasks import load_config_task
    from idp_tutorial.runs.compare import dry_run_comparison
    from results.depth.layer_sweep import plan_layer_sweep

    options.refuse_unread(methods, base)
    dry_run_comparison(methods, base, options.seeds, options.out)
    plan_layer_sweep(methods, base, layers, options.seeds)
    task = load_config_task(base)
    if options.probe:
        require_classes(task, "probe")
    return task


def _print_tables(
    records: list[dict], methods: list[str], layers: list[int] | None, choice: Any
) -> None:
    """Print the tables of a sweep, and which of its runs diverged."""
    from idp_tutorial.methods.all_methods import late_prompt_methods
    from idp_tutorial.runs.tables import select_finished
    from results.depth.layer_sweep import depth_profile_table, layer_choice_regret, sweep_table

    if not select_finished(records):
        raise DivergenceError(records[0]["message"])
    print("\n" + sweep_table(records).round(4).to_string(index=False))
    for r in records:
        if r.get("status") == "diverged":
            print(f"{r['method']} at layer {r.get('layer')} with seed {r['seed']} diverged")
    if not layers and set(methods) & set(late_prompt_methods()):
        print("\n" + depth_profile_table(records).round(2).to_string(index=False))
        if choice:
            print("\n" + layer_choice_regret(records, choice).round(2).to_string(index=False))


def _probe_information(
    base: Any, seeds: int, out: str, task: Any, records: list[dict], probe: Any
) -> None:
    """Measure the information in every layer of models trained with `lpt`."""
    from idp_tutorial.methods.all_methods import METHODS
    from results.depth.layer_sweep import measure_information_curves, sweep_file

    layer_learning_rates = {
        r["layer"]: r["lr"] for r in records if r["method"] == "lpt" and r["lr"]
    }
    cfg = base.with_method("lpt", lr=base.lr or METHODS["lpt"].default_learning_rate)
    file = sweep_file(out, base, "information")
    with handle_messages():
        measure_information_curves(
            cfg, task, None, seeds, layer_learning_rates, file, **asdict(probe)
        )


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TableOptions, ComparisonOptions):
    """Options of this script."""

    option_group: ClassVar[str] = "this command"

    # comma-separated; methods without a layer are trained once
    methods: str = "head-only,fine-tuning,lpt,lpt-npg,lpt-appg,lpt-mppg,id-spam"
    layers: str | None = None  # layers below the prompt, comma-separated (default: all)
    # then train `lpt` at the first, the middle and the last layer, and probe the information in
    # every layer
    probe: bool = False
    probe_depth: int = ProbeConfig.depth  # layers of the probe (LPT: 6); 0: a linear probe
    probe_width: int = ProbeConfig.width  # width of the probe (LPT: 1024), a multiple of 4
    probe_steps: int = ProbeConfig.steps  # training steps of the probe
    # folder for sweep-TASK-BACKBONE.jsonl; runs that the file contains are not repeated
    out: str = "runs"


@command(SweepOptions, run_options=None, excluded=("seed", "eval_every", "layer"), task="questions")
def sweep_command(options: SweepOptions, base: Any) -> None:
    """Choose a prompt layer without training, then train at every layer; run again to resume.

    python -m results.depth.sweep --task questions --methods lpt,lpt-npg --layers 2,4,6
    """
    grid = options.learning_rate_grid(base.lr)
    if not options.probe:
        refuse_given(options, "probe_depth probe_width probe_steps", "without probe")
    require_packages("matplotlib")
    import matplotlib

    from idp_tutorial.runs.learning_rate_search import choose_head_learning_rate
    from idp_tutorial.utils.durable_files import file_lock
    from results.depth.layer_sweep import (
        plan_layer_sweep,
        sweep_file,
        sweep_prompt_layer,
        try_choose_layer,
    )

    matplotlib.use("Agg")
    probe_cfg = ProbeConfig(options.probe_depth, options.probe_width, steps=options.probe_steps)
    methods = split_names(options.methods)
    layers = parse_numbers(options.layers, "layers") or None
    seeds = options.seeds
    out = options.out
    task = _validate(methods, base, layers, options)
    file = sweep_file(out, base)
    with file_lock(file):
        if options.tune_head_first:
            head_lr = choose_head_learning_rate(base, task, records_file=file)
            base = replace(base, head_lr=head_lr)
        sweep = (methods, base, layers, seeds, options.tune or bool(grid), file, task, grid)
        # an error, such as another sweep in the file, is raised before anything is written
        plan_layer_sweep(*sweep)
        with handle_messages():
            choice = try_choose_layer(methods, base, task, sweep_file(out, base, "choice"))
            records = sweep_prompt_layer(*sweep)
        _print_tables(records, methods, layers, choice)
        if options.probe:
            _probe_information(base, seeds, out, task, records, probe_cfg)
    choice_file = f" and {sweep_file(out, base, 'choice').name}" if choice else ""
    print(f"\nwritten: {file}{choice_file}")


if __name__ == "__main__":
    sweep_command.main(sys.argv[1:])

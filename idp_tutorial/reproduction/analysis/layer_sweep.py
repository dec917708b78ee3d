"""Train a method at every layer with several seeds: LPT's pilot experiments.

LPT rests on pilot experiments (§4, §5.2, Figures 2, 4 and 5): the same prompt or generator,
trained at every layer of RoBERTa-large. This module repeats them on any backbone.

A mean over seeds is meaningful only if nothing but the seed differs. Records of a sweep may
differ in method, layer, learning rate and seed (and in the folder and the device of the
machine). Prompts of another length, or another number of steps, are another sweep, and a table
of both would show neither. So every function that takes records checks this first:
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from idp_tutorial.assembly.config import RunConfig, RunOptions, general_options
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.registry import METHODS, late_prompt_methods
from idp_tutorial.runs.compare import run_seeds
from idp_tutorial.runs.store import RunStore
from idp_tutorial.runs.tables import select_finished
from idp_tutorial.runs.tune import describe_lr_selection
from idp_tutorial.utils.checks import UserError, check_at_least, check_name, require_packages
from idp_tutorial.utils.durable import file_lock
from idp_tutorial.utils.records import config_to_record, read_existing_records

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "check_single_sweep",
    "plan_layer_sweep",
    "sweep_prompt_layer",
    "sweep_table",
    "plot_sweep",
    "plot_convergence",
    "sweep_file",
]


_VARYING_FIELDS = {  # the fields in which records of one sweep may differ
    "method",
    "layer",
    "lr",
    "seed",
    "device",
    "cache_dir",
}


def _check_agreement(records: list[dict], name: str) -> None:
    """Check that all records have the same value of a field; an absent field has its default."""
    values = [
        json.dumps(r.get(name, getattr(RunOptions, name, None)), sort_keys=True) for r in records
    ]
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise UserError(
            f"these are records of several sweeps: {name} is {different[0]} in some of them "
            f"and {different[1]} in others. Give records of one sweep at a time."
        )


def _check_no_repeated_run(records: list[dict]) -> None:
    """Check that no late method has two records with the same layer and seed."""
    late = late_prompt_methods()
    runs = [
        (r["method"], r.get("prompt_layer"), r["layer"], r["seed"])
        for r in records
        if r["method"] in late
    ]
    for run in runs:
        count = runs.count(run)
        if count > 1:
            method, _, layer, seed = run
            raise UserError(
                f"these are records of several sweeps: {method!r} at layer {layer} with seed "
                f"{seed} has {count} records. Give records of one sweep at a time."
            )


def check_single_sweep(
    records: list[dict],  # of `sweep_prompt_layer` or `measure_information_curves`
) -> list[dict]:  # the records of runs that did not diverge
    """Check that the records differ only in method, layer, learning rate and seed.

    Raises: `UserError` that names the first field in which they differ.
    """
    records = select_finished(records)
    for name in [*general_options(), "split_sizes", "probe"]:
        if name in _VARYING_FIELDS:
            continue
        compared = records
        if name in ("head_lr", "steps"):
            # a bare head trains at its only learning rate, and a verbalizer without a prompt never
            compared = [r for r in records if r["method"] != "head-only"]
        _check_agreement(compared, name)
    for method in dict.fromkeys(r["method"] for r in records):
        runs = [r for r in records if r["method"] == method]
        for name in ["lr_selection", *(METHODS[method].options.keys() - _VARYING_FIELDS)]:
            _check_agreement(runs, name)
    _check_no_repeated_run(records)
    return records


def _resolve_layers(layers: Sequence[int] | None, backbone: str) -> list[int]:
    """Return all layers of a backbone, or the given ones without repetitions.

    Raises: `UserError` for a layer that the backbone does not have.
    """
    L = load_backbone(backbone).n_layers
    resolved = list(range(L) if layers is None else dict.fromkeys(layers))
    for layer in resolved:
        if layer not in range(L):
            raise UserError(
                f"layers must be between 0 and {L - 1} for backbone {backbone!r}, got {layer}."
            )
    return resolved


def _check_file_has_same_sweep(
    out: Path | None, cfgs: list[RunConfig], lr_selection: str, task: Task | None
) -> None:
    """Check that the file has no records of another sweep."""
    old_records = read_existing_records(out)
    if not old_records:
        return
    # sizes and metric of a task that is not loaded are unknown, and taken from the file
    fields_of_this_sweep = dict(
        seed=None,
        status="done",
        lr_selection=lr_selection,
        split_sizes=task.split_sizes() if task else old_records[0].get("split_sizes"),
    )
    task_metric = dict(metric=task.metric if task else old_records[0].get("metric"))
    planned = [{**task_metric, **config_to_record(cfg), **fields_of_this_sweep} for cfg in cfgs]
    try:
        check_single_sweep([*old_records, *planned])
    except ValueError as e:
        raise UserError(
            f"{out} already contains another sweep ({str(e).rstrip('.')}): write this one to "
            "another file (out=...)."
        ) from None


def _sweep_configs(
    method_name: str, base: RunConfig, layers: list[int], tune_learning_rate: bool
) -> list[RunConfig]:
    """Return the configurations of one method: one for each layer, or one without a layer."""
    method = METHODS[method_name]
    lr = base.lr or (None if tune_learning_rate else method.default_learning_rate)
    head_lr = None if method.kind == "head" else base.head_lr
    # AdapterDrop has a layer as well, but keeps its upper half
    method_layers = layers if method.insertion_point == "middle" else [None]
    return [
        base.with_options(layer=layer).with_method(method_name, lr=lr, head_lr=head_lr)
        for layer in method_layers
    ]


def plan_layer_sweep(
    methods: Sequence[str],  # keys of `METHODS`
    base: RunConfig,  # all settings but method, layer and seed
    layers: Sequence[int] | None = None,  # layers below the prompt; None: all, 0 … n_layers−1
    seeds: int = 3,  # number of seeds
    tune_learning_rate: bool = False,  # whether the learning rate is chosen at every layer
    out: Path | None = None,  # JSONL file of the sweep
    task: Task | None = None,  # the task of `base`, if it is already loaded
    learning_rates: tuple = (),  # learning rates to try; (): the three of each method
) -> tuple[
    list[RunConfig], str
]:  # a config for each method and layer; how learning rates are chosen
    """List the configurations of a sweep, and check its arguments before anything is trained.

    Raises: `UserError` for an unknown method or layer, and for a file with another sweep.
    """
    for name in methods:
        check_name(name, METHODS, "method")
    check_at_least(seeds, 1, "seeds", "use at least two for a standard deviation")
    base = base.resolve_epochs(len(task.splits["train"])) if task else base
    layers = _resolve_layers(layers, base.backbone)
    lr_selection = "default"
    if base.lr:
        lr_selection = "given"
    elif tune_learning_rate:
        lr_selection = describe_lr_selection(learning_rates)
    cfgs = []
    for name in dict.fromkeys(methods):
        cfgs += _sweep_configs(name, base, layers, tune_learning_rate)
    _check_file_has_same_sweep(out, cfgs, lr_selection, task)
    return cfgs, lr_selection


def sweep_prompt_layer(
    methods: Sequence[str],  # keys of `METHODS`
    base: RunConfig,  # all settings but method, layer and seed; `lr` None: default or tuned
    layers: Sequence[int] | None = None,  # layers below the prompt; None: all, 0 … n_layers−1
    seeds: int = 3,  # number of seeds: 0 … seeds−1
    tune_learning_rate: bool = False,  # choose the learning rate at every layer, not the default
    out: Path | None = None,  # JSONL file; what it contains is not run again
    task: Task | None = None,  # the task of `base`, if it is already loaded
    learning_rates: tuple = (),  # learning rates to try, extended at an edge; (): the method's
) -> list[dict]:  # records, old and new, with `n_layers`, `seconds` and `tuning_seconds`
    """Train methods at every layer with every seed (LPT §4 and §5.2, Figures 2, 4 and 5)."""
    task = task or load_task(base.task, base.data, base.shots, base.split_seed, base.stratified)
    cfgs, lr_selection = plan_layer_sweep(
        methods, base, layers, seeds, tune_learning_rate, out, task, learning_rates
    )
    L = load_backbone(base.backbone).n_layers
    records = []
    with file_lock(out):
        store = RunStore(out)
        for cfg in cfgs:
            records += run_seeds(cfg, task, lr_selection, seeds, store, learning_rates, n_layers=L)
    return records


def sweep_table(
    records: list[dict],  # records of one sweep
) -> "pd.DataFrame":  # one row for each method and layer
    """Tabulate mean and standard deviation over seeds, cost and learning rate by layer."""
    import pandas as pd

    finished = check_single_sweep(records)
    if not finished:
        raise UserError(
            "there are no finished records to tabulate: run sweep_prompt_layer or idp sweep first."
        )
    df = pd.DataFrame(finished)
    layers = [record.get("layer") for record in finished]  # some methods have no layer
    df = df.assign(params=[sum(p.values()) for p in df.params], layer=layers)
    groups = df.groupby(["method", "layer"], sort=False, dropna=False)
    return groups.agg(
        score=("score", "mean"),
        std=("score", "std"),
        seeds=("seed", "size"),
        params=("params", "first"),
        ms_per_step=("ms_per_step", "median"),
        peak_memory_mb=("peak_memory_mb", "max"),
        lr=("lr", "first"),
    ).reset_index()


def _get_axes(ax: "Axes | None") -> "Axes":
    """Return the given axes, or new ones."""
    require_packages("matplotlib")
    from matplotlib import pyplot as plt

    return ax or plt.subplots(figsize=(5, 3))[1]


def plot_sweep(
    records: list[dict],  # records of one task and backbone
    ax: "Axes | None" = None,  # axes to draw on; None: new ones
) -> "Axes":
    """Plot test score by prompt layer: dots for seeds, lines for means (LPT, Figures 2, 4, 5)."""
    import pandas as pd

    df = pd.DataFrame(check_single_sweep(records))
    first = select_finished(records)[0]
    ax = _get_axes(ax)
    for i, (method, group) in enumerate(df.groupby("method", sort=False)):
        if method not in late_prompt_methods():
            style = "--" if method == "fine-tuning" else ":"
            ax.axhline(group.score.mean(), color="grey", ls=style, lw=1, label=method)
            continue
        ax.plot(group.layer, group.score, "o", ms=3, alpha=0.4, color=f"C{i}")
        ax.plot(group.groupby("layer").score.mean(), color=f"C{i}", label=method)
    shots = f", {first['shots']} shots" if first["shots"] else ""
    ax.set(
        xlabel="layers below the prompt",
        ylabel=f"test {first['metric']} (%)",
        title=f"{first['task']}{shots}, {Path(first['backbone']).name}",
    )
    ax.legend(fontsize=7)
    return ax


def plot_convergence(
    records: list[dict],  # records of one sweep
    method: str,  # key of `METHODS`
    layers: Sequence[int] | None = None,  # prompt layers; None: the first, the middle and the last
    ax: "Axes | None" = None,  # axes to draw on; None: new ones
) -> "Axes":
    """Plot validation score by step for a few prompt layers (LPT, Figure 2 middle).

    Thin lines are seeds, thick ones their mean.
    """
    import pandas as pd

    selected = check_single_sweep([r for r in records if r["method"] == method])
    if not selected:
        available = ", ".join(dict.fromkeys(r["method"] for r in records)) or "no records"
        raise UserError(f"there are no records of {method!r}: choose one of {available}.")
    first = selected[0]
    ax = _get_axes(ax)
    if layers is None:
        layers = (0, first["n_layers"] // 2, first["n_layers"] - 1)
    if not any(r["layer"] in layers for r in selected):
        available = ", ".join(dict.fromkeys(str(r["layer"]) for r in selected))
        raise UserError(
            f"there are no records of {method!r} at layers {', '.join(map(str, layers))}: "
            f"choose from {available}."
        )
    for i, layer in enumerate(layers):
        curves = [dict(r["history"]) for r in selected if r["layer"] == layer]  # step → score
        if curves:
            df = pd.DataFrame(dict(enumerate(curves))).sort_index()
            ax.plot(df, lw=0.6, alpha=0.5, color=f"C{i}")
            ax.plot(df.mean(axis=1), lw=2, color=f"C{i}", label=f"layer {layer}")
    ax.set(
        xlabel="steps",
        ylabel=f"validation {first['metric']} (%)",
        title=f"{method}, {first['task']}, {Path(first['backbone']).name}",
    )
    ax.legend(fontsize=7)
    return ax


def sweep_file(
    folder: Path | str,  # folder of the sweep's files
    cfg: RunConfig,  # settings of the sweep
    kind: str = "sweep",  # 'sweep', 'choice' or 'information'
) -> Path:
    """Return the path `KIND-TASK[-kSHOTS][-verbalizer]-BACKBONE.jsonl` of a sweep's records."""
    parts = [kind, cfg.task]
    if cfg.shots:
        parts.append(f"k{cfg.shots}")
    if cfg.head == "verbalizer":
        parts.append("verbalizer")
    parts.append(Path(cfg.backbone).name)
    return Path(folder) / f"{'-'.join(parts)}.jsonl"

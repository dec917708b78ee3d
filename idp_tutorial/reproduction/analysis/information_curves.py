"""Train a prompt at a few layers and measure the information in every layer above it.

LPT's Figure 2, right: with the prompt in the middle, information about the label grows through
the layers above it; with the prompt at either end it "collapses". The measurement is defined
there; this notebook applies it to trained models, with a few prompt layers and several seeds.

A curve is complete if the file has every layer of it, measured with the same configuration,
data and probe. If a run was killed within a curve, only the missing layers are probed.
`idp_sweep --probe` runs the measurement at full size.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.task import Task
from idp_tutorial.reproduction.analysis.information import ProbeConfig, probe_layers
from idp_tutorial.reproduction.analysis.layer_sweep import check_single_sweep
from idp_tutorial.runs.experiment import make_diverged_record, train_model
from idp_tutorial.runs.record_checks import (
    data_digest,
    downsample_losses,
    has_current_weights,
    input_digests,
    matches_config,
    provenance_field,
)
from idp_tutorial.runs.tables import select_finished
from idp_tutorial.utils.checks import DivergenceError, require_packages
from idp_tutorial.utils.config import RunConfig
from idp_tutorial.utils.provenance import SCHEMA_VERSION
from idp_tutorial.utils.records import (
    append_record,
    collect_versions,
    config_to_record,
    read_existing_records,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["measure_information_curves", "plot_information_curves"]


def _train_and_probe(
    cfg: RunConfig,
    task: Task,
    layers: list[int],
    max_examples: int,
    include_prompt: bool,
    probe: dict,
) -> list[dict]:
    """Train a model and probe some layers; return their records, or that of a diverged run."""
    started = time.time()
    template = cfg.template if cfg.head == "verbalizer" else None
    try:
        model, log = train_model(cfg, task)
        measurements = probe_layers(
            model, task, layers, max_examples, cfg.max_len, template, include_prompt, **probe
        )
    except FloatingPointError as e:
        return [make_diverged_record(cfg, task, e, started)]
    shared_fields = {
        "schema": SCHEMA_VERSION,
        "status": "done",
        **config_to_record(cfg),
        **model.backbone.weights_info,
        "digests": dict(
            weights=model.backbone.initial_fingerprint(),
            data=data_digest(task),
            **input_digests(cfg),
        ),
        "losses": downsample_losses(log["losses"]),
        "versions": collect_versions(),
        **provenance_field(started),
    }
    return [{**shared_fields, **measurement} for measurement in measurements]


def _belongs_to_curve(record: dict, cfg: RunConfig, task: Task, conditions: dict) -> bool:
    """Tell whether a record is a point of the curve that `cfg` would make."""
    point = {**record, "layer": record.get("prompt_layer")}
    return matches_config(point, cfg, "given", task, **conditions)


def _extend_curve(
    cfg: RunConfig,
    task: Task,
    layers: list[int],
    records: list[dict],  # points of this curve so far
    conditions: dict,
    probe: dict,
    out: Path | None,
    report: Callable[[str], object],
) -> list[dict]:  # all points, and the record of a run that diverged
    """Probe the layers that a curve lacks, and append them to the file."""
    title = f"{cfg.method}  prompt at layer {cfg.layer}  seed {cfg.seed}"
    records = list(records)
    finished = select_finished(records)
    finished_layers = {r["layer"] for r in finished}
    missing = [layer for layer in layers if layer not in finished_layers]
    if missing and len(finished) == len(records):
        report(f"{title}: training, then probing {len(missing)} layers")
        settings = conditions["probe"]
        measured = _train_and_probe(cfg, task, missing, settings["n"], settings["prompt"], probe)
        for record in measured:
            point = {**record, **conditions, "prompt_layer": cfg.layer, "lr_selection": "given"}
            records.append(point)
            if out:
                append_record(point, out)
    curve = {r["layer"]: r for r in select_finished(records)}
    if not {*layers} <= {*curve}:
        report(f"{title}  diverged")
    elif missing:
        bits = " ".join(f"{curve[layer]['bits']:.2f}" for layer in layers)
        report(f"{title}  {bits}")
    return records


def measure_information_curves(
    cfg: RunConfig,  # with a learning rate, unless `layer_learning_rates` has one for each layer
    task: Task,  # with its splits
    prompt_layers: Sequence[int] | None = None,  # None: the first, the middle and the last layer
    seeds: int = 3,  # number of seeds: 0 … seeds−1
    layer_learning_rates: dict[int, float] | None = None,  # prompt layer → learning rate
    out: Path | None = None,  # JSONL file; what it contains is not computed again
    layers: Sequence[int] | None = None,  # layers to probe; None: after each layer
    max_examples: int = 1000,  # maximum number of examples from each split
    include_prompt: bool = False,  # let the probe use the prompt positions as well
    report: Callable[[str], object] = print,  # receives one line of progress at a time
    **probe: Any,  # fields of `ProbeConfig`: depth, width, steps, …
) -> list[dict]:  # a record for each seed, prompt layer and probed layer of the finished runs
    """Measure the information in each layer above trained prompts (LPT §4, Figure 2 right).

    Raises: `DivergenceError` if all runs diverge.
    """
    L = load_backbone(cfg.backbone).n_layers
    old_records = read_existing_records(out)
    layers = list(range(1, L + 1) if layers is None else layers)
    prompt_layers = (0, L // 2, L - 1) if prompt_layers is None else prompt_layers
    cfg = cfg.resolve_epochs(len(task.splits["train"]))
    conditions = dict(
        split_sizes=task.split_sizes(),
        n_layers=L,
        probe={"n": max_examples, "prompt": include_prompt, **asdict(ProbeConfig(**probe))},
    )
    records = []
    diverged = None
    for seed, prompt_layer in product(range(seeds), prompt_layers):
        lr = (layer_learning_rates or {}).get(prompt_layer, cfg.lr)
        curve_cfg = replace(cfg, layer=prompt_layer, seed=seed, lr=lr)
        old_points = [
            r
            for r in old_records
            if _belongs_to_curve(r, curve_cfg, task, conditions)
            and has_current_weights(r, curve_cfg)
        ]
        points = _extend_curve(curve_cfg, task, layers, old_points, conditions, probe, out, report)
        curve = {r["layer"]: r for r in select_finished(points)}
        if {*layers} <= {*curve}:
            records += [curve[layer] for layer in layers]
        else:  # the record of the run that diverged says why; other curves are still measured
            diverged = next(r for r in points if r not in curve.values())
    if not records and diverged:
        raise DivergenceError(diverged["message"])
    return records


def plot_information_curves(
    records: list[dict],  # from `measure_information_curves`
    ax: "Axes | None" = None,  # axes to draw on; None: new ones
) -> "Axes":
    """Plot bits about the label after each layer: thin lines for seeds, thick ones for means."""
    import pandas as pd

    require_packages("matplotlib")
    from matplotlib import pyplot as plt

    df = pd.DataFrame(check_single_sweep(records))
    first = records[0]
    ax = ax or plt.subplots(figsize=(5, 3))[1]
    for i, (prompt_layer, group) in enumerate(df.groupby("prompt_layer", sort=False)):
        bits = group.pivot(index="layer", columns="seed", values="bits")
        ax.plot(bits, lw=0.6, alpha=0.5, color=f"C{i}")
        ax.plot(bits.mean(axis=1), lw=2, color=f"C{i}", label=f"prompt at layer {prompt_layer}")
    ax.set(
        xlabel="layers applied",
        ylabel="information about the label (bits)",
        title=f"{first['method']}, {first['task']}, {Path(first['backbone']).name}",
    )
    ax.legend(fontsize=7)
    return ax

"""Train a prompt at a few layers and measure the information in every layer above it.

LPT's Figure 2, right: with the prompt in the middle, information about the label grows through
the layers above it; with the prompt at either end it "collapses". The measurement is defined
there; this module applies it to trained models, with a few prompt layers and several seeds.

A curve is complete if the file has every layer of it, measured with the same configuration,
data and probe. If a run was killed within a curve, only the missing layers are probed.
`idp sweep --probe` runs the measurement at full size.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.task import Task
from idp_tutorial.reproduction.analysis.information import ProbeConfig, probe_layers
from idp_tutorial.reproduction.analysis.layer_sweep import check_single_sweep
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.record import build_record, make_fingerprint
from idp_tutorial.runs.store import RunStore
from idp_tutorial.runs.tables import select_finished
from idp_tutorial.utils.checks import DivergenceError, require_packages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["measure_information_curves", "plot_information_curves"]

logger = logging.getLogger(__name__)


def _train_and_probe(
    experiment: Experiment, layers: list[int], max_examples: int, include_prompt: bool, probe: dict
) -> list[dict]:
    """Train a model and probe some layers; return their records, or that of a diverged run."""
    cfg = experiment.cfg
    task = experiment.task
    template = cfg.template if cfg.head == "verbalizer" else None
    try:
        model, log = experiment.fit()
        measurements = probe_layers(
            model, task, layers, max_examples, cfg.max_len, template, include_prompt, **probe
        )
    except FloatingPointError as e:
        return [experiment.record_divergence(e).to_dict()]
    records = []
    for measurement in measurements:
        record = build_record(
            cfg,
            experiment.digests(),
            task.split_sizes(),
            experiment.start_time,
            model,
            log,
            **measurement,
        )
        records.append(record.to_dict())
    return records


def _measure_curve(
    experiment: Experiment,
    layers: list[int],
    conditions: dict,
    probe: dict,
    store: RunStore,
) -> list[dict]:  # a record for each layer, or the record of the run, which diverged
    """Return the points of a curve; train and probe if the store lacks some of them."""
    cfg = experiment.cfg
    title = f"{cfg.method}  prompt at layer {cfg.get('layer')}  seed {cfg.seed}"
    fingerprint = make_fingerprint(
        cfg, experiment.digests(), prompt_layer=cfg.get("layer"), lr_selection="given", **conditions
    )
    del fingerprint["layer"]  # of a record it is the layer that is probed
    diverged = store.find({**fingerprint, "status": "diverged"})
    if diverged:
        return [diverged]
    points = {layer: store.find({**fingerprint, "layer": layer}) for layer in layers}
    missing = [layer for layer, point in points.items() if point is None]
    if missing:
        logger.info(f"{title}: training, then probing {len(missing)} layers")
        settings = conditions["probe"]
        for record in _train_and_probe(
            experiment, missing, settings["n"], settings["prompt"], probe
        ):
            point = store.add({**record, **fingerprint})
            if point["status"] == "diverged":
                logger.info(f"{title}  diverged")
                return [point]
            points[point["layer"]] = point
    curve = [point for point in points.values() if point is not None]
    if missing:
        bits = " ".join(f"{point['bits']:.2f}" for point in curve)
        logger.info(f"{title}  {bits}")
    return curve


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
    **probe: Any,  # fields of `ProbeConfig`: depth, width, steps, …
) -> list[dict]:  # a record for each seed, prompt layer and probed layer of the finished runs
    """Measure the information in each layer above trained prompts (LPT §4, Figure 2 right).

    Raises: `DivergenceError` if all runs diverge.
    """
    L = load_backbone(cfg.backbone).n_layers
    store = RunStore(out)
    layers = list(range(1, L + 1) if layers is None else layers)
    prompt_layers = (0, L // 2, L - 1) if prompt_layers is None else prompt_layers
    conditions = dict(
        n_layers=L,
        probe={"n": max_examples, "prompt": include_prompt, **asdict(ProbeConfig(**probe))},
    )
    records = []
    for seed, prompt_layer in product(range(seeds), prompt_layers):
        lr = (layer_learning_rates or {}).get(prompt_layer, cfg.lr)
        experiment = Experiment(cfg.with_options(layer=prompt_layer, seed=seed, lr=lr), task)
        records += _measure_curve(experiment, layers, conditions, probe, store)
    finished = select_finished(records)
    if records and not finished:
        raise DivergenceError(records[0]["message"])
    return finished


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

"""Train a method at every layer with several seeds: LPT's pilot experiments.

LPT rests on pilot experiments (§4, §5.2, Figures 2, 4 and 5): the same prompt or generator,
trained at every layer of RoBERTa-large. This module repeats them on any backbone.

A mean over seeds is meaningful only if nothing but the seed differs. Records of a sweep may
differ in method, layer, learning rate and seed (and in the folder and the device of the
machine). Prompts of another length, or another number of steps, are another sweep, and a table
of both would show neither. So every function that takes records checks this first.

Tables summarise a sweep: scores by depth, and the regret of a layer choice. On
RoBERTa-large, TREC and RTE, LPT finds a static prompt best after 11 to 13 of 24 layers; of
the generators, NPG is worse in the upper half and the pooling generators are not (§4, §5.2). Is
that general, or a property of one model? The questions become three functions of the records of
a sweep, and are tested on synthetic records with known results. The results of the stored
sweeps are in the lab: depth.

A layer that is chosen without training (`analysis.layer_choice`) is stored in a file beside the
sweep, with the settings, weights and data that it was chosen for.

A wiggly line always suggests a hump. So the criterion is numerical: does the mean of the middle
third of the layers exceed the first *and* the last layer by more than two standard errors of
that difference?

Information curves are measured above a prompt that was trained at one of a few layers. LPT's
Figure 2, right: with the prompt in the middle, information about the label grows through
the layers above it; with the prompt at either end it "collapses". The measurement is defined
in `results.depth.information`; it is applied to trained models, with a few prompt layers and
several seeds.

A curve is complete if the file has every layer of it, measured with the same configuration,
data and probe. If a run was killed within a curve, only the missing layers are probed.
`python -m results.depth.sweep --probe` runs the measurement at full size.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from idp_tutorial.assembly.build import load_config_backbone
from idp_tutorial.assembly.config import RunConfig, RunOptions, general_options
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_config_task
from idp_tutorial.methods.all_methods import METHODS, late_prompt_methods
from idp_tutorial.methods.method_registry import PromptConfig
from idp_tutorial.reproduction.analysis.layer_choice import choose_prompt_layer
from idp_tutorial.runs.compare import choose_method_config, run_seeds
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.learning_rate_search import describe_lr_selection
from idp_tutorial.runs.record import RunStore, build_record, make_fingerprint
from idp_tutorial.runs.tables import select_finished
from idp_tutorial.utils.checks import (
    DivergenceError,
    Range,
    UserError,
    check_name,
)
from idp_tutorial.utils.durable_files import file_lock
from idp_tutorial.utils.records import collect_provenance, config_to_record, read_existing_records
from results.depth.information import probe_layers
from results.depth.probe_config import ProbeConfig

logger = logging.getLogger(f"idp_tutorial.{__name__}")  # whose messages commands print

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
    runs = Counter(
        (r["method"], r.get("prompt_layer"), r["layer"], r["seed"])
        for r in records
        if r["method"] in late
    )
    for (method, _, layer, seed), count in runs.items():
        if count > 1:
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


def _resolve_layers(layers: Sequence[int] | None, backbone: str, L: int) -> list[int]:
    """Return all `L` layers of a backbone, or the given ones without repetitions.

    Raises: `UserError` for a layer that the backbone does not have.
    """
    resolved = list(range(L) if layers is None else dict.fromkeys(layers))
    for layer in resolved:
        if layer not in range(L):
            raise UserError(
                f"layers must be between 0 and {L - 1} for backbone {backbone!r}, got {layer}."
            )
    return resolved


def _check_file_has_same_sweep(
    out: Path | None, cfgs: list[RunConfig], lr_selection: str, task: Task
) -> None:
    """Check that the file has no records of another sweep."""
    old_records = read_existing_records(out)
    if not old_records:
        return
    fields_of_this_sweep = dict(
        seed=None, status="done", lr_selection=lr_selection, split_sizes=task.split_sizes()
    )
    planned = [
        {"metric": task.metric, **config_to_record(cfg), **fields_of_this_sweep} for cfg in cfgs
    ]
    try:
        check_single_sweep([*old_records, *planned])
    except ValueError as e:
        raise UserError(
            f"{out} already contains another sweep ({str(e).rstrip('.')}): write this one to "
            "another file (out=...)."
        ) from None


def plan_layer_sweep(
    methods: Sequence[str],  # keys of `METHODS`
    base: RunConfig,  # all settings but method, layer and seed
    layers: Sequence[int] | None = None,  # layers below the prompt; None: all, 0 … n_layers−1
    seeds: int = 3,  # number of seeds
    tune_learning_rate: bool = False,  # whether the learning rate is chosen at every layer
    out: Path | None = None,  # JSONL file of the sweep, which is compared if `task` is given
    task: Task | None = None,  # the task of `base`, if it is already loaded
    learning_rates: tuple = (),  # learning rates to try; (): the three of each method
    n_layers: int | None = None,  # of the backbone; None: it is loaded to count them
) -> tuple[
    list[RunConfig], str
]:  # a config for each method and layer; how learning rates are chosen
    """List the configurations of a sweep, and check its arguments before anything is trained.

    Raises: `UserError` for an unknown method or layer, and for a file with another sweep.
    """
    for name in methods:
        check_name(name, METHODS, "method")
    Range(1, hint="use at least two for a standard deviation").check(seeds, "seeds")
    base = base.resolve_epochs(len(task.splits["train"])) if task else base
    L = n_layers or load_backbone(base.backbone).n_layers
    layers = _resolve_layers(layers, base.backbone, L)
    lr_selection = describe_lr_selection(learning_rates, base.lr, tune_learning_rate)
    cfgs = []
    for name in dict.fromkeys(methods):
        # AdapterDrop has a layer as well, but keeps its upper half
        has_late_prompt = METHODS[name].insertion_point == "middle"
        for layer in layers if has_late_prompt else [None]:
            options = base.with_options(layer=layer)
            cfgs.append(choose_method_config(options, name, [name], tune_learning_rate))
    if task:
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
    task = task or load_config_task(base)
    L = load_backbone(base.backbone).n_layers
    cfgs, lr_selection = plan_layer_sweep(
        methods, base, layers, seeds, tune_learning_rate, out, task, learning_rates, L
    )
    records = []
    with file_lock(out):
        store = RunStore(out)
        for cfg in cfgs:
            records += run_seeds(cfg, task, lr_selection, seeds, store, learning_rates, n_layers=L)
    return records


def _select_sweep(records: list[dict]) -> pd.DataFrame:
    """Return the finished records of one sweep, of which there must be at least one."""
    finished = check_single_sweep(records)
    if not finished:
        raise UserError(
            "there are no finished records: run sweep_prompt_layer or results/depth/sweep.py first."
        )
    return pd.DataFrame([{"layer": None, **r} for r in finished])  # some methods have no layer


def sweep_table(
    records: list[dict],  # records of one sweep
) -> pd.DataFrame:  # one row for each method and layer
    """Tabulate mean and standard deviation over seeds, cost and learning rate by layer."""
    df = _select_sweep(records)
    df = df.assign(params=[sum(p.values()) for p in df.params])
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


def _select_late_records(records: list[dict]) -> pd.DataFrame:
    """Return the finished records of late methods of one sweep, of which there must be one."""
    late = late_prompt_methods()
    df = pd.DataFrame([r for r in check_single_sweep(records) if r["method"] in late])
    if not len(df):
        raise UserError(
            f"none of the {len(records)} records has a late method. Sweep one of {', '.join(late)}."
        )
    return df


def depth_profile_table(
    records: list[dict],  # records of one sweep
) -> pd.DataFrame:  # one row for each late method
    """Compare the scores of the first layer, the middle third and the last layer (LPT §4).

    `error` is the standard error of such a difference; `middle_maximum` tells whether the middle
    exceeds both ends by two of them.
    """
    rows = []
    for method, group in _select_late_records(records).groupby("method", sort=False):
        L = group.n_layers.iloc[0]
        scores = group.groupby("layer").score
        means = scores.mean()
        middle_third = means[(means.index >= L / 3) & (means.index < 2 * L / 3)]
        first = means.get(0, np.nan)
        middle = middle_third.mean()
        last = means.get(L - 1, np.nan)
        variance = scores.var().mean() * (1 + 1 / max(1, len(middle_third)))
        error = (variance / scores.size().min()) ** 0.5
        rows.append(
            dict(
                method=method,
                first=first,
                middle=middle,
                last=last,
                error=error,
                best_layer=int(means.idxmax()),
                best=means.max(),
                middle_maximum=all(middle - end > 2 * error for end in (first, last)),
            )
        )
    return pd.DataFrame(rows)


_MATCHED_SETTINGS = (  # settings of a sweep that a choice is made for
    "task",
    "backbone",
    "data",
    "shots",
    "split_seed",
    "head",
    "prompt_length",
    "max_len",
    "split_sizes",
)


def _comparable_field(record: dict, name: str) -> Any:
    """Return a field of a record, or its default; of a backbone the last part of its path."""
    value = record.get(name, getattr(RunOptions, name, None))
    return Path(str(value)).name if name == "backbone" else value


def choice_matches_sweep(
    choice: dict,  # from `choose_prompt_layer`, with the settings of the command
    record: dict,  # a record of a sweep
) -> bool:
    """Return whether a choice was made for a sweep; settings that it lacks are not compared."""
    names = [*_MATCHED_SETTINGS]
    if record.get("head") == "verbalizer":
        names.append("template")
    return all(
        _comparable_field(choice, name) == _comparable_field(record, name)
        for name in names
        if name in choice
    )


def load_or_choose_layer(
    cfg: RunOptions,  # settings of the sweep
    task: Task,  # with its splits
    out: Path,  # JSONL file of choices
) -> dict:  # record of `choose_prompt_layer`
    """Return the last choice in a file for this sweep, weights and data, or append a new one."""
    bb = load_config_backbone(cfg)
    options: dict[str, Any] = dict(
        head=cfg.head,
        prompt_length=cfg.get("prompt_length", PromptConfig.prompt_length),
        max_len=cfg.max_len,
        template=cfg.template if cfg.head == "verbalizer" else None,
    )
    digests = dict(weights=backbone_id(bb), data=task.digest())

    def choose() -> dict:
        """Choose a layer, and return the record of the choice."""
        started = time.perf_counter()
        bb.model.to("cuda" if cfg.device == "auto" and torch.cuda.is_available() else "cpu")
        choice = choose_prompt_layer(bb, task, **options)
        settings = config_to_record(cfg)
        choice |= {name: settings[name] for name in ("backbone", "data", "shots", "split_seed")}
        provenance = collect_provenance(started, torch.get_num_threads())
        return {**choice, "split_sizes": task.split_sizes(), "provenance": provenance}

    fingerprint = dict(task=task.name, **options, digests=digests)
    return RunStore(out).get_or_run(fingerprint, choose)


def try_choose_layer(
    methods: Sequence[str],  # keys of `METHODS`
    cfg: RunOptions,  # settings of the sweep
    task: Task,  # with its splits
    out: Path,  # JSONL file of choices
) -> dict | None:  # None: no late method, or a task without a choice (regression, few examples)
    """Load or choose a layer if a method has one; log the reason where no choice is possible.

    Raises: `UserError` if a line of the file is damaged.
    """
    if not set(methods) & set(late_prompt_methods()):
        return None
    read_existing_records(out)  # a damaged file must raise, and not be taken for a missing choice
    try:
        return load_or_choose_layer(cfg, task, out)
    except ValueError as e:
        logger.info(f"No layer is chosen without training: {e}")
        return None


def layer_choice_regret(
    records: list[dict],  # records of one sweep
    choice: dict,  # from `choose_prompt_layer`
) -> pd.DataFrame:  # one row for each late method
    """Tabulate the points lost with the chosen, the middle and a random layer, and the seconds."""
    if records and not choice_matches_sweep(choice, records[0]):
        raise UserError(
            "the choice was made for another task, backbone, head, text or prompt length than the "
            "sweep. Choose again with the settings of the sweep."
        )
    chosen = choice["layer"]
    rows = []
    for method, group in _select_late_records(records).groupby("method", sort=False):
        scores = group.groupby("layer").score
        middle = group.n_layers.iloc[0] // 2
        means = scores.mean()
        for layer in (chosen, middle):
            if layer not in means.index:
                raise UserError(
                    f"the sweep of {method!r} has layers {list(means.index)}, but not {layer}: "
                    "sweep every layer first."
                )
        best = means.max()
        seconds = (group.seconds + group.tuning_seconds).sum()
        rows.append(
            dict(
                task=group.task.iloc[0],
                method=method,
                best=int(means.idxmax()),
                chosen=chosen,
                regret=best - means[chosen],
                middle=best - means[middle],
                random=best - means.mean(),
                noise=(scores.var().mean() / scores.size().min()) ** 0.5,
                seconds=choice["seconds"],
                sweep_seconds=seconds,
                share_of_sweep=choice["seconds"] / seconds,
            )
        )
    return pd.DataFrame(rows)


_PROBED = dict(n=1000, prompt=False)  # examples of each split; prompt positions are not probed


def _train_and_probe(experiment: Experiment, layers: list[int], probe: ProbeConfig) -> list[dict]:
    """Train a model and probe some layers; return their records, or that of a diverged run."""
    cfg = experiment.cfg
    task = experiment.task
    template = cfg.template if cfg.head == "verbalizer" else None
    try:
        model, log = experiment.fit()
        measurements = probe_layers(
            model, task, layers, _PROBED["n"], cfg.max_len, template, **asdict(probe)
        )
    except FloatingPointError as e:
        return [experiment.record_divergence(e)]
    run = (cfg, experiment.digests(), task.split_sizes(), experiment.start_time, model, log)
    return [build_record(*run, **measurement) for measurement in measurements]


def _measure_curve(
    experiment: Experiment, L: int, probe: ProbeConfig, store: RunStore
) -> list[dict]:  # a record for each layer, or the record of the run, which diverged
    """Return the points of a curve; train and probe if the store lacks some of them."""
    cfg = experiment.cfg
    title = f"{cfg.method}  prompt at layer {cfg.get('layer')}  seed {cfg.seed}"
    fingerprint = make_fingerprint(
        cfg,
        experiment.digests(),
        prompt_layer=cfg.get("layer"),
        lr_selection="given",
        n_layers=L,
        probe={**_PROBED, **asdict(probe)},
    )
    del fingerprint["layer"]  # of a record it is the layer that is probed
    diverged = store.find({**fingerprint, "status": "diverged"})
    if diverged:
        return [diverged]
    points: dict[int, Any] = {
        layer: store.find({**fingerprint, "layer": layer}) for layer in range(1, L + 1)
    }
    missing = [layer for layer, point in points.items() if point is None]
    if not missing:
        return [*points.values()]
    logger.info(f"{title}: training, then probing {len(missing)} layers")
    for record in _train_and_probe(experiment, missing, probe):
        point = store.add({**record, **fingerprint})
        if point["status"] == "diverged":
            logger.info(f"{title}  diverged")
            return [point]
        points[point["layer"]] = point
    logger.info(f"{title}  " + " ".join(f"{point['bits']:.2f}" for point in points.values()))
    return [*points.values()]


def measure_information_curves(
    cfg: RunConfig,  # with a learning rate, unless `layer_learning_rates` has one for each layer
    task: Task,  # with its splits
    prompt_layers: Sequence[int] | None = None,  # None: the first, the middle and the last layer
    seeds: int = 3,  # number of seeds: 0 … seeds−1
    layer_learning_rates: dict[int, float] | None = None,  # prompt layer → learning rate
    out: Path | None = None,  # JSONL file; what it contains is not computed again
    **probe: Any,  # fields of `ProbeConfig`: depth, width, steps, …
) -> list[dict]:  # a record for each seed, prompt layer and probed layer of the finished runs
    """Measure the information in each layer above trained prompts (LPT §4, Figure 2 right).

    Raises: `DivergenceError` if all runs diverge.
    """
    L = load_backbone(cfg.backbone).n_layers
    store = RunStore(out)
    prompt_layers = (0, L // 2, L - 1) if prompt_layers is None else prompt_layers
    records = []
    for seed, prompt_layer in product(range(seeds), prompt_layers):
        lr = (layer_learning_rates or {}).get(prompt_layer, cfg.lr)
        experiment = Experiment(cfg.with_options(layer=prompt_layer, seed=seed, lr=lr), task)
        records += _measure_curve(experiment, L, ProbeConfig(**probe), store)
    finished = select_finished(records)
    if records and not finished:
        raise DivergenceError(records[0]["message"])
    return finished

"""What generating a prompt is worth, by the number of frozen layers above it.

A static prompt leaves the text to the frozen layers above it. A generated prompt hands them what
a small network has read below it. So the contrast of interest is *generated minus static before
the same layer*, and how it changes from layer to layer. The records are those of runs without a
trained head: SmolLM2 in `results/why/layers-*.jsonl`, the bundled models in `results/crossing`.

`contrast_by_depth` has a row for each layer, `estimate_slope` the planned dose-response test,
`contrast_by_step` the contrast on validation while the prompts learn, and `mechanism_table` what
was measured in the trained models.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import t as student_t

from idp_tutorial.runs.logits import has_logits
from idp_tutorial.runs.statistics import paired_bootstrap, per_example_scores
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import read_records

INPUT_METHODS = ("prompt-tuning", "s-idpg-phm")
TUNING_SEEDS = 2  # a learning rate is chosen by the validation scores of seeds 0 and 1


def read_depth_records(
    *files: Path | str,  # JSONL files of records
    default_layer: int | None = None,  # of records without a layer; None: they are left out
) -> list[dict]:  # each with its `folder`
    """Read the finished runs with a prompt, each with its layer and folder.

    A prompt of a method without this option enters at the input, so its layer is 0. Files that do
    not exist are skipped.
    """
    records = []
    for file in map(Path, files):
        for record in read_records(file) if file.exists() else ():
            if record.get("layer") is None:
                layer = 0 if record["method"] in INPUT_METHODS else default_layer
                record = {**record, "layer": layer}
            if record["status"] == "done" and record.get("layer") is not None:
                records.append({**record, "folder": file.parent})
    return records


def select_chosen_runs(
    records: Sequence[dict],  # of one task, backbone and number of steps
) -> dict[tuple[str, int], dict[int, dict]]:  # method and layer: seed: record
    """Return the runs at the learning rate that validation chose, for each method and layer."""
    by_cell: dict[tuple[str, int], dict[float, dict[int, dict]]] = {}
    for record in records:
        rates = by_cell.setdefault((record["method"], record["layer"]), {})
        rates.setdefault(record["lr"], {})[record["seed"]] = record
    chosen = {}
    for cell, rates in by_cell.items():
        validation = {}
        for rate, runs in rates.items():
            if {*range(TUNING_SEEDS)} <= {*runs}:
                validation[rate] = np.mean([runs[i]["validation"] for i in range(TUNING_SEEDS)])
        if validation:
            runs = rates[max(validation, key=lambda rate: validation[rate])]
            chosen[cell] = {seed: runs[seed] for seed in sorted(runs)}
    return chosen


def _paired_differences(
    records: Sequence[dict], generated: str, static: str, layer: int
) -> tuple[dict[int, np.ndarray], tuple[float, float]] | None:
    """Return generated minus static by seed `[N]`, and both mean scores; None without a pair."""
    chosen = select_chosen_runs(records)
    sides = [chosen.get((method, layer), {}) for method in (generated, static)]
    seeds = sorted({*sides[0]} & {*sides[1]})
    scores: list[dict[int, np.ndarray]] = [{}, {}]
    for seed in seeds:
        pair = [runs[seed] for runs in sides]
        if all(has_logits(record, record["folder"]) for record in pair):
            for of_side, record in zip(scores, pair):
                of_side[seed] = per_example_scores(record, record["folder"])
    if not scores[0]:
        return None
    differences = {seed: scores[0][seed] - scores[1][seed] for seed in scores[0]}
    means = [float(np.mean([*of_side.values()])) for of_side in scores]
    return differences, (means[0], means[1])


def _shared_layers(records: Sequence[dict], *methods: str) -> list[int]:
    pairs = {(r["method"], r["layer"]) for r in records}
    layers = {layer for _, layer in pairs}
    return sorted(k for k in layers if pairs.issuperset((method, k) for method in methods))


def contrast_by_depth(
    records: Sequence[dict],  # from `read_depth_records`, of one task and backbone
    generated: str = "lpt-npg",  # method whose prompt reads the text
    static: str = "lpt",  # method whose prompt does not
) -> pd.DataFrame:
    """Return generated minus static before each layer that both have, paired by seed and text.

    The columns are layer, layers_above, generated, static (mean scores), effect, low, high, p and
    runs.
    """
    rows = []
    for layer in _shared_layers(records, generated, static):
        paired = _paired_differences(records, generated, static, layer)
        if paired is None:
            continue
        differences, scores = paired
        values = np.stack([*differences.values()])
        estimate = paired_bootstrap(values, np.zeros_like(values))
        n_layers = next(r["n_layers"] for r in records if r["layer"] == layer)
        row: dict[str, Any] = dict(layer=layer, layers_above=n_layers - layer)
        row |= dict(generated=scores[0], static=scores[1])
        row |= {key: float(estimate[key]) for key in ("effect", "low", "high", "p")}
        rows.append(row | dict(runs=len(differences)))
    columns = ["layer", "layers_above", "generated", "static", "effect", "low", "high", "p", "runs"]
    return pd.DataFrame(rows, columns=columns)


def contrast_with_control(
    records: Sequence[dict],  # from `read_depth_records`, of one task and backbone
    controls: Path | str,  # JSONL file with a record of the control, and its logits beside it
    control: str = "probe",  # method without a prompt, whose fit does not depend on the seed
    generated: str = "lpt-npg",
) -> pd.DataFrame:
    """Return generated minus a control for each layer, paired by test text.

    The columns are layer, layers_above, control (its score), effect, low, high and p. Raises:
    `UserError` if the file has no finished run of the control on the task.
    """
    task = records[0]["task"]
    wanted = (control, task, "done")
    runs = [r for r in read_records(controls) if (r["method"], r["task"], r["status"]) == wanted]
    if not runs:
        raise UserError(f"{controls} has no run of {control!r} on {task!r}: run it first.")
    of_control = per_example_scores(runs[0], Path(controls).parent)
    rows = []
    for (method, layer), seeds in select_chosen_runs(records).items():
        if method == generated:
            runs_with_logits = [r for r in seeds.values() if has_logits(r, r["folder"])]
            scores = [per_example_scores(r, r["folder"]) for r in runs_with_logits]
            values = np.stack(scores) - of_control
            estimate = paired_bootstrap(values, np.zeros_like(values))
            above = next(iter(seeds.values()))["n_layers"] - layer
            row = dict(layer=layer, layers_above=above, control=float(of_control.mean()))
            rows.append(row | {k: float(estimate[k]) for k in ("effect", "low", "high", "p")})
    columns = ["layer", "layers_above", "control", "effect", "low", "high", "p"]
    return pd.DataFrame(rows, columns=columns).sort_values("layer", ignore_index=True)


def estimate_slope(
    records: Sequence[dict],  # from `read_depth_records`, of one task and backbone
    generated: str = "lpt-npg",
    static: str = "lpt",
    layers: Sequence[int] | None = None,  # None: all that both methods have but 0
) -> dict[str, Any] | None:  # None: fewer than two layers with a shared seed
    """Estimate by how many points generated minus static grows with each fewer frozen layer above.

    The slope of least squares is a weighted sum of the layers' differences, so each seed and text
    has a slope of its own; `paired_bootstrap` resamples both. The result has its keys, and the
    `layers` and number of `runs`. Before layer 0 a generator may read what is the same for every
    text, which says nothing about reading: layer 0 is left out unless it is asked for.
    """
    wanted = _shared_layers(records, generated, static) if layers is None else layers
    differences = {}
    for layer in wanted:
        paired = _paired_differences(records, generated, static, layer)
        if paired and (layer or layers is not None):
            differences[layer] = paired[0]
    if len(differences) < 2:
        return None
    seeds = sorted(set.intersection(*({*by_seed} for by_seed in differences.values())))
    if not seeds:
        return None
    depth = np.array([*differences], float)
    weights = (depth - depth.mean()) / ((depth - depth.mean()) ** 2).sum()
    slopes: Any = 0.0
    for weight, by_seed in zip(weights, differences.values()):
        slopes = slopes + weight * np.stack([by_seed[seed] for seed in seeds])
    estimate = paired_bootstrap(slopes, np.zeros_like(slopes))
    return dict(estimate, layers=[*differences], runs=len(seeds))


def contrast_by_step(
    records: Sequence[dict],  # from `read_depth_records`, of one task and backbone
    layer: int,
    generated: str = "lpt-npg",
    static: str = "lpt",
) -> pd.DataFrame:  # columns: step, effect, low, high, runs
    """Return generated minus static on validation at each evaluation, with an interval over seeds.

    Both prompts enter before the same layer. The interval is Student's, since the predictions on
    validation are not stored; texts are not resampled.
    """
    chosen = select_chosen_runs(records)
    curves = []
    for method in (generated, static):
        runs = chosen.get((method, layer), {})
        curves.append(pd.DataFrame({seed: dict(r["history"]) for seed, r in runs.items()}))
    differences = (curves[0] - curves[1]).dropna(how="all").dropna(axis=1)
    rows = []
    for step, values in differences.iterrows():
        n = len(values)
        error = values.std() / n**0.5 * student_t.ppf(0.975, n - 1) if n > 1 else np.nan
        effect = values.mean()
        rows.append(dict(step=step, effect=effect, low=effect - error, high=effect + error, runs=n))
    return pd.DataFrame(rows, columns=["step", "effect", "low", "high", "runs"])


READER_MEASUREMENTS = {  # key of a measurement: what it is
    "accuracy": "test accuracy (%)",
    "common_share": "share of the change that all texts have in common",
    "effective_dimension": "effective dimension of the rest",
    "prompt_probe": "label read off the prompt alone (%)",
    "follows_prompt": "predictions that follow another text's prompt (%)",
    "follows_text": "predictions that stay with the text (%)",
}


def mechanism_table(
    *files: Path | str,  # `readers-*.jsonl` of results/crossing
) -> pd.DataFrame:  # a row per method and layer: means over seeds, and their number
    """Return what was measured in the trained models, as means over the seeds."""
    lines: list[dict] = []
    for file in map(Path, files):
        if file.exists():
            lines += map(json.loads, file.read_text(encoding="utf-8").splitlines())
    columns = ["method", "layer", "seed", *READER_MEASUREMENTS]
    measured = pd.DataFrame(lines, columns=columns).drop_duplicates(["method", "layer", "seed"])
    groups = measured.groupby(["method", "layer"])
    table = groups[[*READER_MEASUREMENTS]].mean()
    table["seeds"] = groups.size()
    return table.reset_index()

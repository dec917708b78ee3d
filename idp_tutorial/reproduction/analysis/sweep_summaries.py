"""Tables that summarise a layer sweep: score and cost by depth, and the regret of a layer choice.

On RoBERTa-large, TREC and RTE, LPT finds a static prompt best after 11 to 13 of 24 layers; of
the generators, NPG is worse in the upper half and the pooling generators are not (§4, §5.2). Is
that general, or a property of one model? The questions become three functions of the records of
a sweep, and are tested on synthetic records with known results. The results of the stored
sweeps are in the lab: depth.

A wiggly line always suggests a hump. So the criterion is numerical: does the mean of the middle
third of the layers exceed the first *and* the last layer by more than two standard errors of
that difference?
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from idp_tutorial.assembly.config import recorded_option
from idp_tutorial.methods.registry import late_prompt_methods
from idp_tutorial.reproduction.analysis.layer_choice import (
    MATCHED_SWEEP_SETTINGS,
    choice_matches_sweep,
)
from idp_tutorial.reproduction.analysis.layer_sweep import check_single_sweep, sweep_table
from idp_tutorial.utils.checks import UserError

if TYPE_CHECKING:
    import pandas as pd
    from pandas.core.groupby import DataFrameGroupBy

__all__ = ["depth_profile_table", "tradeoff_table", "layer_choice_regret"]


def _no_late_records_error(records: list[dict]) -> UserError:
    """Return the error for records without a late method."""
    return UserError(
        f"none of the {len(records)} records has a late method. Sweep one of "
        f"{', '.join(late_prompt_methods())}."
    )


def _group_late_records(records: list[dict]) -> "DataFrameGroupBy":
    """Group the records of late methods of one sweep by method."""
    import pandas as pd

    late = late_prompt_methods()
    df = pd.DataFrame([r for r in check_single_sweep(records) if r["method"] in late])
    if not len(df):
        raise _no_late_records_error(records)
    return df.groupby("method", sort=False)


def depth_profile_table(
    records: list[dict],  # records of one sweep
) -> "pd.DataFrame":  # one row for each late method
    """Compare the scores of the first layer, the middle third and the last layer (LPT §4).

    `error` is the standard error of such a difference; `middle_maximum` tells whether the middle
    exceeds both ends by two of them.
    """
    import pandas as pd

    rows = []
    for method, group in _group_late_records(records):
        L = group.n_layers.iloc[0]
        scores = group.groupby("layer").score
        means = scores.mean()
        middle_third = [layer for layer in scores.groups if L / 3 <= layer < 2 * L / 3]
        first = means.get(0, np.nan)
        middle = means[middle_third].mean()
        last = means.get(L - 1, np.nan)
        variance = scores.var().mean() * (1 + 1 / max(1, len(middle_third))) / scores.size().min()
        error = variance**0.5
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


def _interpolate_speed_up(
    timing_records: Sequence[dict], depth_fraction: float, cached: bool
) -> float:
    """Return the speed-up over fine-tuning at a fraction of the layers; NaN where not measured."""
    points = sorted(
        (r["layer"] / r["n_layers"], 1 / r["ratio"])
        for r in timing_records
        if r["cached"] == cached
    )
    if not points:
        return np.nan
    fractions, times = zip(*points)
    return 1 / np.interp(depth_fraction, fractions, times, np.nan, np.nan)


def _check_times(timing_records: Sequence[dict]) -> None:
    """Check that all timing records are of one late method on one backbone."""
    timed = {(r["method"], r["backbone"]) for r in timing_records}
    if len(timed) > 1 or any(method not in late_prompt_methods() for method, _ in timed):
        names = ", ".join(f"{method} on {backbone}" for method, backbone in sorted(timed))
        raise UserError(
            f"timing_records must be of one late method on one backbone, got {names}. "
            "Leave the others out."
        )


def tradeoff_table(
    records: list[dict],  # records of one sweep
    depth_fractions: Sequence[float] = (1 / 4, 1 / 2, 3 / 4),  # layers below the prompt, 0 … 1
    timing_records: Sequence[dict] = (),  # of `idp bench` for one late method, on any backbone
) -> "pd.DataFrame":  # one row for each late method and depth
    """Tabulate score, saved memory and speed-up over fine-tuning by depth (LPT, Table 10)."""
    import pandas as pd

    table = sweep_table(records)
    late = late_prompt_methods()
    L = next((r["n_layers"] for r in records if r["method"] in late), None)
    if L is None:
        raise _no_late_records_error(records)
    _check_times(timing_records)
    fine_tuning_ms = np.nan
    fine_tuning_mb = np.nan
    fine_tuning = table[table.method == "fine-tuning"]
    if len(fine_tuning):
        fine_tuning_ms = fine_tuning.ms_per_step.iloc[0]
        fine_tuning_mb = fine_tuning.peak_memory_mb.iloc[0]
    layers = [round(L * fraction) for fraction in depth_fractions]
    table = table[table.method.isin(late) & table.layer.isin(layers)]

    def measured_speed_ups(cached: bool) -> list[float]:
        """Return the interpolated speed-up at each row's layer."""
        return [_interpolate_speed_up(timing_records, layer / L, cached) for layer in table.layer]

    return pd.DataFrame(
        dict(
            method=table.method,
            layer=table.layer.astype(int),
            score=table.score,
            std=table["std"],
            params=table.params,
            memory_saved=1 - table.peak_memory_mb / fine_tuning_mb,
            speed_up=fine_tuning_ms / table.ms_per_step,
            ideal=3 * L / (2 * L - table.layer),
            measured=measured_speed_ups(False),
            ideal_cached=3 * L / (2 * (L - table.layer)),
            measured_cached=measured_speed_ups(True),
        )
    ).reset_index(drop=True)


def _check_choice(choice: dict, record: dict) -> None:
    """Check that a choice was made with the settings of a sweep's record."""
    if choice_matches_sweep(choice, record):
        return
    differences = []
    for name in MATCHED_SWEEP_SETTINGS:
        value = recorded_option(record, name)
        if name in choice and choice[name] != value:
            differences.append(f"{name}={choice[name]!r}, the sweep with {name}={value!r}")
    raise UserError(
        f"the choice was made with {'; '.join(differences)}. Choose again with the settings of "
        "the sweep."
    )


def layer_choice_regret(
    records: list[dict],  # records of one sweep
    choice: dict,  # from `choose_prompt_layer`
) -> "pd.DataFrame":  # one row for each late method
    """Tabulate the points lost with the chosen, the middle and a random layer, and the seconds."""
    import pandas as pd

    if records:
        _check_choice(choice, records[0])
    chosen = choice["layer"]
    rows = []
    for method, group in _group_late_records(records):
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

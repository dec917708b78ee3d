"""Times of methods as prompt length, text length, prompt depth or batch size varies.

A speed-up is measured at one batch size, one length, one depth. How does it change at others?
The cost model predicts it for each axis, and `benchmark_methods` measures it.

One of four settings varies and the others stay fixed: prompt length, text length, layers below
the prompt, batch size.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.methods.registry import late_prompt_methods
from idp_tutorial.reproduction.efficiency.method_times import (
    benchmark_methods,
    list_benchmark_variants,
)
from idp_tutorial.utils.checks import check_name, require_packages
from idp_tutorial.utils.config import RunConfig

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "SCALING_METHODS",
    "SCALING_VALUES",
    "SCALING_AXIS_LABELS",
    "time_scaling",
    "plot_scaling",
]


SCALING_METHODS = ("prompt-tuning", "s-idpg-phm", "lpt-npg")
SCALING_VALUES: dict[str, tuple[int, ...] | None] = dict(
    prompt_length=(5, 10, 20, 50, 100, 200),
    length=(32, 64, 128, 256, 512),
    depth=None,  # seven layers from the first to the last
    batch=(1, 2, 4, 8, 16),
)


def _time_at(
    axis: str,
    value: int,
    bb: Backbone,
    base: RunConfig,
    methods: Sequence[str],
    options: dict,
) -> list[dict]:
    """Time methods with one value of an axis other than the depth."""
    if axis == "length":
        base = replace(base, max_len=value)
    elif axis == "batch":
        base = replace(base, batch_size=value)
    else:
        options = {**options, "prompt_length": value}
    variants = list_benchmark_variants(methods, bb.n_layers, [bb.n_layers // 2])
    return benchmark_methods(bb, variants, base, **options)


def time_scaling(
    axis: str,  # key of `SCALING_VALUES`
    bb: Backbone,
    base: RunConfig,  # from `make_benchmark_config`
    methods: Sequence[str] = SCALING_METHODS,  # keys of `METHODS`; late ones are in the middle
    values: Sequence[int] | None = None,  # None: `SCALING_VALUES`
    **options: Any,  # further arguments of `benchmark_methods`
) -> list[dict]:  # of `benchmark_methods`, with the axis as `grow` and its `value`
    """Time methods while one setting varies.

    For the axis 'depth' only late methods are timed (if no method is late, LPT's NPG).
    """
    check_name(axis, SCALING_VALUES, "axis")
    L = bb.n_layers
    if axis == "depth":
        late = [m for m in methods if m in late_prompt_methods()] or ["lpt-npg"]
        layers = values or sorted({round(i * (L - 1) / 6) for i in range(7)})
        variants = list_benchmark_variants(late, L, layers)
        records = benchmark_methods(bb, variants, base, **options)
        return [{**r, "grow": axis, "value": r["layer"]} for r in records]
    records = []
    for value in values or SCALING_VALUES[axis] or ():
        for r in _time_at(axis, value, bb, base, methods, options):
            records.append({**r, "grow": axis, "value": value})
    return records


SCALING_AXIS_LABELS = dict(
    prompt_length="prompt length $t$",
    length="tokens of an example",
    depth="layers below the prompt",
    batch="batch size",
)


def _plot_axis(ax: "Axes", df: "pd.DataFrame", axis: str, lines: list) -> None:
    """Plot the speed-ups along one axis, with one colour for each method and use of the cache."""
    groups = df.sort_values("value").groupby(["method", "cached"], sort=False)
    for (method, cached), group in groups:
        color = f"C{lines.index((method, cached))}"
        label = method + (", cached" if cached else "")
        ax.plot(group.value, group.ratio, "o", color=color, label=label)
        ax.plot(group.value, group.ideal, color=color, lw=1)
    values = sorted(df.value.unique())
    ax.set(
        xlabel=SCALING_AXIS_LABELS[axis],
        xscale="linear" if axis == "depth" else "log",
        yscale="log",
        xticks=values,
        xticklabels=values,
    )
    low, high = ax.get_ylim()
    ticks = [v for v in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= v <= high]
    ax.set_yticks(ticks, [f"{v:g}" for v in ticks])
    ax.minorticks_off()


def plot_scaling(
    records: list[dict],  # from `time_scaling` or `idp_bench --grow`
) -> "Figure | None":  # None: there are no records, and the commands that make them are printed
    """Plot the measured speed-up over fine-tuning as dots, and that of the cost model as lines."""
    require_packages("matplotlib")
    import matplotlib.pyplot as plt
    import pandas as pd

    df = pd.DataFrame(
        [r for r in records if r.get("grow") and r.get("ms") and r["method"] != "fine-tuning"]
    )
    if not len(df):
        print("There are no measurements. To make them, run on an idle machine:")
        for axis in SCALING_VALUES:
            print(
                f"idp_bench --backbone roberta-large --grow {axis} "
                "--out results/speed/bench-grow.jsonl"
            )
        return None
    axes = [axis for axis in SCALING_VALUES if axis in set(df.grow)]
    lines = [*df.groupby(["method", "cached"], sort=False).groups]
    fig, axs = plt.subplots(1, len(axes), figsize=(3.2 * len(axes), 3), squeeze=False)
    for ax, axis in zip(axs[0], axes):
        _plot_axis(ax, df[df.grow == axis], axis, lines)
    axs[0, 0].set_ylabel("speed-up over fine-tuning")
    axs[0, 0].legend(frameon=False, fontsize=7)
    return fig

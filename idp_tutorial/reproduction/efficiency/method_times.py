"""Times of training steps of all methods in one process, compared with fine-tuning.

The cost model predicts what a method should cost. What does it cost through `fit`, as it is
used? Three rules make the measurement meaningful. Everything runs in one process, so that
machine, libraries and threads are the same. The methods take turns: a few steps each, round
after round. And every result is a ratio to fine-tuning in the same round, data loading and
AdamW included.

LPT sets all inputs to 256 tokens. So we make a task whose examples all have the wanted length:
random words of the bundled reviews, more of them than fit, which `encode` truncates.

A speed-up depends on the setting. `time_scaling` varies one of four settings and keeps the
others: prompt length, text length, layers below the prompt, batch size.
"""

import gc
import logging
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.registry import METHODS, late_prompt_methods
from idp_tutorial.reproduction.efficiency.cost_model import (
    KEY_VALUE_SHARE,
    LPT_PUBLISHED_SPEEDS,
    compare_published_speeds,
    first_backward_layer,
    ideal_speed_up,
    step_cost,
)
from idp_tutorial.reproduction.efficiency.timing import summarize_times, tokens_per_ms
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.checks import UserError, check_name, require_packages

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BenchmarkVariant",
    "make_timing_task",
    "list_benchmark_variants",
    "restore_backbone_on_exit",
    "make_benchmark_config",
    "benchmark_methods",
    "SCALING_METHODS",
    "SCALING_VALUES",
    "time_scaling",
    "plot_scaling",
]

logger = logging.getLogger(__name__)


def make_timing_task(
    n: int,  # number of training examples
    length: int,  # words of each example, which `encode` truncates to as many tokens
) -> Task:
    """Make a task for timing, with random words and labels."""
    rng = random.Random(0)
    words = " ".join(r["sentence1"] for r in make_rows("sentiment", "train", n=64)).split()

    def rows(n: int) -> list[dict]:
        """Return n rows with alternating labels."""
        return [
            dict(sentence1=" ".join(rng.choices(words, k=length)), label=i % 2) for i in range(n)
        ]

    return replace(TASKS["sentiment"], splits=dict(train=rows(n), validation=rows(1), test=rows(1)))


BENCHMARK_PROMPT_LENGTHS = {  # method → prompt length; other methods: 10
    **{r.method: r.prompt_length for r in LPT_PUBLISHED_SPEEDS if r.prompt_length},
    "lpt": 20,
    "p-tuning": 20,
    "prompt-tuning-134": 134,
    **dict.fromkeys(("s-idpg-dnn", "m-idpg-dnn", "m-idpg-phm", "m-idpg-phm-glove", "smop"), 5),
}


class BenchmarkVariant(NamedTuple):
    """Row of the table of times: a method at one layer, with or without cached hidden states."""

    method: str  # key of `METHODS`
    layer: int | None = None  # layers below the prompt
    cached: bool = False  # whether cached hidden states are used
    dtype: str = "float32"  # dtype of the frozen weights


def list_benchmark_variants(
    methods: Iterable[str],  # keys of `METHODS`
    L: int,  # number of layers of the backbone
    layers: Sequence[int] | None = None,  # for late methods; None: a quarter, half, three quarters
    cached: bool = True,  # add variants with a cache where there is something to cache
) -> list[BenchmarkVariant]:  # fine-tuning, the baseline, comes first
    """List the variants of methods that are timed."""
    variants = []
    for method in dict.fromkeys(("fine-tuning", *methods)):
        row = METHODS[check_name(method, METHODS, "method")]
        depths: Sequence[int | None] = [None]  # AdapterDrop has its default layer
        if row.insertion_point == "middle":
            depths = (L // 4, L // 2, 3 * L // 4) if layers is None else layers
        resolved = [
            first_backward_layer(method, L, depth) if row.trains_upper_layers_only else None
            for depth in depths
        ]
        for layer in dict.fromkeys(resolved):
            variants.append(BenchmarkVariant(method, layer))
            if cached and step_cost(method, L, layer, True) != step_cost(method, L, layer):
                variants.append(BenchmarkVariant(method, layer, True))
    return variants


@contextmanager
def restore_backbone_on_exit(bb: Backbone) -> Iterator[None]:
    """Freeze the backbone and undo its edit when the block ends."""
    try:
        yield
    finally:
        if bb.active_edit is not None:
            bb.active_edit.restore()
        for p in bb.model.requires_grad_(False).eval().parameters():
            p.grad = None
        if bb.word_embeddings.weight.numel() > 1e7:
            # frees the state of a large optimizer; for a small one it takes longer than a step
            gc.collect()


def _time_one_turn(bb: Backbone, task: Task, cfg: RunConfig) -> tuple[float, float]:
    """Return the milliseconds and the MB of a step of a new model."""
    with restore_backbone_on_exit(bb):
        log = fit(build_model(cfg, bb, task), task, cfg)
    return log.ms_per_step, log.peak_memory_mb


def make_benchmark_config(
    bb: Backbone,
    batch_size: int = 4,  # examples in a step
    length: int = 64,  # tokens of an example
    **options: Any,  # further fields of `RunConfig`
) -> RunConfig:
    """Return the configuration of a turn: three steps with a negligible learning rate."""
    defaults = dict(
        backbone=bb.name,
        pooling="cls",
        steps=3,
        eval_every=3,
        batch_size=batch_size,
        max_len=length,
        lr=1e-8,
        device="cpu",
    )
    return RunConfig(**{**defaults, **options})


def _make_variant_config(
    bb: Backbone,
    base: RunConfig,
    variant: BenchmarkVariant,
    prompt_length: int | None,
    folder: Path | str,
) -> RunConfig:
    """Return the configuration of a variant.

    Raises: `UserError` if its sequences are too long for the backbone.
    """
    options = base.with_options(
        layer=variant.layer,
        prompt_length=prompt_length or BENCHMARK_PROMPT_LENGTHS.get(variant.method, 10),
        dtype=variant.dtype,
        cache="both" if variant.cached else "none",
        cache_dir=str(folder),
    )
    cfg = options.with_method(variant.method)
    needs_positions = METHODS[variant.method].insertion_point in ("input", "layers", "keys")
    n_prompt = cfg.get("prompt_length", 0) if needs_positions else 0
    if base.max_len + n_prompt > bb.max_tokens:
        prompt = ""
        other_fix = ""
        if n_prompt:
            prompt = f" and the {n_prompt} prompt positions of {variant.method!r}"
            other_fix = ", a smaller prompt_length, or leave this method out"
        raise UserError(
            f"backbone {bb.name!r} has {bb.max_tokens} positions, too few for length={base.max_len}"
            f"{prompt}. Use length={max(bb.max_tokens - n_prompt, 1)} or less"
            f"{other_fix}."
        )
    return cfg


def _published_speed(backbone: str, variant: BenchmarkVariant) -> dict:
    """Return LPT's speed-up (`paper`) and saved memory (`paper_saved`) of a variant, or None."""
    table = compare_published_speeds()
    has_layer = table.layer.isna() if variant.layer is None else table.layer == variant.layer
    rows = table[(table.backbone == backbone) & (table.method == variant.method) & has_layer]
    if not len(rows) or variant.cached:
        return dict(paper=None, paper_saved=None)
    row = rows.iloc[0]
    return dict(paper=float(row.speed_up), paper_saved=float(row.memory_saved))


def _make_record(
    bb: Backbone,
    cfg: RunConfig,
    variant: BenchmarkVariant,
    baseline: BenchmarkVariant,
    ms: dict[BenchmarkVariant, list[float]],
    mb: dict[BenchmarkVariant, float],
    refused: str | None,
) -> dict:
    """Return the record of a variant: its time and memory, the cost model's, and LPT's."""
    insertion_point = METHODS[variant.method].insertion_point
    has_prompt = insertion_point in ("input", "layers", "keys", "middle")
    record = dict(
        method=variant.method,
        layer=variant.layer,
        cached=variant.cached,
        weights_dtype=variant.dtype,
        prompt_length=cfg.get("prompt_length") if has_prompt else None,
        refused=refused,
    )
    if refused:
        return record
    times = summarize_times(np.array(ms[variant]), np.array(ms[baseline]))
    ideal = ideal_speed_up(
        variant.method,
        bb.n_layers,
        variant.layer,
        variant.cached,
        prompt_length=cfg.get("prompt_length") if has_prompt else 0,
        T=cfg.max_len,
        d=bb.d,
        last_layer_share=KEY_VALUE_SHARE if bb.supports_single_position else 1.0,
    )
    is_finite = bool(np.isfinite(ideal))
    return {
        **record,
        **times,
        "tokens_per_ms": tokens_per_ms(cfg.batch_size, cfg.max_len, times["ms"]),
        "ideal": ideal if is_finite else None,
        "share": times["ratio"] / ideal if is_finite else None,
        "mb": mb[variant],
        "saved": 1 - mb[variant] / mb[baseline],
        **_published_speed(bb.name, variant),
    }


class _Turns:
    """Times and memory of variants that take turns."""

    def __init__(self, variants: Sequence[BenchmarkVariant]) -> None:
        self.variants = variants
        self.ms: dict[BenchmarkVariant, list[float]] = {variant: [] for variant in variants}
        self.mb: dict[BenchmarkVariant, float] = {}
        self.refused: dict[BenchmarkVariant, str] = {}

    def run_round(
        self,
        time_variant: Callable[[BenchmarkVariant], tuple[float, float]],
        is_warmup: bool,
    ) -> None:
        """Time every variant once; a variant that raises `ValueError` takes no more turns."""
        for variant in self.variants:
            if variant in self.refused:
                continue
            try:
                ms, self.mb[variant] = time_variant(variant)
            except ValueError as e:  # the family of the backbone does not support the method
                if variant == self.variants[0]:  # without the baseline there is no ratio
                    raise
                self.refused[variant] = str(e)
                continue
            if not is_warmup:
                self.ms[variant].append(ms)


def benchmark_methods(
    bb: Backbone,
    variants: Sequence[
        BenchmarkVariant
    ],  # from `list_benchmark_variants`; the first is the baseline
    base: RunConfig,  # from `make_benchmark_config`
    prompt_length: int | None = None,  # None: `BENCHMARK_PROMPT_LENGTHS`
    repeats: int = 7,  # rounds that are counted
    warmup: int = 1,  # rounds before them
    bb_bfloat16: Backbone | None = None,  # the backbone in bfloat16, for variants of this dtype
) -> list[dict]:  # one record for each variant; `refused` has the reason if it could not run
    """Time variants through `fit` in turns, and compare them with the cost model and with LPT."""
    if repeats < 1 or warmup < 0 or (prompt_length is not None and prompt_length < 1):
        raise UserError(
            f"repeats and prompt_length must be at least 1 and warmup at least 0, got "
            f"repeats={repeats}, warmup={warmup} and prompt_length={prompt_length}."
        )
    backbones = {"float32": bb, "bfloat16": bb_bfloat16}
    task = make_timing_task(base.steps * base.batch_size, base.max_len)
    turns = _Turns(variants)
    with tempfile.TemporaryDirectory() as folder:
        cfgs = {v: _make_variant_config(bb, base, v, prompt_length, folder) for v in variants}

        def time_variant(variant: BenchmarkVariant) -> tuple[float, float]:
            """Time one turn of a variant."""
            backbone = backbones[variant.dtype]
            if backbone is None:
                raise UserError(
                    "variants in bfloat16 need bb_bfloat16=..., the backbone in bfloat16."
                )
            return _time_one_turn(backbone, task, cfgs[variant])

        for i in range(warmup + repeats):
            turns.run_round(time_variant, is_warmup=i < warmup)
            logger.info(f"round {i - warmup + 1} of {repeats}" if i >= warmup else "warmed up")
    return [
        _make_record(bb, cfgs[v], v, variants[0], turns.ms, turns.mb, turns.refused.get(v))
        for v in variants
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
    records: list[dict],  # from `time_scaling` or `idp bench --grow`
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
                f"idp bench --backbone roberta-large --grow {axis} "
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

"""Times of functions and of training steps, measured in turns.

A stopwatch always gives a number. Whether that number is about the code, and not about other
work of the machine in that second, depends on how the measurement was designed. Here the
functions that are compared take turns, one call of each in every round, and each result is the
median of the ratios to the baseline in the same round.

`time_functions` times functions. `benchmark_methods` times the training steps of methods through
`fit`, as they are used, data loading and AdamW included, and sets them beside the cost model and
LPT's tables. Everything runs in one process, so that machine, libraries and threads are the same.
`time_scaling` varies the prompt length, the text length, the layers below the prompt or the batch
size, and keeps the other three.

LPT sets all inputs to 256 tokens. So we make a task whose examples all have the wanted length:
random words of the bundled reviews, more of them than fit, which `encode` truncates.
"""

import gc
import logging
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.benchmark import timer

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.all_methods import METHODS, late_prompt_methods
from idp_tutorial.reproduction.efficiency.cost_model import (
    KEY_VALUE_SHARE,
    LPT_PUBLISHED_SPEEDS,
    first_backward_layer,
    ideal_speed_up,
    step_cost,
)
from idp_tutorial.training.fit import TrainLog, fit
from idp_tutorial.utils.checks import UserError, check_name

logger = logging.getLogger(f"idp_tutorial.{__name__}")  # whose messages commands print


def _summarize_times(
    ms: np.ndarray,  # times of one function, one for each round
    baseline_ms: np.ndarray,  # times of the baseline in the same rounds
) -> dict:  # `ms`, `spread` (half the interquartile range, in percent of the median), `ratio`
    """Return the median time, its variation, and the median speed-up over the baseline."""
    low, median, high = np.quantile(ms, (0.25, 0.5, 0.75))
    spread = float(50 * (high - low) / median) if median else 0.0
    return dict(ms=float(median), spread=spread, ratio=float(np.median(baseline_ms / ms)))


def time_functions(
    functions: Mapping,  # name → function without arguments; the first one is the baseline
    warmup: int = 1,  # rounds that are not counted
    repeats: int = 7,  # rounds that are counted
) -> list[dict]:  # `name`, and `ms`, `spread` and `ratio` as in `benchmark_methods`
    """Time functions in turns, one call of each in every round."""
    ms = np.zeros((warmup + repeats, len(functions)))
    for times in ms:
        for i, function in enumerate(functions.values()):
            start_time = timer()  # waits for the GPU, if there is one
            function()
            times[i] = 1000 * (timer() - start_time)
    ms = ms[warmup:]
    return [
        dict(name=name, **_summarize_times(times, ms[:, 0])) for name, times in zip(functions, ms.T)
    ]


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
    dtypes: Sequence[str] = ("float32",),  # of the frozen weights; the baseline has the first one
) -> list[BenchmarkVariant]:  # fine-tuning, the baseline, comes first
    """List the variants to time; one with a cache is added where there is something to cache."""
    variants = []
    first_dtype, *other_dtypes = dtypes
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
            variants.append(BenchmarkVariant(method, layer, False, first_dtype))
            if step_cost(method, L, layer, True) != step_cost(method, L, layer):
                variants.append(BenchmarkVariant(method, layer, True, first_dtype))
    in_other_dtypes = [v._replace(dtype=dtype) for dtype in other_dtypes for v in variants[1:]]
    return variants + in_other_dtypes


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
        raise UserError(
            f"{variant.method!r} needs {base.max_len} positions for length={base.max_len} and "
            f"{n_prompt} for its prompt, and backbone {bb.name!r} has {bb.max_tokens}. Use a "
            "smaller length or prompt_length, or leave this method out."
        )
    return cfg


def _published_speed(backbone: str, variant: BenchmarkVariant) -> dict:
    """Return LPT's speed-up (`paper`) and saved memory (`paper_saved`) of a variant, or None."""
    rows = {(r.backbone, r.method, r.layer): r for r in LPT_PUBLISHED_SPEEDS}
    row = rows.get((backbone, variant.method, variant.layer))
    if row is None or variant.cached:
        return dict(paper=None, paper_saved=None)
    baseline = rows[backbone, "fine-tuning", None]
    return dict(
        paper=row.tokens_per_ms / baseline.tokens_per_ms,
        paper_saved=1 - row.memory_gb / baseline.memory_gb,
    )


def _make_record(
    bb: Backbone,
    cfg: RunConfig,
    variant: BenchmarkVariant,
    logs: list[TrainLog],  # of the turns that are counted
    baseline_logs: list[TrainLog],
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
    ms = np.array([log.ms_per_step for log in logs])
    baseline_ms = np.array([log.ms_per_step for log in baseline_logs])
    times = _summarize_times(ms, baseline_ms)
    mb = logs[-1].peak_memory_mb
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
        "tokens_per_ms": cfg.batch_size * cfg.max_len / times["ms"],  # without prompt positions
        "ideal": ideal if is_finite else None,
        "share": times["ratio"] / ideal if is_finite else None,
        "mb": mb,
        "saved": 1 - mb / baseline_logs[-1].peak_memory_mb,
        **_published_speed(bb.name, variant),
    }


def benchmark_methods(
    bb: Backbone,
    variants: Sequence[BenchmarkVariant],  # of `list_benchmark_variants`; baseline first
    base: RunConfig,  # from `make_benchmark_config`
    prompt_length: int | None = None,  # None: `BENCHMARK_PROMPT_LENGTHS`
    repeats: int = 7,  # rounds that are counted
    warmup: int = 1,  # rounds before them
    others: Sequence[Backbone] = (),  # the backbone in other dtypes, for variants of these dtypes
) -> list[dict]:  # one record for each variant; `refused` has the reason if it could not run
    """Time variants through `fit` in turns, and compare them with the cost model and with LPT.

    `ms` is the median time of a step, `spread` half the interquartile range in percent of it, and
    `ratio` the median speed-up over the baseline in the same round. `share` is `ratio` over
    `ideal`, the speed-up in the cost model.
    """
    backbones = {backbone.dtype_name: backbone for backbone in (bb, *others)}
    task = make_timing_task(base.steps * base.batch_size, base.max_len)
    logs: dict[BenchmarkVariant, list[TrainLog]] = {variant: [] for variant in variants}
    refused: dict[BenchmarkVariant, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        cfgs = {v: _make_variant_config(bb, base, v, prompt_length, folder) for v in variants}
        for i in range(warmup + repeats):
            for variant in variants:
                if variant in refused:
                    continue
                backbone = backbones[variant.dtype]
                try:
                    with restore_backbone_on_exit(backbone):
                        model = build_model(cfgs[variant], backbone, task)
                        logs[variant].append(fit(model, task, cfgs[variant]))
                except ValueError as e:  # the family of the backbone does not support the method
                    if variant == variants[0]:  # without the baseline there is no ratio
                        raise
                    refused[variant] = str(e)
            logger.info(f"round {i - warmup + 1} of {repeats}" if i >= warmup else "warmed up")
    counted = {variant: logs[variant][warmup:] for variant in variants}
    return [
        _make_record(bb, cfgs[v], v, counted[v], counted[variants[0]], refused.get(v))
        for v in variants
    ]


SCALING_METHODS = ("prompt-tuning", "s-idpg-phm", "lpt-npg")
SCALING_VALUES: dict[str, tuple[int, ...]] = dict(
    prompt_length=(5, 10, 20, 50, 100, 200),
    length=(32, 64, 128, 256),
    depth=(),  # seven layers from the first to the last
    batch=(1, 2, 4, 8, 16),
)


def time_scaling(
    axis: str,  # key of `SCALING_VALUES`
    bb: Backbone,
    base: RunConfig,  # from `make_benchmark_config`
    methods: Sequence[str] = SCALING_METHODS,  # keys of `METHODS`; late ones are in the middle
    values: Sequence[int] | None = None,  # None: `SCALING_VALUES`
    **options: Any,  # further arguments of `benchmark_methods`
) -> Iterator[dict]:  # of `benchmark_methods`, with the axis as `grow` and its `value`
    """Time methods while one setting varies, and yield the records of a value once it is measured.

    For the axis 'depth' only late methods are timed (if no method is late, LPT's NPG).
    """
    check_name(axis, SCALING_VALUES, "axis")
    L = bb.n_layers
    if axis == "depth":
        late = [m for m in methods if m in late_prompt_methods()] or ["lpt-npg"]
        layers = values or sorted({round(i * (L - 1) / 6) for i in range(7)})
        for r in benchmark_methods(bb, list_benchmark_variants(late, L, layers), base, **options):
            yield {**r, "grow": axis, "value": r["layer"]}
        return
    variants = list_benchmark_variants(methods, L, [L // 2])
    for value in values or SCALING_VALUES[axis]:
        logger.info(f"{axis} {value}")
        if axis == "prompt_length":
            options["prompt_length"] = value
        else:
            base = base.with_options(**{"max_len" if axis == "length" else "batch_size": value})
        sizes = dict(batch_size=base.batch_size, length=base.max_len)
        for r in benchmark_methods(bb, variants, base, **options):
            yield {**r, **sizes, "grow": axis, "value": value}

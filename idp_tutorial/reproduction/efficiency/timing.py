"""Times and peak memory of training steps and components, measured in turns with warm-up rounds.

A stopwatch always gives a number. Whether that number is about the code, and not about other
work of the machine in that second, depends on how the measurement was designed.
`time_functions` implements one such design.

A GPU works asynchronously: a call returns before the work is done. So its own events measure
the time.

`benchmark_methods` times the training steps of methods, compared with fine-tuning. The cost model
predicts what a method should cost. What does it cost through `fit`, as it is used? Three rules make
the measurement meaningful. Everything runs in one process, so that machine, libraries and threads
are the same. The methods take turns: a few steps each, round after round. And every result is a
ratio to fine-tuning in the same round, data loading and AdamW included.

LPT sets all inputs to 256 tokens. So we make a task whose examples all have the wanted length:
random words of the bundled reviews, more of them than fit, which `encode` truncates.

A speed-up depends on the setting. `time_scaling` varies one of four settings and keeps the
others: prompt length, text length, layers below the prompt, batch size.

The last part times training steps with and without caches, and six implementations of PHM layers. A
step of prompt tuning runs all layers forward and backward. IDPG adds a forward pass for M(x); LPT
needs no backward pass below its prompt. A cache removes the pass for M(x), or the layers below the
prompt altogether. Reading a batch from disk is part of a step; filling the cache is not, since it
happens once.

A PHM layer is a sum of n Kronecker products. The released code of IDPG multiplies the input by
each of them in turn, so both passes cost as much as n full matrices. Compacter's builds all n
products at once and adds them up, with n times the memory of W. In this implementation `weight`
is one multiplication `[n²,n]×[n,·]`, and `factored` builds no matrix. Peak memory counts all
tensors that exist at the same time, gradients included, parameters excluded.
"""

import contextlib
import ctypes
import gc
import json
import logging
import random
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.encoding import make_dataloader
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.all_methods import METHODS, late_prompt_methods
from idp_tutorial.methods.phm import PHMLinear
from idp_tutorial.reproduction.efficiency.cost_model import (
    KEY_VALUE_SHARE,
    LPT_PUBLISHED_SPEEDS,
    compare_published_speeds,
    first_backward_layer,
    ideal_speed_up,
    step_cost,
)
from idp_tutorial.training.cache import attach_cached_states
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.checks import UserError, check_choice, check_name, require_packages

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "require_gpu",
    "summarize_times",
    "time_functions",
    "tokens_per_ms",
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
    "PHM_IMPLEMENTATIONS",
    "time_cached_training",
    "measure_phm",
]


def require_gpu() -> None:
    """Check that PyTorch finds a GPU.

    Raises: `UserError` if not.
    """
    if not torch.cuda.is_available():
        raise UserError(
            "device='cuda' needs a GPU, and PyTorch sees no GPU. Use 'cpu', or install a build of "
            "PyTorch with CUDA on a machine with a GPU."
        )


def _time_call(function: Callable[[], object], cuda: bool) -> float:
    """Call a function once and return the time in milliseconds."""
    if not cuda:
        start_time = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - start_time)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _peak_resident_bytes() -> int:
    """Return the largest resident set in bytes since `_reset_peak_resident`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def _reset_peak_resident() -> None:
    """Set the high-water mark of the resident set to its present size."""
    with contextlib.suppress(OSError, AttributeError):
        # memory that the allocator keeps would hide that a call takes it again
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure_peak_memory(
    function: Callable[[], object],
    device: str = "cpu",  # 'cpu' or 'cuda'
) -> float | None:  # MB; None: the system does not report it
    """Call a function once and return the peak of the additional memory that it allocates."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated_before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - allocated_before) / 1e6
    try:
        _reset_peak_resident()
        resident_before = _peak_resident_bytes()
    except (OSError, StopIteration):
        function()
        return None
    function()
    return (_peak_resident_bytes() - resident_before) / 1e6


def summarize_times(
    ms: Sequence[float] | np.ndarray,  # times of one function in ms, one for each round
    baseline_ms: Sequence[float] | np.ndarray,  # times of the baseline in the same rounds
) -> dict:  # `ms`, `spread` (half the interquartile range, in percent of the median), `ratio`
    """Return the median time, its variation, and the median speed-up over the baseline."""
    times = np.asarray(ms)
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75))
    spread = float(50 * (high - low) / median) if median else 0.0
    ratio = float(np.median(np.asarray(baseline_ms) / times))
    return dict(ms=float(median), spread=spread, ratio=ratio)


def time_functions(
    functions: Mapping,  # name → function without arguments; the first one is the baseline
    warmup: int = 2,  # rounds that are not counted; the last one measures memory
    repeats: int = 7,  # rounds that are counted
    device: str = "cpu",  # 'cpu' or 'cuda'
) -> list[dict]:  # `name`, `mb` and the fields of `summarize_times`
    """Time functions in turns, one call of each in every round."""
    if not functions or warmup < 1 or repeats < 1:
        raise UserError(
            f"there must be at least one function, warmup and repeats must be at least 1, got "
            f"{len(functions)} functions, warmup={warmup} and repeats={repeats}."
        )
    check_choice(device, ("cpu", "cuda"), "device")
    if device == "cuda":
        require_gpu()
    for _ in range(warmup - 1):
        for function in functions.values():
            function()
    peak_memory = [measure_peak_memory(function, device) for function in functions.values()]
    rounds = []
    for _ in range(repeats):
        rounds.append([_time_call(function, device == "cuda") for function in functions.values()])
    ms = np.array(rounds)  # `[repeats,functions]`
    return [
        dict(name=name, mb=mb, **summarize_times(times, ms[:, 0]))
        for name, mb, times in zip(functions, peak_memory, ms.T)
    ]


def tokens_per_ms(
    batch_size: int,  # examples in a step
    length: int,  # tokens of an example
    ms: float,  # time of a step
) -> float:
    """Return LPT's measure of speed: words per millisecond, without prompt positions."""
    return batch_size * length / ms


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


_CACHE_NAMES = {  # key of an example → name of the cache it was read from
    "sentence": "sentence",
    "mean_sentence": "mean_sentence",
    "hidden_states": "hidden",
}


def _iterate_training_steps(
    model: PromptedModel, examples: Sequence[dict], batch_size: int, trains_backbone: bool
) -> Iterator[None]:
    """Run training steps, and yield after each of them."""
    bb = model.backbone
    device = bb.device
    parameters = list(model.trained_parameters().values())
    if trains_backbone:
        parameters += bb.base.parameters()
    # a learning rate of 0: the work of a step, and the same weights after it
    optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True)
    while True:
        for batch in make_dataloader(examples, batch_size, bb.pad_id, shuffle=True):
            bb.base.requires_grad_(trains_backbone)
            model.train().loss({name: x.to(device) for name, x in batch.items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
            bb.base.requires_grad_(False)
            if device.type == "cuda":
                torch.cuda.synchronize()
            yield


def _make_cache_variants(
    bb: Backbone,
    plans: dict[str, Callable | None],
    examples: list[dict],
    cfg: RunConfig,
    n_classes: int,
) -> tuple[list[dict], list[Iterator[None]]]:
    """Return the record and the training steps of each plan with and without its caches."""
    records = []
    runs = []
    for name, make_plan in plans.items():
        for cache in ("none",) if make_plan is None else ("none", "both"):
            plan = make_plan(bb) if make_plan else {}
            head = ClassificationHead(bb.d, n_classes, "mean")
            model = PromptedModel(bb, head, plan).to(bb.device)
            inputs: Sequence[dict] = examples
            mb = 0.0
            if cache == "both":
                cached_cfg = cfg.with_options(cache=cache)
                (inputs,), log = attach_cached_states(model, [examples], cached_cfg)
                mb = log["mb"]
            used_caches = "+".join(_CACHE_NAMES[key] for key in inputs[0] if key in _CACHE_NAMES)
            if cache == "none" or used_caches:
                records.append(dict(plan=name, cache=used_caches or "none", mb=round(mb, 1), ms=[]))
                runs.append(
                    _iterate_training_steps(model, inputs, cfg.batch_size, make_plan is None)
                )
    return records, runs


def time_cached_training(
    bb: Backbone,
    plans: dict[str, Callable | None],  # name → function from `bb` to a plan; None: fine-tuning
    examples: list[dict],  # with labels, from `task.encode`
    cfg: RunConfig,  # its `cache_dir`, `cache_dtype` and `batch_size` are used
    repeats: int = 30,  # number of steps of each variant
    n_classes: int = 2,  # number of classes of the head
) -> list[
    dict
]:  # `plan`, `cache`, `mb` on disk, median `ms` of a step, `ratio` to the first variant
    """Time training steps of every plan with and without its caches, in turns.

    `ms` and `ratio` are medians over rounds.
    """
    records, runs = _make_cache_variants(bb, plans, examples, cfg, n_classes)
    n_warmup = 2
    for i in range(n_warmup + repeats):
        for record, run in zip(records, runs):
            start_time = time.perf_counter()
            next(run)
            if i >= n_warmup:
                record["ms"].append(1000 * (time.perf_counter() - start_time))
    ms = np.array([record["ms"] for record in records])  # `[variants,rounds]`
    medians = np.median(ms, 1).tolist()
    ratios = np.median(ms / ms[0], 1).tolist()
    return [
        {**record, "ms": round(median, 2), "ratio": round(ratio, 3)}
        for record, median, ratio in zip(records, medians, ratios)
    ]


class _LiveTensorMemory(TorchDispatchMode):
    """Context that counts the bytes of the live tensors that were created in it, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.storage_bytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        for storage in self._find_storages(args):
            self.storage_bytes.setdefault(storage._cdata, 0)  # inputs are not new memory
        result = func(*args, **(kwargs or {}))
        for storage in self._find_storages(result):
            if storage._cdata in self.storage_bytes:
                continue  # the result shares storage with an input
            self.storage_bytes[storage._cdata] = storage.nbytes()
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._on_storage_freed, storage._cdata)
        return result

    def _find_storages(self, tree: Any) -> list[torch.UntypedStorage]:
        """Return the storages of all tensors in nested containers."""
        return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    def _on_storage_freed(self, key: int) -> None:
        """Subtract the bytes of a storage."""
        self.live_bytes -= self.storage_bytes.pop(key, 0)


ApplyLayer = Callable[[Any, Tensor], Tensor]  # (layer, input) → output


def _apply_layer(layer: nn.Module, x: Tensor) -> Tensor:
    """Call the layer."""
    return layer(x)


def _apply_idpg(layer: Any, x: Tensor) -> Tensor:
    """Apply a PHM layer as IDPG's released code does: one multiplication for each term."""
    return sum(x @ torch.kron(a, b) for a, b in zip(layer.A, layer.B)) + layer.bias


def _apply_compacter(layer: Any, x: Tensor) -> Tensor:
    """Apply a PHM layer as Compacter's released code does: build all terms, then their sum."""
    products = layer.A[:, :, None, :, None] * layer.B[:, None, :, None, :]
    weight = products.reshape(layer.n, layer.d_in, layer.d_out).sum(0)
    return x @ weight + layer.bias


def _apply_with_algorithm(algorithm: str) -> ApplyLayer:
    """Return a function that applies a PHM layer with one of its algorithms."""

    def apply(layer: PHMLinear, x: Tensor) -> Tensor:
        """Set the algorithm and call the layer."""
        layer.algorithm = algorithm
        return layer(x)

    return apply


PHM_IMPLEMENTATIONS: dict[str, ApplyLayer] = {  # 'linear' is applied to `nn.Linear` layers
    "linear": _apply_layer,
    "auto": _apply_with_algorithm("auto"),
    "factored": _apply_with_algorithm("factored"),
    "materialised": _apply_with_algorithm("materialised"),
    "idpg": _apply_idpg,
    "compacter": _apply_compacter,
}


def _time_forward_backward(
    apply: ApplyLayer, layers: nn.ModuleList, x: Tensor
) -> tuple[float, float, int]:
    """Return ms of the forward and of the backward pass, and the bytes that autograd saves."""

    def synchronized_ms() -> float:
        """Return the time when all work is done."""
        if x.is_cuda:
            torch.cuda.synchronize()
        return 1000 * time.perf_counter()

    saved_bytes = {}
    parameter_pointers = {p.untyped_storage().data_ptr() for p in layers.parameters()}

    def record_saved(tensor: Tensor) -> Tensor:
        """Record the storage of a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    for p in [x, *layers.parameters()]:
        p.grad = None
    start = synchronized_ms()
    with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda tensor: tensor):
        y = apply(layers[1], F.gelu(apply(layers[0], x)))
    middle = synchronized_ms()
    y.backward(torch.ones_like(y))
    end = synchronized_ms()
    activation_bytes = sum(
        n_bytes for pointer, n_bytes in saved_bytes.items() if pointer not in parameter_pointers
    )
    return middle - start, end - middle, activation_bytes


def _time_in_turns(
    runs: dict[str, tuple[ApplyLayer, nn.ModuleList]],
    x: Tensor,
    repeats: int,
    time_budget_ms: float,
) -> dict[str, list[tuple[float, float]]]:  # name → ms of each forward and backward pass
    """Time implementations in random order, round after round, after one call to warm up.

    An implementation that has used up the time budget has at least 3 turns.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for apply, layers in runs.values():
        _time_forward_backward(apply, layers, x)
    for turn in range(repeats):
        # a random order, because the previous call decides what the processor has cached
        for name in random.Random(turn).sample(list(runs), len(runs)):
            if len(times[name]) < 3 or sum(map(sum, times[name])) < time_budget_ms:
                forward_ms, backward_ms, _ = _time_forward_backward(*runs[name], x)
                times[name].append((forward_ms, backward_ms))
    return times


def measure_phm(
    out: Path | str | None = None,  # JSONL file to write
    d: int = 1024,  # width
    t: int = 5,  # prompt length
    bottlenecks: Sequence[int] = (16, 256),  # values of m
    kronecker_terms: Sequence[int] = (
        2,
        4,
        8,
        16,
        32,
    ),  # values of n; only divisors of m and d count
    batch_sizes: Sequence[int] = (1, 4, 16, 64, 256),  # inputs in a batch
    repeats: int = 15,  # number of turns, of which the medians count
    time_budget_ms: float = 500.0,  # time after which an implementation takes no more than 3 turns
    device: str = "cpu",  # 'cpu' or 'cuda'
) -> list[dict]:  # ms of each pass, peak MB, and MB that autograd saves, for each implementation
    """Time a prompt generator `d → m → t·d` with GELU in the `PHM_IMPLEMENTATIONS`, in turns.

    The gradient with respect to the input is computed too, as M-IDPG needs it.
    """
    records = []
    for m, n, batch_size in product(bottlenecks, kronecker_terms, batch_sizes):
        if m % n or d % n:
            continue
        torch.manual_seed(0)
        phm = nn.ModuleList([PHMLinear(d, m, n), PHMLinear(m, t * d, n)]).to(device)
        linear = nn.ModuleList([nn.Linear(d, m), nn.Linear(m, t * d)]).to(device)
        x = torch.randn(batch_size, d, device=device, requires_grad=True)
        runs = {
            name: (apply, linear if name == "linear" else phm)
            for name, apply in PHM_IMPLEMENTATIONS.items()
        }
        times = _time_in_turns(runs, x, repeats, time_budget_ms)
        for name, (apply, layers) in runs.items():
            with _LiveTensorMemory() as memory:
                _, _, saved_bytes = _time_forward_backward(apply, layers, x)
            forward_ms, backward_ms = (
                sorted(passes)[len(passes) // 2] for passes in zip(*times[name])
            )
            records.append(
                dict(
                    d=d,
                    m=m,
                    t=t,
                    n=n,
                    batch=batch_size,
                    way=name,
                    forward_ms=round(forward_ms, 3),
                    backward_ms=round(backward_ms, 3),
                    peak_mb=round(memory.peak_bytes / 1e6, 3),
                    kept_mb=round(saved_bytes / 1e6, 3),
                    turns=len(times[name]),
                    device=device,
                    threads=torch.get_num_threads(),
                    torch=torch.__version__,
                )
            )
    if out:
        Path(out).write_text("".join(json.dumps(r) + "\n" for r in records))
    return records

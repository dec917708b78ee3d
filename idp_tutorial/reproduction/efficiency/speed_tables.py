"""All timings of one backbone for a table of speed, in one process and with the same weights.

A ratio is valid only for times measured together. So a table of one backbone is one run of one
process: all methods in turns with frozen weights in float32 and in bfloat16, the methods of
`peft`, predictions a second compared with the library's `pipeline`, and how cost scales. Each
part is written before the next begins. A part that exceeds the time limit is skipped with a
message: the same command continues with it. The lab makes the tables.

Texts go in and labels come out: this package's models through `predict`, the library's through
a `pipeline` around a classifier with the same weights.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from idp_tutorial.assembly.build import build_model
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.reproduction.efficiency.method_times import (
    benchmark_methods,
    list_benchmark_variants,
    make_timing_task,
)
from idp_tutorial.reproduction.efficiency.peft_times import build_hf_classifier, time_training_steps
from idp_tutorial.reproduction.efficiency.scaling import time_scaling
from idp_tutorial.reproduction.efficiency.timing import time_functions
from idp_tutorial.training.evaluation import predict
from idp_tutorial.utils.config import RunConfig

__all__ = ["SPEED_TABLE_METHODS", "time_inference", "run_speed_benchmarks"]


def time_inference(
    bb: Backbone,
    base: RunConfig,  # from `make_benchmark_config`
    n: int = 32,  # number of texts
    repeats: int = 3,  # rounds that are counted
) -> list[dict]:  # of `time_functions`, and `texts_per_s`
    """Time `predict` with three methods and transformers' `pipeline` in turns."""
    from transformers import pipeline

    task = make_timing_task(n, base.max_len - 2)
    rows = [dict(sentence1=r["sentence1"]) for r in task.splits["train"]]
    classifier: Any = build_hf_classifier(bb).eval()
    pipe = pipeline(
        "text-classification",
        model=classifier,
        tokenizer=bb.tokenizer,
        device="cpu",
    )

    def run_pipeline() -> None:
        """Predict with transformers' pipeline."""
        pipe([r["sentence1"] for r in rows], batch_size=8, truncation=True, max_length=base.max_len)

    functions: dict[str, Callable[[], object]] = {"pipeline": run_pipeline}
    for method in ("head-only", "prompt-tuning", "lpt-npg"):
        cfg = replace(base, method=method)
        model = build_model(cfg, bb, task).eval()
        functions[f"predict, {method}"] = partial(predict, model, task, cfg, rows, 8)
    return [{**r, "texts_per_s": 1000 * n / r["ms"]} for r in time_functions(functions, 1, repeats)]


# the methods in the tables; fine-tuning, the baseline, is always timed
SPEED_TABLE_METHODS = ("prompt-tuning", "p-tuning-v2", "s-idpg-phm", "lpt-npg", "lora")


def _speed_table_parts(
    bb: Backbone,
    bb_bfloat16: Backbone,
    base: RunConfig,
    repeats: int,
    prompt_length: int,
    report: Callable[[str], object],
) -> dict[str, Callable[[], list[dict]]]:
    """Return the parts of the tables: name → function that measures."""
    variants = list_benchmark_variants(SPEED_TABLE_METHODS, bb.n_layers)
    variants += [v._replace(dtype="bfloat16") for v in variants[1:]]
    parts: dict[str, Callable[[], list[dict]]] = {
        "methods": partial(
            benchmark_methods,
            bb,
            variants,
            base,
            repeats=repeats,
            report=report,
            bb_bfloat16=bb_bfloat16,
        )
    }
    for dtype, backbone in (("float32", bb), ("bfloat16", bb_bfloat16)):
        parts[f"beside peft, {dtype}"] = partial(
            time_training_steps, backbone, base, True, prompt_length, repeats, 1, report
        )
        parts[f"answers, {dtype}"] = partial(time_inference, backbone, base, repeats=repeats)
    L = bb.n_layers
    T = base.max_len
    axes: dict[str, tuple[int, ...]] = {
        "batch": (1, 2, 8),
        "length": (T // 2, 2 * T),
        "depth": (0, L // 4, L // 2, 3 * L // 4),
    }
    for axis, values in axes.items():
        parts[f"growth with {axis}"] = partial(
            time_scaling,
            axis,
            bb,
            base,
            ("prompt-tuning", "lpt-npg"),
            values,
            warmup=0,
            repeats=max(1, repeats - 1),
            report=report,
        )
    return parts


def run_speed_benchmarks(
    bb: Backbone,  # in float32
    bb_bfloat16: Backbone,  # the same backbone in bfloat16
    base: RunConfig,  # from `make_benchmark_config`
    repeats: int = 3,  # rounds that are counted
    max_minutes: float = 6.0,  # time after which no further part is started
    prompt_length: int = 20,  # number of prompt vectors in the comparison with `peft`
    completed_parts: Collection = frozenset(),  # (part, dtype of the weights) to skip
    report: Callable[[str], object] = print,  # receives one line of progress at a time
) -> Iterator[list[dict]]:  # records with `part` and `weights_dtype`, one part at a time
    """Run all timings for the speed tables of a backbone, part by part."""
    parts = _speed_table_parts(bb, bb_bfloat16, base, repeats, prompt_length, report)
    start_time = time.monotonic()
    for name, measure in parts.items():
        seconds = time.monotonic() - start_time
        part, _, dtype = name.partition(", ")
        dtype = dtype or "float32"
        if (part, dtype) in completed_parts:
            continue
        if seconds > 60 * max_minutes:
            report(
                f"{name}: skipped after {seconds:.0f} s. Run the same command again to continue "
                "with it."
            )
            continue
        report(f"{name}: {seconds:.0f} s so far")
        part_fields: dict = dict(part=part)
        if part == "beside peft":
            part_fields["prompt_length"] = prompt_length
        yield [{"weights_dtype": dtype, **record, **part_fields} for record in measure()]

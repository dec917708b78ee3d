"""Measure time and memory of every method, beside other libraries, and how they scale.

    python -m results.speed.bench --measure methods,peft --methods prompt-tuning,lpt-npg

One script times all methods, `peft` and Transformers beside them, and how they scale. It runs on
RoBERTa-large without a download: times do not depend on the weights, so they are random. Whole
commands, from start to exit, are timed with trained weights. A ratio is valid only for times that
were measured together, so each part of a measurement takes turns in one process, and is written
before the next one begins.

The results are in the notebook `nbs/lab/speed.ipynb`.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from idp_tutorial.cli.commands import (
    CommandOptions,
    command,
    parse_numbers,
    refuse_given,
    split_names,
)
from idp_tutorial.utils.checks import (
    Range,
    UserError,
    check_choice,
    check_name,
    require_packages,
)
from idp_tutorial.utils.process import MessageHandler, handle_messages

AXES = ("prompt_length", "length", "depth", "batch")
MEASUREMENTS = ("methods", "peft", "pipeline", "commands", *AXES)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(CommandOptions):
    """Options of this script."""

    # a published configuration (with random weights), 'tiny', 'minilm', or a folder
    backbone: str = "roberta-large"
    # comma-separated: 'methods' (training steps of methods), 'peft' (plain training steps beside
    # `peft`), 'pipeline' (predictions beside `pipeline`), 'commands' (whole commands: `idp train`
    # beside `peft` with Trainer, `idp predict` beside `pipeline`; other work on the machine
    # distorts the times), or the scaling of methods with 'prompt_length', 'length', 'depth' or
    # 'batch'
    measure: str = "methods"
    # comma-separated, besides fine-tuning ('all' of scaling: prompt-tuning, s-idpg-phm, lpt-npg; of
    # commands: prompt-tuning, lora, lpt-npg)
    methods: str = "all"
    batch_size: Annotated[int, Range(1, 10**6)] = 4  # examples in a step
    length: Annotated[int, Range(1, 10**6)] = 64  # tokens of each example; of commands: at most
    # number of prompt vectors (default: as in LPT's Table 5; beside `peft`: 20)
    prompt_length: Annotated[int, Range(1, 10**5)] | None = None
    # width of the bottleneck of the methods that have one (default: the method's own)
    bottleneck: Annotated[int, Range(1, 10**5)] | None = None
    # values of the prompt length, length, depth or batch size, comma-separated
    values: str | None = None
    # a trained classification head, or label words at a mask token
    head: Literal["classification", "verbalizer"] = "classification"
    dtypes: str = "float32"  # of the frozen weights, comma-separated: 'float32', 'bfloat16'
    # for commands: folder of tasks with TREC (default: the bundled task 'questions')
    data: str | None = None
    repeats: Annotated[int, Range(1, 10**6)] = 7  # rounds that are measured, after one warm-up
    device: Literal["auto", "cpu", "cuda"] = "auto"  # processor, or GPU
    # threads of the CPU (default: PyTorch's choice)
    threads: Annotated[int, Range(1, 10**4)] | None = None
    json: bool = False  # print one JSON object a line
    out: str | None = None  # a JSONL file to which the records are appended


def _select_methods(options: BenchOptions, default: Iterable[str]) -> list[str]:
    return [*default] if options.methods == "all" else split_names(options.methods)


def _check_measurements(options: BenchOptions) -> None:
    """Check the names in the options, and that each option has an effect."""
    from idp_tutorial.assembly.config import methods_with_option
    from idp_tutorial.methods.all_methods import METHODS

    measured = {check_name(m, MEASUREMENTS, "measurement") for m in split_names(options.measure)}
    selected = [check_name(method, METHODS, "method") for method in _select_methods(options, ())]
    users = methods_with_option("bottleneck", selected or None)
    if options.bottleneck and not users:
        raise UserError(
            f"bottleneck={options.bottleneck} has no effect on {', '.join(selected)}: leave it "
            "out, or use a method that has it."
        )
    for dtype in split_names(options.dtypes):
        check_choice(dtype, ("float32", "bfloat16"), "dtypes")
    if len(measured & {*AXES}) != 1:
        refuse_given(options, "values", "without one axis of scaling in measure")
    if "commands" not in measured:
        refuse_given(options, "data", "without commands in measure")
    if measured <= {"peft", "pipeline"}:
        refuse_given(options, "methods bottleneck", "beside other libraries")
    if measured == {"commands"}:
        refuse_given(options, "prompt_length bottleneck head dtypes", "for commands")
    require_packages("pandas", *(["peft"] if measured & {"peft", "commands"} else []))
    if options.out and Path(options.out).is_dir():
        raise UserError(f"out={options.out} is a folder: give a file, such as results/bench.jsonl.")


def _load_backbones(options: BenchOptions) -> list[Any]:
    """Load the backbone in every dtype; a published one with random weights and enough positions.

    The positions are those of the prompt and of the longest sequence.
    """
    from idp_tutorial.backbones.load import FULL_SCALE_CONFIGS, load_backbone
    from results.speed.timing import (
        BENCHMARK_PROMPT_LENGTHS,
        SCALING_VALUES,
    )

    dtypes = split_names(options.dtypes)
    if options.backbone not in FULL_SCALE_CONFIGS:
        return [load_backbone(options.backbone, dtype=dtype) for dtype in dtypes]
    largest = dict(
        prompt_length=options.prompt_length or max(BENCHMARK_PROMPT_LENGTHS.values()),
        length=options.length,
    )
    for axis in {*largest} & {*split_names(options.measure)}:
        largest[axis] = max(parse_numbers(options.values, "values") or SCALING_VALUES[axis])
    n_positions = sum(largest.values()) + 2
    published = FULL_SCALE_CONFIGS[options.backbone]()
    sizes: dict[str, Any] = {}
    if getattr(published, "max_position_embeddings", n_positions) < n_positions:
        sizes["max_position_embeddings"] = n_positions
    return [load_backbone(options.backbone, "random", dtype=dtype, **sizes) for dtype in dtypes]


def _measure_parts(
    options: BenchOptions, measurement: str, backbones: list[Any], base: Any
) -> Iterator[tuple[dict, Iterable[dict]]]:
    """Yield the fields that all records of a part have, and its records."""
    from idp_tutorial.methods.all_methods import methods_with_head
    from results.speed import timing
    from results.speed.other_libraries import (
        time_inference,
        time_training_steps,
    )

    records: Iterable[dict]
    if measurement in ("peft", "pipeline"):
        prompt_length = options.prompt_length or 20
        for bb in backbones:
            if measurement == "peft":
                fields = dict(part="beside peft", prompt_length=prompt_length)
                records = time_training_steps(bb, base, prompt_length, options.repeats)
            else:  # predictions are always measured on the CPU
                fields = dict(part="answers", device="cpu")
                records = time_inference(bb, base, repeats=options.repeats)
            yield {**fields, **bb.weights_info}, records
        return
    bb, *others = backbones
    base = base.with_options(bottleneck=options.bottleneck)
    rounds: dict[str, Any] = dict(prompt_length=options.prompt_length, repeats=options.repeats)
    if measurement in AXES:
        methods = _select_methods(options, timing.SCALING_METHODS)
        values = parse_numbers(options.values, "values")
        records = timing.time_scaling(measurement, bb, base, methods, values, **rounds)
        yield dict(part=f"growth with {measurement}"), records
    else:
        methods = _select_methods(options, methods_with_head(options.head))
        dtypes = split_names(options.dtypes)
        variants = timing.list_benchmark_variants(methods, bb.n_layers, dtypes=dtypes)
        records = timing.benchmark_methods(bb, variants, base, others=others, **rounds)
        yield dict(part="methods"), records


def _measure_commands(options: BenchOptions) -> Iterator[dict]:
    """Yield the records of whole commands."""
    from idp_tutorial.assembly.config import RunOptions
    from results.speed.end_to_end import (
        END_TO_END_METHODS,
        measure_end_to_end,
    )

    base = RunOptions(
        backbone=options.backbone,
        data=options.data,
        batch_size=options.batch_size,
        max_len=options.length,
        device="cpu" if options.device == "cpu" else "auto",
    )
    methods = _select_methods(options, END_TO_END_METHODS)
    return measure_end_to_end(base, methods, options.repeats, options.threads)


def _measure(options: BenchOptions) -> Iterator[dict]:
    """Yield all records, each with its part, as soon as they are measured."""
    from results.speed.timing import make_benchmark_config

    measurements = split_names(options.measure)
    if "commands" in measurements:
        yield from _measure_commands(options)
        measurements.remove("commands")
    if not measurements:
        return
    backbones = _load_backbones(options)
    bb = backbones[0]
    base = make_benchmark_config(
        bb,
        options.batch_size,
        options.length,
        head=options.head,
        device="cpu" if options.device == "cpu" else "auto",
    )
    settings = dict(n_layers=bb.n_layers, d=bb.d, head=options.head, **bb.weights_info)
    if options.bottleneck:
        settings["bottleneck"] = options.bottleneck
    for measurement in measurements:
        for fields, records in _measure_parts(options, measurement, backbones, base):
            for record in records:
                yield {**settings, **fields, **record}


def _collect_records(options: BenchOptions) -> list[dict]:
    """Return all records with the settings; append each to the file when it is measured."""
    from importlib.metadata import version

    import torch

    from idp_tutorial.utils.durable_files import file_lock
    from idp_tutorial.utils.records import append_record, collect_versions

    uses_peft = {"peft", "commands"} & {*split_names(options.measure)}
    peft_version = {"peft": version("peft")} if uses_peft else {}
    uses_gpu = options.device != "cpu" and torch.cuda.is_available()
    settings = dict(
        backbone=Path(options.backbone).name,
        batch_size=options.batch_size,
        length=options.length,
        threads=torch.get_num_threads(),
        repeats=options.repeats,
        versions={**collect_versions(), **peft_version},
        device=torch.cuda.get_device_name() if uses_gpu else "cpu",
    )
    records = []
    with handle_messages(MessageHandler(sys.stderr)), file_lock(options.out):
        for record in _measure(options):
            records.append({**settings, **record})
            if options.out:
                append_record(records[-1], options.out)
    return records


COLUMNS = (  # of the printed tables
    *("name", "method", "layer", "cached", "weights_dtype", "dtype", "prompt_length", "value"),
    *("ms", "spread", "ratio", "ideal", "share", "paper", "tokens_per_ms", "mb", "saved"),
    *("paper_saved", "over_ours", "texts_per_s", "seconds_min", "seconds_median", "score"),
    *("as_float32", "over_pipeline"),
)


def _print_tables(records: list[dict]) -> None:
    """Print the settings of the measurement, and a table for each part."""
    import pandas as pd

    first = records[0]
    print(
        f"{first['backbone']}, {first['batch_size']} × {first['length']} tokens, "
        f"{first['device']} ({first['threads']} threads), {first['repeats']} rounds; ratio: "
        "speed-up over fine-tuning, of commands over the other library"
    )
    for part, rows in pd.DataFrame(records).groupby("part", sort=False):
        is_refused = rows.get("refused", pd.Series(index=rows.index)).notna()
        table = rows[~is_refused].reindex(columns=COLUMNS).dropna(axis=1, how="all")
        table = table.convert_dtypes().astype(object).fillna("-")
        text = table.to_string(index=False, float_format="{:.2f}".format)
        print(f"\n{part}\n{text}")
        for row in rows[is_refused].itertuples():
            print(f"{row.method} was not timed: {row.refused}")


@command(BenchOptions)
def bench_command(options: BenchOptions, base: Any) -> None:
    """Measure time and memory of every method, beside the cost model and LPT's tables."""
    import torch

    _check_measurements(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device='cuda' needs a GPU, and PyTorch sees no GPU: use device='cpu'.")
    if options.threads:
        torch.set_num_threads(options.threads)
    records = _collect_records(options)
    if not options.json:
        _print_tables(records)
        return
    for record in records:
        print(json.dumps(record))


if __name__ == "__main__":
    bench_command.main(sys.argv[1:])

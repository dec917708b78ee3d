"""The command `idp bench`: time and memory of every method, of `peft`, and how they scale.

One command times all methods, `peft` beside them, and how they scale. It runs on RoBERTa-large
without a download: times do not depend on the weights, so they are random. Whole commands, from
start to exit, are timed with trained weights.

The results on RoBERTa-large are in the notebook `nbs/lab/speed.ipynb`.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from idp_tutorial.cli.commands import (
    CommandOptions,
    command,
    parse_ints,
    refuse_given,
    split_names,
)
from idp_tutorial.utils.checks import (
    UserError,
    check_name,
    check_writable_folder,
    require_packages,
)
from idp_tutorial.utils.options import Range
from idp_tutorial.utils.process import MessageHandler, handle_messages

__all__ = ["BenchOptions", "bench_command"]

logger = logging.getLogger(__name__)


def _format_table(records: list[dict]) -> str:
    """Return a table for the terminal, with percentages and whole numbers."""
    import pandas as pd

    df = pd.DataFrame(records).dropna(axis=1, how="all")
    for column in set(df) & {"share", "saved", "paper_saved", "spread"}:
        factor = 1 if column == "spread" else 100
        df[column] = [f"{factor * v:.1f} %" if pd.notna(v) else "-" for v in df[column]]
    for column in set(df) & {"layer", "prompt_length", "value", "batch_size", "length"}:
        df[column] = df[column].astype("Int64").astype(str).replace("<NA>", "-")
    return df.to_string(index=False, na_rep="-", float_format="{:.2f}".format)


def _load_benchmark_backbone(
    name: str, grow: str | None, max_length: int, max_prompt_length: int, dtype: str = "float32"
) -> Any:
    """Load a backbone; a published configuration gets random weights and enough positions."""
    from idp_tutorial.backbones.load import FULL_SCALE_CONFIGS, load_backbone

    if name not in FULL_SCALE_CONFIGS:
        return load_backbone(name, dtype=dtype)
    sizes: dict[str, Any] = {}
    if grow and hasattr(FULL_SCALE_CONFIGS[name](), "max_position_embeddings"):
        sizes["max_position_embeddings"] = max(1024, max_length + max_prompt_length + 2)
    return load_backbone(name, "random", dtype=dtype, **sizes)


def _select_methods(options: SimpleNamespace) -> list[str]:
    """Return the methods to measure, after a check of their names."""
    from idp_tutorial.methods.all_methods import METHODS, methods_with_head
    from idp_tutorial.reproduction.efficiency.timing import SCALING_METHODS, SCALING_VALUES

    if options.grow:
        check_name(options.grow, SCALING_VALUES, "grow")
    if options.methods != "all":
        return [check_name(m, METHODS, "method") for m in split_names(options.methods)]
    return [*SCALING_METHODS] if options.grow else methods_with_head(options.head)


def _check_output_file(out: str) -> None:
    """Check that the output file can be written, before an hour of measurements."""
    if Path(out).is_dir():
        raise UserError(f"out={out} is a folder: give a file, such as results/bench.jsonl.")
    check_writable_folder(Path(out).absolute().parent)


def _find_device(options: SimpleNamespace) -> str:
    """Return the name of the GPU, if one is used, or 'cpu'."""
    import torch

    uses_gpu = options.device != "cpu" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if uses_gpu else "cpu"


def _read_measured_parts(options: SimpleNamespace) -> set[tuple[str, str]]:
    """Return the parts of the tables that the file contains, measured with the same settings."""
    import torch

    from idp_tutorial.utils.records import read_existing_records

    settings = dict(
        backbone=Path(options.backbone).name,
        batch_size=options.batch_size,
        length=options.length,
        repeats=options.repeats,
        head=options.head,
        precision=options.precision,
        threads=torch.get_num_threads(),
    )
    device = _find_device(options)
    prompt_length = options.prompt_length or 20

    def has_same_device(record: dict) -> bool:
        """Return whether a record was measured on the device of this command."""
        # inference is always measured on the processor
        return record.get("device") == ("cpu" if record["part"] == "answers" else device)

    def has_same_prompt(record: dict) -> bool:
        """Return whether a comparison with peft had the same prompt length."""
        is_beside_peft = record["part"] == "beside peft"
        return not is_beside_peft or record.get("prompt_length", 20) == prompt_length

    return {
        (r["part"], r["weights_dtype"])
        for r in read_existing_records(options.out)
        if isinstance(r.get("part"), str)
        and isinstance(r.get("weights_dtype"), str)
        and settings.items() <= r.items()
        and has_same_device(r)
        and has_same_prompt(r)
    }


def _name_plain_steps(records: list[dict]) -> list[dict]:
    """Return records in which the name of a plain training step is the method."""
    renamed = []
    for record in records:
        if "name" in record:
            other_fields = {k: v for k, v in record.items() if k != "name"}
            record = dict(method=record["name"], plain=True, **other_fields)
        renamed.append(record)
    return renamed


def _measure_tables(options: SimpleNamespace, bb: Any, base: Any) -> Iterator[list[dict]]:
    """Yield the records of the lab's tables, one part at a time."""
    from idp_tutorial.reproduction.efficiency.speed_tables import run_speed_benchmarks

    bb_bfloat16 = _load_benchmark_backbone(options.backbone, None, 0, 0, "bfloat16")
    parts = run_speed_benchmarks(
        bb,
        bb_bfloat16,
        base,
        options.repeats,
        options.minutes,
        options.prompt_length or 20,
        _read_measured_parts(options),
    )
    for part in parts:
        yield _name_plain_steps(part)


def _measure_methods(
    options: SimpleNamespace,
    bb: Any,
    base: Any,
    methods: Sequence[str],
) -> Iterator[list[dict]]:
    """Yield the records of all methods, then those of the plain training steps."""
    from idp_tutorial.reproduction.efficiency.speed_tables import time_training_steps
    from idp_tutorial.reproduction.efficiency.timing import (
        benchmark_methods,
        list_benchmark_variants,
    )

    yield benchmark_methods(
        bb,
        list_benchmark_variants(methods, bb.n_layers, options.layers),
        base,
        options.prompt_length,
        repeats=options.repeats,
        warmup=options.warmup,
    )
    plain_steps = time_training_steps(
        bb,
        base,
        options.peft,
        options.prompt_length or 20,
        options.repeats,
        options.warmup + 1,
    )
    yield _name_plain_steps(plain_steps)


def _measure_scaling(
    options: SimpleNamespace,
    bb: Any,
    base: Any,
    methods: Sequence[str],
) -> Iterator[list[dict]]:
    """Yield the records of methods while one size grows."""
    from idp_tutorial.reproduction.efficiency.timing import SCALING_VALUES, time_scaling

    kwargs = dict(repeats=options.repeats, warmup=options.warmup)
    if options.prompt_length:
        kwargs["prompt_length"] = options.prompt_length
    if options.grow == "depth":  # all layers in turns
        logger.info("depth")
        yield time_scaling("depth", bb, base, methods, options.values, **kwargs)
        return
    for value in options.values or SCALING_VALUES[options.grow] or ():
        logger.info(f"{options.grow} {value}")
        yield time_scaling(options.grow, bb, base, methods, [value], **kwargs)


def _measure_parts(
    options: SimpleNamespace,
    bb: Any,
    base: Any,
    methods: Sequence[str],
) -> Iterator[list[dict]]:
    """Yield records, so that each part is written before the next one is measured."""
    if options.tables:
        return _measure_tables(options, bb, base)
    if options.grow:
        return _measure_scaling(options, bb, base, methods)
    return _measure_methods(options, bb, base, methods)


def _print_tables(records: list[dict], settings: dict) -> None:
    """Print the settings of the measurement, and a table for each kind of record."""
    print(
        f"{settings['backbone']}, {settings['batch_size']} × {settings['length']} tokens, "
        f"{settings['head']} head, precision {settings['precision']!r}, {settings['device']} "
        f"({settings['threads']} threads), {settings['repeats']} rounds; "
        "ratio: speed-up over fine-tuning\n"
    )
    hidden = {"plain", "grow", *settings} - {"weights_dtype"}
    rows = []
    for record in records:
        rows.append({k: v for k, v in record.items() if k not in hidden})
    measured = [r for r in rows if "refused" in r and not r["refused"]]
    refused = [r for r in rows if r.get("refused")]
    plain = [r for r in rows if "refused" not in r]
    for part in (measured, refused, plain):
        if part:
            print(_format_table(part) + "\n")


def _print_records(
    records: list[dict], as_json: bool, print_tables: Callable[[list[dict]], Any]
) -> None:
    """Print records as JSON lines, or as tables."""
    if not as_json:
        print_tables(records)
        return
    for record in records:
        print(json.dumps(record))


def _check_device_and_file(options: SimpleNamespace) -> None:
    """Check what every kind of measurement needs."""
    from idp_tutorial.reproduction.efficiency.timing import require_gpu

    if options.device == "cuda":
        require_gpu()
    if options.out:
        _check_output_file(options.out)


def _prepare(options: SimpleNamespace) -> tuple[list[str], Any, Any]:
    """Check the options, and return the methods, the backbone and the configuration."""
    from idp_tutorial.reproduction.efficiency.timing import (
        SCALING_VALUES,
        make_benchmark_config,
    )

    _check_device_and_file(options)
    methods = _select_methods(options)
    lengths: Any = [options.length]
    prompt_lengths: Any = [options.prompt_length or 20]
    if options.grow == "length":
        lengths = options.values or SCALING_VALUES["length"]
    if options.grow == "prompt_length":
        prompt_lengths = options.values or SCALING_VALUES["prompt_length"]
    bb = _load_benchmark_backbone(options.backbone, options.grow, max(lengths), max(prompt_lengths))
    base = make_benchmark_config(
        bb,
        options.batch_size,
        options.length,
        head=options.head,
        precision=options.precision,
        device="cpu" if options.device == "cpu" else "auto",
        **(dict(steps=2, eval_every=2) if options.tables else {}),
    )
    return methods, bb, base


def _refuse_unused(options: "BenchOptions") -> None:
    """Check that the options belong to the kind of measurement."""
    if options.end_to_end:
        names = "length layers prompt_length head peft grow values tables minutes warmup precision"
        refuse_given(options, f"{names} batch_size", "with end_to_end")
        return
    refuse_given(options, "data", "without end_to_end")
    if options.tables:
        refuse_given(options, "methods layers peft grow values warmup", "with tables")
        return
    refuse_given(options, "minutes", "without tables")
    if options.grow:
        refuse_given(options, "layers peft", "with grow")
    else:
        refuse_given(options, "values", "without grow")


def _collect_records(
    parts: Iterable[list[dict]], settings: Mapping[str, Any], out: str | None
) -> list[dict]:
    """Return all records with the settings; append each part to a file when it is measured."""
    from idp_tutorial.utils.durable_files import file_lock
    from idp_tutorial.utils.records import append_record

    records = []
    with file_lock(out):
        for part in parts:
            for record in part:
                records.append({**settings, **record})
                if out:
                    append_record(records[-1], out)
    return records


def _measure_all(
    options: SimpleNamespace, bb: Any, base: Any, methods: Sequence[str]
) -> tuple[list[dict], dict]:
    """Return all records, with the settings of the measurement, and these settings."""
    import torch

    from idp_tutorial.utils.records import collect_versions

    grown_field = {"length": "length", "batch": "batch_size"}.get(options.grow)
    settings = dict(
        backbone=Path(options.backbone).name,
        n_layers=bb.n_layers,
        d=bb.d,
        batch_size=options.batch_size,
        length=options.length,
        head=options.head,
        precision=options.precision,
        threads=torch.get_num_threads(),
        repeats=options.repeats,
        versions=collect_versions(),
        device="cpu",
        **bb.weights_info,
    )

    def measure() -> Iterator[list[dict]]:
        """Yield the records of each part, and set the device on which it was measured."""
        for part in _measure_parts(options, bb, base, methods):
            is_on_gpu = bb.word_embeddings.weight.is_cuda
            settings["device"] = torch.cuda.get_device_name() if is_on_gpu else "cpu"
            yield [{**r, grown_field: r["value"]} for r in part] if grown_field else part

    with handle_messages(MessageHandler(sys.stderr)):
        return _collect_records(measure(), settings, options.out), settings


def _measure_end_to_end(options: SimpleNamespace) -> list[dict]:
    """Return the records of whole commands, each written when its part is complete."""
    from importlib.metadata import version

    import torch

    from idp_tutorial.methods.all_methods import METHODS
    from idp_tutorial.reproduction.efficiency import end_to_end
    from idp_tutorial.utils.records import collect_versions, processor_name

    _check_device_and_file(options)
    require_packages("peft")
    methods = [*end_to_end.END_TO_END_METHODS]
    if options.methods != "all":
        methods = [check_name(m, METHODS, "method") for m in split_names(options.methods)]
    device = _find_device(options)
    run = end_to_end.EndToEndSettings(
        backbone=options.backbone or end_to_end.default_backbone(),
        methods=methods,
        data=options.data,
        device="cpu" if device == "cpu" else "auto",
        threads=options.threads,
        sizes=end_to_end.DEFAULT_SIZES,
    )
    report = partial(print, file=sys.stderr, flush=True)
    settings = dict(
        backbone=Path(run.backbone).name,
        batch_size=run.batch_size,
        max_len=run.max_len,
        threads=options.threads or torch.get_num_threads(),
        repeats=options.repeats,
        versions={**collect_versions(), "peft": version("peft")},
        device=device,
        processor=processor_name(),
        load_before=end_to_end.warn_if_busy(report),
    )
    with tempfile.TemporaryDirectory() as folder:
        parts = end_to_end.measure_end_to_end(run, Path(folder), options.repeats, report)
        return _collect_records(parts, settings, options.out)


def _print_end_to_end(records: list[dict]) -> None:
    """Print the settings of whole commands, and a table for each part."""
    first = records[0]
    print(
        f"{first['backbone']}, {first['task']}, {first['sizes']}, one epoch, batches of "
        f"{first['batch_size']}, up to {first['max_len']} tokens, {first['device']} "
        f"({first['threads']} threads of {first['processor']}), {first['repeats']} rounds in "
        "turns; ratio: time of the other command, with the same method and dtype, over this time\n"
    )
    columns = ["name", "method", "dtype", "seconds_min", "seconds_median", "cpu_seconds", "score"]
    columns += ["as_float32", "ratio", "over_pipeline"]
    for part in ("training", "answering"):
        rows = []
        for record in records:
            if record["part"] == part:
                rows.append({column: record.get(column) for column in columns})
        print(f"{part}\n{_format_table(rows)}\n")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(CommandOptions):
    """Options of `idp bench`."""

    # a published configuration (with random weights), 'tiny', 'minilm', or a folder (default:
    # roberta-large; with end_to_end: 'minilm' if it is installed, else 'tiny')
    backbone: str | None = None
    # comma-separated, besides fine-tuning (with grow: prompt-tuning, s-idpg-phm, lpt-npg; with
    # end_to_end: prompt-tuning, lora, lpt-npg)
    methods: str = "all"
    batch_size: Annotated[int, Range(1, 10**6)] = 4  # examples in a step
    length: Annotated[int, Range(1, 10**6)] = 64  # tokens of each example
    # layers below a late prompt, comma-separated (default: a quarter, half and three quarters)
    layers: str | None = None
    # number of prompt vectors (default: as in LPT's Table 5)
    prompt_length: Annotated[int, Range(1, 10**5)] | None = None
    # a trained classification head, or label words at a mask token
    head: Literal["classification", "verbalizer"] = "classification"
    peft: bool = False  # `peft`'s prompt tuning, prefix tuning, P-tuning and LoRA too
    # measure scaling instead, with one of 'prompt_length', 'length', 'depth' or 'batch'
    grow: str | None = None
    values: str | None = None  # values of grow, comma-separated
    # measure all tables of the lab instead, also in bfloat16 and beside `pipeline`
    tables: bool = False
    minutes: float = 6.0  # with tables: start no further part after this time
    # measure whole commands instead: `idp train` beside `peft` with Trainer, `idp predict` beside
    # `pipeline`, in turns; other work on the machine falsifies the times
    end_to_end: bool = False
    # with end_to_end: folder of tasks with TREC (default: the bundled task 'questions')
    data: str | None = None
    repeats: Annotated[int, Range(1, 10**6)] = 7  # rounds that are measured
    warmup: Annotated[int, Range(0, 10**6)] = 1  # rounds before them
    precision: Literal["no", "bf16", "fp16"] = "no"  # autocast
    device: Literal["auto", "cpu", "cuda"] = "auto"  # processor, or GPU
    # threads of the CPU (default: PyTorch's choice)
    threads: Annotated[int, Range(1, 10**4)] | None = None
    json: bool = False  # print one JSON object a line
    out: str | None = None  # a JSONL file to which the records are appended


@command(BenchOptions)
def bench_command(options: BenchOptions, base: Any) -> None:
    """Measure time and memory of every method, beside the cost model and LPT's tables."""
    _refuse_unused(options)
    parsed = SimpleNamespace(**vars(options))
    if options.end_to_end:
        records = _measure_end_to_end(parsed)
        _print_records(records, options.json, _print_end_to_end)
        return
    parsed.backbone = options.backbone or "roberta-large"
    parsed.layers = parse_ints(options.layers, "layers")
    parsed.values = parse_ints(options.values, "values")
    selected, bb, benchmark_config = _prepare(parsed)
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    records, settings = _measure_all(parsed, bb, benchmark_config, selected)
    _print_records(records, options.json, partial(_print_tables, settings=settings))

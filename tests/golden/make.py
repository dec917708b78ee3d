"""Compute the golden values, which code changes must not change.

`python tests/golden/make.py [FILE...]` writes `runs.json` and the other files in this folder.
"""

import contextlib
import copy
import dataclasses
import hashlib
import io
import json
import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg"
)
GOLDEN_FOLDER = Path(__file__).resolve().parent
for folder in (GOLDEN_FOLDER.parents[1], GOLDEN_FOLDER.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import pandas as pd
import torch
from safetensors.torch import save as save_bytes
from small import backbone, config, model_of, small_task

from idp_tutorial.assembly.config import RunConfig, RunOptions, describe_all_options
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.cli.compare import compare_command
from idp_tutorial.cli.main import COMMAND_NAMES
from idp_tutorial.cli.params import params_command
from idp_tutorial.cli.predict import predict_command
from idp_tutorial.cli.train import train_command
from idp_tutorial.core.backbone import Backbone, backbone_id
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.planned_model import PlannedModel, count_parameters, trained_state
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.tasks import Task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.p_tuning_v2 import deep_prompt_plan
from idp_tutorial.reproduction.efficiency.cost_model import (
    compare_published_speeds,
    ideal_speed_up,
    step_cost,
)
from idp_tutorial.reproduction.efficiency.parameter_counts import (
    count_all_parameters,
    count_lora_parameters,
    count_method_parameters,
    format_count,
    meta_model,
)
from idp_tutorial.reproduction.efficiency.published_counts import (
    published_counts,
    recompute_published_averages,
    recompute_published_claims,
)
from idp_tutorial.training.evaluation import predict_logits
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.records import read_records
from idp_tutorial.utils.tensor_files import deserialise_tensors
from results import SCRIPTS, find_command
from results.depth.sweep import sweep_command
from results.pretraining.run import pretrain_command
from results.speed.bench import bench_command
from results.transfer.run import transfer_command
from results.transfer.scores import published_transfer_table

METHOD_ORDER = [  # order of the methods in `counts.json`
    "head-only",
    "fine-tuning",
    "efl",
    "bitfit",
    "lora",
    "lora-all",
    "adapter",
    "compacter",
    "adapterdrop",
    "prompt-tuning",
    "prompt-tuning-134",
    "p-tuning",
    "smop",
    "dept",
    "m-idpg-phm-glove",
    "p-tuning-v2",
    "s-idpg-dnn",
    "s-idpg-phm",
    "m-idpg-dnn",
    "m-idpg-phm",
    "lpt",
    "lpt-npg",
    "lpt-mppg",
    "lpt-appg",
    "id-spam",
    "id-spam-mean",
]
SPLIT_SIZES = {"train": 24, "validation": 12, "test": 12}


def describe_machine() -> dict[str, str]:
    """Return processor and versions; on another machine the last digits may differ."""
    try:
        cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        cpu = platform.processor()
    packages = ("torch", "numpy", "transformers", "accelerate", "tokenizers")
    return {
        "machine": platform.machine(),
        "cpu": cpu,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


# --- runs, variants, deep: three training steps of every method


@cache
def _build_backbone(family: str) -> Backbone:
    options = {"max_position_embeddings": 258} if family == "roberta" else {}
    return backbone(family, **options)


def copy_backbone(family: str = "roberta") -> Backbone:
    """Return a new copy of a small backbone, because some methods change it."""
    bb = _build_backbone(family)
    return copy.deepcopy(bb, {id(bb.tokenizer): bb.tokenizer})


SHORT = {"steps": 3, "eval_every": 3, "batch_size": 8}


def train_and_describe(model: PlannedModel, task: Task, cfg: RunConfig) -> dict[str, Any]:
    """Train for three steps; return losses, predictions and a digest of the trained tensors."""
    log = fit(model, task, cfg)
    model.eval()
    tensors = trained_state(model)
    bb = model.backbone
    template = cfg.template if model.head.pooling == "mask" else None
    max_len = min(cfg.max_len, bb.max_tokens)
    examples = task.encode(task.splits["test"][:4], bb.tokenizer, max_len, template)
    for source in model.prompt_sources():
        examples = source.prepare(examples)
    digest = hashlib.blake2b(digest_size=6)
    for tensor in tensors.values():
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return {
        "losses": log.losses,
        "validation": log.validation,
        "params": count_parameters(model),
        "logits": predict_logits(model, examples).tolist(),
        "bits": digest.hexdigest(),
        "tensors": [f"{name} {'x'.join(map(str, t.shape))}" for name, t in tensors.items()],
    }


def run_method(
    family: str, head: str, method: str, task_name: str = "sentiment", **options: Any
) -> dict[str, Any]:
    """Train a method of `METHODS`; return the description, or the error message of a refusal."""
    task = small_task(task_name, **SPLIT_SIZES)
    try:
        with tempfile.TemporaryDirectory() as cache_dir:
            cfg = config(method=method, head=head, cache_dir=cache_dir, **SHORT, **options)
            model = model_of(method, copy_backbone(family), task, head, **options)
            return train_and_describe(model, task, cfg)
    except ValueError as e:
        return {"error": str(e)}


FAMILIES_BY_HEAD = {
    "classification": ("roberta", "bert", "gpt2", "deberta"),
    "verbalizer": ("roberta", "gpt2"),
}
RUNS = [
    f"{family} {head} {method}"
    for head, families in FAMILIES_BY_HEAD.items()
    for family in families
    for method in METHODS
]

VARIANTS = {  # runs with another option
    **{f"position {i}": {"method": "prompt-tuning", "position": i} for i in (1, 4)},
    **{
        f"position {i}": {"method": "prompt-tuning", "position": i, "task_name": "similarity"}
        for i in (2, 3)
    },
    **{f"position {i} of M-IDPG": {"method": "m-idpg-phm", "position": i} for i in (1, 4)},
    **{f"layer {i}": {"method": "lpt-npg", "layer": i} for i in (0, 2)},
    "lower dropout": {"method": "lpt-npg", "dropout_below_prompt": True},
    "default bottleneck": {"method": "s-idpg-dnn", "bottleneck": 256},
    "cls pooling": {"method": "s-idpg-phm", "pooling": "cls"},
    "cls pooling, head only": {"method": "head-only", "pooling": "cls"},
    "standardised": {"method": "s-idpg-phm", "standardise": True},
    "accumulated": {"method": "id-spam", "accumulate": 2},
    "paper template": {"method": "lpt", "head": "verbalizer", "template": "paper"},
    "loss over label words": {"method": "lpt", "head": "verbalizer", "loss_vocab": "labels"},
    "regression": {"method": "s-idpg-phm", "task_name": "similarity"},
    "sentence pair": {"method": "efl", "task_name": "entailment"},
    "six classes": {"method": "efl", "task_name": "questions"},
    "head learning rate": {"method": "dept", "head_lr": 0.003},
    "warm-up": {"method": "lora", "warmup": 0.5, "weight_decay": 0.1, "clip": 0.01},
    "bf16": {"method": "lpt-npg", "precision": "bf16"},
    "no prompt dropout": {"method": "m-idpg-dnn", "prompt_dropout": 0.0},
    "other seed": {"method": "smop", "seed": 3},
    "cached sentence": {"method": "s-idpg-phm", "cache": "sentence"},
    "both caches": {"method": "lpt-appg", "cache": "both"},
    "cached hidden states": {"method": "lpt-npg", "cache": "hidden"},
    "hidden states in float16": {"method": "lpt", "cache": "hidden", "cache_dtype": "float16"},
}


def run_variant(name: str) -> dict[str, Any]:
    """Train one of `VARIANTS`."""
    options = dict(VARIANTS[name])
    head = options.pop("head", "classification")
    return run_method("roberta", head, options.pop("method"), **options)


DEEP_PROMPTS = [
    f"{family} {insertion}"
    for family in ("roberta", "gpt2", "deberta")
    for insertion in ("kv", "replace", "add")
]


def run_deep_prompts(name: str) -> dict[str, Any]:
    """Train prompts in every layer, inserted in one of three ways."""
    family, insertion = name.split()
    bb = copy_backbone(family)
    task = small_task(**SPLIT_SIZES)
    try:
        torch.manual_seed(0)
        head = ClassificationHead(bb.d, 2, "mean")
        model = PlannedModel(bb, head, deep_prompt_plan(bb, 4, insertion))
        return train_and_describe(model, task, config(**SHORT))
    except ValueError as e:
        return {"error": str(e)}


# --- counts: parameters, costs, published numbers


def _to_plain(cell: Any) -> Any:
    """Return a cell of a DataFrame as JSON stores it; NaN becomes None."""
    if cell is None or (isinstance(cell, float) and cell != cell):
        return None
    return cell.item() if hasattr(cell, "item") else cell


def _dump_frame(df: pd.DataFrame) -> dict[str, list]:
    """Return the columns of a DataFrame, and its rows, each with its index in front."""
    rows = [[str(i), *map(_to_plain, row)] for i, row in zip(df.index, df.values.tolist())]
    return {"columns": [*map(str, df.columns)], "rows": rows}


COST_SETTINGS = (  # number of layers, options of `step_cost`
    (12, {}),
    (24, {"prompt_length": 10, "T": 128, "d": 1024}),
    (24, {"prompt_length": 20, "T": 64, "d": 1024, "last_layer_share": 1 / 6}),
)
CACHING = ({"cached": False}, {"cached": True}, {"cached": True, "epochs": 3})


def _compute_cost(method: str, L: int, options: dict[str, Any]) -> list[float]:
    speed_ups = [ideal_speed_up(method, L, **caching, **options) for caching in CACHING]
    return [*step_cost(method, L, **options), *speed_ups]


def _compute_costs() -> dict[str, list]:
    return {
        method: [_compute_cost(method, L, options) for L, options in COST_SETTINGS]
        for method in METHOD_ORDER
    }


def _list_published_counts() -> list[list]:
    keys = ["paper", "table", "backbone", "method", "reported", "exact", "ours", "status"]
    return [[row[key] for key in keys] for row in published_counts()]


def _count_methods(backbone_name: str, methods: list[str], **options: Any) -> dict[str, list]:
    return _dump_frame(count_method_parameters(backbone_name, RunOptions(**options), methods))


def _count_model_sizes() -> dict[str, list[int]]:
    names = ("roberta-base", "gpt2-medium", "gemma-2b", "flan-t5-xl")
    parts = ("lm", "encoder", "classifier")
    return {
        name: [count_all_parameters(meta_model(name, part)) for part in parts] for name in names
    }


def _count_lora() -> dict[str, int]:
    names = ("roberta-base", "gpt2-medium", "gemma-2b")
    return {name: count_lora_parameters(meta_model(name), 8) for name in names}


def _format_counts() -> list[str]:
    return [
        format_count(count, like, unit)
        for count in (105_472, 1_549_999)
        for unit in (1000, 1024)
        for like in ("105K", "1.55M", "2,064,384")
    ]


def _dump_claims() -> dict[str, list]:
    return _dump_frame(recompute_published_claims().drop(columns=["note", "claim", "formula"]))


def _name_kind(option: Any) -> str:
    """Return the name of an option's type; a union is one of texts and something else."""
    return option.kind.__name__ if isinstance(option.kind, type) else "str"


def _list_config_fields() -> list[list]:
    fields = []
    for name, option in describe_all_options().items():
        fields.append([name, _name_kind(option), option.default])
    return fields


COUNTS: dict[str, Callable[[], Any]] = {
    "methods gpt2": lambda: _count_methods(
        "gpt2",
        ["lpt-npg", "p-tuning-v2", "lora", "smop", "efl"],
        head="verbalizer",
        prompt_length=5,
        bottleneck=16,
    ),
    "methods deberta-large": lambda: _count_methods(
        "deberta-large", ["p-tuning-v2", "lpt-npg", "dept", "lora-all", "bitfit"], prompt_length=7
    ),
    "published": _list_published_counts,
    "claims": _dump_claims,
    "averages": lambda: _dump_frame(recompute_published_averages()),
    "transfer": lambda: _dump_frame(published_transfer_table()),
    "model sizes": _count_model_sizes,
    "lora": _count_lora,
    "formatted counts": _format_counts,
    "costs": _compute_costs,
    "published speeds": lambda: _dump_frame(compare_published_speeds()),
    "learning rates": lambda: {name: [*method.learning_rates] for name, method in METHODS.items()},
    "config": _list_config_fields,
}

# --- help, output: the commands


def describe_help(name: str) -> dict[str, Any]:
    """Return default, help text, type and group of each option of a command."""
    command = find_command(name)
    options = {}
    for option in command.options().values():
        choices = list(option.choices) or _name_kind(option)
        default = "required" if option.default is dataclasses.MISSING else str(option.default)
        options[option.name] = [default, option.help, choices, option.group]
    return {"about": command.function.__doc__, **options}


VARYING_KEYS = {  # their values differ from run to run, or between processors
    "logits_digest",
    "ms_per_step",
    "peak_memory_mb",
    "seconds",
    "tuning_seconds",
    "sweep_seconds",
    "share_of_sweep",
    "versions",
    "threads",
    "provenance",
    "mb",
    "ms",
    "ratio",
    "spread",
    "share",
    "saved",
    "tokens_per_ms",
    "tokens_per_s",
    "over_ours",
}


def mask_varying(value: Any) -> Any:
    """Return a record with '*' for each value that differs from run to run."""
    if isinstance(value, dict):
        return {k: "*" if k in VARYING_KEYS else mask_varying(v) for k, v in value.items()}
    return [*map(mask_varying, value)] if isinstance(value, (list, tuple)) else value


def _file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[!.]*") if path.is_file())


def _masked_records(path: Path) -> list[dict]:
    return [mask_varying(record) for record in read_records(path)]


def _masked_lines(text: str, *masked_columns: str) -> list[str]:
    """Return the lines of a printed table, with single spaces and '*' in the masked columns."""
    lines = []
    masked_indices: list[int] = []
    width = -1
    for line in text.splitlines():
        if line.split()[:1] == ["method"] and masked_columns:
            for column in masked_columns:
                line = line.replace(column, column.replace(" ", "_"))
            words = line.split()
            masked_indices = [words.index(name.replace(" ", "_")) for name in masked_columns]
            width = len(words)
        else:
            words = [word for word in line.split() if not re.fullmatch("-{5,}", word)]
            if len(words) == width:
                words = ["*" if i in masked_indices else word for i, word in enumerate(words)]
        if words:
            lines.append(" ".join(words))
    return lines


@contextlib.contextmanager
def _task_folder() -> Iterator[Path]:
    """Yield a temporary folder with small files of three tasks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task in ("sentiment", "questions", "two-domains"):
            (folder / "data" / task).mkdir(parents=True)
            for split, size in {"train": 40, "validation": 20, "test": 24}.items():
                rows = make_rows(task, split, n=size)
                lines = "".join(json.dumps(row) + "\n" for row in rows)
                (folder / "data" / task / f"{split}.jsonl").write_text(lines)
        yield folder


def _capture_output(command: Callable, folder: Path, **options: Any) -> str:
    """Return the standard output of a command, with `TMP` for the name of the folder."""
    options = {k: str(v) if isinstance(v, Path) else v for k, v in options.items()}
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        command(**options)
    return output.getvalue().replace(str(folder), "TMP")


TEXTS = [
    "who wrote the play ?",
    "where is the river ?",
    "how many people live there ?",
    "what is an atom ?",
    "what does NASA stand for ?",
    "which animal runs fastest ?",
]
SMALL: dict[str, Any] = {"batch_size": 8, "device": "cpu"}


def _run_params(folder: Path, **options: Any) -> list[str]:
    output = _capture_output(params_command, folder, **{"prompt_length": 10, **options})
    return [" ".join(line.split()) for line in output.splitlines()]


def _run_params_as_json(folder: Path) -> list[str]:
    return _run_params(
        folder,
        backbone="roberta-base",
        prompt_length=5,
        head="verbalizer",
        methods="efl,lpt-npg,lora-all",
        json=True,
    )


def _run_compare(folder: Path) -> dict[str, Any]:
    output = _capture_output(
        compare_command,
        folder,
        methods="head-only,lpt-npg",
        seeds=1,
        steps=3,
        prompt_length=10,
        task="questions",
        data=folder / "data",
        out=folder / "out",
        **SMALL,
    )
    table = pd.read_csv(folder / "out/compare.csv")
    varying = [column for column in table if re.search("ms|mem|seconds|per_second", column)]
    return {
        "text": _masked_lines(output, "seconds", "texts/s"),
        "records": _masked_records(folder / "out/compare.jsonl"),
        "csv": _dump_frame(table.drop(columns=varying)),
        "files": _file_names(folder / "out"),
    }


def _run_train_and_predict(folder: Path) -> dict[str, Any]:
    output = _capture_output(
        train_command,
        folder,
        task="questions",
        steps=3,
        prompt_length=3,
        bottleneck=8,
        controls=False,
        data=folder / "data",
        out=folder / "run",
        **SMALL,
    )
    lines = [*TEXTS[:4], json.dumps({"sentence1": TEXTS[4], "id": 3})]
    (folder / "in").write_text("\n".join(lines) + "\n")
    predictions = _capture_output(
        predict_command, folder, model=folder / "run", texts=folder / "in", proba=True
    )
    description, tensors = deserialise_tensors((folder / "run/prompts.safetensors").read_bytes())
    return {
        "text": output.splitlines(),
        "record": _masked_records(folder / "run/record.jsonl"),
        "answers": [*map(json.loads, predictions.splitlines())],
        "about": {
            "cfg": description["cfg"],
            "task": description["task"],
            "fingerprint": backbone_id(load_backbone()),
            "glove": description["glove"],
        },
        "bits": hashlib.sha256(save_bytes(tensors)).hexdigest()[:12],
        "files": _file_names(folder / "run"),
    }


def _read_folder(folder: Path) -> dict[str, list]:
    return {name: _masked_records(folder / name) for name in _file_names(folder)}


def _run_sweep(folder: Path) -> dict[str, Any]:
    output = _capture_output(
        sweep_command,
        folder,
        task="sentiment",
        methods="head-only,lpt",
        layers="1,4",
        seeds=1,
        steps=1,
        max_len=16,
        data=folder / "data",
        out=folder / "out",
        **SMALL,
    )
    text = _masked_lines(output, "ms_per_step", "peak_memory_mb")
    return {"text": text, "files": _read_folder(folder / "out")}


def _run_transfer(folder: Path) -> dict[str, Any]:
    output = _capture_output(
        transfer_command,
        folder,
        source="sentiment",
        target="two-domains",
        methods="lpt",
        seeds=1,
        steps=2,
        test_rows=20,
        target_shots=10,
        max_len=32,
        data=folder / "data",
        out=folder / "out",
        **SMALL,
    )
    return {"text": _masked_lines(output), "files": _read_folder(folder / "out")}


def _run_bench(folder: Path) -> list[dict]:
    output = _capture_output(
        bench_command,
        folder,
        backbone="tiny",
        methods="prompt-tuning,lpt-npg",
        length=24,
        repeats=1,
        json=True,
        **SMALL,
    )
    return [mask_varying(json.loads(line)) for line in output.splitlines()]


def _run_pretrain(folder: Path) -> dict[str, Any]:
    rows = [*make_rows("sentiment", "train", n=400), *make_rows("questions", "train", n=400)]
    (folder / "text.txt").write_text("\n".join(row["sentence1"] for row in rows))
    _capture_output(
        pretrain_command,
        folder,
        text=folder / "text.txt",
        out=folder / "out",
        n_layers=2,
        d=32,
        steps=6,
        tokens_per_step=256,
        held_out_tokens=2000,  # the text is short
        every=3,
        teacher="",
        dtype="float32",
    )
    log = _masked_records(folder / "out/log.jsonl")
    return {"log": log, "files": _file_names(folder / "out/backbone")}


OUTPUTS = {
    "idp params": _run_params,  # on roberta-large
    "idp params of three methods": _run_params_as_json,
    "idp compare": _run_compare,
    "idp train and idp predict": _run_train_and_predict,
    "idp sweep": _run_sweep,
    "idp transfer": _run_transfer,
    "idp bench": _run_bench,
    "idp pretrain": _run_pretrain,
}


def run_command(name: str) -> Any:
    """Return what a command of `OUTPUTS` prints and writes, without times."""
    torch.manual_seed(0)
    with _task_folder() as folder:
        return OUTPUTS[name](folder)


# --- the files

FILES: dict[str, tuple[Callable[[str], Any], Any]] = {  # function of a name, and the names
    "runs": (lambda name: run_method(*name.split(" ", 2)), RUNS),
    "variants": (run_variant, VARIANTS),
    "deep": (run_deep_prompts, DEEP_PROMPTS),
    "counts": (lambda name: COUNTS[name](), COUNTS),
    "help": (describe_help, (*COMMAND_NAMES, *SCRIPTS)),
    "output": (run_command, OUTPUTS),
}


def compute_value(file: str, name: str) -> Any:
    """Return a golden value as it reads after a round trip through JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return json.loads(json.dumps(FILES[file][0](name)))


def load_stored(file: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the machine that wrote a file, and its values by name."""
    content = json.loads((GOLDEN_FOLDER / f"{file}.json").read_text(encoding="utf-8"))
    values = content["values"]
    if "tensors" in content:  # each list of tensors is stored once
        for value in values.values():
            if "tensors" in value:
                value["tensors"] = content["tensors"][value["tensors"]]
    return content["machine"], values


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def write_file(file: str) -> None:
    """Compute all values of a file and write it; one value a line."""
    values = {name: compute_value(file, name) for name in FILES[file][1]}
    tensor_lists: list[list[str]] = []
    if file in ("runs", "variants", "deep"):
        for value in values.values():
            if "tensors" not in value:
                continue
            if value["tensors"] not in tensor_lists:
                tensor_lists.append(value["tensors"])
            value["tensors"] = tensor_lists.index(value["tensors"])
    parts = [f'"machine":{_to_json(describe_machine())}']
    if tensor_lists:
        parts.append('"tensors":[\n' + ",\n".join(map(_to_json, tensor_lists)) + "\n]")
    lines = ",\n".join(f"{_to_json(name)}:{_to_json(value)}" for name, value in values.items())
    parts.append(f'"values":{{\n{lines}\n}}')
    text = "{" + ",\n".join(parts) + "}\n"
    (GOLDEN_FOLDER / f"{file}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for file in sys.argv[1:] or FILES:
        write_file(file)
        size = (GOLDEN_FOLDER / f"{file}.json").stat().st_size
        print(f"{file}.json: {size:,} bytes", flush=True)

"""Turn every cell of a published table into the config of a run.

A table of scores is expanded from its own tasks, methods, backbones and training set sizes.
`full` is the paper's grid; `small` is what two cores can run in a night: one small backbone,
four tasks, 200 steps. `small` changes backbone and budget, so it cannot confirm or refute the
paper's numbers; it shows what happens on this machine.

One name can mean three methods. LPT's "Prompt Tuning" is initialised from N(0, 1) and inserted
after the embeddings, in front of `<s>`: it is `lpt` with `layer=0` and 20 or 256 vectors. The
prompts of IDPG and ID-SPAM are placed among the words. ID-SPAM's "LoRA" changes all matrices,
and its "LPT" is NPG with m = 256 and t = 10, as its parameter count shows.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from idp_tutorial.assembly.controls import ALL_METHODS, CONTROL_METHODS
from idp_tutorial.assembly.options import METHOD_OPTIONS
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.reproduction.papers.protocols import (
    SINGLE_PROMPT_METHODS,
    build_paper_config,
    is_decoder_name,
    paper_backbone,
    parse_paper_name,
)
from idp_tutorial.reproduction.papers.published_scores import (
    METHOD_NAMES,
    TASK_NAMES,
    load_published_scores,
    load_published_tables,
)
from idp_tutorial.utils.checks import UserError, check_choice, check_name
from idp_tutorial.utils.config import RunConfig

__all__ = [
    "PROMPT_LENGTHS",
    "PROMPT_LENGTH_OVERRIDES",
    "METHOD_OVERRIDES",
    "GENERATOR_VARIANTS",
    "IDPG_TASKS",
    "FIGURE_VARIANTS",
    "FIGURE_TO_TABLE",
    "N_LAYERS_BY_BACKBONE",
    "SMALL_SCALE_TASKS",
    "paper_method_fields",
    "parse_published_method",
    "load_table_cells",
    "parse_shots",
    "scale_to_backbone",
    "plan_table_runs",
]


PROMPT_LENGTHS = {"idpg": 5, "lpt": 20, "id-spam": 10}  # paper: number of prompt vectors
PROMPT_LENGTH_OVERRIDES = {  # (paper, method): number of prompt vectors
    ("lpt", "lpt-npg"): 5,
    ("lpt", "s-idpg-phm"): 5,
    ("lpt", "lpt-appg"): 10,
    ("lpt", "lpt-mppg"): 10,
}
# (paper, published name): method and fields, where `METHOD_NAMES` has another method
METHOD_OVERRIDES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("lpt", "Prompt Tuning"): ("lpt", dict(layer=0)),
    ("lpt", "Prompt Tuning-256"): ("lpt", dict(layer=0, prompt_length=256)),
    ("id-spam", "LoRA"): ("lora-all", {}),
    ("id-spam", "LPT"): ("lpt-npg", dict(bottleneck=256)),
}
GENERATOR_VARIANTS = {  # published name: value of `generator`
    "PHM": "plain",
    "+residual": "residual",
    "+LayerNorm": "layer-norm",
    "+residual+LayerNorm": "both",
}


def _parse_method_name(published_method: str, setting: str, paper: str) -> tuple[str | None, dict]:
    """Return the method (None if it is unknown) and the fields that its published name states."""
    if match := re.fullmatch(r"(.+) ([SML]) version m=(\d+)", published_method):
        fields = dict(
            parameter_sharing=match[2],
            bottleneck=int(match[3]),
            generator_input="layer0" if "layer 0" in setting else "previous",
        )
        return METHOD_NAMES[match[1]], fields
    if match := re.fullmatch(r"(.+) at layer (\d+)", published_method):
        method, _ = _parse_method_name(match[1], setting, paper)
        return method, dict(layer=int(match[2]) - 1)  # LPT counts from 1, of 24
    if published_method in GENERATOR_VARIANTS:
        return "s-idpg-phm", dict(generator=GENERATOR_VARIANTS[published_method])
    override = METHOD_OVERRIDES.get((paper, published_method))
    return override or (METHOD_NAMES.get(published_method), {})


def paper_method_fields(
    method: str,  # key of `ALL_METHODS`
    table: str,  # such as 'lpt-2'
    **row_fields: Any,  # fields of `RunConfig` that the row of the table states
) -> dict:  # fields of `RunConfig`; the value None means the method's default
    """Return the prompt length, bottleneck, layer and other options of a method in a table."""
    paper = parse_paper_name(table)
    paper_fields: dict[str, Any] = dict(
        prompt_length=PROMPT_LENGTH_OVERRIDES.get((paper, method), PROMPT_LENGTHS[paper]),
        bottleneck=None,
        generator="plain",
        parameter_sharing="M",
        generator_input="layer0" if table == "idpg-3" else "previous",
    )
    fields = {name: value for name, value in paper_fields.items() if METHOD_OPTIONS[name](method)}
    if ALL_METHODS[method].insertion_point == "middle":
        fields["layer"] = None
    if method == "p-tuning-v2":  # IDPG's few-shot code adds its vectors to the hidden states
        fields["insertion"] = "add" if paper == "idpg" else None
    if table == "id-spam-16":  # the table has losses by epoch, so short runs have 30 epochs too
        fields["epochs"] = 30.0
    return fields | row_fields


def parse_published_method(
    published_method: str,  # name of a method as the paper prints it
    setting: str = "",  # setting of the row, such as 'K=100'
    table: str = "lpt-1",
) -> tuple[str | None, dict]:  # key of `ALL_METHODS`, or None; fields of `RunConfig`
    """Return the method and the options that a row of a published table stands for."""
    method, row_fields = _parse_method_name(published_method, setting, parse_paper_name(table))
    return method, paper_method_fields(method, table, **row_fields) if method else {}


IDPG_TASKS = ("mpqa", "subj", "cr", "mr", "sst2", "qnli", "rte", "mrpc", "stsb", "qqp")
# figures without printed numbers: their tasks, and the methods with fields that they compare
FIGURE_VARIANTS: dict[str, tuple[tuple[str, ...], list[tuple[str, dict[str, int]]]]] = {
    "idpg-f7": (
        IDPG_TASKS,
        [(m, dict(position=p)) for m in ("prompt-tuning", "s-idpg-phm") for p in range(5)],
    ),
    "idpg-f9": (
        IDPG_TASKS,
        [
            (m, dict(prompt_length=t))
            for m in ("prompt-tuning", "m-idpg-phm")
            for t in (1, 5, 10, 20)
        ],
    ),
}
FIGURE_TO_TABLE = {"idpg-f1": "idpg-1", "idpg-f3": "idpg-6"}  # figures that show a table


def _add_prompt_position(table: str, method: str, task: str, fields: dict) -> dict:
    """Return the fields with the position of IDPG's single prompts: 1 for pairs, else 0."""
    if parse_paper_name(table) == "idpg" and method in SINGLE_PROMPT_METHODS:
        return dict(position=int(TASKS[task].pair)) | fields
    return fields


def _figure_cells(table: str) -> pd.DataFrame:
    """Return the cells of a figure without printed numbers."""
    tasks, variants = FIGURE_VARIANTS[table]
    cells = []
    for method, fields in variants:
        label = " ".join([method, *(f"{name}={value}" for name, value in fields.items())])
        for task in tasks:
            if fields.get("position") in (2, 3) and not TASKS[task].pair:
                continue
            cells.append(
                dict(
                    setting="",
                    backbone="RoBERTa-large",
                    method=label,
                    ours=method,
                    fields=paper_method_fields(method, table, **fields),
                    task=task,
                    name=task,
                    metric="",
                    mean=None,
                    std=None,
                )
            )
    return pd.DataFrame(cells)


def _published_cells(table: str) -> pd.DataFrame:
    """Return the cells of a table of scores, with the tasks and methods of this library."""
    cells = load_published_scores(table)
    parsed = [
        parse_published_method(method, setting, table)
        for method, setting in zip(cells.method, cells.setting)
    ]
    cells = cells.assign(
        name=cells.task.map(TASK_NAMES),
        ours=[method for method, _ in parsed],
        fields=[fields for _, fields in parsed],
    )
    if cells.name.isna().all() and cells.task.eq("Avg").all():  # only means over IDPG's tasks
        cells = pd.concat([cells.assign(name=t, task=t, mean=None, std=None) for t in IDPG_TASKS])
    return cells


def load_table_cells(
    table: str,  # a table of scores or a figure, such as 'idpg-1' or 'idpg-f7'
) -> pd.DataFrame:
    """Return a row for each cell of a table or figure whose task and method can be run.

    Columns as published: setting, backbone, method, task, metric, mean and std. Columns of this
    library: `name` (the task), `ours` (the method) and `fields` (fields of `RunConfig`).
    """
    table = FIGURE_TO_TABLE.get(table, table)
    cells = _figure_cells(table) if table in FIGURE_VARIANTS else _published_cells(table)
    cells = cells.dropna(subset=["name", "ours"])
    fields = [
        _add_prompt_position(table, cell.ours, cell.name, cell_fields)
        for cell, cell_fields in zip(cells.itertuples(), cells.fields)
    ]
    return cells.assign(fields=fields)


N_LAYERS_BY_BACKBONE = {  # any other backbone has 24
    "tiny": 8,
    "tiny-gpt2": 8,
    "minilm": 6,
    "smollm2": 30,
    "mpnet": 12,
    "roberta-base": 12,
    "gpt2": 12,
    "gpt2-large": 36,
}
# tasks of scale 'small': the first four that the table has
SMALL_SCALE_TASKS = ("trec", "sst2", "mrpc", "rte", "subj", "mr", "cr", "stsb")


def parse_shots(
    setting: str,  # setting of a row, such as 'K=100' or 'few-shot, 500 training samples'
) -> int | None:  # None: all examples
    """Return the number of training examples that the setting of a row states."""
    match = re.search(r"K=(\d+)|(\d+) (?:training|samples)", setting)
    return int(match[1] or match[2]) if match else None


def _read_n_layers(backbone: str) -> int | None:
    """Return the number of layers in the `config.json` of a folder, or None."""
    file = Path(backbone) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    return next((config[name] for name in names if name in config), None)


def scale_to_backbone(
    fields: dict,  # fields of `RunConfig`; `layer` is one of 0 to 23
    backbone: str,  # name or folder
    n_layers: int | None = None,  # layers of the backbone; None: looked up
) -> dict:
    """Return the fields with a layer and a prompt position that suit the backbone.

    A layer of 24 is mapped to the same fraction of the depth, and to the last layer at most. The
    prompt of a decoder is put in front, where every later position can attend to it.
    """
    n_layers = _read_n_layers(backbone) or n_layers or N_LAYERS_BY_BACKBONE.get(backbone, 24)
    if fields.get("layer") is not None:
        fields = fields | dict(layer=min(round(fields["layer"] * n_layers / 24), n_layers - 1))
    if fields.get("position") and is_decoder_name(backbone):
        fields = fields | dict(position=0)
    return fields


def _plan_control_runs(table: str, runs: list[RunConfig]) -> list[RunConfig]:
    """Return a run of every control for each backbone, task, size and split of `runs`."""
    distinct = {(c.backbone, c.task, c.shots, c.split_seed, c.data): c for c in runs}
    controls = []
    for method in CONTROL_METHODS:
        for c in distinct.values():
            if method == "probe" and c.task in ("qqp", "mnli") and c.shots is None:
                continue
            scale = "small" if c.pooling == "mean" else "full"
            control = build_paper_config(table, method, c.task, scale, c.shots, c.backbone)
            controls.append(
                replace(control, data=c.data, split_seed=c.split_seed, stratified=c.stratified)
            )
    return controls


def _select_small_scale_tasks(cells: pd.DataFrame) -> list[str]:
    """Return at most four tasks of a table."""
    tasks = set(cells.name)
    return [t for t in SMALL_SCALE_TASKS if t in tasks][:4] or sorted(tasks)[:4]


def _plan_cell_runs(
    table: str, cell: Any, scale: str, backbone: str | None, data: str | None, glove: str | None
) -> list[RunConfig]:
    """Return the runs of one cell, one for each split."""
    paper = parse_paper_name(table)
    is_small = scale == "small"
    if backbone is None and is_small:
        backbone = "smollm2" if paper == "lpt" else "minilm"
    backbone = backbone or paper_backbone(table, cell.ours, cell.backbone)
    published_shots = parse_shots(cell.setting)
    shots = published_shots or (1000 if is_small and cell.name != "trec" else None)
    fields = scale_to_backbone(cell.fields, backbone)
    cfg = build_paper_config(table, cell.ours, cell.name, scale, shots, backbone, **fields)
    cfg = replace(cfg, data=data)
    if METHOD_OPTIONS["glove"](cell.ours):
        cfg = replace(cfg, glove=glove)
    is_fixed_sample = data and (Path(data) / cell.name / f"k{shots}").is_dir()
    has_four_splits = paper == "lpt" and published_shots and not is_fixed_sample
    return [replace(cfg, split_seed=seed) for seed in range(4 if has_four_splits else 1)]


def _plan_method_runs(
    table: str,
    cells: pd.DataFrame,
    scale: str,
    backbone: str | None,
    data: str | None,
    glove: str | None,
) -> list[RunConfig]:
    """Return the runs of the methods of a table, without the controls."""
    small_scale_tasks = _select_small_scale_tasks(cells)
    first_backbone = cells.backbone.iloc[0]
    runs: list[RunConfig] = []
    for cell in cells.itertuples():
        is_left_out = cell.name not in small_scale_tasks or cell.backbone != first_backbone
        if scale == "small" and is_left_out:
            continue
        runs += _plan_cell_runs(table, cell, scale, backbone, data, glove)
    return list(dict.fromkeys(runs))  # cells that differ in their metric have the same runs


def _resolve_score_table(table: str) -> tuple[str, str]:
    """Return the table whose cells are run and its kind; refuse a table without scores."""
    tables = load_published_tables().set_index("table")
    row = tables.loc[check_name(table, list(tables.index), "table")]
    score_table = FIGURE_TO_TABLE.get(table, table)
    has_scores = score_table in set(load_published_scores().table) and row.kind in (
        "scores",
        "variants",
        "curve",
    )
    if score_table not in FIGURE_VARIANTS and not has_scores:
        raise UserError(
            f"{table} ({row.what}) is not a table of scores, so it has no runs. Run this "
            f"command instead: {row.command}."
        )
    return score_table, row.kind


def plan_table_runs(
    table: str,  # such as 'lpt-2'
    scale: str = "small",  # 'small' or 'full'
    backbone: str | None = None,  # None: the paper's; in `small` smollm2 for LPT, else minilm
    data: str | None = None,  # folder of tasks
    methods: list[str] | None = None,  # keys of `ALL_METHODS`; None: all methods of the table
    tasks: list[str] | None = None,  # keys of `TASKS`; None: all tasks of the table
    glove: str | None = None,  # file or folder of GloVe vectors; None: word vectors of `tiny`
) -> list[RunConfig]:  # one for each setting, method, task and split; all have seed 0
    """Return the configs of all runs of a table, controls included.

    Raises: `UserError` for an unknown name, a table without scores, or if no run remains.
    """
    check_choice(scale, ("small", "full"), "scale")
    methods = [check_name(m, ALL_METHODS, "method") for m in methods or ()]
    score_table, kind = _resolve_score_table(table)
    runs = _plan_method_runs(
        score_table, load_table_cells(score_table), scale, backbone, data, glove
    )
    if kind != "curve":  # controls have no loss curves
        runs += _plan_control_runs(score_table, runs)
    selected = [
        c for c in runs if (not methods or c.method in methods) and (not tasks or c.task in tasks)
    ]
    if not selected:
        raise UserError(
            f"no run of {table} matches methods={methods}, tasks={tasks}. It has the methods "
            f"{', '.join(dict.fromkeys(c.method for c in runs))} and the tasks "
            f"{', '.join(dict.fromkeys(c.task for c in runs))}."
        )
    return selected

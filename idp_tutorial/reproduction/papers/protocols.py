"""Turn every cell of a published table into the config of a run, as its paper trained it.

A table can be run at two scales: `full` is what its paper says about training, and its released
code where the paper says nothing; `small` is what two cores can run in a night: one small
backbone, four tasks, 200 steps. Both use the paper's optimiser. `full` is one point of the
paper's search space, at which every learning rate of the paper is tried: the other values that a
paper searches (`SEARCH_SPACES`) are fixed. `small` changes backbone and budget, so it cannot
confirm or refute the paper's numbers; it shows what happens on this machine.

The initial model of a row. IDPG's few-shot scripts load a RoBERTa-large that was fine-tuned on
MNLI, for every method. That the single-layer rows of its Table 1 start from the same model is an
inference: the paper does not say it. With the plain model, a prompt among the words does not
reach the 87 to 89 points of those rows on RTE (LPT's Table 1 has 61 and 63).

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

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.backbones.sizes import DECODER_CONFIGS
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.method_registry import ALL_METHODS, CONTROL_METHODS, METHODS
from idp_tutorial.reproduction.papers.published_scores import (
    METHOD_NAMES,
    TASK_NAMES,
    load_published_scores,
    load_published_tables,
)
from idp_tutorial.utils.checks import UserError, check_choice, check_name

BACKBONE_NAMES = {  # published name: name on the Hugging Face hub
    "RoBERTa-large": "roberta-large",
    "RoBERTa-base": "roberta-base",
    "GPT2": "gpt2",
    "GPT2-large": "gpt2-large",
    "DeBERTa-large": "microsoft/deberta-large",
}
SINGLE_PROMPT_METHODS = (  # methods with one prompt, among the words
    "prompt-tuning",
    "prompt-tuning-134",
    "s-idpg-phm",
    "s-idpg-dnn",
)


def parse_paper_name(
    table: str,  # name of a table or figure, such as 'idpg-3' or 'lpt-f2'
) -> str:  # 'idpg', 'lpt' or 'id-spam'
    """Return the name of the paper that a table or figure belongs to."""
    return re.sub(r"-f?\d+b?$", "", table)


def paper_backbone(
    table: str,  # such as 'idpg-3'
    method: str,  # key of `ALL_METHODS`
    published_backbone: str,  # key of `BACKBONE_NAMES`
) -> str:  # name on the Hugging Face hub
    """Return the pretrained model that the paper uses for a method in a table.

    For the single prompts of IDPG's full-data tables it is inferred (see the module).
    """
    uses_mnli_model = parse_paper_name(table) == "idpg" and (
        method in SINGLE_PROMPT_METHODS or table == "idpg-3"
    )
    return "roberta-large-mnli" if uses_mnli_model else BACKBONE_NAMES[published_backbone]


def is_decoder_name(
    backbone: str,  # name or folder of a backbone
) -> bool:
    """Return whether the name of a backbone is that of a known decoder (causal attention)."""
    return Path(backbone).name in (*DECODER_CONFIGS, "smollm2", "tiny-gpt2")


TRAINED_HEAD_METHODS = (  # methods with a classification head in LPT's tables
    "fine-tuning",
    "lora",
    "bitfit",
    "adapter",
    "adapterdrop",
    "p-tuning-v2",
)
FULL_TUNING_METHODS = ("fine-tuning", "efl")  # methods that train all weights
_ADAM_FIELDS: dict[str, Any] = dict(beta2=0.98, eps=1e-6)
# paper: fields of `RunConfig` that differ from its defaults (linear decay, 6 % warm-up, clip 1)
PAPER_OPTIMISER_FIELDS: dict[str, dict[str, Any]] = {
    "idpg": dict(
        **_ADAM_FIELDS,
        weight_decay=0.1,
        clip=float("inf"),
        schedule="constant",
        warmup=0.0,
        two_layer_head=True,
    ),
    "lpt": dict(weight_decay=0.1, no_decay_on_bias_and_norm=True),
    "id-spam": _ADAM_FIELDS,
}


def paper_optimiser_fields(
    paper: str,  # 'idpg', 'lpt' or 'id-spam'
    method: str,  # key of `ALL_METHODS`
) -> dict:  # fields of `RunConfig`
    """Return the settings of AdamW, schedule, clipping and head that a paper uses for a method."""
    if method in CONTROL_METHODS:
        return {}
    fields = dict(PAPER_OPTIMISER_FIELDS[paper])
    if paper == "idpg" and method in FULL_TUNING_METHODS:
        fields |= dict(schedule="linear", warmup=0.06)
    if method == "efl":  # it is built with its own entailment head
        del fields["two_layer_head"]
    return fields


LARGE_TASKS = ("sst2", "qnli", "qqp", "mnli")  # the first three are tasks of IDPG


def _epoch_budget(n: int, batch_size: int) -> dict:
    """Return fields for `n` epochs; `resolve_epochs` keeps the ratio of steps to `eval_every`."""
    return dict(epochs=float(n), steps=n, eval_every=1, batch_size=batch_size)


def paper_training_budget(
    paper: str,  # 'idpg', 'lpt' or 'id-spam'
    method: str,  # key of `ALL_METHODS`
    task: str,  # key of `TASKS`
    shots: int | None = None,  # few-shot: number of training examples
) -> dict:  # fields of `RunConfig`
    """Return the batch size, number of epochs or steps, and evaluation interval of a paper."""
    if paper == "id-spam":
        return _epoch_budget(30, 32)
    if paper == "lpt":
        return dict(steps=1000, eval_every=100, batch_size=16) if shots else _epoch_budget(10, 16)
    if shots and method not in FULL_TUNING_METHODS:  # fifty epochs, rounded up to whole steps
        return dict(steps=-(-50 * shots // 16), eval_every=-(-shots // 16), batch_size=16)
    is_large = task in LARGE_TASKS and not shots
    n_epochs = 10 if is_large or method in FULL_TUNING_METHODS else 50
    return _epoch_budget(n_epochs, 32 if is_large else 16)


PAPER_LEARNING_RATES = {  # paper or table: learning rates
    "idpg": (5e-3, 1e-3, 5e-4, 1e-4),
    "idpg-3": (5e-4, 1e-4, 5e-5, 1e-5),
    "idpg-6": (1e-2, 7e-3, 5e-3, 3e-3, 1e-3, 7e-4, 5e-4, 3e-4, 1e-4),  # "more carefully" (App. A.3)
    "lpt": (5e-4, 1e-3, 5e-3, 1e-2),
    "id-spam": (1e-3, 5e-4, 1e-4, 5e-5, 1e-5),
}
FULL_TUNING_LEARNING_RATES = (1e-5, 2e-5, 3e-5)  # RoBERTa (Liu et al. 2019), Table 10


def select_paper_learning_rates(
    table: str,  # such as 'idpg-3'
    method: str,  # key of `ALL_METHODS`
) -> tuple:  # (): the method's own learning rates
    """Return the learning rates that the paper of a table tried for a method."""
    paper = parse_paper_name(table)
    if method in CONTROL_METHODS:
        return ()
    if paper != "id-spam" and method in FULL_TUNING_METHODS:
        return FULL_TUNING_LEARNING_RATES
    return PAPER_LEARNING_RATES.get(table, PAPER_LEARNING_RATES[paper])


# paper: values that it searches beside the learning rate, and the value of `full`
SEARCH_SPACES = {
    "idpg": "batch_size 16, 32 (here 32 for SST-2, QNLI and QQP, else 16); epochs 10 or 50 (here "
    "10 for SST-2, QNLI and QQP, else 50)",
    "lpt": "batch_size 16, 32; few-shot also 8; GPT-2 large 8, 16, few-shot also 4 (here 16); "
    "warmup 0, 0.06 (here 0.06); prompt_length of APPG and MPPG 10, 15, 20 (here 10)",
    "id-spam": "layer 1 to 23, RoBERTa-base 1 to 11 (here half of the layers); batch_size 16, 32, "
    "64 (here 32); epochs 1, 5, 10, 20, 30 (here 30); dropout 0.1, 0.2, 0.3 (here 0.1); "
    "weight_decay 0, 0.01, 0.1 (here 0.01)",
}


def describe_search_space(
    table: str,  # such as 'lpt-2'
) -> str:
    """Return what the paper of a table searches beside the learning rate, and what `full` has."""
    return (
        "scale 'full' is one point of the paper's search space, with all its learning rates. The "
        f"paper also searches: {SEARCH_SPACES[parse_paper_name(table)]}."
    )


STATIC_PROMPT_LEARNING_RATES = (0.1, 0.3, 1.0, 3.0, 9.0)  # for static prompts with a verbalizer


def _max_text_length(paper: str, method: str, backbone: str, fields: dict) -> int:
    """Return the number of tokens at which a paper truncates a text."""
    if paper == "id-spam":
        return 256
    row = ALL_METHODS[method]
    takes_positions = row.insertion_point in ("input", "layers", "keys")
    prompt_length = fields.get("prompt_length", 0)
    if "prompt_length" not in row.options:  # the method has no prompt, or one of fixed length
        prompt_length = getattr(row.config_class, "prompt_length", 0)
    n_separators = 2 if fields.get("position") == 4 else 0  # position 4 is between two separators
    n_prompt_tokens = prompt_length * takes_positions + n_separators
    limit = 256 if paper == "lpt" and "roberta" not in backbone else 512
    return min(limit, 512 - n_prompt_tokens)


def paper_head(paper: str, method: str) -> str:
    """Return the kind of head that a paper uses for a method."""
    has_verbalizer = method not in TRAINED_HEAD_METHODS and method not in CONTROL_METHODS
    return "verbalizer" if paper == "lpt" and has_verbalizer else "classification"


def build_paper_config(
    table: str,  # such as 'lpt-2'
    method: str,  # key of `ALL_METHODS`
    task: str,  # key of `TASKS`
    scale: str = "full",  # 'full' or 'small'
    shots: int | None = None,  # few-shot: number of training examples
    backbone: str = "roberta-large",  # name or folder
    **fields: Any,  # further fields of `RunConfig`, from the row of the table
) -> RunConfig:  # `data`, `seed` and `split_seed` keep their defaults
    """Return the config of a run as the paper of a table trained it."""
    paper = parse_paper_name(table)
    is_control = method in CONTROL_METHODS
    options = dict(
        task=task,
        backbone=backbone,
        shots=shots,
        stratified=not (paper == "idpg" and shots is not None),
        **fields,
    )
    options["head"] = paper_head(paper, method)
    options |= paper_optimiser_fields(paper, method)
    if scale != "full":
        short = dict(steps=200, eval_every=20, batch_size=16)
        if fields.get("epochs"):
            short = _epoch_budget(int(fields["epochs"]), 16)
        return RunConfig(method, **options | short, max_len=128)
    options |= paper_training_budget(paper, method, task, shots)
    if ALL_METHODS[method].kind == "second pass":
        options["sentence_pooling"] = "noisy"
    if method == "m-idpg-phm-glove":
        options["glove_noise"] = 0.6
    return RunConfig(
        method,
        **options,
        pooling="cls",
        dropout_below_prompt=paper == "lpt" and not is_control,
        max_len=_max_text_length(paper, method, backbone, fields),
    )


PROMPT_LENGTHS = {"idpg": 5, "lpt": 20, "id-spam": 10}  # paper: number of prompt vectors
PROMPT_LENGTH_OVERRIDES = {  # (paper, method): number of prompt vectors
    ("lpt", "lpt-npg"): 5,
    ("lpt", "s-idpg-phm"): 5,
    ("lpt", "lpt-appg"): 10,
    ("lpt", "lpt-mppg"): 10,
}


def own_prompt_lengths() -> dict[str, int]:  # method: number of prompt vectors
    """Return the prompt length of each method in its own paper.

    Methods that are only baselines have that of the paper whose table has their larger count.
    """
    lengths = {}
    for method, row in METHODS.items():
        if "prompt_length" in row.options:
            paper = "id-spam"
            if method.startswith("lpt") or method == "p-tuning-v2":
                paper = "lpt"
            elif "idpg" in method or method == "prompt-tuning":
                paper = "idpg"
            lengths[method] = paper_method_fields(method, f"{paper}-1")["prompt_length"]
    return lengths


# (paper, published name): method and fields, where `METHOD_NAMES` has another method or none
METHOD_OVERRIDES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("lpt", "Prompt Tuning"): ("lpt", dict(layer=0)),
    ("lpt", "Prompt Tuning-256"): ("lpt", dict(layer=0, prompt_length=256)),
    ("id-spam", "LoRA"): ("lora-all", {}),
    ("id-spam", "LPT"): ("lpt-npg", dict(bottleneck=256)),
    ("idpg", "PHM"): ("s-idpg-phm", dict(generator="plain")),
    ("idpg", "+residual"): ("s-idpg-phm", dict(generator="residual")),
    ("idpg", "+LayerNorm"): ("s-idpg-phm", dict(generator="layer-norm")),
    ("idpg", "+residual+LayerNorm"): ("s-idpg-phm", dict(generator="both")),
}


def paper_method_fields(
    method: str,  # key of `ALL_METHODS`
    table: str,  # such as 'lpt-2'
    **row_fields: Any,  # fields of `RunConfig` that the row of the table states
) -> dict:  # fields of `RunConfig`; the value None means the method's default
    """Return the prompt length, bottleneck, layer and other options of a method in a table."""
    paper = parse_paper_name(table)
    paper_fields: dict[str, Any] = dict(
        prompt_length=PROMPT_LENGTH_OVERRIDES.get((paper, method), PROMPT_LENGTHS[paper]),
        generator="plain",
        parameter_sharing="M",
        generator_input="layer0" if table == "idpg-3" else "previous",
    )
    options = ALL_METHODS[method].options
    fields = {name: value for name, value in paper_fields.items() if name in options}
    if "bottleneck" in options:
        fields["bottleneck"] = options["bottleneck"].default
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
    row_fields: dict[str, Any] = {}
    if match := re.fullmatch(r"(.+) ([SML]) version m=(\d+)", published_method):
        published_method = match[1]
        generator_input = "layer0" if "layer 0" in setting else "previous"
        row_fields = dict(
            parameter_sharing=match[2], bottleneck=int(match[3]), generator_input=generator_input
        )
    if match := re.fullmatch(r"(.+) at layer (\d+)", published_method):
        published_method = match[1]
        row_fields = dict(layer=int(match[2]) - 1)  # LPT counts from 1, of 24
    override = METHOD_OVERRIDES.get((parse_paper_name(table), published_method))
    method, fields = override or (METHOD_NAMES.get(published_method), {})
    return method, paper_method_fields(method, table, **fields | row_fields) if method else {}


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
            options = paper_method_fields(method, table, **fields)
            cells.append(dict(method=label, task=task, ours=method, fields=options, name=task))
    return pd.DataFrame(cells).assign(
        setting="", backbone="RoBERTa-large", metric="", mean=None, std=None
    )


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
    """Return the fields with a layer and a prompt position that fit the backbone.

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
    for method in ("majority", "probe", "side-network"):
        for c in distinct.values():
            if method == "probe" and c.task in ("qqp", "mnli") and c.shots is None:
                continue
            scale = "small" if c.pooling == "mean" else "full"
            control = build_paper_config(table, method, c.task, scale, c.shots, c.backbone)
            controls.append(
                replace(control, data=c.data, split_seed=c.split_seed, stratified=c.stratified)
            )
    return controls


def _select_small_scale_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of at most four tasks of a table, with its first backbone."""
    tasks = set(cells.name)
    selected = [t for t in SMALL_SCALE_TASKS if t in tasks][:4] or sorted(tasks)[:4]
    return cells[cells.name.isin(selected) & (cells.backbone == cells.backbone.iloc[0])]


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
    cfg = cfg.with_options(data=data, glove=glove)
    is_fixed_sample = data and (Path(data) / cell.name / f"k{shots}").is_dir()
    has_four_splits = paper == "lpt" and published_shots and not is_fixed_sample
    return [replace(cfg, split_seed=seed) for seed in range(4 if has_four_splits else 1)]


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
            f"{table} ({row.what}) is not a table of scores, so it has no runs here. Run: "
            f"{row.command}. Its cost is in docs/reproduce.md."
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
    cells = load_table_cells(score_table)
    if scale == "small":
        cells = _select_small_scale_cells(cells)
    runs: list[RunConfig] = []
    for cell in cells.itertuples():
        runs += _plan_cell_runs(score_table, cell, scale, backbone, data, glove)
    runs = list(dict.fromkeys(runs))  # cells that differ in their metric have the same runs
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

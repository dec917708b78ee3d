"""Write `docs/reproduce.md`: each published table with its command, estimated cost and scores.

`python docs/reproduce.py` writes the page; `python docs/reproduce.py lpt-5` prints the commands of
a table.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for the scripts beside the records

from idp_tutorial.assembly.config import RunConfig, RunOptions, recorded_option
from idp_tutorial.methods.all_methods import methods_with_head
from idp_tutorial.methods.method_registry import ALL_METHODS, CONTROL_METHODS
from idp_tutorial.reproduction.efficiency.cost_model import (
    LPT_BACKBONE_LAYERS,
    LPT_BACKBONE_WIDTHS,
    LPT_PUBLISHED_SPEEDS,
    first_backward_layer,
    step_cost,
)
from idp_tutorial.reproduction.papers.protocols import (
    FIGURE_TO_TABLE,
    load_table_cells,
    own_prompt_lengths,
    parse_paper_name,
    plan_table_runs,
)
from idp_tutorial.reproduction.papers.published_scores import (
    load_published_scores,
    load_published_tables,
)
from idp_tutorial.reproduction.papers.reproduce import (
    choose_seed_count,
    compare_with_published,
    select_learning_rates,
)
from idp_tutorial.runs.tables import select_finished
from idp_tutorial.utils.digests import asset_path
from idp_tutorial.utils.records import config_fingerprint, read_existing_records
from results import split_command
from results.figures.paper_figures import plan_figure_runs
from results.figures.run import FiguresOptions, figure_options
from results.speed.bench import BenchOptions
from results.speed.timing import list_benchmark_variants
from results.supplement.run import supplement_command

FILE = Path(__file__).with_name("reproduce.md")
RECORDS = ROOT / "results/reproduce"  # records of `idp reproduce`, where somebody has run it
# task: training examples, as the papers print them (SuperGLUE: as published; of MultiRC the answers
# to its 5,100 questions, a count that was not checked)
TRAINING_EXAMPLES = {
    "sst2": 67349,
    "mpqa": 8606,
    "mr": 8662,
    "cr": 1775,
    "subj": 8000,
    "trec": 5452,
    "mnli": 392702,
    "qnli": 104743,
    "qqp": 363846,
    "rte": 2490,
    "mrpc": 3668,
    "stsb": 5749,
    "imdb": 25000,
    "cb": 250,
    "copa": 400,
    "multirc": 27243,
    "boolq": 9427,
}
# task: mean number of tokens of an example, measured with SmolLM2's byte-level BPE on up to 2,000
# examples, of which each is cut at 256 tokens
MEAN_TOKENS = {
    "sst2": 13,
    "mr": 28,
    "cr": 24,
    "subj": 30,
    "trec": 14,
    "imdb": 204,
    "rte": 75,
    "mrpc": 58,
    "qqp": 32,
    "stsb": 31,
}
ASSUMED_TOKENS = 64  # for a task that was not measured
LONG_TASKS = {"multirc": 256, "boolq": 256}  # cut at ID-SPAM's limit
TABLE_5_TOKENS = 256  # tokens of an example in LPT's Table 5
TABLE_5_BATCH = 16
BACKBONE_SHAPES = {  # name: number of layers, width, parameters in millions
    "roberta-large": (24, 1024, 355),
    "roberta-base": (12, 768, 125),
    "deberta-large": (24, 1024, 405),
    "gpt2": (12, 768, 124),
    "gpt2-large": (36, 1280, 774),
}
HEADLINES = {  # paper or table: method whose scores the page repeats
    "idpg": "M-IDPG-PHM",
    "idpg-6": "M-IDPG-PHM M version m=256",
    "idpg-7": "PHM",
    "lpt": "LPT w/ NPG",
    "lpt-10": "LPT w/ NPG at layer 13",
    "id-spam": "ID-SPAM",
    "id-spam-16": "LoRA",
}
# steps of `results/speed/bench.py` for a variant: three in each round and in the warm-up
BENCH_STEPS = 3 * (1 + BenchOptions.repeats)
MEMORY_OF_GPUS = (24, 48, 80)  # GB
MAX_CELLS = 4  # scores of a table that the page repeats
SCORE_KINDS = ("scores", "variants", "curve")  # kinds of tables that `idp reproduce` trains


@dataclass(frozen=True)
class Work:
    """The runs of a table: how many they are, and what they need."""

    runs: int  # 0: nothing is trained, only timed
    hours: float
    memory_gb: float  # of the run that needs most


def backbone_shape(backbone: str) -> tuple[int, int, int]:
    """Return the number of layers, the width and the parameters in millions of a backbone."""
    if backbone.startswith("runs/"):  # the first stage of supplementary training
        return BACKBONE_SHAPES["roberta-large"]
    return BACKBONE_SHAPES[backbone.split("/")[-1].removesuffix("-mnli")]


def layer_tokens_per_ms(backbone: str) -> float:
    """Return the speed of LPT's GPU: passes of a token through a layer in a millisecond.

    It is that of fine-tuning in LPT's Table 5; other backbones have that of RoBERTa-large,
    corrected for the square of their width.
    """
    name = backbone.split("/")[-1]
    name = name if name in LPT_BACKBONE_LAYERS else "roberta-large"
    published = next(
        row
        for row in LPT_PUBLISHED_SPEEDS
        if row.backbone == name and row.method == "fine-tuning" and row.table == "Table 5"
    )
    width = LPT_BACKBONE_WIDTHS[name]
    cost = step_cost("fine-tuning", LPT_BACKBONE_LAYERS[name], T=TABLE_5_TOKENS, d=width)
    return published.tokens_per_ms * cost.total * (width / backbone_shape(backbone)[1]) ** 2


def activation_line() -> tuple[float, float]:
    """Return memory in GB that does not depend on the depth, and GB for each layer with gradient.

    A line through LPT's published memory of NPG at three depths.
    """
    points = [
        (LPT_BACKBONE_LAYERS["roberta-large"] - row.layer, row.memory_gb)
        for row in LPT_PUBLISHED_SPEEDS
        if row.backbone == "roberta-large" and row.method == "lpt-npg" and row.layer is not None
    ]
    slope, intercept = linear_regression(*zip(*points))
    return intercept, slope


def estimate_memory(cfg: RunConfig, trains_backbone: bool = False) -> float:
    """Return the memory of a step in GB for examples of 256 tokens."""
    n_layers, width, millions = backbone_shape(cfg.backbone)
    constant, slope = activation_line()
    below = n_layers  # of a control, which has no gradient in the backbone
    if cfg.method not in CONTROL_METHODS:
        below = first_backward_layer(cfg.method, n_layers, cfg.get("layer"))
    tokens = cfg.batch_size / TABLE_5_BATCH
    large_weights = 4e-3 * BACKBONE_SHAPES["roberta-large"][2]
    weights = 4e-3 * millions  # float32
    memory = constant - large_weights + weights
    memory += slope * (n_layers - below) * tokens * width / BACKBONE_SHAPES["roberta-large"][1]
    if trains_backbone or ALL_METHODS[cfg.method].kind in ("all weights", "entailment"):
        memory += 3 * weights  # gradients, and AdamW's two means
    return memory


def mean_tokens(task: str) -> int:
    """Return the mean number of tokens of an example."""
    return MEAN_TOKENS.get(task) or LONG_TASKS.get(task) or ASSUMED_TOKENS


def training_hours(cfg: RunConfig, steps: int, n_runs: int, trains_backbone: bool = False) -> float:
    """Return the hours of some runs on LPT's GPU by the cost model."""
    if cfg.method in CONTROL_METHODS:
        return 0.0
    n_layers, width, _ = backbone_shape(cfg.backbone)
    tokens = mean_tokens(cfg.task)
    t = cfg.get("prompt_length", 0) or 0
    cost = step_cost(cfg.method, n_layers, cfg.get("layer"), prompt_length=t, T=tokens, d=width)
    passes = cost.total
    if trains_backbone:
        passes += step_cost("fine-tuning", n_layers, T=tokens, d=width).weight_gradients
    ms = steps * cfg.batch_size * tokens * passes / layer_tokens_per_ms(cfg.backbone)
    return n_runs * ms / 3.6e6


def count_steps(cfg: RunConfig) -> int:
    """Return the optimizer steps of a run."""
    return cfg.resolve_epochs(cfg.shots or TRAINING_EXAMPLES[cfg.task]).steps


def estimate_table(
    table: str,
    backbone: str | None = None,
    methods: list[str] | None = None,
    tasks: list[str] | None = None,
) -> Work:
    """Return the work of the runs of a table of scores at scale `full`."""
    plan = plan_table_runs(table, "full", backbone, methods=methods, tasks=tasks)
    works = []
    for cfg in plan:
        n_seeds = choose_seed_count(cfg, plan)
        # seed 0 tries each learning rate; the other seeds take the best
        n = max(1, len(select_learning_rates(cfg, table, "full"))) + n_seeds - 1
        works.append(Work(n, training_hours(cfg, count_steps(cfg), n), estimate_memory(cfg)))
    return add_works(works)


def read_options(command: str) -> dict[str, str]:
    """Return the options of a command as text."""
    return dict(re.findall(r"--(\w+) ([^-\s]\S*)", command))


def read_run_options(options: dict[str, str], task: str) -> RunOptions:
    """Return the options of runs that decide their cost."""
    given = {
        name: int(options[name])
        for name in ("batch_size", "prompt_length", "bottleneck")
        if name in options
    }
    return RunOptions(task=task, backbone=options["backbone"], **given)


def estimate_sweep(options: dict[str, str]) -> Work:
    """Return the work of a sweep, which trains at every layer, or of a transfer."""
    n = len(options["learning_rates"].split(",")) + int(options["seeds"]) - 1
    base = read_run_options(options, options.get("task") or options["source"])
    works = []
    for method in options["methods"].split(","):
        cfg = base.with_method(method)
        layers = range(backbone_shape(cfg.backbone)[0]) if "task" in options else [None]
        for k in layers:
            placed = cfg if k is None else cfg.with_options(layer=k)
            hours = training_hours(placed, int(options["steps"]), n)
            works.append(Work(n, hours, estimate_memory(placed)))
    return add_works(works)


def estimate_train(options: dict[str, str]) -> Work:
    """Return the work of `idp train`, which tries each learning rate with one seed."""
    cfg = read_run_options(options, options["task"]).with_method(options["method"])
    cfg = cfg.with_options(epochs=float(options["epochs"]))
    n = len(options["learning_rates"].split(","))
    return Work(n, training_hours(cfg, count_steps(cfg), n), estimate_memory(cfg))


def estimate_supplement(options: dict[str, str]) -> Work:
    """Return the work of supplementary training, whose epochs have every pair in both orders."""
    defaults = supplement_command.defaults
    given = {
        "prompt_length": str(own_prompt_lengths()[options["method"]]),
        "batch_size": str(defaults["batch_size"]),
        **options,
    }
    cfg = read_run_options(given, options["task"]).with_method(options["method"])
    epochs = float(options.get("epochs", defaults["epochs"]))
    steps = round(epochs * math.ceil(2 * TRAINING_EXAMPLES[cfg.task] / cfg.batch_size))
    return Work(1, training_hours(cfg, steps, 1, True), estimate_memory(cfg, True))


def estimate_bench(options: dict[str, str]) -> Work:
    """Return the work of `results/speed/bench.py`: a few steps of each variant."""
    n_layers, width, _ = backbone_shape(options["backbone"])
    tokens = int(options["length"])
    methods = methods_with_head(options.get("head", "classification"))
    methods = options["methods"].split(",") if "methods" in options else methods
    works = []
    for variant in list_benchmark_variants(methods, n_layers):
        cost = step_cost(variant.method, n_layers, variant.layer, variant.cached, T=tokens, d=width)
        steps_ms = BENCH_STEPS * int(options["batch_size"]) * tokens * cost.total
        cfg = read_run_options(options, "sst2").with_options(layer=variant.layer)
        hours = steps_ms / layer_tokens_per_ms(options["backbone"]) / 3.6e6
        works.append(Work(0, hours, estimate_memory(cfg.with_method(variant.method))))
    return add_works(works)


def estimate_reproduce(options: dict[str, str]) -> Work:
    """Return the work of `idp reproduce`."""
    methods, tasks = (
        options[name].split(",") if name in options else None for name in ("methods", "tasks")
    )
    return estimate_table(options["table"], options.get("backbone"), methods, tasks)


def estimate_figures(options: dict[str, str]) -> Work:
    """Return the work of `results/figures/run.py` at scale `full`."""
    name = options["figure"]
    base = figure_options(FiguresOptions(figure=name, scale="full"), None)
    plan = plan_figure_runs(name, base)
    return add_works(
        [Work(1, training_hours(cfg, count_steps(cfg), 1), estimate_memory(cfg)) for cfg in plan]
    )


ESTIMATES = {
    "sweep": estimate_sweep,
    "transfer": estimate_sweep,
    "train": estimate_train,
    "supplement": estimate_supplement,
    "bench": estimate_bench,
    "reproduce": estimate_reproduce,
    "figures": estimate_figures,
}


def estimate_command(command: str) -> Work:
    """Return the work of a command that needs a GPU."""
    return ESTIMATES[split_command(command)[0]](read_options(command))


def add_works(works: list[Work]) -> Work:
    """Return the sum of runs and hours, and the largest memory."""
    return Work(
        sum(work.runs for work in works),
        sum(work.hours for work in works),
        max(work.memory_gb for work in works),
    )


def estimate_row(kind: str, command: str) -> Work | None:
    """Return the work of a row of the page, or None if it needs no GPU."""
    if kind in ("counts", "data"):
        return None
    return add_works([estimate_command(part) for part in command.split(" && ")])


# ---- scores


def headline_rows(table: str) -> pd.DataFrame:
    """Return the printed scores of the paper's own method, at most `MAX_CELLS` and one more."""
    source = FIGURE_TO_TABLE.get(table, table)
    scores = load_published_scores()
    method = HEADLINES.get(source, HEADLINES[parse_paper_name(table)])
    rows = scores[(scores.table == source) & (scores.method == method)]
    rows = rows[rows.task == "Avg"] if (rows.task == "Avg").any() else rows
    rows = rows.drop_duplicates(["backbone", "setting", "task", "metric", "mean"])
    return rows.head(MAX_CELLS + 1)


def published_number(table: str, kind: str) -> str:
    """Return the paper's own method in a table, with the score or count that the paper prints."""
    if kind == "counts":
        return published_count(table)
    rows = headline_rows(table)
    if rows.empty:
        return "no number printed"
    return format_cells(rows, [f"{value:g}" for value in rows["mean"]])


def published_count(table: str) -> str:
    """Return the trained parameters of the paper's own method, as the paper prints them."""
    paper = parse_paper_name(table)
    counts = pd.DataFrame(json.loads(asset_path("published_counts.json").read_text())["counts"])
    number = f"Table {table.split('-')[-1]}"
    is_in_table = counts.tables.map(lambda tables: number in tables)
    is_of_paper = counts.paper.str.lower() == paper
    rows = counts[is_in_table & is_of_paper & (counts.method == HEADLINES[paper])]
    rows = rows.sort_values("exact").assign(setting="", task="", metric="")
    return format_cells(rows, list(rows.reported))


def format_cells(rows: pd.DataFrame, values: list[str]) -> str:
    """Return the method and its first cells: what tells a cell apart from the others, a value."""
    cells = list(describe_cells(rows, values))
    shown = cells[:MAX_CELLS] + ["…"] * (len(cells) > MAX_CELLS)
    return f"{rows.method.iloc[0]}: {'; '.join(shown)}"


def describe_cells(rows: pd.DataFrame, values: list[str]) -> Iterator[str]:
    """Yield a text for each cell: what tells it apart from the other cells, and its value."""
    for cell, cell_value in zip(rows.itertuples(), values):
        parts = []
        for column in ("backbone", "setting", "task", "metric"):
            value = getattr(cell, column)
            if rows[column].nunique() > 1:
                parts.append(str(value).split("; ")[-1])
        yield " ".join([*parts, cell_value])


def is_run_of(record: dict, cfg: RunConfig) -> bool:
    """Return whether a record is a run of a planned config, at any learning rate and seed.

    So a shorter run, or one on another backbone, is not.
    """
    if (record["method"], record["task"]) != (cfg.method, cfg.task):
        return False
    resolved = cfg.resolve_epochs(record["split_sizes"]["train"])
    planned = json.loads(json.dumps(config_fingerprint(resolved)))
    backbones = [Path(options["backbone"]).name for options in (record, planned)]
    return backbones[0] == backbones[1] and all(
        recorded_option(record, name) == recorded_option(planned, name)
        for name in planned.keys() - {"lr", "seed", "backbone"}
    )


def select_learning_rate(runs: list[dict]) -> list[dict]:
    """Return the runs of one config at its chosen learning rate, the last one of each seed.

    Only the chosen learning rate is trained with further seeds. Where none or several have them,
    the best mean score on validation decides.
    """
    by_lr: dict[float | None, dict[int, dict]] = {}
    for run in runs:
        by_lr.setdefault(run["lr"], {})[run["seed"]] = run

    def preference(runs_by_seed: dict[int, dict]) -> tuple[bool, float]:
        """Return what is greatest for the chosen learning rate."""
        scores = [run["validation"] for run in runs_by_seed.values()]
        return max(runs_by_seed) > 0, mean(scores)

    return [*max(by_lr.values(), key=preference).values()]


def select_planned(records: list[dict], table: str, method: str | None) -> list[dict]:
    """Return the finished runs of a method that the plan of a table has at scale `full`.

    `method` is a key of `ALL_METHODS`; None selects all but the controls.
    """
    finished = select_finished(records)
    selected = []
    for cfg in plan_table_runs(table, "full", methods=[method] if method else None):
        runs = [record for record in finished if is_run_of(record, cfg)]
        if runs and cfg.method not in CONTROL_METHODS:
            selected += select_learning_rate(runs)
    return selected


def our_score(row: Any, comparison: pd.DataFrame) -> str:
    """Return this project's score for a printed score, or a dash.

    A printed mean over tasks has a counterpart only if every task of it was run.
    """
    same = comparison[
        (comparison.setting == row.setting)
        & (comparison.backbone == row.backbone)
        & (comparison.method == row.method)
    ]
    if row.task != "Avg":
        same = same[same.task == row.task]
    if (same.metric == row.metric).any():
        same = same[same.metric == row.metric]
    scores = same["our mean"].dropna()
    is_measured_by_bench = "speed" in row.metric or "memory" in row.metric
    if scores.empty or is_measured_by_bench:
        return "–"
    if len(scores) < len(same):
        return f"{len(scores)} of {len(same)} tasks"
    return f"{scores.mean():.2g}" if "loss" in row.metric else f"{scores.mean():.1f}"


def count_runs(runs: list[dict]) -> str:
    """Return the number of runs in words of the page."""
    return f"{len(runs):,} run{'s' * (len(runs) != 1)}"


def our_number(table: str, kind: str, folder: Path = RECORDS) -> str:
    """Return this project's scores in the cells of `published_number`, from runs of `full`."""
    if kind == "counts":
        return "[counted](../nbs/engine/efficiency/published_counts.ipynb)"
    source = FIGURE_TO_TABLE.get(table, table)
    records = []
    for name in dict.fromkeys((source, table)):
        records += read_existing_records(folder / f"{name}-full.jsonl")
    rows = headline_rows(table)
    if kind not in SCORE_KINDS or rows.empty:  # nothing printed that a score compares with
        runs = select_planned(records, source, None) if kind in SCORE_KINDS else records
        return count_runs(runs) if runs else "not run"
    cells = load_table_cells(source)
    method = cells[cells.method == rows.method.iloc[0]].ours.iloc[0]
    runs = select_planned(records, source, method)
    comparison = compare_with_published([{**run, "folder": folder} for run in runs], source)
    values = [our_score(row, comparison) for row in rows.itertuples()]
    if set(values) == {"–"}:
        return "not run"
    return f"{format_cells(rows, values)} ({count_runs(runs)})"


# ---- the page


def format_command(table: str, command: str) -> str:
    """Return a command for a cell of the page; empty where it is the command of every table."""
    if command == f"idp reproduce --table {table} --scale full":
        return ""
    if " && " in command:
        return f"`python docs/reproduce.py {table}` prints it"
    return f"`{command}`"


def smallest_gpu(memory_gb: float) -> str:
    """Return the memory of the smallest common GPU that is large enough."""
    return next((f"{gb} GB" for gb in MEMORY_OF_GPUS if gb >= memory_gb), "several")


def format_hours(hours: float) -> str:
    """Return hours with two significant digits."""
    if hours < 1:
        return "< 1"
    digits = 10 ** max(0, len(str(int(hours))) - 2)
    return f"{round(hours / digits) * digits:,}"


def format_work(work: Work | None) -> list[str]:
    """Return the cells for runs, GPU and hours."""
    if work is None:
        return ["–", "none", "minutes on a CPU"]
    return [
        f"{work.runs:,}" if work.runs else "–",
        smallest_gpu(work.memory_gb),
        format_hours(work.hours),
    ]


PAPERS = {
    "idpg": "IDPG (Wu et al. 2022)",
    "lpt": "LPT (Liu et al. 2022)",
    "id-spam": "ID-SPAM (Muppidi et al. 2025)",
}
HEADER = "| table | content | command | runs | GPU | hours | the paper's number | here |"


def summarise_state(states: list[str]) -> str:
    """Return the sentence that says how many tables have scores of this project."""
    n_not_run = sum(state == "not run" for state in states)
    n_counted = sum(state.startswith("[counted]") for state in states)
    if n_not_run + n_counted == len(states):
        return (
            f"**None of these tables has been run at the papers' scale.** {n_not_run} of "
            f"{len(states)} are not run; the other {n_counted} need no training, and were counted."
        )
    return f"**{n_not_run} of {len(states)} tables are not run at the papers' scale.**"


def render_page() -> str:
    """Return the text of `docs/reproduce.md`."""
    tables = load_published_tables()
    states = {row.table: our_number(row.table, row.kind) for row in tables.itertuples()}
    speed = layer_tokens_per_ms("roberta-large")
    lines = [INTRODUCTION.format(state=summarise_state([*states.values()]), speed=speed)]
    for paper, title in PAPERS.items():
        lines += ["", f"## {title}", "", HEADER, "|---|---|---|--:|---|--:|---|---|"]
        for row in tables.itertuples():
            if parse_paper_name(row.table) != paper:
                continue
            cells = [
                row.table,
                row.what,
                format_command(row.table, row.command),
                *format_work(estimate_row(row.kind, row.command)),
                published_number(row.table, row.kind),
                states[row.table],
            ]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, "", NOTES, ""])


INTRODUCTION = """<!-- Made by `python docs/reproduce.py`: do not edit. -->
# Reproduce the papers on a GPU

{state} What this project measured, on smaller models, is in [the lab](../nbs/lab/claims.ipynb).

You can run every table and figure of the three papers that has results. Begin with a cheap one,
such as `lpt-10`. If you have run a table, tell us, whatever came out: a record with its config is
worth more than a score.

```bash
pip install '.[experiments]'
idp reproduce --table lpt-10 --scale full --plan                    # print the runs and stop
idp reproduce --table lpt-10 --scale full --steps 20 --out runs/test # test them with short runs
idp reproduce --table lpt-10 --scale full          # train; after an interruption, the same again
```

An empty cell below *command* stands for `idp reproduce --table TABLE --scale full`. Models and
data sets are downloaded from the Hugging Face hub; `--data` names a folder instead. `--methods
fine-tuning,lpt-npg --tasks rte,trec` runs a part of a table. At the end, the published score and
yours stand side by side.

*Hours* are those of one RTX 3090 with 24 GB, the GPU of LPT's Table 5, in float32: {speed:.0f}
passes of a token through a layer of RoBERTa-large in a millisecond. They are estimates by the
[cost model](../nbs/engine/efficiency/cost_model.ipynb), without evaluations, and a lower bound for
short examples. *GPU* is the smallest of 24, 48 and 80 GB that holds a batch of 256-token examples.
*Here* is the same method from finished runs in `results/reproduce/`."""

NOTES = f"""## What the numbers rest on

- **runs.** The first seed tries every learning rate of the paper; the others take the best one on
  validation. If it is at an edge of the grid, the command tries more. Controls are included. A
  dash: nothing is trained.
- **lengths.** The mean number of tokens was measured for SST-2, MR, CR, Subj, TREC, IMDB, RTE,
  MRPC, QQP and STS-B. {ASSUMED_TOKENS} tokens are *assumed* for MNLI, QNLI, MPQA, CB and COPA,
  and 256 for MultiRC and BoolQ.
- **the paper's number.** The paper's own method, averaged over the tasks where the paper prints a
  mean.
- **your scores.** Put `runs/reproduce/TABLE-full.jsonl` into `results/reproduce/`, with its folder
  `logits` for `idpg-7`, and run `python docs/reproduce.py`.

## When the score differs

1. Look at the plan. `full` is *one point* of each paper's search space, with all of its learning
   rates; `idp reproduce` prints what the paper also searched.
2. Compare fine-tuning first. If it differs too, look at the data, the split or the optimizer before
   you look at the prompt.
3. Look at the controls. If a method is significantly below the probe, first try more steps and
   other learning rates.
4. Look for a learning rate at the edge of its grid (`lr_at_grid_edge` in the record), and for a
   training curve that still rises.
5. Compute an interval over seeds before you call two scores different ([chapter
   11](../nbs/course/11_a_fair_comparison.ipynb)). Some published means are of three runs.
6. Read where [the papers and their code differ](differences.md)."""


def main(names: list[str]) -> None:
    """Write the page, or print the commands of some tables."""
    if not names:
        FILE.write_text(render_page(), encoding="utf-8")
        return
    commands = load_published_tables().set_index("table").command
    for name in names:
        if name not in commands:
            sys.exit(f"no table {name!r}: docs/reproduce.md lists all")
        print(commands[name].replace(" && ", "\n"))


if __name__ == "__main__":
    main(sys.argv[1:])

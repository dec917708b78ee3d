"""Run what is missing of a published table and compare its scores with ours.

The missing runs of a plan are trained, seed by seed, with the protocol of the paper; after an
interruption the same call continues. In `full`, one point of the paper's search space, every
method tries the learning rates that its paper tried, in `small` those of the protocol, and more
while the best one is at an edge. There are five seeds, or two seeds for each of four splits,
which a verdict needs.
"""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from idp_tutorial.assembly.build import load_config_backbone
from idp_tutorial.assembly.config import RunConfig, recorded_option
from idp_tutorial.data.tasks import load_config_task
from idp_tutorial.methods.method_registry import ALL_METHODS, CONTROL_METHODS
from idp_tutorial.reproduction.papers.protocols import (
    BACKBONE_NAMES,
    FIGURE_TO_TABLE,
    N_LAYERS_BY_BACKBONE,
    STATIC_PROMPT_LEARNING_RATES,
    load_table_cells,
    paper_backbone,
    parse_shots,
    plan_table_runs,
    scale_to_backbone,
    select_paper_learning_rates,
)
from idp_tutorial.runs.compare import run_seeds
from idp_tutorial.runs.learning_rate_search import describe_lr_selection
from idp_tutorial.runs.logits import majority_vote_score
from idp_tutorial.runs.record import RunStore
from idp_tutorial.runs.tables import select_finished
from idp_tutorial.utils.checks import Range, UserError, check_writable_folder
from idp_tutorial.utils.durable_files import file_lock

logger = logging.getLogger(__name__)


def select_learning_rates(
    cfg: RunConfig,
    table: str,  # such as 'lpt-2'
    scale: str,  # 'small' or 'full'
    given_learning_rates: tuple = (),  # learning rates that every method tries
) -> tuple:  # (): the learning rates of a control
    """Return the learning rates that a run tries.

    They are the given ones, else the paper's in `full`. In `small` they are the method's own, and
    larger ones for a static prompt with a verbalizer.
    """
    if cfg.method in CONTROL_METHODS:
        return ()
    if given_learning_rates:
        return tuple(given_learning_rates)
    if scale == "full":
        return select_paper_learning_rates(FIGURE_TO_TABLE.get(table, table), cfg.method)
    if cfg.head == "verbalizer" and cfg.method in ("prompt-tuning", "lpt"):
        return STATIC_PROMPT_LEARNING_RATES
    return ALL_METHODS[cfg.method].learning_rates


def choose_seed_count(
    cfg: RunConfig,
    planned_runs: list[RunConfig],  # all runs of the table
    requested_seeds: int | None = None,  # None: as many as a verdict needs
) -> int:
    """Return the number of seeds: 2 for a task that has several splits, else 5.

    These are the numbers that a verdict on a claim needs (`results/claims/decision.py`).
    """
    tasks_with_splits = {c.task for c in planned_runs if c.split_seed}
    return requested_seeds or (2 if cfg.task in tasks_with_splits else 5)


def _run_plan(
    plan: list[RunConfig],
    file: Path,
    table: str,
    scale: str,
    seeds: int | None,
    steps: int | None,
    given_learning_rates: tuple,
) -> list[dict]:
    """Run what `file` lacks of a plan; return all records, each with the `folder` of its logits."""
    start_time = time.perf_counter()
    store = RunStore(file)
    records = []
    for i, cfg in enumerate(plan):
        task = load_config_task(cfg)
        learning_rates = select_learning_rates(cfg, table, scale, given_learning_rates)
        n_seeds = choose_seed_count(cfg, plan, seeds)
        cfg = cfg.resolve_epochs(len(task.splits["train"]))
        if steps:
            cfg = replace(cfg, epochs=None, steps=steps, eval_every=max(1, steps // 10))
        records += run_seeds(
            cfg,
            task,
            describe_lr_selection(learning_rates),
            n_seeds,
            store,
            learning_rates,
        )
        seconds_left = (time.perf_counter() - start_time) / (i + 1) * (len(plan) - i - 1)
        logger.info(
            f"{table} {scale}: {i + 1} of {len(plan)}, about {seconds_left / 60:.0f} minutes left"
        )
    return [{**r, "folder": file.parent} for r in records]


def _check_inputs_exist(plan: list[RunConfig], scale: str) -> None:
    """Load every task and backbone once, so that a missing one fails before a folder is made."""
    if scale == "full" and any(c.get("glove", "") is None for c in plan):
        raise UserError(
            "m-idpg-phm-glove at scale 'full' needs glove=: the paper's vectors are those of "
            "glove.6B.300d.txt. Give the file or its folder, or leave the method out with methods=."
        )
    for c in {(c.task, c.shots, c.split_seed): c for c in plan}.values():
        load_config_task(c)
    for c in {c.backbone: c for c in plan}.values():
        load_config_backbone(c)


def reproduce_table(
    table: str,  # such as 'lpt-2'
    scale: str = "small",  # 'small' or 'full'
    backbone: str | None = None,  # None: the paper's; in `small` smollm2 for LPT, else minilm
    data: str | None = None,  # folder of tasks
    seeds: int | None = None,  # None: 2 where a task has several splits, else 5
    out: Path
    | str = "runs/reproduce",  # folder; the runs in its TABLE-SCALE.jsonl are not repeated
    methods: list[str] | None = None,  # keys of `ALL_METHODS`; None: all methods of the table
    tasks: list[str] | None = None,  # keys of `TASKS`; None: all tasks of the table
    # learning rates that every method tries; (): as `select_learning_rates` says
    learning_rates: tuple = (),
    steps: int | None = None,  # steps of a run; None: the paper's, in `small` 200
    # file or folder of GloVe vectors; None: word vectors of `tiny`, in `small` only
    glove: str | None = None,
) -> pd.DataFrame:  # from `compare_with_published`
    """Run what is missing of a table and return its published scores with ours beside them.

    Raises: `UserError` for an argument that makes no run, before anything is trained.
    """
    check_writable_folder(out)
    for name, value, most in (("seeds", seeds, 10**6), ("steps", steps, 10**9)):
        if value is not None:
            Range(1, most).check(value, name)
    plan = plan_table_runs(table, scale, backbone, data, methods, tasks, glove)
    _check_inputs_exist(plan, scale)
    file = Path(out) / f"{table}-{scale}.jsonl"
    with file_lock(file):  # two commands at a time would write the same records twice
        records = _run_plan(plan, file, table, scale, seeds, steps, learning_rates)
        return compare_with_published(records, table)


def _field_value(record: dict, name: str) -> Any:
    """Return an option of a run; the layer is a number, also where it is the default."""
    value = recorded_option(record, name)
    if value is None and name == "layer":
        n_layers = record.get("n_layers") or N_LAYERS_BY_BACKBONE.get(record["backbone"], 24)
        return n_layers // 2
    return value


def _matches_cell(record: dict, cell: Any) -> bool:
    """Return whether a record is a run of a cell of `load_table_cells`."""
    shots = parse_shots(cell.setting)
    is_same_task = (record["method"], record["task"]) == (cell.ours, cell.name)
    if not is_same_task or shots not in (None, record.get("shots")):
        return False
    fields = scale_to_backbone(cell.fields, record["backbone"], record.get("n_layers"))
    expected = {**record, **fields}
    return all(
        _field_value(record, name) == _field_value(expected, name)
        for name in cell.fields
        if name != "epochs"
    )


def _metric_value(record: dict, metric: str) -> float | None:
    """Return the value of a record for the published name of a metric; None if it has none."""
    if any(word in metric for word in ("speed", "memory", "time")):
        return None  # `results/speed/bench.py` measures these
    if metric.startswith("training loss at epoch"):
        fraction = int(metric.split()[-1]) / 30
        losses = record["losses"]
        return losses[math.ceil(fraction * len(losses)) - 1]
    if "macro" in metric:
        return (record.get("scores") or {}).get("accuracy+macro_f1", record["score"])
    return record["score"]


def _metric_values(records: list[dict], metric: str) -> list[float | None]:
    """Return the value of each record, or the one value of a vote of all records."""
    if metric == "voting over 5 runs":
        return [majority_vote_score(records)]
    return [_metric_value(r, metric) for r in records]


def _select_backbone_records(
    records: list[dict], cells: pd.DataFrame, cell: Any, table: str
) -> list[dict]:
    """Return the records of the cell's backbone, else those of backbones that no cell has."""

    def backbone_names(published_backbone: str) -> list[str]:
        """Return the names under which records may have a published backbone."""
        names = (
            paper_backbone(table, cell.ours, published_backbone),
            BACKBONE_NAMES[published_backbone],
        )
        return [Path(name).name for name in names]

    for name in backbone_names(cell.backbone):
        selected = [r for r in records if Path(r["backbone"]).name == name]
        if selected:
            return selected
    table_backbones = {name for b in {*cells.backbone} for name in backbone_names(b)}
    return [r for r in records if Path(r["backbone"]).name not in table_backbones]


def _summarise_scores(values: Iterable[float | None], records: list[dict]) -> dict:
    """Return the columns of our half of a row."""
    scores = pd.Series([v for v in values if v is not None], dtype=float)
    backbones = " ".join(dict.fromkeys(r["backbone"] for r in records))
    return {
        "our mean": scores.mean(),
        "our std": scores.std(),
        "runs": len(scores) or None,
        "our backbone": backbones or None,
    }


def _summarise_controls(cells: pd.DataFrame, records: Sequence[dict]) -> Iterator[dict]:
    """Yield a row for each task, number of examples, control and backbone."""
    sizes = cells.assign(
        shots=[parse_shots(s) or 0 for s in cells.setting],
        setting=cells.setting.str.split(";").str[0],
    )
    for cell in sizes.drop_duplicates(["shots", "name"]).itertuples():
        groups: dict[tuple[str, str], list[dict]] = {}
        for r in records:
            is_size = not cell.shots or r.get("shots") == cell.shots
            if r["task"] == cell.name and r["method"] in CONTROL_METHODS and is_size:
                groups.setdefault((r["method"], r["backbone"]), []).append(r)
        for (method, _), runs in groups.items():
            summary = _summarise_scores([_metric_value(r, cell.metric) for r in runs], runs)
            yield dict(setting=cell.setting, method=method, task=cell.task, **summary)


def compare_with_published(
    records: list[dict],  # of runs; a vote also needs the `folder` of their logits
    table: str,  # such as 'lpt-2'
) -> pd.DataFrame:
    """Return a row for each cell of a table and for each control, with our scores.

    A record counts for a cell if task, variant of the method and number of examples agree.
    Columns: setting, backbone, method, task, metric, mean and std as published, then `our mean`,
    `our std`, `runs` and `our backbone`.
    """
    score_table = FIGURE_TO_TABLE.get(table, table)
    cells = load_table_cells(score_table)
    finished = select_finished(records)
    summaries = []
    for cell in cells.itertuples():
        matching = [r for r in finished if _matches_cell(r, cell)]
        runs = _select_backbone_records(matching, cells, cell, score_table)
        summaries.append(_summarise_scores(_metric_values(runs, str(cell.metric)), runs))
    published = cells[["setting", "backbone", "method", "task", "metric", "mean", "std"]]
    both = pd.concat([published, pd.DataFrame(summaries, index=cells.index)], axis=1)
    controls = pd.DataFrame([*_summarise_controls(cells, finished)], columns=both.columns)
    return pd.concat([both, controls], ignore_index=True) if len(controls) else both

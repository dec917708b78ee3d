"""Run transfer for several methods and seeds, and ID-SPAM's Tables 6 and 11.

`run_transfer` runs one model. This module runs several methods and seeds. The results, beside
the published scores, are in the lab: transfer.

`compare_transfer` runs several methods and seeds, and writes each record as soon as it has it; an
interrupted call can be repeated and continues from its last checkpoint. With `tune_learning_rates`,
the learning rate of the first task is chosen on its own validation split with seed 0, as everywhere
in this library, and those of the few-shot stages on the target's; the model that chose a learning
rate is the one that is scored. With `tune_head_first`, every head is trained at the learning rate
that is best for a head without a prompt on the first task (what a prompt adds).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.assembly.options import config_for_method
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.reproduction.papers.transfer import resolve_label_map, run_transfer
from idp_tutorial.runs.record import format_summary_line, make_fingerprint, run_digests
from idp_tutorial.runs.store import RunStore, checkpoint_folder, remove_checkpoints
from idp_tutorial.runs.tables import check_same_settings, format_std, select_finished
from idp_tutorial.runs.tune import choose_head_learning_rate
from idp_tutorial.utils.checks import DivergenceError, UserError, check_between, check_name
from idp_tutorial.utils.durable import file_lock

__all__ = [
    "ID_SPAM_TABLE_6",
    "ID_SPAM_TABLE_11",
    "compare_transfer",
    "published_transfer_table",
    "transfer_table",
]

logger = logging.getLogger(__name__)


def _load_target_task(name: str, base: RunConfig, target_shots: int) -> Task:
    """Load the target with `target_shots` training examples; with 0, at most 100 unused ones."""
    if not target_shots:
        whole = load_task(name, base.data, None, base.split_seed, base.stratified)
        if len(whole.splits["train"]) <= 100:
            return whole
    return load_task(name, base.data, target_shots or 100, base.split_seed, base.stratified)


def _limit_test_rows(task: Task, n: int | None) -> Task:
    """Return the task with the first `n` test rows, which must contain all classes."""
    rows = task.splits["test"][:n]
    if task.labels:
        missing = {r["label"] for r in task.splits["test"]} - {r["label"] for r in rows}
        if missing:
            raise UserError(
                f"the first {n} test rows of {task.name!r} have no example of class "
                f"{task.labels[min(missing)]!r}: shuffle the file, or score more rows."
            )
    return replace(task, splits={**task.splits, "test": rows})


def _describe_learning_rate_choice(
    cfg: RunConfig, tune_learning_rates: bool, learning_rates: tuple
) -> str:  # for the records
    """Return the text by which a record states how its learning rate was chosen."""
    if cfg.lr:
        return "given"
    if not tune_learning_rates:
        return "default"
    grid = f"{len(learning_rates)} ({', '.join(f'{lr:g}' for lr in learning_rates)})"
    return f"best of {grid if learning_rates else '3'} on validation"


@dataclass
class _TransferSettings:
    """Settings that all methods of a comparison share."""

    source: Task
    target: Task
    explicit_map: dict | None
    target_shots: int
    seeds: int
    tune_learning_rates: bool
    learning_rates: tuple
    store: RunStore  # what it contains is not run again


def compare_transfer(
    methods: list[str],  # keys of `METHODS`
    # config of the first task; method and seed are replaced, and the learning rate if it is None
    base: RunConfig,
    target: str,  # name of the second task
    target_shots: int = 100,  # its training examples (ID-SPAM, Table 11); 0: zero-shot only
    seeds: int = 3,  # number of seeds, from 0
    # choose among several learning rates; False: the method's default
    tune_learning_rates: bool = False,
    explicit_map: dict | None = None,  # as for `make_label_map`
    records_file: Path | None = None,  # JSONL file; the runs in it are not repeated
    loaded_tasks: tuple[Task, Task] | None = None,  # both tasks; None: they are loaded
    test_rows: int | None = None,  # number of rows of each test split to score; None: all
    # train every method's head at the learning rate that is best without a prompt on the source
    tune_head_first: bool = False,
    # learning rates that every method tries in each stage, with `tune_learning_rates`; (): the
    # method's own
    learning_rates: tuple = (),
) -> list[dict]:  # old and new records
    """Run transfer between two tasks for several methods and seeds (ID-SPAM, Tables 6 and 11).

    Raises: `UserError`, before anything is trained, for tasks or methods that cannot work.
    """
    for method in methods:
        check_name(method, METHODS, "method")
    if seeds < 1 or target_shots < 0:
        raise UserError(
            f"seeds must be at least 1 (2 for a standard deviation) and target_shots at least "
            f"0, got "
            f"seeds={seeds} and target_shots={target_shots}."
        )
    check_between(seeds, 1, 10**6, "seeds")
    if loaded_tasks:
        source_task, target_task = loaded_tasks
    else:
        source_task = load_task(base.task, base.data, base.shots, base.split_seed, base.stratified)
        target_task = _load_target_task(target, base, target_shots)
    label_maps = {
        m: resolve_label_map(base.with_method(m), source_task, target_task, explicit_map)
        for m in methods
    }
    source_task = _limit_test_rows(source_task, test_rows)
    target_task = _limit_test_rows(target_task, test_rows)
    with file_lock(records_file):
        if tune_head_first:
            head_lr = choose_head_learning_rate(base, source_task, records_file)
            base = replace(base, head_lr=head_lr)
        settings = _TransferSettings(
            source_task,
            target_task,
            explicit_map,
            target_shots,
            seeds,
            tune_learning_rates,
            learning_rates,
            RunStore(records_file),
        )
        records = []
        for method in methods:
            cfg = config_for_method(base, method, methods)
            label_map = label_maps[method]
            class_map = list(label_map) if label_map else None
            records += _run_method(cfg, class_map, settings)
    return records


def _run_method(
    base: RunConfig,  # with the method
    class_map: list | None,
    settings: _TransferSettings,
) -> list[dict]:
    """Run the seeds of one method that have no records; return the records of all seeds."""
    source = settings.source
    target = settings.target
    method = METHODS[base.method]
    learning_rates = None
    if settings.tune_learning_rates and not base.lr:
        learning_rates = settings.learning_rates or method.learning_rates
    cfg = replace(
        base,
        task=source.name,
        lr=base.lr or (None if settings.tune_learning_rates else method.default_learning_rate),
        head_lr=None if method.kind == "head" else base.head_lr,
    ).resolve_epochs(len(source.splits["train"]))
    conditions: dict[str, Any] = dict(
        digests={**run_digests(cfg, source), "target": target.digest()},
        target=target.name,
        target_shots=settings.target_shots,
        label_map=class_map,
        lr_selection=_describe_learning_rate_choice(
            base, settings.tune_learning_rates, settings.learning_rates
        ),
    )
    stage_names = ("zero-shot", "few-shot", "alone") if settings.target_shots else ("zero-shot",)
    records: list[dict] = []
    lr = cfg.lr
    for seed in range(settings.seeds):
        if seed and not lr:
            break  # every learning rate diverged with seed 0
        seed_cfg = replace(cfg, lr=lr, seed=seed)
        fingerprint = make_fingerprint(seed_cfg, **conditions)
        seed_records = [
            settings.store.find({**fingerprint, "setting": name}) for name in stage_names
        ]
        if None in seed_records:
            seed_records = _run_stages(seed_cfg, fingerprint, learning_rates, settings)
        records += [record for record in seed_records if record is not None]
        lr = lr or next((record["lr"] for record in records if record["lr"]), None)
    return records


def _run_stages(
    cfg: RunConfig,  # with the seed
    fingerprint: dict[str, Any],  # of all stages
    learning_rates: Sequence[float] | None,
    settings: _TransferSettings,
) -> list[dict | None]:
    """Run all stages, and return their records; of an interrupted run the stored ones."""
    source = settings.source
    target = settings.target
    store = settings.store
    records: list[dict | None] = []
    folder = checkpoint_folder(store.file, fingerprint)
    for new_record in run_transfer(
        cfg,
        source,
        target,
        settings.explicit_map,
        learning_rates,
        settings.target_shots > 0,
        store.file,
        folder,
    ):
        stage = new_record["setting"]
        stored = store.find({**fingerprint, "setting": stage})
        if stored is None:
            stored = store.add({**new_record, **fingerprint})
            summary = format_summary_line({**stored, "lr": None})
            logger.info(
                f"{cfg.method:14} {source.name} → {target.name}  seed {cfg.seed}  {stage:9}  "
                f"{summary}"
            )
        records.append(stored)
    remove_checkpoints(folder)
    return records


# ID-SPAM's LPT has a generator: 2,162,688 parameters are those of NPG with m = 256 and t = 10
# zero-shot, RoBERTa-large, mean of three runs: QQP→MRPC, MRPC→QQP, SST-2→IMDB, IMDB→SST-2
ID_SPAM_TABLE_6 = {
    "fine-tuning": (64.0, 68.3, 87.1, 88.8),
    "lora": (71.1, 66.1, 90.3, 87.6),
    "prompt-tuning": (54.1, 54.6, 68.7, 63.5),
    "p-tuning": (57.6, 52.7, 66.5, 66.8),
    "smop": (67.9, 64.1, 84.5, 83.3),
    "lpt-npg": (66.7, 64.5, 67.1, 71.1),
    "dept": (63.3, 58.8, 69.8, 69.3),
    "id-spam": (70.9, 69.2, 89.1, 86.0),
}
# few-shot with 100 examples: QQP→MRPC, MRPC→QQP
ID_SPAM_TABLE_11 = {
    "fine-tuning": (79.7, 81.7),
    "lpt-npg": (69.4, 74.4),
    "id-spam": (72.5, 73.1),
}


def published_transfer_table() -> pd.DataFrame:
    """Return ID-SPAM's Tables 6 and 11 in the form of `transfer_table`."""
    pairs = ["qqp → mrpc", "mrpc → qqp", "sst2 → imdb", "imdb → sst2"]
    rows = {}
    for method, zero_shot_scores in ID_SPAM_TABLE_6.items():
        row = {(pair, "zero-shot"): score for pair, score in zip(pairs, zero_shot_scores)}
        few_shot_scores = ID_SPAM_TABLE_11.get(method, ())
        row |= {(pair, "few-shot"): score for pair, score in zip(pairs, few_shot_scores)}
        rows[method] = row
    few_shot_pairs = pairs[:2]
    columns = [(pair, setting) for pair in few_shot_pairs for setting in ("zero-shot", "few-shot")]
    columns += [(pair, "zero-shot") for pair in pairs[2:]]
    return pd.DataFrame.from_dict(rows, orient="index").reindex(columns=columns)


def transfer_table(
    records: list[dict],  # of `compare_transfer`, with one backbone and head
) -> pd.DataFrame:
    """Return a row for each method and a column for each pair of tasks and setting.

    A cell is mean ± std over seeds; the last row is always predicting the most frequent label.
    Raises: `UserError` if there are no records, `DivergenceError` if all runs diverged.
    """
    if not records:
        raise UserError(
            "there are no records to make a table of: run compare_transfer(...) or idp transfer "
            "first."
        )
    if not select_finished(records):
        raise DivergenceError(records[0]["message"])
    df = pd.DataFrame(records)
    check_same_settings(df, ["backbone", "head"], "one table has one backbone and one head")
    df["pair"] = df.task + " → " + df.target
    scores = df.groupby(["method", "pair", "setting"], sort=False).score
    cells = scores.mean().round(1).astype(str) + scores.std().round(1).map(format_std)
    cells = cells.where(scores.count() > 0, "diverged")
    table = cells.unstack(["pair", "setting"], sort=False)
    majority = df.drop_duplicates("pair").set_index("pair").majority_score
    majority_row = [f"{majority[pair]:.1f}" for pair, _ in table]
    last = pd.DataFrame([majority_row], ["majority"], table.columns)
    return pd.concat([table, last]).rename_axis(None)

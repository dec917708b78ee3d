"""Train on one task and score another, zero-shot or after a few examples of it.

Does a prompt learn the task or the dataset? ID-SPAM (§3.4) tests this by moving a trained model
to a similar task: QQP and MRPC both ask whether two texts have the same meaning, SST-2 and IMDB
both whether a text about a film is positive. *Zero-shot*, the model sees nothing of the second
task (Table 6). *Few-shot*, training continues on 100 of its examples (Table 11).

The 100 examples are the training data. As in IDPG's splits, up to 1,000 further labelled rows
of the second task choose the checkpoint and the learning rate, so a few-shot score has used
1,100 labels, not 100.

The classes of one task are mapped to those of the other. A model of QQP predicts *duplicate*, and
MRPC needs *equivalent*. The indices of the classes do not help: class 0 of RTE is *entailment*,
class 0 of MRPC is *not equivalent*. The map follows from the tasks if the two have the same set of
label words, or the same set of label names. In every other case the user gives the map.

`run_transfer` runs one model. The results of several methods and seeds, beside the published
scores of ID-SPAM's Tables 6 and 11, are in the lab: transfer.

`compare_transfer` runs several methods and seeds, and writes each record as soon as it has it; an
interrupted call can be repeated and continues from its last checkpoint. With `tune_learning_rates`,
the learning rate of the first task is chosen on its own validation split with seed 0, as everywhere
in this library, and those of the few-shot stages on the target's; the model that chose a learning
rate is the one that is scored. With `tune_head_first`, every head is trained at the learning rate
that is best for a head without a prompt on the first task (as in `nbs/lab/what_a_prompt_adds`).
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.context import Context
from idp_tutorial.core.planned_model import PlannedModel, copy_state, restore_state
from idp_tutorial.core.random_numbers import exclusive_random_numbers, seed_random_numbers
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_config_task, load_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.reproduction.papers.published_scores import METHOD_NAMES, load_published_scores
from idp_tutorial.runs.compare import (
    check_longest_example,
    choose_method_config,
    validate_comparison,
)
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.learning_rate_search import choose_head_learning_rate, try_learning_rates
from idp_tutorial.runs.logits import logits_name, save_logits, split_outputs
from idp_tutorial.runs.record import (
    RunStore,
    build_record,
    checkpoint_folder,
    format_summary_line,
    make_fingerprint,
    remove_checkpoints,
    run_digests,
)
from idp_tutorial.runs.tables import check_same_settings, select_finished
from idp_tutorial.training.fit import TrainLog, fit
from idp_tutorial.utils.checks import DivergenceError, Range, UserError, check_name
from idp_tutorial.utils.durable_files import file_lock
from results.claims.statements import task_key


def _describe_labels(task: Task) -> str:
    """Return the label names, each with its label word if the task has label words."""
    with_words = [f"{name}: {word}" for name, word in zip(task.labels, task.label_words)]
    return f"{task.name!r} ({', '.join(with_words or task.labels)})"


def _infer_label_map(source: Task, target: Task) -> tuple[int, ...]:
    """Return the map that equal label words or equal label names define."""
    class_maps = set()
    for names, target_names in (
        (source.label_words, target.label_words),
        (source.labels, target.labels),
    ):
        if names and set(names) == set(target_names):
            class_maps.add(tuple(target_names.index(name) for name in names))
    if len(class_maps) == 1:
        return class_maps.pop()
    problem = "do not correspond"
    if class_maps:
        problem = "have two maps, one by their names and another by their words"
    raise UserError(
        f"the labels of {_describe_labels(source)} and {_describe_labels(target)} {problem}. Give "
        f"a label map, such as {{{source.labels[0]!r}: {target.labels[0]!r}, …}}."
    )


def make_label_map(
    source: Task,  # the task that a model was trained on
    target: Task,  # the task that the model is to answer
    explicit_map: dict | None = None,  # source label → target label; None: inferred from the tasks
) -> tuple[int, ...] | None:  # for every class of `source`, a class index of `target`
    """Return the target class of each source class, or None for two regression tasks."""
    if source.is_regression and target.is_regression and not explicit_map:
        return None
    if not (source.labels and target.labels):
        raise UserError(
            f"a label map from {source.name!r} to {target.name!r} needs two tasks with classes, "
            "and two regression tasks need no map."
        )
    if explicit_map is None:
        return _infer_label_map(source, target)
    if {*explicit_map} != {*source.labels} or {*explicit_map.values()} != {*target.labels}:
        raise UserError(
            f"label map {explicit_map}: each label of {_describe_labels(source)} must be a key, "
            f"and each label of {_describe_labels(target)} a value, and there must be no others."
        )
    return tuple(target.labels.index(explicit_map[label]) for label in source.labels)


class LabelMapHead(nn.Module):
    """A head whose outputs are the classes of another task.

    The probability of a class is the sum over all classes of the wrapped head that mean it.
    """

    def __init__(
        self,
        head: nn.Module,  # head of the task that the model was trained on
        class_map: tuple[int, ...],  # from `make_label_map`
    ):
        super().__init__()
        self.head: Any = head
        self.pooling = head.pooling
        self.source_classes = []
        for target in range(max(class_map) + 1):
            self.source_classes.append([i for i, c in enumerate(class_map) if c == target])

    def forward(self, ctx: Context) -> Tensor:  # `[B,C]`, C classes of the other task
        """Return logits over the classes of the other task."""
        logits = self.head(ctx)
        return torch.stack([logits[:, classes].logsumexp(1) for classes in self.source_classes], 1)

    def loss(
        self, ctx: Context, label: Tensor
    ) -> Tensor:  # classes of the other task `[B]`; scalar
        """Return the loss of the wrapped head, or cross-entropy if the map merges classes."""
        if all(len(classes) == 1 for classes in self.source_classes):
            to_source = [classes[0] for classes in self.source_classes]
            return self.head.loss(ctx, torch.tensor(to_source, device=label.device)[label])
        return F.cross_entropy(self(ctx), label)


def changes_class_indices(class_map: tuple[int, ...] | None) -> bool:
    """Return whether a label map changes the index of any class."""
    return class_map is not None and class_map != tuple(range(len(class_map)))


def compute_headline_score(
    task: Task,
    scores: dict[str, float],  # metric: value
) -> float:
    """Return the mean of accuracy and macro-F1 (ID-SPAM, Table 6), for regression its metric."""
    if task.is_regression:
        return scores[task.metric]
    return (scores["accuracy"] + scores["macro_f1"]) / 2


def compute_majority_score(
    task: Task,  # with its splits
) -> float:  # percent; 0 for regression
    """Return the score of always predicting the most frequent label of the test split."""
    if task.is_regression:
        return 0.0
    rows = task.splits["test"]
    labels = [r["label"] for r in rows]
    groups = [r.get("group") for r in rows]
    ((majority_label, _),) = Counter(labels).most_common(1)
    scores = task.score([majority_label] * len(rows), labels, groups)
    return compute_headline_score(task, scores)


@exclusive_random_numbers()
def _train_with_best_learning_rate(
    model: PlannedModel,
    task: Task,
    cfg: RunConfig,
    learning_rates: Sequence[float],
    checkpoint_dir: Path | None = None,  # folder of this stage
) -> tuple[TrainLog, float]:  # the log of the best learning rate, and the rate
    """Continue training, once with each learning rate; keep the model best on validation."""
    state = {**model.trained_parameters(), **dict(model.named_buffers())}
    initial_state = copy_state(state)

    def train(lr: float) -> tuple[dict[str, Tensor], TrainLog]:
        """Train from the initial state with a learning rate."""
        restore_state(state, initial_state)
        seed_random_numbers(cfg.seed)  # the same batches and dropout masks for every learning rate
        folder = checkpoint_dir and checkpoint_dir / f"lr-{lr:g}"
        log = fit(model, task, replace(cfg, lr=lr), checkpoint_dir=folder)
        return copy_state(state), log

    trials = try_learning_rates(train, learning_rates)
    if trials.log is None or trials.lr is None:
        raise DivergenceError(
            f"{cfg.method!r} diverged on {task.name!r} with every learning rate of "
            f"{list(learning_rates)}: a lower lr usually fixes it."
        )
    restore_state(state, trials.trained)
    return trials.log, trials.lr


def resolve_label_map(
    cfg: RunConfig,
    source: Task,  # the task that is trained
    target: Task,  # the task that is scored
    explicit_map: dict | None = None,  # as for `make_label_map`
) -> tuple | None:  # as from `make_label_map`
    """Return the label map from source to target; refuse one that the method cannot use.

    Raises: `UserError` if the labels do not correspond, or if the method needs another head.
    """
    class_map = make_label_map(source, target, explicit_map)
    kind = METHODS[check_name(cfg.method, METHODS, "method")].kind
    if kind == "entailment" and not source.pair and changes_class_indices(class_map):
        raise UserError(
            f"{cfg.method!r} has no head whose classes could be renamed, as {source.name!r} and "
            f"{target.name!r} require: leave the method out, or use a task with the labels in the "
            "same order."
        )
    return class_map


STAGES = ("zero-shot", "few-shot", "alone")  # the field `setting` of a record


class _Stages:
    """Source, target and shared record fields of a transfer."""

    def __init__(
        self,
        source: Experiment,
        target: Task,
        records_file: Path | None,  # logits are stored beside it
        **shared_fields: Any,  # of all records
    ) -> None:
        self.source = source
        self.target = target
        self.records_file = records_file
        self.shared_fields = shared_fields
        self.digests = {**source.digests(), "target": target.digest()}

    def record(self, setting: str, start_time: float, **values: Any) -> dict:
        """Return the record of a stage that has finished or diverged."""
        source = self.source
        target = self.target
        return build_record(
            source.cfg,
            self.digests,
            {task.name: task.split_sizes() for task in (source.task, target)},
            start_time,
            target=target.name,
            setting=setting,
            metric=target.metric if target.is_regression else "accuracy+macro_f1",
            target_train_size=0 if setting == "zero-shot" else len(target.splits["train"]),
            **self.shared_fields,
            **values,
        )

    def score(
        self, setting: str, model: PlannedModel, log: TrainLog, lr: float, start_time: float
    ) -> dict:
        """Score a trained model on the target, and return the record of the stage."""
        cfg = self.source.cfg
        target = self.target
        splits = [*["validation"] * bool(self.records_file), "test"]
        outputs = {split: split_outputs(model, target, cfg, split) for split in splits}
        scores, _ = target.score_outputs(*outputs["test"])
        # zero-shot, the target has no influence on the choice of the checkpoint
        selection_task = self.source.task if setting == "zero-shot" else target
        values: dict[str, Any] = dict(
            score=compute_headline_score(target, scores),
            scores=scores,
            stage_learning_rate=lr,
            checkpoint_selection=f"checkpoint: best on validation of {selection_task.name}",
        )
        if self.records_file:
            label_map = self.shared_fields["label_map"]
            name = logits_name(cfg, target, self.digests, setting, label_map)
            values |= save_logits(self.records_file, name, outputs, target)
        return self.record(setting, start_time, model=model, log=log, **values)


def run_transfer(
    cfg: RunConfig,  # of both stages; without `lr`, the source tries `learning_rates` too
    source: Task,  # the task that is trained, with its splits
    target: Task,  # the task that is scored; its `train` split has the few examples
    explicit_map: dict | None = None,  # as for `make_label_map`
    # learning rates to try in the few-shot stages; None: that of the source
    learning_rates: Sequence[float] | None = None,
    few_shot: bool = True,  # also run the few-shot stage and its control
    # JSONL file to which the caller adds the records; logits are stored beside it
    records_file: Path | None = None,
    checkpoint_dir: Path | None = None,  # folder for checkpoints, to resume a killed transfer
) -> list[dict]:  # of the settings 'zero-shot', 'few-shot' and 'alone', finished or diverged
    """Train on one task and score another; then train on a few of its examples and score again.

    Zero-shot is ID-SPAM §3.4, few-shot its App. C; 'alone' is the control that is trained on the
    few examples only.
    Raises: `UserError`, before anything is trained, for two tasks or a method that cannot work.
    """
    class_map = resolve_label_map(cfg, source, target, explicit_map)
    source_learning_rates = [cfg.lr] if cfg.lr else learning_rates
    if not source_learning_rates:
        raise UserError(
            f"no learning rate for {cfg.method!r}: give RunConfig(lr=...), or learning_rates=[...] "
            "to choose from."
        )
    experiment = Experiment(cfg, source)
    start_time = experiment.start_time
    model = experiment.build_model()
    if few_shot and cfg.head == "verbalizer":
        target.word_ids(model.backbone.tokenizer)  # the control predicts the target's label words
    for task in (source, target):
        check_longest_example(model, task, cfg)
    stages = _Stages(
        experiment,
        target,
        records_file,
        label_map=class_map and list(class_map),
        majority_score=compute_majority_score(target),
    )
    try:
        log, lr = _train_with_best_learning_rate(
            model, source, cfg, source_learning_rates, checkpoint_dir and checkpoint_dir / "source"
        )
        cfg = replace(cfg, lr=lr)
        experiment.cfg = replace(experiment.cfg, lr=lr)
        source_scores, _ = source.score_outputs(*split_outputs(model, source, cfg, "test"))
        stages.shared_fields["source_score"] = compute_headline_score(source, source_scores)
        if class_map and changes_class_indices(class_map):
            model.head = LabelMapHead(model.head, class_map)
        records = [stages.score("zero-shot", model, log, lr, start_time)]
    except FloatingPointError as e:
        settings = STAGES if few_shot else STAGES[:1]
        experiment.cfg = replace(experiment.cfg, lr=cfg.lr)
        diverged = dict(status="diverged", message=str(e))
        return [stages.record(setting, start_time, **diverged) for setting in settings]

    target_cfg = replace(cfg, task=target.name, init_from=None)
    for setting in STAGES[1:] if few_shot else ():
        if setting == "alone":
            model = Experiment(target_cfg, target).build_model()
        start_time = time.perf_counter()
        try:
            log, lr = _train_with_best_learning_rate(
                model,
                target,
                target_cfg,
                learning_rates or [lr],
                checkpoint_dir and checkpoint_dir / setting,
            )
            record = stages.score(setting, model, log, lr, start_time)
        except FloatingPointError as e:
            record = stages.record(setting, start_time, status="diverged", message=str(e))
        records.append(record)
    return records


logger = logging.getLogger(f"idp_tutorial.{__name__}")  # whose messages commands print


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
    validate_comparison(methods, base.head, seeds)
    Range(0).check(target_shots, "target_shots")
    if loaded_tasks:
        source_task, target_task = loaded_tasks
    else:
        source_task = load_config_task(base)
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
        store = RunStore(records_file)
        records = []
        for method in methods:
            cfg = choose_method_config(base, method, methods, tune_learning_rates)
            cfg = replace(cfg, task=source_task.name)
            cfg = cfg.resolve_epochs(len(source_task.splits["train"]))
            tried_learning_rates: tuple | None = None
            if tune_learning_rates and not base.lr:
                tried_learning_rates = learning_rates or METHODS[method].learning_rates
            label_map = label_maps[method]
            conditions = dict(
                digests={**run_digests(cfg, source_task), "target": target_task.digest()},
                target=target_task.name,
                target_shots=target_shots,
                label_map=list(label_map) if label_map else None,
                lr_selection=_describe_learning_rate_choice(
                    base, tune_learning_rates, learning_rates
                ),
            )
            run_args = (source_task, target_task, explicit_map, tried_learning_rates)
            records += _run_seeds(cfg, run_args, conditions, seeds, store)
    return records


def _run_seeds(
    cfg: RunConfig,  # without `lr`, seed 0 chooses it
    # of `run_transfer`: source, target, explicit map and learning rates
    run_args: tuple[Task, Task, dict | None, tuple | None],
    conditions: dict[str, Any],  # further fields of the fingerprint
    seeds: int,
    store: RunStore,
) -> list[dict]:
    """Run the seeds of one method that have no records; return the records of all seeds."""
    few_shot = conditions["target_shots"] > 0
    stages = STAGES if few_shot else STAGES[:1]
    records: list[dict] = []
    for seed in range(seeds):
        if seed and not cfg.lr:
            break  # every learning rate diverged with seed 0
        cfg = replace(cfg, seed=seed)
        fingerprint = make_fingerprint(cfg, **conditions)
        by_stage: dict[str, Any] = {s: store.find({**fingerprint, "setting": s}) for s in stages}
        if None in by_stage.values():
            folder = checkpoint_folder(store.file, fingerprint)
            for new_record in run_transfer(cfg, *run_args, few_shot, store.file, folder):
                setting = new_record["setting"]
                if by_stage[setting] is None:
                    by_stage[setting] = record = store.add({**new_record, **fingerprint})
                    logger.info(
                        f"{cfg.method:14} {record['task']} → {record['target']}  seed {seed}  "
                        f"{setting:9}  {format_summary_line({**record, 'lr': None})}"
                    )
            remove_checkpoints(folder)
        records += by_stage.values()
        cfg = replace(cfg, lr=cfg.lr or next((r["lr"] for r in records if r["lr"]), None))
    return records


def published_transfer_table() -> pd.DataFrame:
    """Return ID-SPAM's Tables 6 and 11 in the form of `transfer_table`.

    Its LPT has a generator: 2,162,688 parameters are those of NPG with m = 256 and t = 10.
    """
    scores: dict[tuple[str, str], dict[str, float]] = {}
    for table, setting in (("id-spam-6", "zero-shot"), ("id-spam-11", "few-shot")):
        for cell in load_published_scores(table).itertuples():
            pair = task_key(str(cell.task)).replace("→", " → ")
            scores.setdefault((pair, setting), {})[METHOD_NAMES[str(cell.method)]] = cell.mean
    pairs = dict.fromkeys(pair for pair, _ in scores)
    columns = [(pair, name) for pair in pairs for name in ("zero-shot", "few-shot")]
    return pd.DataFrame(scores).reindex(columns=[c for c in columns if c in scores])


def _format_std(std: float) -> str:
    """Return ` ± std`, or an empty string for a single seed, whose `std` is NaN."""
    return "" if pd.isna(std) else f" ± {std}"


def transfer_table(
    records: list[dict],  # of `compare_transfer`, with one backbone and head
) -> pd.DataFrame:
    """Return a row for each method and a column for each pair of tasks and setting.

    A cell is mean ± std over seeds; the last row is always predicting the most frequent label.
    Raises: `DivergenceError` if all runs diverged.
    """
    if not select_finished(records):
        raise DivergenceError(records[0]["message"])
    df = pd.DataFrame(records)
    check_same_settings(df, ["backbone", "head"], "one table has one backbone and one head")
    df["pair"] = df.task + " → " + df.target
    scores = df.groupby(["method", "pair", "setting"], sort=False).score
    cells = scores.mean().round(1).astype(str) + scores.std().round(1).map(_format_std)
    cells = cells.where(scores.count() > 0, "diverged")
    table = cells.unstack(["pair", "setting"], sort=False)
    majority = df.drop_duplicates("pair").set_index("pair").majority_score
    majority_row = [f"{majority[pair]:.1f}" for pair, _ in table]
    last = pd.DataFrame([majority_row], ["majority"], table.columns)
    return pd.concat([table, last]).rename_axis(None)

"""Train on one task and score another, zero-shot or after a few examples of it.

Does a prompt learn the task or the dataset? ID-SPAM (§3.4) tests this by moving a trained model
to a similar task: QQP and MRPC both ask whether two texts have the same meaning, SST-2 and IMDB
both whether a text about a film is positive. *Zero-shot*, the model sees nothing of the second
task (Table 6). *Few-shot*, training continues on 100 of its examples (Table 11).

The 100 examples are the training data. As in IDPG's splits, up to 1,000 further labelled rows
of the second task choose the checkpoint and the learning rate, so a few-shot score has used
1,100 labels, not 100.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.prompted_model import PromptedModel, copy_state, restore_state
from idp_tutorial.core.random_numbers import seed_random_numbers
from idp_tutorial.data.task import Task
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.reproduction.papers.label_maps import (
    apply_label_map,
    changes_class_indices,
    make_label_map,
)
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.logits import logits_name, save_logits, split_outputs
from idp_tutorial.runs.record import build_record
from idp_tutorial.runs.tune import try_learning_rates
from idp_tutorial.training.evaluation import evaluate, predict_logits
from idp_tutorial.training.examples import encode_for_model
from idp_tutorial.training.fit import TrainLog, fit
from idp_tutorial.utils.checks import DivergenceError, UserError, check_name

__all__ = [
    "compute_headline_score",
    "compute_majority_score",
    "resolve_label_map",
    "run_transfer",
]


def compute_headline_score(
    task: Task,
    scores: dict[str, float],  # metric: value
) -> tuple[str, float]:  # name and value of the score
    """Return the mean of accuracy and macro-F1 (ID-SPAM, Table 6).

    For regression, return the task's own metric.
    """
    if task.is_regression:
        return task.metric, scores[task.metric]
    return "accuracy+macro_f1", (scores["accuracy"] + scores["macro_f1"]) / 2


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
    return compute_headline_score(task, scores)[1]


def _evaluate_test_split(model: PromptedModel, task: Task, cfg: RunConfig) -> dict[str, float]:
    """Return all scores of a model on the test split."""
    examples = encode_for_model(model, task, cfg, task.splits["test"])
    scores, _ = evaluate(model, examples, task, 4 * cfg.batch_size, next(model.parameters()).device)
    return scores


def _train_with_best_learning_rate(
    model: PromptedModel,
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
    has_entailment_head = METHODS[check_name(cfg.method, METHODS, "method")].kind == "entailment"
    if has_entailment_head and cfg.head == "verbalizer":
        raise UserError(
            f"{cfg.method!r} always has an entailment head and cannot use head='verbalizer': leave "
            "the method out, or use head='classification'."
        )
    if has_entailment_head and not source.pair and changes_class_indices(class_map):
        raise UserError(
            f"{cfg.method!r} has no head whose classes could be renamed, which the label map "
            f"{class_map} from {source.name!r} to {target.name!r} requires: leave the method out, "
            "or use a task with the labels in the same order."
        )
    return class_map


def _text_length(row: dict) -> int:
    """Return the number of characters of a row."""
    return len(row["sentence1"]) + len(row.get("sentence2", ""))


def _check_inputs(
    model: PromptedModel, cfg: RunConfig, source: Task, target: Task, few_shot: bool
) -> None:
    """Run the longest text of both tasks, so that a later stage fails before training."""
    if few_shot and cfg.head == "verbalizer":
        target.word_ids(model.backbone.tokenizer)  # the control predicts the target's label words
    device = next(model.parameters()).device
    for task in (source, target):  # a template may be missing, or the text too long for the model
        rows = [row for split in task.splits.values() for row in split]
        longest = max(rows, key=_text_length)
        predict_logits(model, encode_for_model(model, task, cfg, [longest]), device=device)


def _transfer_digests(source: Experiment, target: Task) -> dict[str, str]:
    """Return the digests of everything that a transfer reads."""
    return {**source.digests(), "target": target.digest()}


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

    def _make_record(self, setting: str, start_time: float, **values: Any) -> dict:
        source = self.source
        target = self.target
        is_zero_shot = setting == "zero-shot"
        fields: dict[str, Any] = dict(
            target=target.name,
            setting=setting,
            metric=target.metric if target.is_regression else "accuracy+macro_f1",
            target_train_size=0 if is_zero_shot else len(target.splits["train"]),
            **self.shared_fields,
        )
        digests = _transfer_digests(source, target)
        split_sizes = {task.name: task.split_sizes() for task in (source.task, target)}
        record = build_record(source.cfg, digests, split_sizes, start_time, **{**fields, **values})
        return record.to_dict()

    def record_divergence(self, setting: str, error: Exception, start_time: float) -> dict:
        """Return the record of a stage that diverged."""
        return self._make_record(setting, start_time, status="diverged", message=str(error))

    def score(
        self, setting: str, model: PromptedModel, log: TrainLog, lr: float, start_time: float
    ) -> dict:
        """Score a trained model on the target, and return the record of the stage."""
        cfg = self.source.cfg
        target = self.target
        splits = [*["validation"] * bool(self.records_file), "test"]
        outputs = {split: split_outputs(model, target, cfg, split) for split in splits}
        scores, _ = target.score_outputs(*outputs["test"])
        metric, score = compute_headline_score(target, scores)
        # zero-shot, the target has no influence on the choice of the checkpoint
        selection_task = self.source.task if setting == "zero-shot" else target
        values: dict[str, Any] = dict(
            metric=metric,
            score=score,
            scores=scores,
            stage_learning_rate=lr,
            checkpoint_selection=f"checkpoint: best on validation of {selection_task.name}",
        )
        if self.records_file:
            digests = _transfer_digests(self.source, target)
            identifiers = (setting, self.shared_fields["label_map"])
            name = logits_name(cfg, target, digests, *identifiers)
            values |= save_logits(self.records_file, name, outputs, target)
        return self._make_record(setting, start_time, model=model, log=log, **values)


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
    _check_inputs(model, cfg, source, target, few_shot)
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
        source_scores = _evaluate_test_split(model, source, cfg)
        stages.shared_fields["source_score"] = compute_headline_score(source, source_scores)[1]
        apply_label_map(model, class_map)
        records = [stages.score("zero-shot", model, log, lr, start_time)]
    except FloatingPointError as e:
        settings = ("zero-shot", "few-shot", "alone") if few_shot else ("zero-shot",)
        experiment.cfg = replace(experiment.cfg, lr=cfg.lr)
        return [stages.record_divergence(setting, e, start_time) for setting in settings]

    target_cfg = replace(cfg, task=target.name, init_from=None)
    for setting in ("few-shot", "alone") if few_shot else ():
        if setting == "alone":
            model = Experiment(target_cfg, target).build_model()
        start_time = time.time()
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
            record = stages.record_divergence(setting, e, start_time)
        records.append(record)
    return records

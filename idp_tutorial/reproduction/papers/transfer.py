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

import torch
from accelerate.utils import set_seed
from torch import Tensor

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.core.prompted_model import PromptedModel, count_parameters
from idp_tutorial.data.task import Task
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.reproduction.papers.label_maps import (
    apply_label_map,
    changes_class_indices,
    make_label_map,
)
from idp_tutorial.runs.experiment import initialise_model, make_diverged_record
from idp_tutorial.runs.logits import logits_name, save_logits
from idp_tutorial.runs.record_checks import (
    data_digest,
    downsample_losses,
    input_digests,
    provenance_field,
    split_outputs,
)
from idp_tutorial.training.evaluation import evaluate, predict_logits
from idp_tutorial.training.examples import encode_for_model
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.checks import DivergenceError, UserError, check_name
from idp_tutorial.utils.config import RunConfig
from idp_tutorial.utils.provenance import SCHEMA_VERSION
from idp_tutorial.utils.records import collect_versions, config_to_record

__all__ = ["compute_headline_score", "compute_majority_score", "resolve_label_map", "run_transfer"]


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


def _trained_state_and_buffers(model: PromptedModel) -> dict[str, Tensor]:
    """Return the tensors that training changes, by name."""
    return {**model.trained_parameters(), **dict(model.named_buffers())}


def _copy_state(model: PromptedModel) -> dict[str, Tensor]:
    """Return copies of the tensors that training changes."""
    state = _trained_state_and_buffers(model)
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@torch.no_grad()
def _restore_state(model: PromptedModel, saved: dict[str, Tensor]) -> None:
    """Set the tensors that training changes to saved copies."""
    for name, tensor in _trained_state_and_buffers(model).items():
        tensor.copy_(saved[name])


def _train_with_best_learning_rate(
    model: PromptedModel, task: Task, cfg: RunConfig, learning_rates: Sequence[float]
) -> dict:  # the training log of the best learning rate, with `lr`
    """Continue training, once with each learning rate; keep the model best on validation."""
    initial_state = _copy_state(model)
    best_log = None
    best_state = initial_state
    for lr in learning_rates:
        _restore_state(model, initial_state)
        set_seed(cfg.seed)  # the same batches and dropout masks for every learning rate
        try:
            log = {**fit(model, task, replace(cfg, lr=lr)), "lr": lr}
        except FloatingPointError:
            continue
        if best_log is None or log["validation"] > best_log["validation"]:
            best_log = log
            best_state = _copy_state(model)
    if best_log is None:
        raise DivergenceError(
            f"{cfg.method!r} diverged on {task.name!r} with every learning rate of "
            f"{list(learning_rates)}: a lower lr usually fixes it."
        )
    _restore_state(model, best_state)
    return best_log


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


def _shared_record_fields(source: Task, target: Task, setting: str) -> dict:
    """Return the record fields that state both tasks and the setting."""
    return dict(
        target=target.name,
        setting=setting,
        target_train_size=0 if setting == "zero-shot" else len(target.splits["train"]),
        split_sizes={task.name: task.split_sizes() for task in (source, target)},
    )


def _make_diverged_transfer_record(
    cfg: RunConfig,  # of the source
    tasks: tuple[Task, Task],  # source and target
    setting: str,
    error: Exception,
    start_time: float,
    extra_fields: dict,
) -> dict:
    """Return the record of a stage that diverged."""
    source, target = tasks
    record = make_diverged_record(cfg, source, error, start_time)
    return {
        **record,
        "digests": {**record["digests"], "target": data_digest(target)},
        **_shared_record_fields(source, target, setting),
        "metric": target.metric if target.is_regression else "accuracy+macro_f1",
        **extra_fields,
    }


def _make_transfer_record(
    cfg: RunConfig,  # of the source
    tasks: tuple[Task, Task],  # source and target
    setting: str,
    model: PromptedModel,
    training_log: dict,
    records_file: Path | None,
    start_time: float,
    extra_fields: dict,
) -> dict:
    """Return the record of a finished stage, scored on the target."""
    source, target = tasks
    splits = [*["validation"] * bool(records_file), "test"]
    outputs = {split: split_outputs(model, target, cfg, split) for split in splits}
    scores, _ = target.score_outputs(*outputs["test"])
    metric, score = compute_headline_score(target, scores)
    # zero-shot, the target has no influence on the choice of the checkpoint
    selection_task = source if setting == "zero-shot" else target
    data_digests = dict(data=data_digest(source), target=data_digest(target))
    weights = model.backbone.initial_fingerprint()
    shared_fields = _shared_record_fields(source, target, setting)
    record = {
        "schema": SCHEMA_VERSION,
        "status": "done",
        **config_to_record(cfg),
        **model.backbone.weights_info,
    }
    if records_file:
        identifiers = (data_digests["data"], setting, extra_fields["label_map"])
        name = logits_name(cfg, target, weights, *identifiers)
        record |= save_logits(records_file, name, outputs, target)
    return {
        **record,
        "digests": dict(weights=weights, **data_digests, **input_digests(cfg)),
        "target": target.name,
        "setting": setting,
        "metric": metric,
        "score": score,
        "scores": scores,
        "target_train_size": shared_fields["target_train_size"],
        "stage_learning_rate": training_log["lr"],
        "validation": training_log["validation"],
        "checkpoint_selection": f"checkpoint: best on validation of {selection_task.name}",
        "split_sizes": shared_fields["split_sizes"],
        "params": count_parameters(model),
        "steps_done": training_log["steps"],
        "losses": downsample_losses(training_log["losses"]),
        "versions": collect_versions(),
        **provenance_field(start_time),
        **extra_fields,
    }


def _build_untrained_model(cfg: RunConfig, task: Task) -> PromptedModel:
    """Build a model on a newly loaded backbone."""
    bb = load_config_backbone(cfg)
    bb.initial_fingerprint()  # before anything is trained
    return initialise_model(build_model(cfg, bb, task), task, cfg)


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
) -> list[dict]:  # of the settings 'zero-shot', 'few-shot' and 'alone', finished or diverged
    """Train on one task and score another; then train on a few of its examples and score again.

    Zero-shot is ID-SPAM §3.4, few-shot its App. C; 'alone' is the control that is trained on the
    few examples only.
    Raises: `UserError`, before anything is trained, for two tasks or a method that cannot work.
    """
    class_map = resolve_label_map(cfg, source, target, explicit_map)
    tasks = (source, target)
    start_time = time.time()
    source_learning_rates = [cfg.lr] if cfg.lr else learning_rates
    if not source_learning_rates:
        raise UserError(
            f"no learning rate for {cfg.method!r}: give RunConfig(lr=...), or learning_rates=[...] "
            "to choose from."
        )
    model = _build_untrained_model(cfg, source)
    _check_inputs(model, cfg, source, target, few_shot)
    extra_fields: dict[str, Any] = dict(
        label_map=class_map and list(class_map), majority_score=compute_majority_score(target)
    )
    try:
        log = _train_with_best_learning_rate(model, source, cfg, source_learning_rates)
        cfg = replace(cfg, lr=log["lr"])
        source_scores = _evaluate_test_split(model, source, cfg)
        extra_fields["source_score"] = compute_headline_score(source, source_scores)[1]
        apply_label_map(model, class_map)
        records = [
            _make_transfer_record(
                cfg, tasks, "zero-shot", model, log, records_file, start_time, extra_fields
            )
        ]
    except FloatingPointError as e:
        settings = ("zero-shot", "few-shot", "alone") if few_shot else ("zero-shot",)
        return [
            _make_diverged_transfer_record(cfg, tasks, s, e, start_time, extra_fields)
            for s in settings
        ]

    target_cfg = replace(cfg, task=target.name, init_from=None)
    for setting in ("few-shot", "alone") if few_shot else ():
        if setting == "alone":
            model = _build_untrained_model(target_cfg, target)
        start_time = time.time()
        try:
            log = _train_with_best_learning_rate(
                model, target, target_cfg, learning_rates or [log["lr"]]
            )
            record = _make_transfer_record(
                cfg, tasks, setting, model, log, records_file, start_time, extra_fields
            )
        except FloatingPointError as e:
            record = _make_diverged_transfer_record(
                cfg, tasks, setting, e, start_time, extra_fields
            )
        records.append(record)
    return records

"""Encoding of texts as examples for a model, with its template and cached states.

A text is encoded for one model: with its tokenizer, its maximum length and, if the prediction
is read at a mask, its template. Inputs that are the same in every epoch are computed at the
same time: word vectors, and the hidden states of frozen layers.

A backbone has a limited number of positions; no example is longer, whatever maximum length is
given. Sentences are truncated, a template never is.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.packed_examples import PackedExamples, pack_examples
from idp_tutorial.data.rows import check_row
from idp_tutorial.data.task import Task
from idp_tutorial.training.cache import attach_cached_states
from idp_tutorial.training.config import TrainingConfig

__all__ = [
    "encode_rows",
    "validate_inference_row",
    "select_template",
    "precompute_source_inputs",
    "encode_for_model",
    "encode_for_evaluation",
    "count_cut_texts",
    "encode_training_splits",
]

_logger = logging.getLogger(__name__)


def encode_rows(
    task: Task,
    rows: list[dict],  # texts and labels, as in `task.splits`
    bb: Backbone,
    max_len: int | None = None,  # maximum number of tokens; None: all positions of the backbone
    template: str | None = None,  # 'code', or a string with a mask; None: only the sentences
) -> Sequence[dict]:
    """Encode rows as examples that are no longer than the backbone allows.

    An example has `input_ids`, `token_type_ids`, `label` and, with a template, `mask_position`.
    """
    max_tokens = min(max_len or bb.max_tokens, bb.max_tokens)
    return pack_examples(
        lambda chunk: task.encode(chunk, bb.tokenizer, max_tokens, template, bb.causal), rows
    )


def validate_inference_row(
    task: Task,
    row: dict,
    where: str,  # name of the row in messages, such as 'row 3'
) -> dict:
    """Return the columns of a row that the task reads, after `check_row`; the label is optional.

    The group is optional too, unless the task chooses among the rows of a group.
    """
    has_label = row.get("label") is not None
    if all(row.get(c) is not None for c in ("sentence1", "sentence2")[: 1 + task.pair]):
        defaults = {} if task.grouping == "choose" else {"group": 0}
        row = {**defaults, **row}
        if not has_label:  # any valid label, removed below
            row["label"] = task.label_range[0] if task.is_regression else 0
    checked = check_row(task, row, where, " (a label only to train)")
    return {k: v for k, v in checked.items() if k != "label" or has_label}


def select_template(model: PromptedModel, cfg: TrainingConfig) -> str | None:
    """Return the config's template if the head reads a mask or generates text, or None."""
    return cfg.template if model.head.pooling in ("mask", "answer") else None


def precompute_source_inputs(model: PromptedModel, examples: Sequence[dict]) -> Sequence[dict]:
    """Return the examples with what the prompt sources compute from each text beforehand."""
    for source in model.prompt_sources():
        examples = source.prepare(examples)
    return examples


def encode_for_model(
    model: PromptedModel,
    task: Task,
    cfg: TrainingConfig,  # `max_len` and `template` are read
    rows: list[dict],
) -> Sequence[dict]:
    """Encode rows as examples with the template and the precomputed inputs of a model."""
    return precompute_source_inputs(
        model, encode_rows(task, rows, model.backbone, cfg.max_len, select_template(model, cfg))
    )


def encode_for_evaluation(
    model: PromptedModel,
    task: Task,
    cfg: TrainingConfig,
    rows: list[dict],
) -> tuple[Sequence[dict], dict]:
    """Return the examples of `encode_for_model` with cached states, and the cache's cost."""
    examples = encode_for_model(model, task, cfg, rows)
    if cfg.cache == "none":
        return examples, {}
    # evaluations run without autocast
    (cached,), cost = attach_cached_states(model, [examples], replace(cfg, precision="no"))
    return cached, cost


def _input_lengths(examples: Sequence[dict]) -> np.ndarray:
    """Return the number of tokens of each example, those of an answer not counted."""
    if isinstance(examples, PackedExamples):
        answer_starts = examples.columns.get("answer_start")
        return np.array(answer_starts or np.diff(examples.ends, prepend=0))
    return np.array([e.get("answer_start", len(e["input_ids"])) for e in examples])


def count_cut_texts(
    model: PromptedModel,
    task: Task,
    cfg: TrainingConfig,  # `max_len` and `template` are read
    rows: Sequence[dict],
    examples: Sequence[dict],  # the encoded rows
) -> int:
    """Count the examples that are longer than `max_len` and were cut.

    An example with the allowed number of tokens may just fit, so it is encoded again with one more.
    """
    if len(examples) != len(rows):  # a method that makes several examples of a row
        return 0
    bb = model.backbone
    max_tokens = min(cfg.max_len or bb.max_tokens, bb.max_tokens)
    lengths = _input_lengths(examples)
    largest = max_tokens - (task.max_answer_len if task.is_generation else 0)
    full = np.flatnonzero(lengths >= largest)
    template = select_template(model, cfg)
    longer = task.encode(
        [rows[int(i)] for i in full], bb.tokenizer, max_tokens + 1, template, bb.causal
    )
    return int((_input_lengths(longer) > lengths[full]).sum()) if len(full) else 0


@lru_cache
def _log_cut_texts_once(task_name: str, n_cut: int, n_rows: int, max_len: int) -> None:
    """Log how many training texts are cut; once, although a search trains many times."""
    _logger.warning(
        "%d of %d training texts of %s (%.0f %%) are longer than max_len=%d tokens and are cut",
        *(n_cut, n_rows, task_name, max(1, 100 * n_cut / n_rows), max_len),
    )


def encode_training_splits(
    acc: Any,  # an `Accelerator`
    model: PromptedModel,
    task: Task,  # with its splits
    cfg: TrainingConfig,
) -> tuple[Sequence[dict], Sequence[dict], dict, int]:
    """Return training and validation examples, the cost of the cache, and how many texts are cut.

    States are cached only for a model that has trainable parameters.
    """
    rows = task.splits["train"]
    train = encode_for_model(model, task, cfg, rows)
    n_cut = count_cut_texts(model, task, cfg, rows, train)
    if n_cut and acc.is_main_process:
        max_len = min(cfg.max_len, model.backbone.max_tokens)
        _log_cut_texts_once(task.name, n_cut, len(rows), max_len)
    if cfg.cache == "none" or not model.trained_parameters():
        return train, encode_for_model(model, task, cfg, task.splits["validation"]), {}, n_cut
    model.to(acc.device)
    with acc.local_main_process_first():
        with acc.autocast():
            (train,), cost = attach_cached_states(model, [train], cfg)
        validation, validation_cost = encode_for_evaluation(
            model, task, cfg, task.splits["validation"]
        )
    return train, validation, {k: cost[k] + validation_cost[k] for k in cost}, n_cut

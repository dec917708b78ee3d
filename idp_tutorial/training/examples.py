"""Encoding of texts as examples for a model, and their storage in flat arrays.

A text is encoded for one model: with its tokenizer, its maximum length and, if the prediction
is read at a mask, its template. Inputs that are the same in every epoch are computed at the
same time: word vectors, and the hidden states of frozen layers.

A backbone has a limited number of positions; no example is longer, whatever maximum length is
given. Sentences are truncated, a template never is.

`PackedExamples` stores tokenized examples in less memory than a list: the token ids of all examples
are concatenated in one array, and the token type ids in another. A value that an example has once,
such as its label, is stored in a list. Indexing returns a dictionary with the same values as
before, so code that reads examples does not change.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.task import Task
from idp_tutorial.training.cache import attach_cached_states
from idp_tutorial.training.config import TrainingConfig

# columns with one value per token
TOKEN_DTYPES = {"input_ids": np.int32, "token_type_ids": np.int16}


@dataclass(eq=False, repr=False)
class PackedExamples(Sequence):
    """Sequence of examples that are stored in flat arrays; `packed[i]` is a dictionary."""

    column_names: list[str]  # of an example, in their order
    token_arrays: dict[str, np.ndarray]  # column name → values of all tokens of all examples
    columns: dict[str, list]  # column name → one value per example
    ends: np.ndarray  # index after the last token of each example

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        start = self.ends[i - 1] if i else 0
        end = self.ends[i]
        example = {}
        for name in self.column_names:
            if name in self.token_arrays:
                example[name] = self.token_arrays[name][start:end].tolist()
            else:
                example[name] = self.columns[name][i]
        return example


def pack_examples(
    encode_fn: Callable,  # converts rows to examples with `input_ids` and `token_type_ids`
    rows: Sequence,  # rows of a split
    chunk_size: int = 2000,  # number of rows encoded at once; up to this number a list is returned
) -> Sequence:  # `PackedExamples`, or a list
    """Encode rows chunk by chunk into flat arrays, or into a list if their columns differ."""
    if len(rows) <= chunk_size:
        return encode_fn(rows)
    flat: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_DTYPES}
    columns: dict[str, list] = {}
    lengths: list[int] = []
    names: list[str] = []
    for i in range(0, len(rows), chunk_size):
        examples = encode_fn(rows[i : i + chunk_size])
        names = names or [*examples[0]]
        if any([*e] != names for e in examples):
            return encode_fn(rows)
        for name, dtype in TOKEN_DTYPES.items():
            flat[name].append(np.array([v for e in examples for v in e[name]], dtype))
        for name in names:
            if name not in TOKEN_DTYPES:
                columns.setdefault(name, []).extend(e[name] for e in examples)
        lengths += [len(e["input_ids"]) for e in examples]
    token_arrays = {name: np.concatenate(chunks) for name, chunks in flat.items()}
    return PackedExamples(names, token_arrays, columns, np.cumsum(lengths))


logger = logging.getLogger(__name__)


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
    max_tokens = bb.max_tokens if max_len is None else min(max_len, bb.max_tokens)
    return pack_examples(
        lambda chunk: task.encode(chunk, bb.tokenizer, max_tokens, template, bb.causal), rows
    )


def select_template(model: PlannedModel, cfg: TrainingConfig) -> str | None:
    """Return the config's template if the head reads a mask or generates text, or None."""
    return cfg.template if model.head.pooling in ("mask", "answer") else None


def precompute_source_inputs(model: PlannedModel, examples: Sequence[dict]) -> Sequence[dict]:
    """Return the examples with what the prompt sources compute from each text beforehand."""
    for source in model.prompt_sources():
        examples = source.prepare(examples)
    return examples


def encode_for_model(
    model: PlannedModel,
    task: Task,
    cfg: TrainingConfig,  # `max_len` and `template` are read
    rows: list[dict],
) -> Sequence[dict]:
    """Encode rows as examples with the template and the precomputed inputs of a model."""
    if model.encode_texts:
        return model.encode_texts(rows)
    return precompute_source_inputs(
        model, encode_rows(task, rows, model.backbone, cfg.max_len, select_template(model, cfg))
    )


def encode_for_evaluation(
    model: PlannedModel,
    task: Task,
    cfg: TrainingConfig,
    rows: list[dict],
) -> Sequence[dict]:
    """Return the examples of `encode_for_model` with cached states."""
    examples = encode_for_model(model, task, cfg, rows)
    if cfg.cache == "none":
        return examples
    # evaluations run without autocast
    return attach_cached_states(model, examples, replace(cfg, precision="no"))


def _input_lengths(examples: Sequence[dict]) -> np.ndarray:
    """Return the number of tokens of each example, those of an answer not counted."""
    return np.array([e.get("answer_start", len(e["input_ids"])) for e in examples])


def count_cut_texts(
    model: PlannedModel,
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
    max_tokens = min(cfg.max_len, bb.max_tokens)
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
    logger.warning(
        "%d of %d training texts of %s (%.0f %%) are longer than max_len=%d tokens and are cut",
        *(n_cut, n_rows, task_name, max(1, 100 * n_cut / n_rows), max_len),
    )


def encode_training_splits(
    acc: Any,  # an `Accelerator`
    model: PlannedModel,
    task: Task,  # with its splits
    cfg: TrainingConfig,
) -> tuple[Sequence[dict], Sequence[dict], int]:
    """Return training and validation examples, and how many texts are cut.

    States are cached only for a model that has trainable parameters.
    """
    rows = task.splits["train"]
    train = encode_for_model(model, task, cfg, rows)
    n_cut = count_cut_texts(model, task, cfg, rows, train)
    if n_cut and acc.is_main_process:
        max_len = min(cfg.max_len, model.backbone.max_tokens)
        _log_cut_texts_once(task.name, n_cut, len(rows), max_len)
    if cfg.cache == "none" or not model.trained_parameters():
        return train, encode_for_model(model, task, cfg, task.splits["validation"]), n_cut
    model.to(acc.device)
    with acc.local_main_process_first():
        with acc.autocast():
            train = attach_cached_states(model, train, cfg)
        validation = encode_for_evaluation(model, task, cfg, task.splits["validation"])
    return train, validation, n_cut

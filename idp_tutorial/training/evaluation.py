"""Predictions and scores of trained models: logits, generated answers and metrics.

A trained model is used in two ways: it is scored on a split, and it predicts for texts without
labels.

Models run without dropout and without gradients. Batches are sorted by length, so that there is
little padding; outputs are returned in the order of the examples. The task computes the score.
A regression is trained on labels scaled to 0…1, and its predictions are converted back to its
own units.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.generation import generate_ids
from idp_tutorial.core.heads import prediction_loss
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.encoding import check_batching, collate, make_dataloader
from idp_tutorial.data.rows import require_utf8
from idp_tutorial.data.task import Task, scale_labels
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.training.examples import encode_for_model
from idp_tutorial.utils.batch import Batch
from idp_tutorial.utils.checks import DivergenceError, UserError


def explain_non_finite(
    model: nn.Module,
    fallback_reason: str,  # a clause to begin with if all frozen weights are finite
) -> str:
    """Return why a model's outputs are not finite and what usually fixes that."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not parameter.isfinite().all():
            return (
                f"The backbone's weights {name!r} are not finite, which no learning rate fixes; "
                "download or save the backbone again"
            )
    return f"{fallback_reason}. A lower lr usually fixes it"


# Largest number of tokens in a batch of new texts on a CPU. With more, the hidden states
# leave its caches: MiniLM takes a tenth longer for a token if a batch has 16,384 of them.
CPU_BATCH_TOKENS = 4096


def batch_by_length(
    lengths: Sequence[int],  # number of tokens of every example
    batch_size: int,  # largest number of examples in a batch
    max_tokens: int | None = None,  # largest number of tokens in a batch, padding included
) -> list[list[int]]:  # indices of the examples of each batch, the shortest examples first
    """Split examples into batches of similar length; one that exceeds `max_tokens` is alone."""
    batches: list[list[int]] = [[]]
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        n_examples = len(batches[-1])
        n_tokens = (n_examples + 1) * lengths[i]  # no earlier example is longer
        is_full = n_examples == batch_size or (max_tokens is not None and n_tokens > max_tokens)
        if is_full and n_examples:
            batches.append([])
        batches[-1].append(i)
    return batches if lengths else []


@torch.inference_mode()
def predict_logits(
    model: PlannedModel,
    examples: Sequence[dict],  # from `task.encode`
    batch_size: int = 128,
    device: torch.device | str = "cpu",
    max_tokens: int | None = None,  # as for `batch_by_length`
) -> Tensor:
    """Return the outputs of the head for all examples, in their order `[N,C]`, without dropout.

    Raises: `DivergenceError` if an output is not finite.
    """
    check_batching(examples, batch_size)
    model.eval()
    lengths = [len(example["input_ids"]) for example in examples]
    batches = batch_by_length(lengths, batch_size, max_tokens)
    outputs = []
    for indices in batches:
        batch = collate([examples[i] for i in indices], model.backbone.pad_id)
        outputs.append(model(batch.to(device)).float().cpu())
    logits = torch.cat(outputs)
    if not logits.isfinite().all():
        cause = explain_non_finite(model, "The training has diverged")
        raise DivergenceError(f"the model's outputs are not finite. {cause}.")
    order = torch.tensor([i for indices in batches for i in indices])
    return logits[order.argsort()]


def generate_answers(
    model: PlannedModel,
    examples: Sequence[dict],  # from `task.encode`; tokens from `answer_start` on are ignored
    task: Task,
    batch_size: int = 128,
    **generation_kwargs: Any,  # arguments of `generate_ids`, such as `do_sample` or `temperature`
) -> list[str]:
    """Return the texts that a decoder generates for the examples, in their order."""
    tokenizer = model.backbone.tokenizer
    answers = {}
    inputs = [e["input_ids"][: e["answer_start"]] for e in examples]
    generation_kwargs = dict(max_new_tokens=task.max_answer_len) | generation_kwargs
    for indices in batch_by_length([len(ids) for ids in inputs], batch_size):
        generated = generate_ids(model, [inputs[i] for i in indices], **generation_kwargs)
        if len(generated) != len(indices):
            raise UserError(
                f"generate_ids returned {len(generated)} answers to {len(indices)} texts: one each "
                "is needed, without num_return_sequences."
            )
        for i, ids in zip(indices, generated):
            answers[i] = " ".join(tokenizer.decode(ids, skip_special_tokens=True).split())
    return [answers[i] for i in range(len(inputs))]


def model_outputs(
    model: PlannedModel,
    examples: Sequence[dict],
    task: Task,
    batch_size: int = 128,
    device: torch.device | str = "cpu",
) -> Tensor | list[str]:
    """Return the outputs that the task scores: logits `[N,C]`, or `N` generated texts."""
    if task.is_generation:
        return generate_answers(model, examples, task, batch_size)
    return predict_logits(model, examples, batch_size, device)


def evaluate(
    model: PlannedModel,
    examples: Sequence[dict],  # from `task.encode`
    task: Task,
    batch_size: int = 128,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, float], list]:
    """Return the scores in percent, the main metric first, and the predictions in order."""
    return task.score_outputs(model_outputs(model, examples, task, batch_size, device), examples)


def compute_output_loss(
    task: Task,
    outputs: Tensor | list[str],  # from `model_outputs`
    examples: Sequence[dict],  # from `task.encode`, in the same order
) -> float | None:  # None for generated texts, which have no loss
    """Return the mean loss of outputs that are already computed.

    It is the loss of `prediction_loss`, of a verbalizer over the label words; the labels of a
    regression are scaled to 0…1.
    """
    if not isinstance(outputs, Tensor):
        return None
    labels = torch.tensor([e["label"] for e in examples], device=outputs.device)
    if task.is_regression:
        labels = scale_labels(Batch(dict(label=labels.double())), task)["label"]
    elif task.multi_label:
        labels = labels.double()
    return prediction_loss(outputs.double(), labels).item()


def iterate_batches(bb: Backbone, examples: Sequence[dict], batch_size: int) -> Iterator[dict]:
    """Yield batches of the examples in the given order, on the backbone's device."""
    for batch in make_dataloader(examples, batch_size, bb.pad_id, group_by_length=False):
        yield batch.to(bb.device)


def require_text_columns(task: Task, row: dict, where: str = "this row") -> dict:
    """Return the row if it has the columns that the task reads; raise `UserError` if not."""
    example = '{"sentence1": ...}, or a line of text'
    arguments = "text="
    if task.pair:
        example = '{"sentence1": ..., "sentence2": ...}, or two texts separated by a tab'
        arguments = "text= and text2="
    for column in task.text_columns:
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str) or not (text.strip() or task.allow_empty_text):
            raise UserError(
                f"{where}: {row!r:.80} has no text {column!r}, which task {task.name!r} needs: "
                f"pass {example}; name the columns of a table with {arguments}."
            )
        require_utf8(text, f"{where}: {column}")
    if task.grouping == "choose" and not isinstance(row.get("group"), (str, int, float)):
        raise UserError(
            f"{where}: {row!r:.80} has no 'group', and task {task.name!r} chooses one of the rows "
            "of a question: give the rows of a question the same group, such as a number."
        )
    return row


def generate(
    model: PlannedModel,
    texts: Sequence[str | dict],  # texts, or rows with `sentence1` and, for pairs, `sentence2`
    task: Task,
    cfg: TrainingConfig,
    **generation_kwargs: Any,  # arguments of `generate_ids`: `max_new_tokens`, `temperature`, ...
) -> list[str]:
    """Return the texts that a model generates for new texts."""
    if not task.is_generation:
        raise UserError(f"task {task.name!r} is not answered with a text: use `predict`.")
    rows = [dict(sentence1=text) if isinstance(text, str) else text for text in texts]
    return [p["generated"] for p in predict(model, task, cfg, rows, **generation_kwargs)]


def format_predictions(
    task: Task,
    outputs: Tensor,  # outputs of the head `[N,C]`
    groups: list,  # question of each row, or None `[N]`
) -> list[dict]:
    """Convert outputs to `label` and `probabilities` by label, or to `value` (regression).

    Where a row may have several labels, `label` is a list of names.
    """
    predictions = task.to_predictions(outputs, groups)
    if task.is_regression:
        return [dict(value=v) for v in predictions]
    formatted: list[dict] = []
    for label, probabilities in zip(predictions, task.to_probabilities(outputs).tolist()):
        names: Any = task.labels[label] if not task.multi_label else task.label_names(label)
        by_label = dict(zip(task.labels, probabilities))
        formatted.append(dict(label=names, probabilities=by_label))
    return formatted


def predict(
    model: PlannedModel,
    task: Task,
    cfg: TrainingConfig,  # `max_len`, `head` and `template` determine how texts are encoded
    # `sentence1`, for pairs `sentence2`; `group` where the task chooses among rows
    rows: list[dict],
    batch_size: int = 128,  # largest number of texts in a batch; long texts make smaller batches
    **generation_kwargs: Any,  # arguments of `generate_ids`, for a task that generates text
) -> list[dict]:
    """Predict for new rows.

    Each prediction has `label` and `probabilities` by label; of a regression it has `value`, of a
    task that generates text `generated`. Where a row may have several labels, `label` is a list.
    """
    if not rows:
        return []
    for i, row in enumerate(rows):
        require_text_columns(task, row, f"row {i}")
    texts = [dict(zip(task.text_columns, map(row.get, task.text_columns))) for row in rows]
    examples = encode_for_model(model, task, cfg, texts)
    if task.is_generation:
        answers = generate_answers(model, examples, task, batch_size, **generation_kwargs)
        return [dict(generated=answer) for answer in answers]
    device = next(model.parameters()).device
    max_tokens = CPU_BATCH_TOKENS if device.type == "cpu" else None
    logits = predict_logits(model, examples, batch_size, device, max_tokens)
    return format_predictions(task, logits, [row.get("group") for row in rows])

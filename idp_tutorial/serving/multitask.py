"""One frozen backbone with a prompt and a head for each of several tasks, in joint batches.

Prompt tuning "facilitates mixed-task inference" (LPT, §1): the model in memory is the same for
all tasks, and only a few prompt vectors differ. Examples of ten tasks can share one queue and
one batch. With fine-tuned weights this is not possible, because each task has its own.
(Adapters and LoRA could be mixed with more work; this implementation refuses them.)

Each task has its own `Context`, so that its prompt sources see only its own examples, as when
it runs alone. Before each layer, the prompt of every task enters its own context. Then the layer
runs once for all: the hidden states are padded to one length and concatenated; after the layer
they are split again. Keys and values need one more step: examples without them must not attend to
padding in their place. A mask states for every example which of the keys in front belong to it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context
from idp_tutorial.core.loop import walk_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.prompt_key_values import PromptKeyValues
from idp_tutorial.core.steps import Plan
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.task import Task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.saving.hub import SavedPrompts, read_saved_prompts
from idp_tutorial.saving.prompt_files import build_saved_model
from idp_tutorial.training.evaluation import (
    batch_by_length,
    format_predictions,
    require_text_columns,
)
from idp_tutorial.training.examples import encode_rows, select_template
from idp_tutorial.utils.checks import Range, UserError, check_name


class TaskModel(NamedTuple):
    """A trained model of one task, with the task and the config that built it."""

    model: PlannedModel  # prompt and head; all tasks of a `MultiTaskModel` share the backbone
    task: Task  # labels, template and label words
    cfg: RunConfig  # the config that `build_model` was called with


# ---- one pass for the examples of several tasks


def _pad_to_length(x: Tensor, length: int, dim: int = 1) -> Tensor:
    """Append zeros to a tensor along one dimension, up to a length."""
    return F.pad(x, (*(0,) * 2 * (x.dim() - dim - 1), 0, length - x.shape[dim]))


def _join_keys_values(
    kvs: Sequence[PromptKeyValues | None],  # one per task; None: the task has none at this layer
    batch_sizes: list[int],  # examples of each task
    t: int,  # largest number of keys that a task has
) -> PromptKeyValues | None:
    """Concatenate the prompt keys and values of all tasks, with zeros for those that have none."""
    if not t:
        return None
    like = next(kv for kv in kvs if kv).k
    keys = []
    values = []
    for kv, n in zip(kvs, batch_sizes):
        empty = like.new_zeros(n, like.shape[1], t, like.shape[3])
        keys.append(_pad_to_length(kv.k, t, 2) if kv else empty)
        values.append(_pad_to_length(kv.v, t, 2) if kv else empty)
    return PromptKeyValues(torch.cat(keys), torch.cat(values))


def _run_layer_jointly(
    ctxs: Sequence[Context],  # one per task, after the layer; their hidden states are replaced
    kvs: Sequence[PromptKeyValues | None],  # one per task
) -> None:
    """Run one layer once, on the examples of all tasks."""
    bb = ctxs[0].backbone
    batch_sizes = [len(c.input_ids) for c in ctxs]
    T = max(c.h.shape[1] for c in ctxs)
    key_counts = [kv.t if kv else 0 for kv in kvs]
    t = max(key_counts)
    h = torch.cat([_pad_to_length(c.h, T) for c in ctxs])
    mask = torch.cat([_pad_to_length(c.attention_mask, T) for c in ctxs])
    key_mask = torch.cat(
        [_pad_to_length(mask.new_ones(n, count), t) for n, count in zip(batch_sizes, key_counts)]
    )
    is_padded = [c.batch.has_padding or c.h.shape[1] < T for c in ctxs]
    has_padding = any(is_padded) or min(key_counts) < t
    layer_kwargs = bb.layer_kwargs_by_type(mask, h, key_mask, has_padding)
    h = bb.run_layer(ctxs[0].layer - 1, h, layer_kwargs, _join_keys_values(kvs, batch_sizes, t))
    for ctx, task_h in zip(ctxs, h.split(batch_sizes)):
        ctx.h = task_h[:, : ctx.h.shape[1]]


def run_joint_batch(
    bb: Backbone,
    # one per task, with `input_ids`, `attention_mask`, `token_type_ids` `[B,T]`, which may differ
    # in size, and `mask_position` `[B]` if the task has a template
    batches: Sequence[dict],
    plans: Sequence[Plan],  # one per task: layer → step
) -> list[Context]:  # one per task, as `run_layers` returns it
    """Run several plans at once: each layer runs once, on the examples of all tasks."""
    kvs: list[PromptKeyValues | None] = []  # of the layer that all walks have reached, one per task
    walks = [
        walk_layers(bb, batch, plan, run=lambda ctx, kv: kvs.append(kv))
        for batch, plan in zip(batches, plans)
    ]
    for contexts in zip(*walks):  # the walks have applied their steps, and leave the layer to us
        if kvs:
            _run_layer_jointly(contexts, kvs)
        kvs.clear()
    for ctx in contexts:
        ctx.h = bb.norm(ctx.h)
    return list(contexts)


def _refuse_changed_weights(name: str, method: str) -> NoReturn:
    """Raise `UserError` for a task that trains weights of the backbone."""
    raise UserError(
        f"{name!r} ({method}) changes the backbone's weights, which all tasks share. Use prompt "
        "methods only, or a separate backbone for this task."
    )


def _validate_one_pass(name: str, task_model: TaskModel) -> None:
    """Check that a model needs only one pass per example."""
    if task_model.task.is_generation:
        raise UserError(
            f"the task {name!r} generates text token by token, but a joint batch needs tasks that "
            "predict classes or numbers in one pass. Leave it out, and call `generate` for it."
        )
    if type(task_model.model) is not PlannedModel:
        raise UserError(
            f"{name!r} is a {type(task_model.model).__name__}, which needs passes of its own and "
            "cannot join a joint batch: use a method with prompts."
        )


def _validate_shared_backbone(task_models: dict[str, TaskModel]) -> None:
    """Check that models can share one backbone in a joint batch."""
    if not task_models:
        raise UserError("give at least one task, as {name: TaskModel(model, task, cfg)}.")
    bb = next(iter(task_models.values())).model.backbone
    for name, task_model in task_models.items():
        _validate_one_pass(name, task_model)
        model = task_model.model
        trains_backbone = any(p.requires_grad for p in model.lm.parameters())
        if model.backbone.active_edit is not None or trains_backbone:
            _refuse_changed_weights(name, task_model.cfg.method)
        if model.backbone is not bb:
            raise UserError(
                f"{name!r} and the first task have two backbone objects ({model.backbone.name!r}, "
                f"{bb.name!r}): call load_backbone once, and build every model on it."
            )


# ---- saved models


def _read_by_name(folders: Sequence[Path | str] | dict[str, Path | str]) -> dict[str, SavedPrompts]:
    """Read saved models, by the name of their task; those of equal tasks by the name of folder."""
    if isinstance(folders, dict):
        return {name: read_saved_prompts(folder) for name, folder in folders.items()}
    models = [read_saved_prompts(folder) for folder in folders]
    task_names = [saved.description["task"]["name"] for saved in models]
    named = {
        name if task_names.count(name) == 1 else Path(str(saved.source)).name: saved
        for name, saved in zip(task_names, models)
    }
    if len(named) < len(folders):
        raise UserError(
            f"two of the folders {', '.join(map(str, folders))} have the same name. Give a "
            "dictionary, {name: folder}."
        )
    return named


class MultiTaskModel:
    """A frozen backbone with a prompt and a head for each of several tasks (LPT, §1).

    The rows of a batch may belong to different tasks.
    """

    def __init__(
        self,
        task_models: dict[str, TaskModel],  # by name; all models have the same backbone object
    ):
        _validate_shared_backbone(task_models)
        self.task_models = dict(task_models)
        self.task_names = list(task_models)
        self.backbone: Backbone = task_models[self.task_names[0]].model.backbone

    def encode(
        self,
        rows: list[dict],  # each with `task`, `sentence1`, and for a pair `sentence2`
    ) -> list[dict]:  # as from `Task.encode`, with `task`
        """Return an example for each row; the rows of a task are encoded together."""
        indices_by_task: dict[str, list[int]] = {}
        for i, row in enumerate(rows):
            name = check_name(str(row.get("task")), self.task_names, f"task in row {i}:")
            require_text_columns(self.task_models[name].task, row, f"row {i}")
            indices_by_task.setdefault(name, []).append(i)
        examples: list[dict] = [{} for _ in rows]
        for name, indices in indices_by_task.items():
            m = self.task_models[name]
            columns = m.task.text_columns
            texts = [dict(zip(columns, map(rows[i].get, columns))) for i in indices]
            template = select_template(m.model, m.cfg)
            encoded = encode_rows(m.task, texts, self.backbone, m.cfg.max_len, template)
            for i, example in zip(indices, encoded):
                examples[i] = {**example, "task": name}
        return examples

    @torch.no_grad()
    def compute_outputs(
        self,
        examples: list[dict],  # from `encode`
    ) -> list[Tensor]:  # `[C]` for each example, C outputs of its task's head
        """Run all examples in one pass, and return the outputs of the heads."""
        indices_by_task: dict[str, list[int]] = {}
        for i, example in enumerate(examples):
            indices_by_task.setdefault(example["task"], []).append(i)
        models = [self.task_models[name].model.eval() for name in indices_by_task]
        batches = []
        for indices in indices_by_task.values():
            batch = collate([examples[i] for i in indices], self.backbone.pad_id)
            batches.append(batch.to(self.backbone.device))
        contexts = run_joint_batch(self.backbone, batches, [model.plan for model in models])
        outputs: list[Any] = [None] * len(examples)
        for indices, model, ctx in zip(indices_by_task.values(), models, contexts):
            for i, output in zip(indices, model.head(ctx)):
                outputs[i] = output
        return outputs

    def predict(
        self,
        rows: list[dict],  # each with `task`, `sentence1`, and for a pair `sentence2`
        batch_size: int = 16,  # rows that run together; use more on a GPU
        probabilities: bool = False,  # True: return dictionaries with all probabilities
    ) -> list[Any]:  # label names, lists of them, or numbers; with `probabilities` dictionaries
        """Return the prediction for every row, as a label name or a number."""
        Range(1).check(batch_size, "batch_size")
        examples = self.encode(rows)
        outputs: list[Any] = [None] * len(rows)
        for indices in batch_by_length([len(e["input_ids"]) for e in examples], batch_size):
            batch_outputs = self.compute_outputs([examples[i] for i in indices])
            for i, output in zip(indices, batch_outputs):
                outputs[i] = output.float().cpu()
        predictions: list[Any] = [None] * len(rows)
        for name in self.task_names:
            indices = [i for i, example in enumerate(examples) if example["task"] == name]
            if not indices:
                continue
            formatted = format_predictions(
                self.task_models[name].task,
                torch.stack([outputs[i] for i in indices]),
                [rows[i].get("group") for i in indices],
            )
            for i, prediction in zip(indices, formatted):
                predictions[i] = prediction
        if probabilities:
            return predictions
        return [p.get("label", p.get("value")) for p in predictions]

    @classmethod
    def from_pretrained(
        cls,
        # saved models or repositories on the Hub, which are named by their tasks (and those of one
        # task by the last part of their path); or a dictionary, name → folder
        folders: Sequence[Path | str] | dict[str, Path | str],
        bb: Backbone | Path | str | None = None,  # None: the backbone that the first model names
        glove: Path | str | None = None,  # GloVe vectors, if a model was trained with a file
    ) -> "MultiTaskModel":
        """Load several saved models onto one backbone."""
        task_models = {}
        for name, saved in _read_by_name(folders).items():
            method = check_name(saved.description["cfg"].get("method", ""), METHODS, "method")
            if METHODS[method].insertion_point.endswith("weights"):
                _refuse_changed_weights(name, method)
            has_glove = "glove" in METHODS[method].options
            model, task, cfg = build_saved_model(saved, bb, glove if has_glove else None)
            task_models[name] = TaskModel(model, task, cfg)
            bb = model.backbone
        return cls(task_models)

"""Examples of several tasks in one pass through one frozen backbone; each layer runs once.

Each task has its own `Context`, so that its prompt sources see only its own examples, as when
it runs alone. Before each layer, the prompt of every task enters its own context. Then the layer
runs once for all: the hidden states are padded to one length and concatenated; after the layer
they are split again. Keys and values need one more step: examples without them must not attend to
padding in their place. A mask states for every example which of the keys in front belong to it.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context
from idp_tutorial.core.loop import apply_step, begin_pass
from idp_tutorial.core.prompt_key_values import PromptKeyValues
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.core.steps import Plan
from idp_tutorial.utils.checks import UserError

__all__ = ["run_joint_batch", "refuse_changed_weights", "validate_shared_backbone"]


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
    layer: int,
    ctxs: Sequence[Context],  # one per task; their hidden states are replaced
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
    layer_kwargs = bb.layer_kwargs_by_type(mask, h, key_mask)
    h = bb.run_layer(layer, h, layer_kwargs, _join_keys_values(kvs, batch_sizes, t))
    for ctx, task_h in zip(ctxs, h.split(batch_sizes)):
        ctx.h = task_h[:, : ctx.h.shape[1]]


def run_joint_batch(
    bb: Backbone,
    # one per task, with `input_ids`, `attention_mask`, `token_type_ids` `[B,T]`, which may differ
    # in size, and `mask_position` `[B]` if the task has a template
    batches: list[dict],
    plans: Sequence[Plan],  # one per task: layer → step
) -> list[Context]:  # one per task, as `run_layers` returns it
    """Run several plans at once: each layer runs once, on the examples of all tasks."""
    contexts = [begin_pass(bb, batch, plan) for batch, plan in zip(batches, plans)]
    for layer in range(bb.n_layers):
        kvs = []
        for ctx, plan in zip(contexts, plans):
            ctx.layer = layer
            kvs.append(apply_step(ctx, plan))
        _run_layer_jointly(layer, contexts, kvs)
    for ctx in contexts:
        ctx.layer = bb.n_layers
        ctx.h = bb.norm(ctx.h)
    return contexts


def refuse_changed_weights(
    name: str,  # name of a task
    method: str,  # its method
) -> NoReturn:
    """Raise `UserError` for a task that trains weights of the backbone."""
    raise UserError(
        f"{name!r} ({method}) changes the backbone's weights, which all tasks share. Use prompt "
        "methods only, or a separate backbone for this task."
    )


def _validate_one_pass(name: str, task_model: Any) -> None:
    """Check that a model needs only one pass per example."""
    if task_model.task.is_generation:
        raise UserError(
            f"the task {name!r} generates text token by token, but a joint batch needs tasks that "
            "predict classes or numbers in one pass. Leave it out, and call `generate` for it."
        )
    if type(task_model.model) is not PromptedModel:
        raise UserError(
            f"{name!r} is a {type(task_model.model).__name__}, which makes several pairs of every "
            "example, so it cannot join a joint batch. Use a PromptedModel."
        )


def validate_shared_backbone(
    task_models: dict[str, Any],  # by name, each with a `model`, a `task` and a `cfg`
) -> None:
    """Check that models can share one backbone in a joint batch.

    Raises: `UserError` if not.
    """
    if not task_models:
        raise UserError("give at least one task, as {name: TaskModel(model, task, cfg)}.")
    first_name = next(iter(task_models))
    bb = task_models[first_name].model.backbone
    for name, task_model in task_models.items():
        if not name or not isinstance(name, str):
            raise UserError(f"a task name must be a string that is not empty, got {name!r}.")
        _validate_one_pass(name, task_model)
        model = task_model.model
        trains_backbone = any(p.requires_grad for p in model.lm.parameters())
        if model.backbone.active_edit is not None or trains_backbone:
            refuse_changed_weights(name, task_model.cfg.method)
        if model.backbone is not bb:
            raise UserError(
                f"{name!r} has another backbone object ({model.backbone.name!r}) than "
                f"{first_name!r} ({bb.name!r}). Call load_backbone once, and build every model on "
                "that object."
            )

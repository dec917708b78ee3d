"""Checks of a plan: what would give a wrong result, or no result, is refused."""

from torch import nn

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import INPUT, Context
from idp_tutorial.core.steps import Insert, KeyValue, Plan, PromptChange, Step
from idp_tutorial.utils.checks import UserError

__all__ = ["check_plan", "check_stop", "check_max_tokens"]


def check_plan(
    plan: Plan,
    backbone: Backbone,
    start: int = INPUT,  # layer at which the pass starts: a higher one with cached hidden states
) -> None:
    """Raise `UserError` for a plan that is impossible on this backbone."""
    for layer in plan:
        if layer not in range(INPUT, backbone.n_layers):
            raise UserError(
                f"a plan's layer must be INPUT or between 0 and {backbone.n_layers - 1} for "
                f"backbone {backbone.name!r}, got {layer!r}. It is the number of layers already "
                "applied: 0 is the embedding output."
            )
    has_prompt = False
    for layer in sorted(plan):
        step = plan[layer]
        where = "INPUT" if layer == INPUT else f"layer {layer}"
        if not isinstance(step, Step):
            raise UserError(
                f"the plan has a {type(step).__name__} at {where} instead of a step. Write for "
                "example {0: Insert(source)}."
            )
        if isinstance(step.update, nn.Module):
            raise UserError(
                f"the update of {step.name!r} at {where} is a module, which would be neither "
                "trained nor saved: make it a method of the source."
            )
        if layer < start:
            raise UserError(
                f"the plan has a prompt at {where}, but the batch has hidden states that have "
                f"passed {start} layers, so the prompt would be left out. "
                "Give states of a lower layer, computed without a prompt, or none."
            )
        if isinstance(step, PromptChange) and not has_prompt:
            raise UserError(
                f"{step.name!r} at {where} changes a prompt, but no prompt is inserted before it. "
                "Begin the plan with an `Insert`."
            )
        if isinstance(step, KeyValue) and not backbone.supports_kv_prompt:
            raise UserError(
                f"{step.name!r} at {where}: the attention of a {backbone.family} backbone takes no "
                "prompt keys and values. Use `Insert` and `Replace`."
            )
        if isinstance(step, KeyValue) and layer == INPUT:
            raise UserError(
                f"{step.name!r} at {where}: keys and values enter at a layer. Give a layer, or use "
                "`Insert`."
            )
        has_prompt = has_prompt or isinstance(step, Insert)


def check_stop(
    ctx: Context,  # before the first layer of the pass
    stop: int,  # layer before which it ends
) -> None:
    """Raise `UserError` for a pass that ends before it starts, or above the last layer."""
    bb = ctx.backbone
    if not ctx.layer <= stop <= bb.n_layers:
        raise UserError(
            f"stop must be between {ctx.layer}, the layer at which the pass starts, and "
            f"{bb.n_layers}, the number of layers of backbone {bb.name!r}, got {stop}."
        )


def check_max_tokens(
    ctx: Context,  # at `INPUT`, with the prompt
) -> None:
    """Raise `UserError` if a text and its prompt are longer than the table of positions."""
    bb = ctx.backbone
    n_tokens = ctx.input_ids.shape[1]
    t = ctx.h.shape[1] - n_tokens
    if n_tokens + t > bb.max_tokens:
        prompt = f", and the prompt {t} vectors" if t else ""
        hints = ["shorten the prompt", "insert it at layer 0"] if t else []
        if t < bb.max_tokens:
            hints.insert(0, f"encode with max_len={bb.max_tokens - t} or less")
        raise UserError(
            f"the longest example has {n_tokens} tokens{prompt}, but backbone {bb.name!r} has only "
            f"{bb.max_tokens} positions: {', or '.join(hints)}."
        )

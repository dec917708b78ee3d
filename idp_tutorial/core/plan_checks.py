"""Checks of a plan: what would give a wrong result, or no result, is refused."""

from torch import nn

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import INPUT, Context
from idp_tutorial.core.steps import Insert, KeyValue, Plan, PromptChange, Step
from idp_tutorial.utils.checks import UserError


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
                f"backbone {backbone.name!r}, got {layer!r}: 0 is the embedding output."
            )
    has_prompt = False
    for layer in sorted(plan):
        step = plan[layer]
        where = "INPUT" if layer == INPUT else f"layer {layer}"
        if not isinstance(step, Step):
            raise UserError(
                f"the plan has a {type(step).__name__} at {where} instead of a step, such as "
                "Insert(source)."
            )
        problem = _find_problem(step, layer, backbone, start, has_prompt)
        if problem:
            raise UserError(f"{step.name!r} at {where}: {problem}")
        has_prompt = has_prompt or isinstance(step, Insert)


def _find_problem(
    step: Step, layer: int, backbone: Backbone, start: int, has_prompt: bool
) -> str | None:
    """Return why a step is impossible at a layer, or None."""
    if isinstance(step.update, nn.Module):
        return "its update is a module, which is not trained: make it a method of the source."
    if layer < start:
        return (
            f"the batch has hidden states that have passed {start} layers, so the prompt would be "
            "left out: give states of a lower layer, or none."
        )
    if isinstance(step, PromptChange) and not has_prompt:
        return "no prompt is inserted before it. Begin the plan with an `Insert`."
    if isinstance(step, KeyValue) and not backbone.supports_kv_prompt:
        return (
            f"the attention of a {backbone.family} backbone takes no prompt keys and values. Use "
            "`Insert` and `Replace`."
        )
    if isinstance(step, KeyValue) and layer == INPUT:
        return "keys and values enter at a layer. Give a layer, or use `Insert`."
    return None


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

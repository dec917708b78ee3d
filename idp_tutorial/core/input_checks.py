"""Checks of a batch and a plan: what would give a wrong result, or no result, is refused.

The layer loop, the context and the steps call these functions, which contain nothing but conditions
and messages. A compiled or exported graph cannot depend on the values of its input, so checks of
values are left out there.
"""

from typing import Any

import torch
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.utils.checks import UserError

__all__ = [
    "check_layer",
    "check_step",
    "check_stop",
    "check_no_prompt_below",
    "check_prompt_shape",
    "check_prompt_length",
    "check_prompt_exists",
    "check_key_values_possible",
    "check_key_values_used",
    "check_right_padding",
    "check_cached_states",
    "check_max_tokens",
    "check_insertion",
    "check_position_name",
    "embed_words",
]


# ---- the plan


def _describe_layer(layer: int) -> str:
    """Return the name of a plan's layer; a negative one is `INPUT`."""
    return "INPUT" if layer < 0 else f"layer {layer}"


def _describe_step(name: str, layer: int) -> str:
    return f"{name!r} at {_describe_layer(layer)}"


def check_layer(
    layer: Any,  # key of a plan
    backbone: Backbone,
) -> None:
    """Raise `UserError` for a key of a plan that is not a layer of the backbone or `INPUT`."""
    if layer not in range(-1, backbone.n_layers):
        raise UserError(
            f"a plan's layer must be INPUT or between 0 and {backbone.n_layers - 1} for "
            f"backbone {backbone.name!r}, got {layer!r}. It is the number of layers already "
            "applied: 0 is the embedding output."
        )


def check_step(
    step: object,  # value of a plan
    is_step: bool,  # is it a `Step`?
    layer: int,  # its key
) -> None:
    """Raise `UserError` for a value of a plan that is not a step."""
    if not is_step:
        raise UserError(
            f"the plan has a {type(step).__name__} at {_describe_layer(layer)} instead of a step. "
            "Write for example {0: Insert(source)}."
        )


def check_stop(
    backbone: Backbone,
    start: int,  # layer at which the pass starts
    stop: int,  # layer before which it ends
) -> None:
    """Raise `UserError` for a pass that ends before it starts, or above the last layer."""
    if not start <= stop <= backbone.n_layers:
        raise UserError(
            f"stop must be between {start}, the layer at which the pass starts, and "
            f"{backbone.n_layers}, the number of layers of backbone {backbone.name!r}, got {stop}."
        )


def check_no_prompt_below(
    start: int,  # number of layers that cached states have passed
    lowest: int,  # lowest layer of the plan
) -> None:
    """Raise `UserError` for a prompt that cached states have already passed."""
    if lowest < start:
        raise UserError(
            f"the plan has a prompt at layer {'INPUT' if lowest < 0 else lowest}, but the "
            f"batch has hidden states that have passed {start} layers, so the prompt would be left "
            "out. Give states of a lower layer, computed without a prompt, or none."
        )


# ---- the prompt


def check_prompt_shape(
    p: Tensor,  # prompt that a source has returned
    B: int,  # number of examples
    width: int,  # width that a vector needs
    name: str,  # name of the step
    layer: int,  # layer of the step, or `INPUT`
) -> None:
    """Raise `UserError` for a prompt that is not `[B,t,width]`."""
    if p.dim() != 3 or (p.shape[0], p.shape[2]) != (B, width):
        raise UserError(
            f"{_describe_step(name, layer)}: the source must return a prompt of shape ({B}, t, "
            f"{width}) (batch, length, width), got {tuple(p.shape)}. A static prompt needs "
            "`.expand(len(ctx.h), -1, -1)`."
        )


def check_prompt_length(
    p: Tensor,  # prompt that a source has returned `[B,t,d]`
    t: int,  # length of the prompt that was inserted
    name: str,  # name of the step
    layer: int,  # layer of the step, or `INPUT`
) -> None:
    """Raise `UserError` for a prompt of another length than the inserted one."""
    if p.shape[1] != t:
        raise UserError(
            f"{_describe_step(name, layer)}: the inserted prompt has {t} vectors but the source "
            f"gives {p.shape[1]}. Use one prompt length for the whole plan."
        )


def check_prompt_exists(
    has_prompt: bool,  # is a prompt inserted before the step?
    name: str,  # name of the step
    layer: int,  # layer of the step, or `INPUT`
) -> None:
    """Raise `UserError` for a change of a prompt that is not there."""
    if not has_prompt:
        raise UserError(
            f"{_describe_step(name, layer)} changes a prompt, but no prompt is inserted before it. "
            "Begin the plan with an `Insert`."
        )


def check_key_values_possible(
    backbone: Backbone,
    name: str,  # name of the step
    layer: int,  # layer of the step, or `INPUT`
) -> None:
    """Raise `UserError` among the word embeddings, or if the layers take no keys and values."""
    if not backbone.supports_kv_prompt:
        raise UserError(
            f"{_describe_step(name, layer)}: the attention of a {backbone.family} backbone "
            "takes no prompt keys and values. Use `Insert` and `Replace`."
        )
    if layer < 0:
        raise UserError(
            f"{_describe_step(name, layer)}: keys and values enter at a layer. Give a layer, or "
            "use `Insert`."
        )


def check_key_values_used(
    backbone: Backbone,
    layer: int,  # layer that got keys and values
    was_used: bool,
) -> None:
    """Raise `UserError` for a family whose layer ignores the keys and values of a prompt."""
    if not was_used:
        name = type(backbone).__name__
        raise UserError(
            f"layer {layer} of a {backbone.family} backbone did not use the prompt's keys "
            f"and values. Pass `kv` on in `{name}.run_layer`, or set "
            f"`supports_kv_prompt = False` in {name}."
        )


# ---- the batch


def check_right_padding(
    attention_mask: Tensor,  # 1 = real token, 0 = padding `[B,T]`
) -> None:
    """Check that each example begins with a token, and that its padding is on the right.

    Raises: UserError for padding on the left or between tokens.
    """
    if torch.compiler.is_compiling():
        return
    is_first_real = attention_mask[:, 0].bool().all()
    if not bool(is_first_real & (attention_mask[:, 1:] <= attention_mask[:, :-1]).all()):
        raise UserError(
            "an example begins with padding, or has padding between its tokens. The layer loop "
            "needs padding on the right (padding_side='right' of a tokenizer) and at least one "
            "token in each example; `collate` does both."
        )


def check_cached_states(
    backbone: Backbone,
    attention_mask: Tensor,  # 1 = real token, 0 = padding `[B,T]`
    layer: int,  # number of layers that the states have passed
    h: Tensor,  # cached hidden states
) -> None:
    """Raise `UserError` for states of a wrong shape, or of a layer that does not exist."""
    if not 0 <= layer <= backbone.n_layers:
        raise UserError(
            f"start_layer must be between 0 and {backbone.n_layers} for backbone "
            f"{backbone.name!r}, which has {backbone.n_layers} layers, got {layer}."
        )
    B, T = attention_mask.shape
    if h.shape != (B, T, backbone.d):
        raise UserError(
            f"hidden_states must have shape {(B, T, backbone.d)} for a batch of {B} examples with "
            f"{T} tokens, got {tuple(h.shape)}. Give hidden states without prompts."
        )


def check_max_tokens(
    backbone: Backbone,
    n_tokens: int,  # length of the longest text
    t: int,  # length of the prompt among the words
) -> None:
    """Raise `UserError` if a text and its prompt are longer than the table of positions."""
    max_tokens = backbone.max_tokens
    if n_tokens + t <= max_tokens:
        return
    prompt = f" and the prompt {t} vectors" if t else ""
    fixes = [f"encode with max_len={max_tokens - t} or less"] if t < max_tokens else []
    if t:
        fixes.append("shorten the prompt, or insert it at layer 0, after the position embeddings")
    raise UserError(
        f"the longest example has {n_tokens} tokens{prompt}, but backbone {backbone.name!r} "
        f"has only {max_tokens} positions. To fix this, {'; or '.join(fixes)}."
    )


def check_insertion(
    first: Tensor,  # position of a prompt in each example `[B]`
    attention_mask: Tensor,  # 1 = word or prompt, 0 = padding `[B,T']`
) -> None:
    """Raise `UserError` for a position outside an example or inside its padding."""
    if torch.compiler.is_compiling():
        return
    lengths = attention_mask.sum(1)
    if bool(((first < 0) | (first > lengths)).any()):
        raise UserError(
            f"a prompt cannot be inserted at positions {first.tolist()}, because the examples of "
            f"this batch have {lengths.tolist()} tokens. Use positions from 0 to the length of "
            "each example, not inside the padding."
        )


def check_position_name(
    name: str,  # name of a tracked position
    tracked: dict[str, Tensor],  # positions of the batch
) -> None:
    """Raise `UserError` for a position that the batch does not have."""
    if name not in tracked:
        raise UserError(
            f"this batch has no {name!r} position, only {', '.join(tracked)}. "
            "For 'mask', encode the examples with `task.encode(..., template='code')`, since "
            "it needs a template."
        )


def embed_words(
    backbone: Backbone,
    input_ids: Tensor,  # tokens of the text `[B,T]`
) -> Tensor:  # `[B,T,d_embedding]`
    """Return the word embeddings of the tokens; raise `UserError` for unknown tokens.

    On a GPU, CUDA reports unknown tokens itself.
    """
    if torch.compiler.is_compiling():
        return backbone.word_embeddings(input_ids)
    try:
        return backbone.word_embeddings(input_ids)
    except IndexError:
        raise UserError(
            f"input_ids must be between 0 and {backbone.word_embeddings.weight.shape[0] - 1} for "
            f"backbone {backbone.name!r}, got ids from {int(input_ids.min())} to "
            f"{int(input_ids.max())}. Encode the texts with the tokenizer of the backbone, without "
            "added tokens."
        ) from None

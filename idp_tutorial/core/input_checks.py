"""Checks of a batch: what would give a wrong result, or no result, is refused.

The context calls these functions. A compiled or exported graph cannot depend on the values of its
input, so checks of values are left out there.
"""

import torch
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.utils.checks import UserError

__all__ = [
    "check_right_padding",
    "check_insertion",
    "check_key_values_used",
    "check_position_name",
]


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

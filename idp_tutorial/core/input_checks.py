"""Checks of a pass, which the context calls: what would give a wrong result, or no result.

What can be known of a batch before is checked by `utils.batch`.
"""

from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.utils.batch import require
from idp_tutorial.utils.checks import UserError


def check_insertion(
    first: Tensor,  # position of a prompt in each example `[B]`
    attention_mask: Tensor,  # 1 = word or prompt, 0 = padding `[B,T']`
) -> None:
    """Raise `UserError` for a position outside an example or inside its padding."""
    lengths = attention_mask.sum(1)
    require(
        (first >= 0) & (first <= lengths),
        "a prompt cannot be inserted at positions {}, because the examples of this batch have {} "
        "tokens. Use positions from 0 to the length of each example, not inside the padding.",
        first,
        lengths,
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
            f"layer {layer} of a {backbone.family} backbone ignored the prompt's keys and values: "
            f"pass `kv` on in `{name}.run_layer`, or set `supports_kv_prompt = False` there."
        )


def check_position_name(
    name: str,  # name of a tracked position
    tracked: dict[str, Tensor],  # positions of the batch
) -> None:
    """Raise `UserError` for a position that the batch does not have."""
    if name not in tracked:
        raise UserError(
            f"this batch has no {name!r} position, only {', '.join(tracked)}: for 'mask', encode "
            "the examples with a template, as `task.encode(..., template='code')` does."
        )

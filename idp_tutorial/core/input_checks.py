"""Checks of a batch: what would give a wrong result, or no result, is refused.

`first_fields` takes from a batch what a pass begins with: word embeddings or cached hidden states.

The context calls these functions. A compiled or exported graph cannot depend on the values of its
input, so checks of values are left out there.
"""

from typing import Any

import torch
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.utils.checks import UserError

__all__ = [
    "check_right_padding",
    "first_fields",
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


def first_fields(
    backbone: Backbone,
    batch: dict[str, Any],  # fields as for `Context.from_batch`
) -> dict[str, Any]:
    """Return the fields of the context of a batch: at `INPUT`, or at the layer of cached states.

    A prompt depends on the input, not on the target text after it, which begins at `answer_start`.
    """
    attention_mask = batch["attention_mask"]
    check_right_padding(attention_mask)
    word_mask = attention_mask
    if "answer_start" in batch:
        index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        word_mask = attention_mask * (index < batch["answer_start"][:, None])
    tracked = dict(cls=torch.zeros_like(word_mask[:, 0]), last=word_mask.sum(1) - 1)
    if "mask_position" in batch:
        tracked["mask"] = batch["mask_position"]
    is_cached = "hidden_states" in batch
    return dict(
        input_ids=batch["input_ids"],
        attention_mask=attention_mask,
        token_type_ids=batch["token_type_ids"],
        word_mask=word_mask,
        tracked_positions=tracked,
        h=_cached_states(backbone, batch) if is_cached else _embed_words(backbone, batch),
        batch={**batch, "attention_mask": word_mask},
        layer=int(batch["start_layer"][0]) if is_cached else -1,
    )


def _cached_states(backbone: Backbone, batch: dict[str, Any]) -> Tensor:
    """Return the cached hidden states; raise `UserError` for a wrong shape or layer."""
    h = batch["hidden_states"].to(backbone.word_embeddings.weight.dtype)
    layer = int(batch["start_layer"][0])
    shape = (*batch["input_ids"].shape, backbone.d)
    if not 0 <= layer <= backbone.n_layers or h.shape != shape:
        raise UserError(
            f"hidden_states must have shape {shape} without prompts, and start_layer must be "
            f"between 0 and {backbone.n_layers} for backbone {backbone.name!r}; got "
            f"{tuple(h.shape)} and {layer}."
        )
    return h


def _embed_words(backbone: Backbone, batch: dict[str, Any]) -> Tensor:
    """Return the word embeddings.

    Raises: UserError for unknown tokens; on a GPU, CUDA reports these itself.
    """
    ids = batch["input_ids"]
    word_embeddings = backbone.word_embeddings
    if torch.compiler.is_compiling():
        return word_embeddings(ids)
    try:
        return word_embeddings(ids)
    except IndexError:
        raise UserError(
            f"input_ids must be between 0 and {word_embeddings.num_embeddings - 1} for backbone "
            f"{backbone.name!r}, got ids from {int(ids.min())} to {int(ids.max())}. Encode the "
            "texts with the tokenizer of the backbone, without added tokens."
        ) from None


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

"""The insertion plan of a method: which prompt vectors enter, at which layer, and how.

A method consists of two parts: a *source*, which computes `t` prompt vectors, and a *plan*,
which says where they enter. This notebook defines the types that both use. It runs no layers:
the layer loop does.

`Step` is one entry of a plan: an operation, the source of its vectors, and a position. A plan
maps a layer to a step. The layer is the number of layers already applied, so 0 is the output of
the embedding module. `'words'` is earlier still: among the word embeddings, before positions
and LayerNorm, where IDPG inserts its prompt. (LPT counts from one: its "13th layer" is our 12.
ID-SPAM's *m* is our layer.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.utils.checks import UserError, check_choice

__all__ = ["STEP_OPERATIONS", "Step", "to_float32", "Context", "check_plan"]


class Step(NamedTuple):
    """Entry of an insertion plan: an operation and the source of its prompt vectors."""

    op: str  # 'insert', 'add', 'replace' or 'kv'
    source: Callable[
        ..., Tensor
    ]  # context → prompt `[B,t,d]`; for 'kv' keys, then values `[B,t,2d]`
    # 'insert' only: position of the first prompt vector, or a function context → positions `[B]`
    position: int | Callable[..., Tensor] = 0
    # 'insert' only: vectors at each end of the source's output that later steps leave unchanged
    n_separator_vectors: int = 0
    # function context → `[B,T',d]` applied to the hidden states before the vectors enter (DePT)
    transform_hidden: Callable[..., Tensor] | None = None


def to_float32(x: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged if it is float64.

    Sources and heads compute in float32, whatever the dtype of the frozen weights.
    """
    return x if x.dtype == torch.float64 else x.float()


@dataclass
class Context:
    """State of the layer loop: batch, current hidden states and the meaning of each position.

    Prompt sources and heads get it as their only input. `T` is the length of the input text and
    `T'` the current length, with inserted prompts.
    """

    backbone: Backbone
    input_ids: Tensor  # tokens of the text `[B,T]`
    attention_mask: Tensor  # 1 = word or prompt, 0 = padding `[B,T']`
    token_type_ids: Tensor  # `[B,T']`
    word_mask: Tensor  # 1 = word, 0 = prompt or padding `[B,T']`
    # current positions of 'cls', 'last' and, with a template, 'mask' `[B]`
    tracked_positions: dict[str, Tensor]
    h: Tensor = field(default_factory=lambda: torch.empty(0))  # hidden states `[B,T',d]`
    layer: int | str = "words"  # number of layers already applied
    # first position `[B]` and length of the prompt that was inserted last
    prompt_span: tuple[Tensor, int] | None = None
    batch: dict[str, Any] = field(default_factory=dict)  # all fields that `collate` returns
    memo: dict[Any, Any] = field(
        default_factory=dict
    )  # values that a source stores for later layers
    layer_kwargs: dict[str, Any] = field(
        default_factory=dict
    )  # of the layers; set by the layer loop
    layer_kwargs_key: tuple[int, ...] = ()  # sequence length and prefix for which they are valid

    def state_at(self, name: str) -> Tensor:  # `[B,d]`
        """Return the current hidden states at a tracked position: 'cls', 'last' or 'mask'.

        Raises: UserError if the batch has no such position.
        """
        if name not in self.tracked_positions:
            raise UserError(
                f"this batch has no {name!r} position, only {', '.join(self.tracked_positions)}. "
                "For 'mask', encode the examples with `task.encode(..., template='code')`, since "
                "it needs a template."
            )
        each_example = torch.arange(len(self.h), device=self.h.device)
        return to_float32(self.h[each_example, self.tracked_positions[name]])

    @property
    def float32_states(self) -> Tensor:  # `[B,T',d]`
        """Current hidden states in float32; `h` itself may be bfloat16."""
        return to_float32(self.h)

    def mean_state(self) -> Tensor:  # `[B,d]`
        """Return the mean hidden state of the words, without padding and prompts."""
        h = self.float32_states
        weights = self.word_mask[..., None].to(h.dtype)
        return (h * weights).sum(1) / weights.sum(1)


STEP_OPERATIONS = ("insert", "add", "replace", "kv")


def check_plan(
    plan: Mapping[int | str, Step],  # layer → step
    bb: Backbone,
    # layer from which a run resumes with given hidden states; None: words
    start: int | None = None,
) -> None:
    """Raise `UserError` for a plan that cannot be carried out on this backbone."""
    is_inserted = False
    for layer in sorted(plan, key=_layer_order):
        op = plan[layer].op
        if layer != "words" and layer not in range(bb.n_layers):
            raise UserError(
                f"a plan's layer must be 'words' or between 0 and {bb.n_layers - 1} for backbone "
                f"{bb.name!r}, got {layer!r}. It is the number of layers already applied: 0 is the "
                "embedding output."
            )
        check_choice(op, STEP_OPERATIONS, "operation", f"at layer {layer}")
        if op in ("add", "replace") and not is_inserted:
            raise UserError(
                f"{op!r} at layer {layer} changes a prompt, but no prompt is inserted before it. "
                "Begin the plan with an 'insert'."
            )
        if op == "kv":
            _check_kv_step(layer, bb)
        if start is not None and _layer_order(layer) < start:
            raise UserError(
                f"the plan has a prompt at layer {layer}, but the run resumes from layer {start}, "
                f"so the prompt would be left out. Start at layer {layer} or below, with hidden "
                "states that were computed without a prompt."
            )
        is_inserted = is_inserted or op == "insert"


def _layer_order(layer: int | str) -> int:
    """Return a sort key of a plan's layers; 'words' is below layer 0."""
    return -1 if isinstance(layer, str) else layer


def _check_kv_step(layer: int | str, bb: Backbone) -> None:
    if not bb.supports_kv_prompt:
        raise UserError(
            f"'kv' at layer {layer!r}: the attention of a {bb.family} backbone takes no prompt "
            "keys and values. Use 'insert' and 'replace'."
        )
    if layer == "words":
        raise UserError(
            "'kv' at 'words': keys and values enter at a layer. Give a layer, or use 'insert'."
        )

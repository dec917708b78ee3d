"""Prompt sources, and the four steps of a plan: where and how their vectors enter a frozen model.

A method consists of two parts: a *source*, which computes `t` prompt vectors, and a *plan*, which
says where they enter. A plan maps a layer to a step. The layer is the number of layers already
applied, so 0 is the output of the embedding module; `INPUT` is earlier still, among the word
embeddings. (LPT counts from one: its "13th layer" is our 12. ID-SPAM's *m* is our layer.)

A step applies itself to the context of the layer loop. It may have an `update` of the hidden
states, which the loop calls first (DePT, P-tuning v2). A method that needs more defines a subclass
beside its source (IDPG's position 4).

`PromptSource` is the base class of prompt sources, with all that the library may ask of one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from idp_tutorial.core.context import Context
from idp_tutorial.core.prompt_key_values import PromptKeyValues
from idp_tutorial.utils.checks import UserError


class PromptSource(nn.Module):
    """Module that computes prompt vectors from the context, or a part of one.

    A method defines `forward`. The rest has defaults, and concerns sources whose inputs can be
    stored (`needs`), are computed from the text beforehand (`prepare`, `state_digest`), or which
    train parts at another learning rate (`lr_scale`).
    """

    # sentence vectors that the source reads and that a cache may store: names from
    # `training.cache.SENTENCE_POOLINGS`
    needs: tuple[str, ...] = ()
    # factors on the learning rate, for parameters of this module by name
    lr_scale: Mapping[str, float] = MappingProxyType({})

    def forward(self, ctx: Context) -> Tensor:  # `[B,t,d]`
        """Return the prompt of each example; a `KeyValue` step needs keys, then values."""
        raise NotImplementedError

    def prepare(self, examples: Sequence[dict]) -> Sequence[dict]:
        """Return encoded examples with what the source computes from each text, once."""
        return examples

    def state_digest(self) -> str | None:
        """Return a digest of data that is no parameter and changes the result; None: no data."""
        return None


@dataclass(frozen=True)
class Step:
    """Entry of a plan: a prompt source, and how its vectors enter. The base of the four steps."""

    source: Callable[[Context], Tensor]  # context → prompt `[B,t,d]`
    # function that returns the hidden states `[B,T,d]` that the prompt enters; None: unchanged.
    # What it trains must be part of `source`
    update: Callable[[Context], Tensor] | None = field(default=None, kw_only=True)
    name: ClassVar[str]  # in messages and pictures

    def apply(self, ctx: Context) -> PromptKeyValues | None:
        """Let the prompt enter; return keys and values for the next layer, or None."""
        raise NotImplementedError

    def compute_prompt(
        self,
        ctx: Context,
        width: int | None = None,  # width of the vectors; None: that of the hidden states
        t: int | None = None,  # number of vectors; None: any
    ) -> Tensor:  # `[B,t,width]`
        """Return the source's vectors in the dtype of the hidden states.

        Raises: UserError for a wrong shape.
        """
        p = self.source(ctx)
        B = ctx.h.shape[0]
        width = width or ctx.h.shape[2]
        if p.dim() != 3 or p.shape != (B, p.shape[1] if t is None else t, width):
            where = "INPUT" if ctx.layer < 0 else f"layer {ctx.layer}"
            raise UserError(
                f"{self.name!r} at {where}: the source must return ({B}, {t or 't'}, {width}), got "
                f"{tuple(p.shape)}; a static prompt needs `.expand(len(ctx.h), -1, -1)`."
            )
        return p.to(ctx.h.dtype)


Plan = Mapping[int, Step]  # layer, or `INPUT` → step


@dataclass(frozen=True)
class Insert(Step):
    """Insert the vectors as new positions (prompt tuning, IDPG, LPT, ID-SPAM)."""

    # of the first vector, or a function context → positions `[B]`
    position: int | Callable[[Context], Tensor] = 0
    name = "insert"

    def apply(self, ctx: Context) -> None:
        """Insert the prompt."""
        p = self.compute_prompt(ctx)
        ctx.insert(p, self.position(ctx) if callable(self.position) else self.position)


@dataclass(frozen=True)
class PromptChange(Step):
    """Step that changes the hidden states of the prompt that was inserted last."""

    def prompt_and_index(self, ctx: Context) -> tuple[Tensor, Tensor]:  # `[B,t,d]` each
        """Return the source's vectors, and the positions of the prompt, expanded to their width."""
        assert ctx.prompt_span is not None  # `check_plan` requires an `Insert` below
        first, t = ctx.prompt_span
        p = self.compute_prompt(ctx, t=t)
        positions = first[:, None] + torch.arange(t, device=p.device)
        return p, positions[..., None].expand_as(p)


@dataclass(frozen=True)
class Add(PromptChange):
    """Add the vectors to the prompt that was inserted last (IDPG's later layers)."""

    name = "add"

    def apply(self, ctx: Context) -> None:
        """Add to the hidden states of the prompt."""
        p, index = self.prompt_and_index(ctx)
        ctx.h = ctx.h.scatter_add(1, index, p)


@dataclass(frozen=True)
class Replace(PromptChange):
    """Put the vectors in place of the prompt that was inserted last (deep prompts)."""

    name = "replace"

    def apply(self, ctx: Context) -> None:
        """Replace the hidden states of the prompt."""
        p, index = self.prompt_and_index(ctx)
        ctx.h = ctx.h.scatter(1, index, p)


@dataclass(frozen=True)
class KeyValue(Step):
    """Give the next layer keys and values, without a new position (P-tuning v2, prefix tuning).

    The source returns keys, then values, `[B,t,d_kv_prompt]`.
    """

    name = "kv"

    def apply(self, ctx: Context) -> PromptKeyValues:
        """Return the keys and values for the next layer."""
        p = self.compute_prompt(ctx, ctx.backbone.d_kv_prompt)
        return PromptKeyValues.from_prompt(p, ctx.backbone.n_kv_heads)

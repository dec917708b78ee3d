"""Caches that give a layer a prompt's keys and values, or the keys and values of all positions.

Hugging Face's layers take an object `past_key_values`, pass it their keys and values, and
attend to what it returns. This interface has two uses. A prompt of keys and values (P-tuning
v2) adds its own in front. A single position: a head needs one position of the last layer, so
the layer is called with this position only, and gets the keys and values of all positions
instead of its own. The library's own layer does the rest: no code is duplicated, and what was
added to the layer (LoRA, adapters) still works.
"""

from typing import Any

import torch
from torch import Tensor


def split_heads(
    x: Tensor,  # `[B,T,n·d_head]`
    n: int,  # number of heads
) -> Tensor:  # `[B,n,T,d_head]`
    """Split the last dimension into attention heads."""
    return x.unflatten(-1, (n, -1)).transpose(1, 2)


class PromptKeyValues:
    """Cache that puts a prompt's keys and values before those of a layer."""

    def __init__(
        self,
        k: Tensor,  # keys of the prompt `[B,n_kv_heads,t,d_head]`
        v: Tensor,  # values of the prompt `[B,n_kv_heads,t,d_head]`
    ) -> None:
        self.k = k
        self.v = v
        self.t = k.shape[2]
        self.was_used = False  # has a layer called `update`?

    @classmethod
    def from_prompt(
        cls,
        p: Tensor,  # prompt: keys, then values `[B,t,2·n·d_head]`
        n: int,  # number of key/value heads: fewer than query heads with grouped-query attention
    ) -> "PromptKeyValues":
        """Split a prompt into the keys and values of all heads."""
        keys, values = p.chunk(2, -1)
        return cls(split_heads(keys, n), split_heads(values, n))

    def update(
        self,
        k: Tensor,  # keys of the layer `[B,n_kv_heads,T,d_head]`
        v: Tensor,  # values of the layer `[B,n_kv_heads,T,d_head]`
        *args: Any,  # the library's further arguments, which are not used
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:  # `[B,n_kv_heads,t+T,d_head]` each
        """Return the keys and values to attend to, in the layer's dtype."""
        self.was_used = True
        return torch.cat([self.k.to(k.dtype), k], 2), torch.cat([self.v.to(v.dtype), v], 2)

    def get_seq_length(self, *args: Any) -> int:
        """Return 0; T5 requests the length, but does not use it if it gets a position bias."""
        return 0


class FullKeyValues(PromptKeyValues):
    """Cache with the keys and values of all positions, for a layer that computes one position."""

    def __init__(
        self,
        k: Tensor,  # keys of all positions `[B,n_kv_heads,T,d_head]`
        v: Tensor,  # values of all positions `[B,n_kv_heads,T,d_head]`
        kv: PromptKeyValues | None = None,  # keys and values of a prompt, which are put in front
    ) -> None:
        if kv:
            k, v = kv.update(k, v)
        super().__init__(k, v)

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all positions instead of the given ones."""
        return self.k, self.v


def select_position(
    x: Any,  # `[·,T,n]`, a mask or bias `[·,heads,T,S]`, a tuple of these, or None
    position: Tensor,  # position to select in each example `[B]`
) -> Any:  # `[B,1,n]`, `[B,heads,1,S]`, a tuple, or None
    """Select one query position of each example from hidden states, masks or rotary angles."""
    if isinstance(x, tuple):
        return tuple(select_position(element, position) for element in x)
    if x is None or (x.dim() == 4 and x.shape[2] == 1):
        return x
    each_example = torch.arange(position.shape[0], device=position.device)
    x = x.expand(position.shape[0], *x.shape[1:])
    if x.dim() == 4:
        return x[each_example, :, position][:, :, None]
    return x[each_example, position][:, None]

"""The base class of prompt sources, with all that the library may ask of one."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor, nn

from idp_tutorial.core.context import Context

__all__ = ["PromptSource"]


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

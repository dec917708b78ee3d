"""`HeadConfig`: the options of the head and of the representation that it gets."""

from dataclasses import dataclass
from typing import ClassVar, Literal

__all__ = ["HeadConfig"]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Options of the head and of the representation that it gets.

    The papers pool with the classification token `<s>` (`pooling='cls'`), which small backbones
    have not trained; the default is therefore the mean over the words.
    """

    option_group: ClassVar[str] = "the head"

    # a trained classification head, or label words at a mask token
    head: Literal["classification", "verbalizer"] = "classification"
    # pooled representation that the classification head gets; IDPG's M(x) is the mean with 'mean',
    # else the papers' <s>, unless sentence_pooling is given
    pooling: Literal["mean", "cls", "last", "mask"] = "mean"
    # template of the verbalizer, or of a trained head with pooling='mask': 'code', 'paper', or your
    # own
    template: str = "code"
    # vocabulary of the verbalizer's loss: 'full', or 'labels' (the label words alone)
    loss_vocab: Literal["full", "labels"] = "full"
    two_layer_head: bool = False  # IDPG's classification head of two layers
    # initial classification head: 'random', or 'probe', a linear probe of the last layer
    head_init: Literal["random", "probe"] = "random"

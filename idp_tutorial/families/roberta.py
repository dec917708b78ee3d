"""BERT, RoBERTa, XLM-RoBERTa and CamemBERT, which differ in position ids and heads.

BERT is `Backbone` as it is. RoBERTa, XLM-RoBERTa and CamemBERT count positions from the padding
id plus 1, and padding itself gets the padding id as its position; so a table of 514 positions
is enough for 512 tokens.
"""

from typing import Any

from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.families.family import register_family
from idp_tutorial.utils.checks import UserError


class RobertaBackbone(Backbone):
    """RoBERTa, XLM-RoBERTa or CamemBERT: position ids start after the padding id."""

    lm_head_modules = ("lm_head",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.base.embeddings.padding_idx is None:
            raise UserError(
                f"backbone {self.name!r}: its config has no pad_token_id, from which the positions "
                f"of a {self.config.model_type!r} model are counted: set it, RoBERTa's is 1."
            )
        self.pad_position: int = self.base.embeddings.padding_idx
        self.max_tokens -= self.pad_position + 1

    def position_ids(self, attention_mask: Tensor) -> Tensor:
        """Return the position ids: tokens are counted, and padding gets the padding id `[B,T]`."""
        return attention_mask.cumsum(1) * attention_mask + self.pad_position


register_family("bert", Backbone)
register_family(("roberta", "xlm-roberta", "camembert"), RobertaBackbone)

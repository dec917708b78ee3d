"""ELECTRA: BERT's layers behind word embeddings that can be narrower than the hidden states.

The word embeddings of ELECTRA-small have 128 dimensions and its hidden states 256; a matrix
maps one to the other. A prompt among the words then has 128 dimensions. The model in common use
is the discriminator, which predicts for each token whether it was replaced. It cannot fill a
blank, so it has no language-model head in this package; the generator has one, in two parts.
"""

from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.families.family import register_family


class ElectraBackbone(Backbone):
    """ELECTRA: word embeddings, and prompts among them, can be narrower than `d`."""

    lm_head_modules = ("generator_predictions", "generator_lm_head")

    def embed(self, e: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return the first layer's input, projected to width `d` if the embeddings are narrower."""
        h = super().embed(e, attention_mask, token_type_ids)
        return h if self.d_embedding == self.d else self.base.embeddings_project(h)


register_family("electra", ElectraBackbone)

"""DistilBERT: BERT without token types, and the simplest explicit layer."""

from typing import Any

from torch import Tensor

from idp_tutorial.core.prompt_key_values import split_heads
from idp_tutorial.families.explicit_layer import ExplicitLayerBackbone
from idp_tutorial.families.family import register_family


class DistilBertBackbone(ExplicitLayerBackbone):
    """DistilBERT: BERT without token types."""

    layers_path = "transformer.layer"
    lm_head_modules = ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector")
    lora_target_modules = ("q_lin", "v_lin")
    sublayer_output_modules = ("attention.out_lin", "ffn.dropout")
    attention_dropout_field = "attention_dropout"

    def embed(self, e: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return the first layer's input: positions added, LayerNorm, dropout."""
        return self.base.embeddings(None, e, self.position_ids(attention_mask))

    def _compute_layer(
        self,
        block: Any,
        x: Tensor,
        h: Tensor,
        selected: dict[str, Any],
        layer_kwargs: dict[str, Any],
        kv: Any,
    ) -> Tensor:
        attention = block.attention
        q = split_heads(attention.q_lin(x), self.n_heads)
        k = split_heads(attention.k_lin(h), self.n_heads)
        v = split_heads(attention.v_lin(h), self.n_heads)
        mask = selected["attention_mask"]
        dropout = attention.dropout.p if attention.training else 0.0
        attended = self._attend(q, k, v, mask, kv, dropout)
        x = block.sa_layer_norm(attention.out_lin(attended) + x)
        return block.output_layer_norm(block.ffn(x) + x)


register_family("distilbert", DistilBertBackbone)

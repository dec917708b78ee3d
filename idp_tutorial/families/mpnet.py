"""MPNet: RoBERTa with a relative position bias that all layers share.

Besides RoBERTa's positions, MPNet adds a bias to each attention score, which depends on the
distance of the two positions and on the head. What is the distance of a prompt? Its vectors are
tokens to the left of the text: two of them have the distance `|i−j|`, like two words. The keys
and values of a 'kv' prompt have no position of their own; they are treated as the `t` positions
to the left of the text.
"""

from typing import Any

from torch import Tensor

from idp_tutorial.core.backbone import Layout
from idp_tutorial.core.prompt_key_values import split_heads
from idp_tutorial.families.explicit_layer import ExplicitLayerBackbone
from idp_tutorial.families.family import register_family
from idp_tutorial.families.roberta import RobertaBackbone


class MPNetBackbone(ExplicitLayerBackbone, RobertaBackbone):
    """MPNet: relative position bias, in which prompts and their keys are tokens to the left."""

    lora_target_modules = ("q", "v")
    sublayer_output_modules = ("attention.dropout", "output.dropout")

    def embed(self, e: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return the first layer's input: positions added, LayerNorm, dropout."""
        return self.base.embeddings(inputs_embeds=e, position_ids=self.position_ids(attention_mask))

    def layer_kwargs(self, layer_type: str, h: Tensor, layout: Layout) -> dict[str, Any]:
        """Return the keyword arguments of a layer: its mask and the relative position bias."""
        layer_kwargs = super().layer_kwargs(layer_type, h, layout)
        encoder = self.base.encoder
        buckets = encoder.relative_position_bucket(-layout.distance)
        bias = encoder.relative_attention_bias(buckets)  # `[B or 1,T,P+T,heads]`
        return dict(layer_kwargs, position_bias=bias.permute(0, 3, 1, 2).contiguous())

    def _compute_layer(
        self,
        block: Any,
        x: Tensor,
        h: Tensor,
        selected: dict[str, Any],
        layer_kwargs: dict[str, Any],
        kv: Any,
    ) -> Tensor:
        attention = block.attention.attn
        q = split_heads(attention.q(x), self.n_heads)
        k = split_heads(attention.k(h), self.n_heads)
        v = split_heads(attention.v(h), self.n_heads)
        bias = selected["position_bias"]
        mask = selected["attention_mask"]
        if mask is not None:
            bias = bias + mask
        dropout = attention.dropout.p if attention.training else 0.0
        output = attention.o(self._attend(q, k, v, bias, kv, dropout))
        x = block.attention.LayerNorm(block.attention.dropout(output) + x)
        return block.output(block.intermediate(x), x)


register_family("mpnet", MPNetBackbone, supports_sdpa=False)

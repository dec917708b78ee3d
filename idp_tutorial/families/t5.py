"""The encoder of T5 and FLAN-T5, with a relative position bias instead of positions.

ID-SPAM's results include FLAN-T5; a classification head needs its encoder only. The first layer
owns the bias and all layers share it, so it is computed for the current sequence and passed to
each layer. T5 has no `<s>`: the state of `</s>`, which ends every text, is used. Dropout
follows the last norm.
"""

from typing import Any

from torch import Tensor, nn

from idp_tutorial.core.backbone import Backbone, Layout
from idp_tutorial.core.prompt_key_values import split_heads
from idp_tutorial.families.family import register_family


class T5Backbone(Backbone):
    """Encoder of T5: a relative position bias, in which prompts are tokens to the left.

    It has no language-model head, so it cannot fill in templates.
    """

    layers_path = "encoder.block"
    default_pooling = "last"
    lm_head_modules = ()
    lora_target_modules = ("q", "v")
    sublayer_output_modules = ("layer.0.dropout", "layer.1.dropout")
    attention_dropout_field = "dropout_rate"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = nn.Sequential(self.base.encoder.final_layer_norm, self.base.encoder.dropout)

    def embed(self, e: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return the word embeddings after dropout, since positions enter in the layers."""
        return self.base.encoder.dropout(e)

    def layer_kwargs(self, layer_type: str, h: Tensor, layout: Layout) -> dict[str, Any]:
        """Return the keyword arguments of a layer: its mask and the relative position bias."""
        layer_kwargs = super().layer_kwargs(layer_type, h, layout)
        first_layer: Any = self.layers[0]
        attention = first_layer.layer[0].SelfAttention
        buckets = attention._relative_position_bucket(
            -layout.distance,
            True,
            attention.relative_attention_num_buckets,
            attention.relative_attention_max_distance,
        )
        bias = attention.relative_attention_bias(buckets)
        return dict(layer_kwargs, position_bias=bias.permute(0, 3, 1, 2))

    def compute_keys_values(
        self, layer: Any, h: Tensor, **layer_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a layer computes from `h`."""
        attention = layer.layer[0].SelfAttention
        x = layer.layer[0].layer_norm(h)
        k = split_heads(attention.k(x), self.n_kv_heads)
        v = split_heads(attention.v(x), self.n_kv_heads)
        return k, v


register_family("t5", T5Backbone, "T5EncoderModel")

"""ModernBERT: an encoder with rotary positions and layers with sliding-window attention."""

from typing import Any

from torch import Tensor

from idp_tutorial.core.backbone import Layout
from idp_tutorial.core.prompt_key_values import split_heads
from idp_tutorial.families.explicit_layer import ExplicitLayerBackbone
from idp_tutorial.families.family import register_family
from idp_tutorial.families.llama import apply_rotary_embedding


class ModernBertBackbone(ExplicitLayerBackbone):
    """ModernBERT: some layers attend only to positions within a window on both sides.

    In these layers, words farther than the window from a prompt do not attend to it.
    """

    layers_path = "layers"
    final_norm_path = "final_norm"
    lm_head_modules = ("head", "decoder")
    lora_target_modules = ("Wqkv",)
    sublayer_output_modules = ("attn.out_drop", "mlp.Wo")
    attention_dropout_field = "attention_dropout"

    def in_attention_window(self, distance: Tensor) -> Tensor:
        """Return which keys are within the window, on either side of the query."""
        assert self.sliding_window is not None
        return distance.abs() <= self.sliding_window

    def embed(self, e: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return the first layer's input: LayerNorm and dropout, without positions."""
        return self.base.embeddings(inputs_embeds=e)

    def layer_kwargs(self, layer_type: str, h: Tensor, layout: Layout) -> dict[str, Any]:
        """Return the keyword arguments of a layer: its mask and its rotary angles."""
        layer_kwargs = super().layer_kwargs(layer_type, h, layout)
        angles = self.base.rotary_emb(h, layout.positions, layer_type)
        return dict(layer_kwargs, position_embeddings=angles)

    def _compute_layer(
        self,
        block: Any,
        x: Tensor,
        h: Tensor,
        selected: dict[str, Any],
        layer_kwargs: dict[str, Any],
        kv: Any,
    ) -> Tensor:
        attention = block.attn
        q = attention.Wqkv(block.attn_norm(x)).chunk(3, -1)[0]
        _, k, v = attention.Wqkv(block.attn_norm(h)).chunk(3, -1)
        q, k, v = [split_heads(projection, self.n_heads) for projection in (q, k, v)]
        q = apply_rotary_embedding(q.float(), *selected["position_embeddings"]).to(h.dtype)
        k = apply_rotary_embedding(k.float(), *layer_kwargs["position_embeddings"]).to(h.dtype)
        mask = selected["attention_mask"]
        dropout = attention.attention_dropout if attention.training else 0.0
        attended = self._attend(q, k, v, mask, kv, dropout)
        x = x + attention.out_drop(attention.Wo(attended))
        return x + block.mlp(block.mlp_norm(x))


register_family("modernbert", ModernBertBackbone)

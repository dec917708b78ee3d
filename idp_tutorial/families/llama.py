"""Decoders with rotary positions: Llama, Mistral, Qwen and Gemma.

No position embeddings are added to the words. Instead, every layer rotates queries and keys by
an angle proportional to their position, so a score depends on the distance between two
positions. An inserted prompt adds positions on the left: the position ids change, but the
distance between two words does not.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from idp_tutorial.core.backbone import Backbone, Layout
from idp_tutorial.core.prompt_key_values import split_heads
from idp_tutorial.families.family import register_family


def apply_rotary_embedding(
    x: Tensor,  # queries or keys `[B,n_heads,T,d_head]`
    cos: Tensor,  # cosines of the angles `[1,T,d_head]`
    sin: Tensor,  # sines of the angles `[1,T,d_head]`
) -> Tensor:  # `[B,n_heads,T,d_head]`
    """Rotate queries or keys by the angles of their positions (RoFormer, Su et al., 2021)."""
    first_half, second_half = x.chunk(2, -1)
    rotated = torch.cat([-second_half, first_half], -1)
    return x * cos[:, None] + rotated * sin[:, None]


class LlamaBackbone(Backbone):
    """Decoder with rotary positions, such as Llama, Mistral or Qwen.

    The keys of a 'kv' prompt have positions 0 to `t`-1 and are not rotated again.
    """

    causal = True
    layers_path = "layers"
    final_norm_path = "norm"
    default_pooling = "last"
    lm_head_modules = ("lm_head",)
    lora_target_modules = ("q_proj", "v_proj")
    sublayer_output_modules = ("self_attn.o_proj", "mlp.down_proj")
    attention_dropout_field = "attention_dropout"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # in Mistral, all layers have sliding-window attention and the config does not list them
        if self.sliding_window and not hasattr(self.config, "layer_types"):
            self.layer_types = ["sliding_attention"] * self.n_layers
        rotary_parameters = signature(self.base.rotary_emb.forward).parameters
        self.rope_depends_on_layer_type = "layer_type" in rotary_parameters  # Gemma 3

    def embed(self, e: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return the word embeddings unchanged, since positions enter in the layers."""
        return e

    def layer_kwargs(self, layer_type: str, h: Tensor, layout: Layout) -> dict[str, Any]:
        """Return the keyword arguments of a layer: its mask and its rotary angles."""
        layer_kwargs = super().layer_kwargs(layer_type, h, layout)
        extra = [layer_type] if self.rope_depends_on_layer_type else []
        angles = self.base.rotary_emb(h, layout.positions, *extra)
        return dict(layer_kwargs, position_embeddings=angles)

    def compute_keys_values(
        self, layer: Any, h: Tensor, **layer_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the rotated keys and the values that a layer computes from `h`."""
        attention = layer.self_attn
        x = layer.input_layernorm(h)
        k = split_heads(attention.k_proj(x), self.n_kv_heads)
        v = split_heads(attention.v_proj(x), self.n_kv_heads)
        if hasattr(attention, "k_norm"):  # Qwen 3, Gemma 3
            k = attention.k_norm(k)
        return apply_rotary_embedding(k, *layer_kwargs["position_embeddings"]), v


class GemmaBackbone(LlamaBackbone):
    """Gemma 1 to 3: scaled word embeddings, norms before the residual sums, bounded logits."""

    sublayer_output_modules = ("post_attention_layernorm", "post_feedforward_layernorm")

    def softcap_logits(self, logits: Tensor) -> Tensor:
        """Return the logits, bounded by `final_logit_softcapping` if the config has it."""
        bound = getattr(self.config, "final_logit_softcapping", None)
        return logits if bound is None else torch.tanh(logits / bound) * bound


register_family(("llama", "mistral", "qwen2", "qwen3"), LlamaBackbone, "causal")
register_family(
    "gemma", GemmaBackbone, "causal", sublayer_output_modules=LlamaBackbone.sublayer_output_modules
)
# Gemma 2 bounds the attention scores, which fused attention does not support
register_family("gemma2", GemmaBackbone, "causal", supports_sdpa=False)
register_family("gemma3_text", GemmaBackbone, "causal")

"""GPT-2: a decoder with learnt positions, whose last token represents the text.

GPT-2 has separate tables of words and positions, normalises before each block, and once more
after the last layer. One matrix computes queries, keys and values, so LoRA is applied to that
matrix. To compute one position of the last layer, it is applied once to all positions, so
`run_layer_at_position` is written out.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.prompt_key_values import select_position, split_heads
from idp_tutorial.families.family import register_family


class GPT2Backbone(Backbone):
    """GPT-2: causal, with LayerNorm before each block; the last token represents the text."""

    causal = True
    layers_path = "h"
    final_norm_path = "ln_f"
    default_pooling = "last"
    lm_head_modules = ("lm_head",)
    lora_target_modules = ("c_attn",)
    sublayer_output_modules = ("attn.resid_dropout", "mlp.dropout")
    attention_dropout_field = "attn_pdrop"

    def embed(self, e: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return the first layer's input: positions added, dropout."""
        return self.base.drop(e + self.base.wpe(self.position_ids(attention_mask)))

    def run_layer_at_position(
        self,
        position: Tensor,
        layer: int,
        h: Tensor,
        layer_kwargs_by_type: dict[str, Any],
        kv: Any = None,
    ) -> Tensor:
        """Run one layer at a single position of each example."""
        block: Any = self.layers[layer]
        attention = block.attn
        projections = attention.c_attn(block.ln_1(h)).chunk(3, -1)
        q, k, v = [split_heads(projection, self.n_heads) for projection in projections]
        if kv:
            k, v = kv.update(k, v)
        mask = select_position(layer_kwargs_by_type["full_attention"]["attention_mask"], position)
        dropout = attention.attn_dropout.p if attention.training else 0.0
        attended = F.scaled_dot_product_attention(
            select_position(q, position), k, v, mask, dropout, scale=attention.scaling
        )
        output = attention.c_proj(attended.transpose(1, 2).flatten(2))
        x = select_position(h, position) + attention.resid_dropout(output)
        return x + block.mlp(block.ln_2(x))


register_family("gpt2", GPT2Backbone, "causal")

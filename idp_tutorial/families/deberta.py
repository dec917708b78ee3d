"""DeBERTa 1 to 3: separate attention to content and to relative positions.

Each layer uses a table of relative positions, which is computed for the current sequence
length. The attention takes no cache and computes all positions, so P-tuning v2 replaces hidden
states instead of adding keys and values. Version 3 has the config of version 2. Its two largest
models add a convolution to the first layer. Microsoft's own checkpoints store their
language-model head under another name.
"""

from typing import Any

from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.families.family import register_family


class DebertaBackbone(Backbone):
    """DeBERTa 1 to 3: relative positions of the current sequence; no prompts of keys and values."""

    supports_kv_prompt = False
    supports_single_position = False
    lora_target_modules = ("in_proj",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Microsoft's checkpoints (`config.legacy=False`) have another language-model head
        self.has_microsoft_lm_head = hasattr(self.model, "lm_predictions")
        self.has_lm_head |= self.has_microsoft_lm_head

    def embed(self, e: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return the first layer's input, which is zero at padding."""
        return self.base.embeddings(
            inputs_embeds=e,
            position_ids=self.position_ids(attention_mask),
            token_type_ids=token_type_ids,
            mask=attention_mask,
        )

    def layer_kwargs_by_type(
        self,
        attention_mask: Tensor,
        h: Tensor,
        prefix: int | Tensor = 0,
        has_padding: bool | None = None,
    ) -> dict[str, Any]:
        """Return the keyword arguments of all layers, and the mask for the convolution."""
        encoder = self.base.encoder
        layer_kwargs = dict(
            relative_pos=encoder.get_rel_pos(h),
            rel_embeddings=encoder.get_rel_embedding(),
            attention_mask=encoder.get_attention_mask(attention_mask),
        )
        return {"full_attention": layer_kwargs, "attention_mask": attention_mask}

    def run_layer(
        self, layer: int, h: Tensor, layer_kwargs_by_type: dict[str, Any], kv: Any = None
    ) -> Tensor:
        """Run one layer; the first is followed by a convolution in models that have one."""
        output = super().run_layer(layer, h, layer_kwargs_by_type)
        convolution = getattr(self.base.encoder, "conv", None)
        if convolution is None or layer > 0:
            return output
        return convolution(h, output, layer_kwargs_by_type["attention_mask"])

    def lm_logits(self, h: Tensor) -> Tensor:
        """Apply the language-model head, Microsoft's or the library's."""
        if not self.has_microsoft_lm_head:
            return super().lm_logits(h)
        weights = self.word_embeddings.weight
        return self.model.lm_predictions(h.to(weights.dtype), self.word_embeddings).to(h.dtype)

    def lm_logits_for_tokens(self, h: Tensor, ids: Tensor) -> Tensor:
        """Return `lm_logits` for a few tokens only."""
        if self.has_microsoft_lm_head:
            return self.lm_logits(h)[..., ids]
        return super().lm_logits_for_tokens(h, ids)


register_family("deberta", DebertaBackbone, supports_sdpa=False)
register_family(
    "deberta-v2",
    DebertaBackbone,
    supports_sdpa=False,
    lora_target_modules=("query_proj", "value_proj"),
)

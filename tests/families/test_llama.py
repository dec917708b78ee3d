"""Grouped-query attention."""

import torch
from small_models import (
    small_backbone,
)


def test_grouped_query_attention_gets_no_mask_without_padding():
    def mask(name, keep, prefix=0, attn="sdpa"):
        bb = small_backbone(name, attn)
        return bb.layer_kwargs_by_type(keep, torch.zeros(*keep.shape, bb.d), prefix)[
            "full_attention"
        ]["attention_mask"]

    whole = torch.ones(2, 5, dtype=torch.long)
    assert mask("llama", whole) is None
    padded = whole.tril(3)
    assert all(
        m is not None
        for m in (
            mask("llama", padded),
            mask("llama", whole, 2),
            mask("gpt2", whole),
            mask("llama", whole, attn="eager"),
        )
    )

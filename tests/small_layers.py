"""Small random models, batches and prompt sources for the tests of the layer loop."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DebertaConfig,
    DebertaForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from idp_tutorial.families.family import wrap_hf_model

SMALL = dict(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=40,
)
MODELS = dict(
    roberta=lambda a: RobertaForMaskedLM._from_config(
        RobertaConfig(**SMALL, intermediate_size=64, pad_token_id=1), attn_implementation=a
    ),
    bert=lambda a: BertForMaskedLM._from_config(
        BertConfig(**SMALL, intermediate_size=64), attn_implementation=a
    ),
    gpt2=lambda a: GPT2LMHeadModel._from_config(GPT2Config(**SMALL), attn_implementation=a),
    deberta=lambda a: DebertaForMaskedLM._from_config(
        DebertaConfig(
            **SMALL,
            intermediate_size=64,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_biased_input=False,
        ),
        attn_implementation="eager",
    ),
)
KINDS = [(f, a) for f in MODELS for a in ("eager", "sdpa") if (f, a) != ("deberta", "sdpa")]
WITH_KV = [(f, a) for f, a in KINDS if f != "deberta"]
B = 3
T = 9
t = 4
d = 32


def backbone(family, attn="sdpa"):
    m = MODELS[family](attn)
    for p in m.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.2)
    return wrap_hf_model(m, None, family)


def make_batch(bb, lens=(9, 5, 2), T=None):
    T = T or max(lens)
    keep = (torch.arange(T)[None] < torch.tensor(lens)[:, None]).long()
    pad = bb.config.pad_token_id or 0
    return dict(
        input_ids=torch.randint(5, 50, keep.shape).masked_fill(keep == 0, pad),
        attention_mask=keep,
        token_type_ids=torch.zeros_like(keep),
        mask_position=torch.tensor(lens) // 2,
    )


def single_example(batch, i):  # without its padding
    n = int(batch["attention_mask"][i].sum())
    return {k: v[i : i + 1, :n] if v.dim() == 2 else v[i : i + 1] for k, v in batch.items()}


def resume(batch, layer, h):
    return dict(batch, hidden_states=h, start_layer=torch.full((len(h),), layer))


def static(width=d, t=t, seed=1):
    p = torch.randn(t, width, generator=torch.Generator().manual_seed(seed))
    return lambda ctx: p.expand(len(ctx.h), -1, -1)


def dynamic(ctx):
    return (
        ctx.mean_state()[:, None] * torch.arange(1.0, t + 1)[:, None] + ctx.state_at("cls")[:, None]
    )  # differs from text to text


def same(a, b, atol=2e-6):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def refused(f, *words):
    with pytest.raises(ValueError) as e:
        f()
    assert all(w in str(e.value) for w in words), str(e.value)

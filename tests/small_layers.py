"""Small random models, batches and prompt sources for the tests of the layer loop."""

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
DEBERTA = dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False)
MODELS = dict(
    roberta=lambda attn, **kw: RobertaForMaskedLM._from_config(
        RobertaConfig(**SMALL | dict(intermediate_size=64, pad_token_id=1) | kw),
        attn_implementation=attn,
    ),
    bert=lambda attn, **kw: BertForMaskedLM._from_config(
        BertConfig(**SMALL | dict(intermediate_size=64) | kw), attn_implementation=attn
    ),
    gpt2=lambda attn, **kw: GPT2LMHeadModel._from_config(
        GPT2Config(**SMALL | kw), attn_implementation=attn
    ),
    deberta=lambda attn, **kw: DebertaForMaskedLM._from_config(
        DebertaConfig(**SMALL | dict(intermediate_size=64) | DEBERTA | kw),
        attn_implementation="eager",
    ),
)
KINDS = [(f, a) for f in MODELS for a in ("eager", "sdpa") if (f, a) != ("deberta", "sdpa")]
WITH_KV = [(f, a) for f, a in KINDS if f != "deberta"]
B = 3
T = 9
t = 4
d = 32


def backbone(family, attn="sdpa", **kw):
    """Return a backbone whose weights are large enough for differences to show."""
    m = MODELS[family](attn, **kw)
    for p in m.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.2)
    return wrap_hf_model(m, None, family)


def make_batch(bb, lens=(9, 5, 2), T=None, is_pair=False):
    """Return a batch of random tokens; the second halves of pairs have token type 1."""
    T = T or max(lens)
    keep = (torch.arange(T)[None] < torch.tensor(lens)[:, None]).long()
    pad = bb.config.pad_token_id or 0
    second = (torch.arange(T) >= T // 2).long() * keep
    return dict(
        input_ids=torch.randint(5, 50, keep.shape).masked_fill(keep == 0, pad),
        attention_mask=keep,
        token_type_ids=second if is_pair else torch.zeros_like(keep),
        mask_position=torch.tensor(lens) // 2,
    )


def library_output(bb, batch, **kw):
    """Return what the library's own forward pass returns, with all hidden states."""
    # a cache copies the keys, and some CPUs round products with the copy differently
    types = (
        dict(use_cache=False)
        if bb.family == "gpt2"
        else dict(token_type_ids=batch["token_type_ids"])
    )
    return bb.model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        output_hidden_states=True,
        **types,
        **kw,
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

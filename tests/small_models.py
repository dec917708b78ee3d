"""Small models of all families with random weights, and prompts of every kind for them.

Three layers of 32 dimensions with random weights. Attention windows are shorter than the texts,
there are fewer key/value heads than query heads, and heads are wider or narrower than `d/n`, so
that an error in the loop changes the result. The name before the comma is the family; a variant
follows it.
"""

from typing import Any

import torch
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import INPUT
from idp_tutorial.core.steps import KeyValue, Step
from idp_tutorial.families.family import FAMILIES, build_hf_model, wrap_hf_model

__all__ = [
    "SMALL_CONFIGS",
    "RAGGED_LENGTHS",
    "EQUAL_LENGTHS",
    "SINGLE_TOKEN_LENGTHS",
    "attention_implementations",
    "small_backbone",
    "random_batch",
    "random_prompt",
]


_COMMON_SIZES: dict[str, Any] = dict(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=64,
    pad_token_id=1,
)
_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
_RELATIVE_POSITIONS: dict[str, Any] = dict(
    **_DROPOUT, relative_attention=True, position_biased_input=False, type_vocab_size=0
)
_DEBERTA_V2: dict[str, Any] = dict(
    _RELATIVE_POSITIONS, share_att_key=True, position_buckets=8, pos_att_type=["p2c", "c2p"]
)
_GROUPED_QUERY: dict[str, Any] = dict(
    num_key_value_heads=2, bos_token_id=0, eos_token_id=2, attention_dropout=0.1
)
_T5_SIZES: dict[str, Any] = dict(
    vocab_size=60, d_model=32, d_ff=48, num_layers=3, num_heads=4, pad_token_id=1
)
_SLIDING_WINDOW: dict[str, Any] = dict(_GROUPED_QUERY, head_dim=16, sliding_window=4)
# name → name of the transformers config class, and its arguments
SMALL_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _COMMON_SIZES | _DROPOUT),
    "roberta": ("RobertaConfig", _COMMON_SIZES | _DROPOUT),
    "xlm-roberta": ("XLMRobertaConfig", _COMMON_SIZES | _DROPOUT),
    "camembert": ("CamembertConfig", _COMMON_SIZES | _DROPOUT),
    "electra": ("ElectraConfig", _COMMON_SIZES | _DROPOUT | dict(embedding_size=16)),
    "mpnet": ("MPNetConfig", _COMMON_SIZES | _DROPOUT),
    "distilbert": ("DistilBertConfig", _COMMON_SIZES | dict(hidden_dim=48)),
    "deberta": (
        "DebertaConfig",
        _COMMON_SIZES | _RELATIVE_POSITIONS | dict(pos_att_type=["c2p", "p2c"]),
    ),
    "deberta-v2": (
        "DebertaV2Config",
        _COMMON_SIZES | _DEBERTA_V2 | dict(norm_rel_ebd="layer_norm"),
    ),
    "deberta-v2, conv": ("DebertaV2Config", _COMMON_SIZES | _DEBERTA_V2 | dict(conv_kernel_size=3)),
    "deberta-v2, new head": (
        "DebertaV2Config",
        _COMMON_SIZES | _RELATIVE_POSITIONS | dict(pos_att_type=["p2c"], legacy=False),
    ),
    "modernbert": (
        "ModernBertConfig",
        _COMMON_SIZES
        | dict(
            attention_dropout=0.1,
            mlp_dropout=0.1,
            embedding_dropout=0.1,
            local_attention=6,
            global_attn_every_n_layers=2,
            bos_token_id=0,
            eos_token_id=2,
            cls_token_id=0,
            sep_token_id=2,
        ),
    ),
    "t5": ("T5Config", _T5_SIZES | dict(d_kv=12)),
    "t5, gated": ("T5Config", _T5_SIZES | dict(d_kv=8, feed_forward_proj="gated-gelu")),
    "gpt2": (
        "GPT2Config",
        _COMMON_SIZES | dict(bos_token_id=0, eos_token_id=2, pad_token_id=None),
    ),
    "llama": ("LlamaConfig", _COMMON_SIZES | _GROUPED_QUERY),
    "mistral": ("MistralConfig", _COMMON_SIZES | _SLIDING_WINDOW),
    "qwen2": (
        "Qwen2Config",
        _COMMON_SIZES
        | _GROUPED_QUERY
        | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    "qwen3": ("Qwen3Config", _COMMON_SIZES | _GROUPED_QUERY | dict(head_dim=16)),
    "gemma": ("GemmaConfig", _COMMON_SIZES | _GROUPED_QUERY | dict(head_dim=16)),
    "gemma2": ("Gemma2Config", _COMMON_SIZES | _SLIDING_WINDOW | dict(query_pre_attn_scalar=16)),
    "gemma3_text": (
        "Gemma3TextConfig",
        _COMMON_SIZES
        | _SLIDING_WINDOW
        | dict(sliding_window_pattern=2, query_pre_attn_scalar=16, final_logit_softcapping=20.0),
    ),
}


def attention_implementations(
    name: str,  # a key of `SMALL_CONFIGS`
) -> list[str]:
    """Return the attention implementations of a family: 'eager', and mostly 'sdpa'."""
    family = name.partition(",")[0]
    return ["sdpa", "eager"] if FAMILIES[family].supports_sdpa else ["eager"]


def small_backbone(
    name: str,  # a key of `SMALL_CONFIGS`
    attn: str = "sdpa",  # 'sdpa' or 'eager'; always 'eager' in families without fused attention
) -> Backbone:  # without a tokenizer
    """Return a small model of a family, with the same random weights in each call."""
    import transformers

    config_class, sizes = SMALL_CONFIGS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_hf_model(getattr(transformers, config_class)(**sizes), attn)
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
    return wrap_hf_model(model, None, name)


RAGGED_LENGTHS = (11, 7, 4)  # tokens of each text of a batch with padding
EQUAL_LENGTHS = (11, 11, 11)
SINGLE_TOKEN_LENGTHS = (1,)


def random_batch(
    lengths: tuple[int, ...] = RAGGED_LENGTHS,  # tokens of each text
) -> dict[str, Tensor]:
    """Return a batch of random tokens, the same in each call.

    The mask position is the last but one token of each text.
    """
    n_tokens = torch.tensor(lengths)
    T = max(lengths)
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(5, 60, (len(lengths), T), generator=generator)
    attention_mask = (torch.arange(T) < n_tokens[:, None]).long()
    return dict(
        input_ids=input_ids.masked_fill(attention_mask == 0, 1),
        attention_mask=attention_mask,
        token_type_ids=torch.zeros_like(input_ids),
        mask_position=(n_tokens - 2).clamp(min=0),
    )


def random_prompt(
    bb: Backbone,
    step_class: type[Step],  # class of the step
    layer: int,  # layer at which the prompt enters
) -> Tensor:  # `[3,3,width]`
    """Return random prompts of three vectors for three examples, the same in each call.

    They require a gradient.
    """
    generator = torch.Generator().manual_seed(3)
    width = bb.d_embedding if layer == INPUT else bb.d
    if step_class is KeyValue:
        width = bb.d_kv_prompt
    p = torch.randn(3, 3, width, generator=generator)
    return (0.5 * p).requires_grad_()

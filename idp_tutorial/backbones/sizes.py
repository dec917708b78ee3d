"""Configs of published models, to count their parameters or to time a step without a download.

`FULL_SCALE_CONFIGS` maps a name to a function that returns the published config; the library is
imported only when the function is called.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from idp_tutorial.core.random_numbers import forked_random_numbers
from idp_tutorial.families.family import build_hf_model
from idp_tutorial.utils.checks import UserError

__all__ = [
    "ENCODER_CONFIGS",
    "DECODER_CONFIGS",
    "FULL_SCALE_CONFIGS",
    "FULL_SCALE_HUB_NAMES",
    "build_full_scale_model",
]


_ConfigBuilder = Callable[[], Any]  # function that returns a Hugging Face config


def _make_config(config_class: str, **fields: Any) -> Any:
    """Return a config of the transformers class with this name."""
    import transformers

    return getattr(transformers, config_class)(**fields)


def _family(
    config_class: str,  # name of the class in transformers
    # its field for the width of the feed-forward network; None: it is 4 d without one
    d_ff_field: str | None = "intermediate_size",
    **family_fields: Any,  # what all its models have in common
) -> Callable[..., _ConfigBuilder]:
    """Return a function of the sizes of a model, which returns the function of its config."""

    def describe_model(
        d: int,  # width
        n_layers: int,
        n_heads: int,  # of queries
        n_kv_heads: int | None = None,  # of keys and values; None: not a field of the class
        d_ff: int | None = None,  # width of the feed-forward network; None: 4 d
        **fields: Any,  # other fields
    ) -> _ConfigBuilder:
        """Return the function that returns the config of a model."""
        # every class takes these names, whatever its own names are
        sizes = dict(hidden_size=d, num_hidden_layers=n_layers, num_attention_heads=n_heads)
        if n_kv_heads:
            sizes["num_key_value_heads"] = n_kv_heads
        if d_ff_field:
            sizes[d_ff_field] = d_ff or 4 * d
        return partial(_make_config, config_class, **{**family_fields, **sizes, **fields})

    return describe_model


_ROBERTA: dict[str, Any] = dict(max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5)
_DEBERTA: dict[str, Any] = dict(
    relative_attention=True, position_biased_input=False, type_vocab_size=0, layer_norm_eps=1e-7
)

_bert = _family("BertConfig", vocab_size=30522)
_roberta = _family("RobertaConfig", vocab_size=50265, **_ROBERTA)
_xlm_roberta = _family("XLMRobertaConfig", vocab_size=250002, **_ROBERTA)
_electra = _family("ElectraConfig", vocab_size=30522)
_deberta = _family("DebertaConfig", vocab_size=50265, pos_att_type=["c2p", "p2c"], **_DEBERTA)
_deberta_v3 = _family(
    "DebertaV2Config",
    vocab_size=128100,
    pos_att_type=["p2c", "c2p"],
    share_att_key=True,
    position_buckets=256,
    norm_rel_ebd="layer_norm",
    **_DEBERTA,
)
_distilbert = _family("DistilBertConfig", "hidden_dim", vocab_size=30522)
_mpnet = _family("MPNetConfig", vocab_size=30527, max_position_embeddings=514, layer_norm_eps=1e-5)
_modernbert = _family("ModernBertConfig", vocab_size=50368, max_position_embeddings=8192)
_t5 = _family("T5Config", "d_ff", vocab_size=32128, d_kv=64)

ENCODER_CONFIGS: dict[str, _ConfigBuilder] = {
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "roberta-base": _roberta(768, 12, 12),
    "roberta-large": _roberta(1024, 24, 16),
    "xlm-roberta-base": _xlm_roberta(768, 12, 12),
    "xlm-roberta-large": _xlm_roberta(1024, 24, 16),
    "electra-small": _electra(256, 12, 4, embedding_size=128),
    "electra-base": _electra(768, 12, 12, embedding_size=768),
    "electra-large": _electra(1024, 24, 16, embedding_size=1024),
    "deberta-base": _deberta(768, 12, 12),
    "deberta-large": _deberta(1024, 24, 16),
    "deberta-v3-base": _deberta_v3(768, 12, 12),
    "deberta-v3-large": _deberta_v3(1024, 24, 16),
    "distilbert": _distilbert(768, 6, 12),
    "mpnet-base": _mpnet(768, 12, 12),
    "modernbert-base": _modernbert(768, 22, 12, d_ff=1152),
    "modernbert-large": _modernbert(1024, 28, 16, d_ff=2624),
    "t5-base": _t5(768, 12, 12, num_decoder_layers=12),
    "t5-large": _t5(1024, 24, 16, num_decoder_layers=24),
}

_gpt2 = _family("GPT2Config", None)
_smollm2 = _family(
    "LlamaConfig",
    vocab_size=49152,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    tie_word_embeddings=True,
)
_llama3 = _family(  # version 3.2
    "LlamaConfig",
    vocab_size=128256,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters=dict(
        rope_type="llama3",
        rope_theta=5e5,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    tie_word_embeddings=True,
)
_mistral = _family(
    "MistralConfig",
    vocab_size=32000,
    max_position_embeddings=32768,
    sliding_window=4096,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)
_QWEN: dict[str, Any] = dict(rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True)
_qwen2 = _family("Qwen2Config", max_position_embeddings=131072, **_QWEN)  # version 2.5
_qwen3 = _family(
    "Qwen3Config", vocab_size=151936, head_dim=128, max_position_embeddings=40960, **_QWEN
)
_GEMMA: dict[str, Any] = dict(head_dim=256, query_pre_attn_scalar=256)
_gemma2 = _family(
    "Gemma2Config",
    vocab_size=256000,
    sliding_window=4096,
    max_position_embeddings=8192,
    **_GEMMA,
)
_gemma3 = _family(
    "Gemma3TextConfig",
    vocab_size=262144,
    sliding_window=512,
    max_position_embeddings=32768,
    **_GEMMA,
)
_gemma = _family("GemmaConfig", vocab_size=256000, head_dim=256)

DECODER_CONFIGS: dict[str, _ConfigBuilder] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "smollm2-135m": _smollm2(576, 30, 9, 3, 1536),
    "smollm2-360m": _smollm2(960, 32, 15, 5, 2560),
    "smollm2-1.7b": _smollm2(2048, 24, 32, 32, 8192, rope_theta=1.3e5),
    "llama-3.2-1b": _llama3(2048, 16, 32, 8, 8192),
    "llama-3.2-3b": _llama3(3072, 28, 24, 8, 8192),
    "mistral-7b": _mistral(4096, 32, 32, 8, 14336),  # v0.1
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, vocab_size=151936, max_position_embeddings=32768),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, vocab_size=151936),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944, vocab_size=152064, tie_word_embeddings=False),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 8, 6144),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12288, tie_word_embeddings=False),
    "gemma-2b": _gemma(2048, 18, 8, 1, 16384),
    "gemma-2-2b": _gemma2(2304, 26, 8, 4, 9216),
    "gemma-3-1b": _gemma3(1152, 26, 4, 1, 6912),
}
FULL_SCALE_CONFIGS = ENCODER_CONFIGS | DECODER_CONFIGS

FULL_SCALE_HUB_NAMES = {  # name in `FULL_SCALE_CONFIGS` → name on the hub, where they differ
    "bert-base": "google-bert/bert-base-uncased",
    "bert-large": "google-bert/bert-large-uncased",
    "electra-small": "google/electra-small-discriminator",
    "electra-base": "google/electra-base-discriminator",
    "electra-large": "google/electra-large-discriminator",
    "distilbert": "distilbert/distilbert-base-uncased",
    "t5-base": "google-t5/t5-base",
    "t5-large": "google-t5/t5-large",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "modernbert-base": "answerdotai/ModernBERT-base",
    "modernbert-large": "answerdotai/ModernBERT-large",
    **{
        name: f"microsoft/{name}"
        for name in ENCODER_CONFIGS
        if name.startswith(("deberta", "mpnet"))
    },
    **{f"smollm2-{n.lower()}": f"HuggingFaceTB/SmolLM2-{n}" for n in ("135M", "360M", "1.7B")},
    **{f"llama-3.2-{n.lower()}": f"meta-llama/Llama-3.2-{n}" for n in ("1B", "3B")},
    **{f"qwen2.5-{n.lower()}": f"Qwen/Qwen2.5-{n}" for n in ("0.5B", "1.5B", "7B")},
    **{f"qwen3-{n.lower()}": f"Qwen/Qwen3-{n}-Base" for n in ("0.6B", "1.7B", "8B")},
    "gemma-2b": "google/gemma-2b",
    "gemma-2-2b": "google/gemma-2-2b",
    "gemma-3-1b": "google/gemma-3-1b-pt",
}


def build_full_scale_model(
    name: str,  # a key of `FULL_SCALE_CONFIGS`
    weights: str,  # 'random', or 'meta' (no memory)
    attn: str,  # attention implementation: 'sdpa' or 'eager'
    overrides: Mapping[str, Any],  # fields of the config that replace the published values
) -> Any:  # a Hugging Face model
    """Return a published model with random weights (seed 0) or none.

    Raises: UserError if the name, `weights` or a field is unknown.
    """
    if name not in FULL_SCALE_CONFIGS or weights not in ("random", "meta"):
        raise UserError(
            f"load_backbone({name!r}, weights={weights!r}): weights must be None, 'random' or "
            "'meta', and the last two need one of these names: "
            f"{', '.join(FULL_SCALE_CONFIGS)}."
        )
    config = FULL_SCALE_CONFIGS[name]()
    unknown = [field for field in overrides if not hasattr(config, field)]
    if unknown:
        raise UserError(
            f"load_backbone({name!r}): a {config.model_type} config has no {unknown[0]!r}. Its "
            "sizes are hidden_size, num_hidden_layers, num_attention_heads, vocab_size and "
            "max_position_embeddings."
        )
    config.update(overrides)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        config.layer_types = layer_types[: config.num_hidden_layers]
    if (config.pad_token_id or 0) >= config.vocab_size:
        config.pad_token_id = 0  # the vocabulary is smaller than the published one
    with forked_random_numbers(0, []), torch.device("meta" if weights == "meta" else "cpu"):
        return build_hf_model(config, attn)

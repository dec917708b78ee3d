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

_ConfigBuilder = Callable[[], Any]  # function that returns a Hugging Face config


def _make_config(config_class: str, **fields: Any) -> Any:
    """Return a config of the transformers class with this name."""
    import transformers

    return getattr(transformers, config_class)(**fields)


def _describe_model(
    config_class: str,  # name of the class in transformers
    d: int,  # width
    n_layers: int,
    n_heads: int,
    **fields: Any,  # other fields of the config
) -> _ConfigBuilder:
    """Return the function that returns the config of a model."""
    # every class takes these names, whatever its own names are
    sizes = dict(hidden_size=d, num_hidden_layers=n_layers, num_attention_heads=n_heads)
    return partial(_make_config, config_class, **sizes, **fields)


_ROBERTA: dict[str, Any] = dict(
    vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
)

ENCODER_CONFIGS: dict[str, _ConfigBuilder] = {
    "bert-base": _describe_model("BertConfig", 768, 12, 12, intermediate_size=3072),
    "bert-large": _describe_model("BertConfig", 1024, 24, 16, intermediate_size=4096),
    "roberta-base": _describe_model(
        "RobertaConfig", 768, 12, 12, intermediate_size=3072, **_ROBERTA
    ),
    "roberta-large": _describe_model(
        "RobertaConfig", 1024, 24, 16, intermediate_size=4096, **_ROBERTA
    ),
    "deberta-large": _describe_model(
        "DebertaConfig",
        1024,
        24,
        16,
        intermediate_size=4096,
        vocab_size=50265,
        relative_attention=True,
        position_biased_input=False,
        type_vocab_size=0,
        layer_norm_eps=1e-7,
        pos_att_type=["c2p", "p2c"],
    ),
    "distilbert": _describe_model("DistilBertConfig", 768, 6, 12, hidden_dim=3072),
    "mpnet-base": _describe_model(
        "MPNetConfig",
        768,
        12,
        12,
        intermediate_size=3072,
        vocab_size=30527,
        max_position_embeddings=514,
        layer_norm_eps=1e-5,
    ),
}
DECODER_CONFIGS: dict[str, _ConfigBuilder] = {
    "gpt2": _describe_model("GPT2Config", 768, 12, 12),
    "gpt2-medium": _describe_model("GPT2Config", 1024, 24, 16),
    "gpt2-large": _describe_model("GPT2Config", 1280, 36, 20),
    "gpt2-xl": _describe_model("GPT2Config", 1600, 48, 25),
    "gemma-2b": _describe_model(
        "GemmaConfig",
        2048,
        18,
        8,
        num_key_value_heads=1,
        intermediate_size=16384,
        vocab_size=256000,
        head_dim=256,
    ),
}
FULL_SCALE_CONFIGS = ENCODER_CONFIGS | DECODER_CONFIGS

FULL_SCALE_HUB_NAMES = {  # name in `FULL_SCALE_CONFIGS` → name on the hub, where they differ
    "bert-base": "google-bert/bert-base-uncased",
    "bert-large": "google-bert/bert-large-uncased",
    "deberta-large": "microsoft/deberta-large",
    "distilbert": "distilbert/distilbert-base-uncased",
    "mpnet-base": "microsoft/mpnet-base",
    "gemma-2b": "google/gemma-2b",
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
            f"weights={weights!r} of backbone {name!r} must be None, 'random' or 'meta', and the "
            f"last two need one of {', '.join(FULL_SCALE_CONFIGS)}."
        )
    config = FULL_SCALE_CONFIGS[name]()
    unknown = [field for field in overrides if not hasattr(config, field)]
    if unknown:
        raise UserError(
            f"{name!r} ({config.model_type}) has no {unknown[0]!r}; its sizes are hidden_size, "
            "num_hidden_layers, num_attention_heads, vocab_size and max_position_embeddings."
        )
    config.update(overrides)
    if (config.pad_token_id or 0) >= config.vocab_size:
        config.pad_token_id = 0  # the vocabulary is smaller than the published one
    with forked_random_numbers(0, []), torch.device("meta" if weights == "meta" else "cpu"):
        return build_hf_model(config, attn)

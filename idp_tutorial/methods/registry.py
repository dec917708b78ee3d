"""The registry `METHODS`: the 26 methods of three papers and their baselines, one row each.

The course and the notebooks of this package build prompt sources and plans. The registry gives
each published method a name and one row with everything that other packages need to know: its
learning rates, where its vectors enter, whether it has a layer to choose. All methods share the
head, the training loop and the selection of checkpoints.

The two extremes: train only the head, or all weights.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.steps import Step
from idp_tutorial.methods.adapters import add_adapters, add_compacters, add_lora
from idp_tutorial.methods.backbone_edits import train_biases, unfreeze
from idp_tutorial.methods.glove import load_glove_encoder
from idp_tutorial.methods.id_spam import AttentionPromptGenerator
from idp_tutorial.methods.idpg import PromptGenerator, idpg_plan
from idp_tutorial.methods.idpg_multilayer import multilayer_idpg_plan
from idp_tutorial.methods.lpt import NaivePromptGenerator, PoolingPromptGenerator, lpt_plan
from idp_tutorial.methods.method import Method
from idp_tutorial.methods.p_tuning import ReparameterizedPrompt
from idp_tutorial.methods.p_tuning_v2 import deep_prompt_plan
from idp_tutorial.methods.prompt_tuning import SoftPrompt, prompt_plan
from idp_tutorial.methods.sentence_vectors import resolve_dropouts, resolve_sentence_encoder
from idp_tutorial.methods.smop_dept import DecomposedPrompt, RoutedPrompt, dept_plan
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.config import RunConfig

__all__ = [
    "METHODS",
    "build_head_only",
    "build_fine_tuning",
    "build_prompt_tuning",
    "build_p_tuning",
    "build_p_tuning_v2",
    "build_dept",
    "build_lpt",
    "build_smop",
    "make_s_idpg_builder",
    "make_m_idpg_builder",
    "build_m_idpg_glove",
    "build_lpt_npg",
    "make_lpt_ppg_builder",
    "make_id_spam_builder",
    "build_efl",
    "build_adapter",
    "build_adapterdrop",
    "build_compacter",
    "build_lora",
    "build_lora_all",
    "build_bitfit",
    "late_prompt_methods",
    "methods_with_head",
]


_Plan: TypeAlias = dict[int, Step]


def _bottleneck(cfg: RunConfig) -> int:
    if cfg.bottleneck is None:  # `Method` replaces it by the method's default
        raise UserError(
            f"method {cfg.method!r} needs a bottleneck: pass bottleneck=..., such as 64."
        )
    return cfg.bottleneck


def _middle_layer(bb: Backbone) -> int:
    return bb.n_layers // 2


def build_head_only(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Return an empty plan, so that only the head is trained."""
    return {}


def build_fine_tuning(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Unfreeze all weights of the backbone, and return an empty plan."""
    unfreeze(bb, cfg.head == "verbalizer", reversible=False)
    return {}


def _prompt_width(bb: Backbone, cfg: RunConfig) -> int:
    # word vectors may be narrower than hidden states (ELECTRA)
    return bb.d if cfg.position is None else bb.d_embedding


def _require_equal_widths(bb: Backbone, cfg: RunConfig) -> None:
    if bb.d_embedding != bb.d:
        raise UserError(
            f"{cfg.method!r} needs word vectors and hidden states of the same width, but backbone "
            f"{bb.name!r} has word vectors of width {bb.d_embedding} and hidden states of width "
            f"{bb.d}: use a larger model of the family."
        )


def build_prompt_tuning(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Return the plan of prompt tuning: a static prompt among the word vectors."""
    return prompt_plan(
        bb,
        SoftPrompt(cfg.prompt_length, _prompt_width(bb, cfg), cfg.init_std or 0.02),
        cfg.position,
    )


def build_p_tuning(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Return the plan of P-tuning: a static prompt that a small network parameterises."""
    return prompt_plan(
        bb,
        ReparameterizedPrompt(cfg.prompt_length, _prompt_width(bb, cfg), _bottleneck(cfg)),
        cfg.position,
    )


def build_p_tuning_v2(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Return the plan of P-tuning v2: a static prompt in every layer."""
    return deep_prompt_plan(
        bb, cfg.prompt_length, cfg.insertion, dropout=cfg.prompt_dropout, std=cfg.init_std or 0.02
    )


def build_dept(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Return the plan of DePT: a short prompt and a low-rank update of the word vectors."""
    return dept_plan(
        bb,
        DecomposedPrompt(bb.d_embedding, cfg.prompt_length, min(cfg.max_len, bb.max_tokens)),
        cfg.position,
    )


def build_lpt(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Return the plan of late prompt tuning with a static prompt."""
    return lpt_plan(bb, SoftPrompt(cfg.prompt_length, bb.d, cfg.init_std or 1.0), cfg.layer)


def build_smop(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Return the plan of SMoP: one of several prompts, chosen by a router."""
    return prompt_plan(bb, RoutedPrompt(_prompt_width(bb, cfg), cfg.prompt_length), cfg.position)


def make_s_idpg_builder(
    kind: str,  # 'dnn' or 'phm'
    **generator_options: Any,  # arguments of `PromptGenerator`, such as `residual` or `shared_A`
) -> Callable[[Backbone, RunConfig], _Plan]:  # `build_plan` of a `Method`
    """Return the builder of S-IDPG: one generated prompt among the word vectors."""

    def build(bb: Backbone, cfg: RunConfig) -> _Plan:
        width = _prompt_width(bb, cfg)
        bottleneck = _bottleneck(cfg)
        n = math.gcd(16, bb.d, width, bottleneck)
        sentence_dropout, generator_dropout = resolve_dropouts(cfg)
        variant: dict[str, Any] = dict(
            residual="paper" if cfg.generator in ("residual", "both") else None,
            layer_norm=cfg.generator in ("layer-norm", "both"),
        )
        generator = PromptGenerator(
            bb.d,
            width,
            cfg.prompt_length,
            bottleneck,
            kind,
            n,
            dropout=generator_dropout,
            **variant | generator_options,
        )
        return idpg_plan(
            bb,
            generator,
            cfg.position,
            resolve_sentence_encoder(cfg),
            sentence_dropout,
            cfg.standardise,
        )

    return build


def make_m_idpg_builder(
    kind: str,  # 'dnn' or 'phm'
) -> Callable[[Backbone, RunConfig], _Plan]:  # `build_plan` of a `Method`
    """Return the builder of M-IDPG: a generated prompt in every layer."""

    def build(bb: Backbone, cfg: RunConfig) -> _Plan:
        _require_equal_widths(bb, cfg)
        bottleneck = _bottleneck(cfg)
        sentence_dropout, generator_dropout = resolve_dropouts(cfg)
        return multilayer_idpg_plan(
            bb,
            cfg.prompt_length,
            bottleneck,
            position=cfg.position,
            encoder=resolve_sentence_encoder(cfg),
            dropout=sentence_dropout,
            generator_dropout=generator_dropout,
            standardise=cfg.standardise,
            kind=kind,
            n=math.gcd(16, bb.d, bottleneck),
            parameter_sharing=cfg.parameter_sharing,
            generator_input=cfg.generator_input,
            insertion=cfg.insertion or "add",
        )

    return build


def build_m_idpg_glove(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Return the plan of M-IDPG whose generators read the mean GloVe vector of the words."""
    _require_equal_widths(bb, cfg)
    bottleneck = _bottleneck(cfg)
    glove = load_glove_encoder(cfg.glove, bb.tokenizer, noise=cfg.glove_noise)
    sentence_dropout, generator_dropout = resolve_dropouts(cfg)
    return multilayer_idpg_plan(
        bb,
        cfg.prompt_length,
        bottleneck,
        generator_input="layer0",
        position=cfg.position,
        encoder=glove,
        d_in=glove.d,
        kind="phm",
        dropout=sentence_dropout,
        generator_dropout=generator_dropout,
        standardise=cfg.standardise,
        n=math.gcd(4, bb.d, glove.d, bottleneck),
    )


def build_lpt_npg(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Return the plan of LPT with the naive prompt generator (NPG)."""
    source = NaivePromptGenerator(
        bb.d, cfg.prompt_length, _bottleneck(cfg), cfg.prompt_dropout, cfg.standardise
    )
    return lpt_plan(bb, source, cfg.layer)


def make_lpt_ppg_builder(
    pool: str,  # 'mean' (APPG) or 'max' (MPPG)
) -> Callable[[Backbone, RunConfig], _Plan]:  # `build_plan` of a `Method`
    """Return the builder of LPT with a pooling prompt generator (APPG, MPPG)."""

    def build(bb: Backbone, cfg: RunConfig) -> _Plan:
        source = PoolingPromptGenerator(
            bb.d,
            cfg.prompt_length,
            _bottleneck(cfg),
            pool,
            cfg.prompt_dropout,
            cfg.exclude_last_token,
        )
        return lpt_plan(bb, source, cfg.layer)

    return build


def make_id_spam_builder(
    pool: str,  # 'attention', or 'mean' for the ablation
) -> Callable[[Backbone, RunConfig], _Plan]:  # `build_plan` of a `Method`
    """Return the builder of ID-SPAM or of its ablation with mean pooling."""

    def build(bb: Backbone, cfg: RunConfig) -> _Plan:
        _require_equal_widths(bb, cfg)
        source = AttentionPromptGenerator(
            bb.d,
            cfg.prompt_length,
            _bottleneck(cfg),
            pool,
            attention_input=cfg.attention_input,
            prompt_relu=cfg.prompt_relu,
            dropout=cfg.prompt_dropout,
        )
        return lpt_plan(bb, source, cfg.layer)

    return build


def build_efl(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Unfreeze all weights for EFL, whose `EntailmentModel` is built by `build_model`.

    Raises: `UserError` for a verbalizer, since EFL has an entailment head.
    """
    if cfg.head == "verbalizer":
        raise UserError(
            "'efl' has an entailment head and cannot use a verbalizer: use head='classification', "
            "or leave head out."
        )
    return build_fine_tuning(bb, cfg)


def build_adapter(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Add Houlsby adapters to every layer."""
    add_adapters(bb, _bottleneck(cfg), dropout=cfg.prompt_dropout)
    return {}


def build_adapterdrop(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Add adapters to the layers from `cfg.layer` on."""
    first_layer = _middle_layer(bb) if cfg.layer is None else cfg.layer
    add_adapters(bb, _bottleneck(cfg), first_layer, dropout=cfg.prompt_dropout)
    return {}


def build_compacter(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Add Compacter's adapters to every layer."""
    bottleneck = _bottleneck(cfg)
    add_compacters(bb, bottleneck, math.gcd(4, bb.d, bottleneck), dropout=cfg.prompt_dropout)
    return {}


def build_lora(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Add LoRA to the query and value matrices (LPT: r=8, α=16; on GPT-2 r=4, α=32)."""
    add_lora(bb, _bottleneck(cfg), 32 if bb.causal else None)
    return {}


def build_lora_all(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Add LoRA to all matrices (ID-SPAM: rank 16)."""
    add_lora(
        bb,
        _bottleneck(cfg),
        target_modules="all",
        include_lm_head=cfg.head == "verbalizer" and not bb.causal,
    )
    return {}


def build_bitfit(bb: Backbone, cfg: RunConfig) -> _Plan:
    """Train the biases of the backbone."""
    train_biases(bb, cfg.head == "verbalizer")
    return {}


_PROMPT_LEARNING_RATES = (1e-2, 3e-2, 1e-1)
_NETWORK_LEARNING_RATES = (1.5e-3, 5e-3, 1.5e-2)
_PHM_LEARNING_RATES = (3e-3, 1e-2, 3e-2)
_FINE_TUNING_LEARNING_RATES = (5e-5, 1.5e-4, 5e-4)


def _default_lora_rank(bb: Backbone) -> int:
    return 4 if bb.causal else 8


# name → builder, learning rates, insertion point, kind, defaults of options, reference
METHODS: dict[str, Method] = {
    "head-only": Method(
        build_head_only,
        _PROMPT_LEARNING_RATES,
        "nowhere",
        "head",
        {},
        "this implementation: the head alone",
    ),
    "prompt-tuning": Method(
        build_prompt_tuning, _PROMPT_LEARNING_RATES, "input", "static", {}, "Lester et al. 2021"
    ),
    "prompt-tuning-134": Method(
        build_prompt_tuning,
        _PROMPT_LEARNING_RATES,
        "input",
        "static",
        dict(prompt_length=134),
        "IDPG, Table 1",
    ),
    "p-tuning": Method(
        build_p_tuning,
        (5e-3, 1.5e-2, 5e-2),
        "input",
        "static",
        dict(bottleneck=128),
        "Liu et al. 2021",
    ),
    "p-tuning-v2": Method(
        build_p_tuning_v2, _PROMPT_LEARNING_RATES, "keys", "static", {}, "Liu et al. 2021a"
    ),
    "s-idpg-dnn": Method(
        make_s_idpg_builder("dnn"),
        _NETWORK_LEARNING_RATES,
        "input",
        "second pass",
        dict(bottleneck=256),
        "IDPG (Wu et al. 2022), §3.1",
    ),
    "s-idpg-phm": Method(
        make_s_idpg_builder("phm"),
        _PHM_LEARNING_RATES,
        "input",
        "second pass",
        dict(bottleneck=256),
        "IDPG, Eq. 4",
    ),
    "m-idpg-dnn": Method(
        make_m_idpg_builder("dnn"),
        _NETWORK_LEARNING_RATES,
        "layers",
        "second pass",
        dict(bottleneck=16),
        "IDPG, §3.2.2",
    ),
    # with 3e-2 one seed in three did not learn
    "m-idpg-phm": Method(
        make_m_idpg_builder("phm"),
        (1e-3, 3e-3, 1e-2),
        "layers",
        "second pass",
        dict(bottleneck=16),
        "IDPG, §3.2.2",
    ),
    "m-idpg-phm-glove": Method(
        build_m_idpg_glove,
        _PHM_LEARNING_RATES,
        "layers",
        "generated",
        dict(bottleneck=16),
        "IDPG, Eq. 5",
    ),
    "lpt": Method(
        build_lpt, _PROMPT_LEARNING_RATES, "middle", "static", {}, "LPT (Liu et al. 2022)"
    ),
    "lpt-npg": Method(
        build_lpt_npg,
        _NETWORK_LEARNING_RATES,
        "middle",
        "generated",
        dict(bottleneck=128),
        "LPT, §5.1",
    ),
    "lpt-mppg": Method(
        make_lpt_ppg_builder("max"),
        _NETWORK_LEARNING_RATES,
        "middle",
        "generated",
        dict(bottleneck=128),
        "LPT, Eq. 3–4",
    ),
    "lpt-appg": Method(
        make_lpt_ppg_builder("mean"),
        _NETWORK_LEARNING_RATES,
        "middle",
        "generated",
        dict(bottleneck=128),
        "LPT, Eq. 3–4",
    ),
    "id-spam": Method(
        make_id_spam_builder("attention"),
        _NETWORK_LEARNING_RATES,
        "middle",
        "generated",
        dict(bottleneck=64),
        "Muppidi et al. 2025, Eq. 1–2",
    ),
    "id-spam-mean": Method(
        make_id_spam_builder("mean"),
        _NETWORK_LEARNING_RATES,
        "middle",
        "generated",
        dict(bottleneck=64),
        "ID-SPAM, Table 3",
    ),
    "smop": Method(
        build_smop, _PROMPT_LEARNING_RATES, "input", "generated", {}, "Choi et al. 2023"
    ),
    "dept": Method(
        build_dept, _PROMPT_LEARNING_RATES, "input", "static", {}, "Shi and Lipani 2024"
    ),
    "bitfit": Method(
        build_bitfit, _NETWORK_LEARNING_RATES, "weights", "weights", {}, "Ben Zaken et al. 2022"
    ),
    "lora": Method(
        build_lora,
        _NETWORK_LEARNING_RATES,
        "weights",
        "weights",
        dict(bottleneck=_default_lora_rank),
        "Hu et al. 2022, as LPT runs it",
    ),
    "lora-all": Method(
        build_lora_all,
        (5e-4, 1.5e-3, 5e-3),
        "weights",
        "weights",
        dict(bottleneck=16),
        "ID-SPAM, Table 12",
    ),
    "adapter": Method(
        build_adapter,
        _NETWORK_LEARNING_RATES,
        "weights",
        "weights",
        dict(bottleneck=16),
        "Houlsby et al. 2019",
    ),
    "adapterdrop": Method(
        build_adapterdrop,
        _NETWORK_LEARNING_RATES,
        "upper weights",
        "weights",
        dict(bottleneck=16, layer=_middle_layer),
        "Rücklé et al. 2021",
    ),
    "compacter": Method(
        build_compacter,
        _PHM_LEARNING_RATES,
        "weights",
        "weights",
        dict(bottleneck=16),
        "Karimi Mahabadi et al. 2021",
    ),
    "efl": Method(
        build_efl, _FINE_TUNING_LEARNING_RATES, "weights", "entailment", {}, "Wang et al. 2021"
    ),
    "fine-tuning": Method(
        build_fine_tuning,
        _FINE_TUNING_LEARNING_RATES,
        "weights",
        "all weights",
        {},
        "this implementation: all weights are trained",
    ),
}


def late_prompt_methods() -> list[str]:
    """Return the names of the methods whose prompt enters between two layers."""
    return [name for name, m in METHODS.items() if m.insertion_point == "middle"]


def methods_with_head(
    head: str,  # 'classification' or 'verbalizer'
) -> list[str]:
    """Return the names of the methods that can be used with a head (EFL: classification)."""
    return [name for name, m in METHODS.items() if head != "verbalizer" or m.kind != "entailment"]

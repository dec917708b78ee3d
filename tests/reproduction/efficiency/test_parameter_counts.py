"""Parameter counts: formulas, modules, other libraries, and the counts in the papers."""

from decimal import ROUND_CEILING

import pandas as pd
import pytest
import torch
from peft import LoraConfig, get_peft_model
from small import refused
from torch import nn

from idp_tutorial.assembly.config import RunConfig, RunOptions
from idp_tutorial.backbones.load import FULL_SCALE_CONFIGS
from idp_tutorial.reproduction.efficiency.parameter_counts import (
    COUNT_ONLY_CONFIGS,
    count_all_parameters,
    count_lora_parameters,
    count_method_parameters,
    format_count,
    meta_model,
)


@pytest.mark.parametrize(
    "n,like,unit,want",
    [
        (107_776, "105K", 1024, "105K"),
        (107_776, "105K", 1000, "108K"),
        (152_832, "149.25K", 1024, "149.25K"),
        (1_622_784, "1.55M", 1024, "1.55M"),
        (1_622_784, "1.6M", 1000, "1.6M"),
        (355_359_744, "355M", 1000, "355M"),
        (3_495_312, "1,234", 1, "3,495,312"),
        (20_500, "21K", 1000, "21K"),
        (19_500, "9K", 1000, "20K"),
        (20_499, "1K", 1000, "20K"),
        (3_044_992, "3.0M", 1000, "3.0M"),
        (999_950_000, "1.0M", 1000, "1000.0M"),
        (7, "5", 1000, "7"),
    ],
)
def test_format_count(n, like, unit, want):
    assert format_count(n, like, unit) == want


def test_format_count_uses_the_rounding_mode():
    assert (
        format_count(20_001, "1K") == "20K"
        and format_count(20_001, "1K", rounding=ROUND_CEILING) == "21K"
    )


@pytest.mark.parametrize("like", ["", "many", "21G", "K", "1.5.2M", "21 K"])
def test_format_count_refuses_other_templates(like):
    with pytest.raises(ValueError) as e:
        format_count(1, like)
    assert repr(like) in str(e.value) and "'105K'" in str(e.value)


SIZES = {
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "deberta-large": 406_264_921,
    "gemma-2b": 2_506_172_416,
}


@pytest.mark.parametrize("name", SIZES)
def test_published_models(name):
    m = meta_model(name)
    assert count_all_parameters(m) == SIZES[name] and all(p.is_meta for p in m.parameters())


def test_kinds_of_model():
    assert (
        count_all_parameters(meta_model("roberta-large", "encoder")) == 355_359_744
        and count_all_parameters(meta_model("roberta-large", "classifier")) == 355_361_794
        and count_all_parameters(meta_model("deberta-large", "classifier")) == 406_214_658
    )
    assert (
        count_all_parameters(meta_model("flan-t5-xl", "classifier")) == 2_823_647_266 - 35_487_776
        and count_all_parameters(meta_model("gpt2-large", "classifier")) == 774_032_640
    )
    assert set(SIZES) <= set(FULL_SCALE_CONFIGS) and [*COUNT_ONLY_CONFIGS] == ["flan-t5-xl"]


@pytest.mark.parametrize(
    "args,words",
    [
        (
            ("roberta-larg",),
            ["unknown configuration 'roberta-larg'", "'roberta-large'", "flan-t5-xl"],
        ),
        (("gpt2", "head"), ["kind of model 'head'", "encoder"]),
    ],
)
def test_meta_model_refuses_unknown_names(args, words):
    refused(lambda: meta_model(*args), *words)


def test_tied_tensors_count_once():
    a = nn.Linear(3, 4)
    b = nn.Linear(3, 4)
    b.weight = a.weight
    assert count_all_parameters(nn.ModuleList([a, b])) == 12 + 4 + 4


ALL = [
    ("roberta-base", "lm", "(?!lm_head.decoder).*", "all-linear", 16),
    ("roberta-base", "lm", ".*", ["query", "key", "value", "dense", "decoder"], 16),
    ("roberta-base", "lm", r".*\.(query|value)", ["query", "value"], 8),
    ("gpt2", "lm", "(?!lm_head).*", "all-linear", 16),
    ("gpt2", "lm", r".*\.c_attn", ["c_attn"], 4),
    ("gemma-2b", "lm", "(?!lm_head).*", "all-linear", 16),
    ("flan-t5-xl", "classifier", ".*", "all-linear", 16),
]


@pytest.mark.parametrize(
    "name,kind,pattern,target_modules,r", ALL, ids=[f"{o[0]} {o[3]}" for o in ALL]
)
@pytest.mark.filterwarnings("ignore")
def test_lora_counts_agree_with_peft(name, kind, pattern, target_modules, r):
    model = meta_model(name, kind)
    n = count_lora_parameters(model, r, pattern)
    with torch.device("meta"):
        wrapped = get_peft_model(
            model, LoraConfig(r=r, target_modules=target_modules, init_lora_weights=False)
        )
    assert n == sum(p.numel() for p in wrapped.parameters() if p.requires_grad)


def test_lora_needs_a_layer():
    with pytest.raises(ValueError) as e:
        count_lora_parameters(meta_model("gpt2"), 4, "c_atn")
    assert "'c_atn'" in str(e.value) and "transformer.h.0.attn.c_attn" in str(e.value)


BY_HAND = {
    "head-only": lambda d, L, t: 0,
    "prompt-tuning": lambda d, L, t: t * d,
    "prompt-tuning-134": lambda d, L, t: 134 * d,
    "lpt": lambda d, L, t: t * d,
    "lpt-npg": lambda d, L, t: 128 * d + 128 + t * d * 129,
    "lpt-appg": lambda d, L, t: 128 * d + 128 + 129 * d,
    "lpt-mppg": lambda d, L, t: 128 * d + 128 + 129 * d,
    "s-idpg-dnn": lambda d, L, t: 256 * (d + 1) + t * d * 257,
    "s-idpg-phm": lambda d, L, t: 16 * d + 256 + 16 * t * d + t * d + 2 * 16**3,
    "m-idpg-phm": lambda d, L, t: d + 16 + t * d + t * d * L + 2 * 16**3,
    "m-idpg-dnn": lambda d, L, t: 16 * d + 16 + 16 * t * d + t * d * L,
    "m-idpg-phm-glove": lambda d, L, t: 300 * 4 + 16 + 16 * t * d // 4 + t * d * L + 2 * 4**3,
    "id-spam": lambda d, L, t: 3 * d * d + 64 * d * (1 + t),
    "id-spam-mean": lambda d, L, t: 64 * d * (1 + t),
}


WIDTHS = {"roberta-base": (768, 12), "gpt2-medium": (1024, 24)}


@pytest.mark.grid
@pytest.mark.parametrize("name", WIDTHS)
def test_prompts_by_hand(name):
    d, L = WIDTHS[name]
    n = count_method_parameters(name, RunConfig(prompt_length=7), list(BY_HAND)).set_index("method")
    assert (
        n.prompt.to_dict() == {m: f(d, L, 7) for m, f in BY_HAND.items()}
        and set(n["head"]) == {2 * d + 2}
        and set(n.backbone) == {0}
        and n.refused.isna().all()
    )
    assert (n.trained == n.prompt + n["head"]).all() and n.percent["lpt"] == pytest.approx(
        100 * (7 * d + 2 * d + 2) / SIZES[name]
    )


def test_methods_are_counted_one_by_one():
    methods = ["fine-tuning", "lora", "p-tuning-v2", "lpt", "head-only"]
    n = count_method_parameters("roberta-large", methods=methods).set_index("method")
    assert list(n.index) == methods and (n.trained > 0).all() and n.refused.isna().all()
    assert (
        n.loc["fine-tuning", ["prompt", "head", "backbone"]].tolist() == [0, 2050, 354_310_144]
        and n.loc["p-tuning-v2", "prompt"] == 10 * 24 * 2 * 1024
    )
    # a method that changes the backbone leaves the next one's alone
    assert (n.backbone > 0).sum() >= 1 and n.backbone["lpt"] == n.backbone["head-only"] == 0


def test_verbalizer_and_bottleneck():
    n = count_method_parameters(
        "roberta-base",
        RunOptions(head="verbalizer", bottleneck=24, prompt_length=3),
        ["lpt-npg", "lpt"],
    ).set_index("method")
    assert n["head"].tolist() == [0, 0] and n.prompt.tolist() == [24 * 769 + 3 * 768 * 25, 3 * 768]


def test_a_small_backbone_with_weights():
    n = count_method_parameters("tiny", methods=["prompt-tuning", "fine-tuning"])
    assert n.prompt[0] > 0 and n.backbone[1] > n.prompt[0] and (n.percent < 101).all()


def test_the_reason_of_a_refused_method_is_in_the_table():
    n = count_method_parameters(
        "roberta-base", RunConfig(position=9), ["lpt", "prompt-tuning"]
    ).set_index("method")
    assert (
        n.refused.notna().to_dict() == {"lpt": False, "prompt-tuning": True}
        and "position must be between 0 and 4" in n.refused["prompt-tuning"]
        and pd.isna(n.prompt["prompt-tuning"])
    )


@pytest.mark.parametrize(
    "kw,words",
    [
        (
            dict(backbone="flan-t5-xl"),
            ["'flan-t5-xl'", "only the size is known", "published_counts()"],
        ),
        (dict(methods=["lpt-ngp"]), ["unknown method 'lpt-ngp'", "'lpt-npg'"]),
        (dict(backbone="roberta-larg"), ["'roberta-larg'", "Did you mean 'roberta-large'"]),
    ],
)
def test_refused_arguments(kw, words):
    refused(lambda: count_method_parameters(**kw), *words)


def test_counting_draws_no_number():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    count_method_parameters("roberta-base", methods=["lpt-npg", "s-idpg-phm"])
    assert torch.equal(torch.rand(3), want)

"""A config refuses what no run can have, and what its method does not have.

Options that no method of a comparison has, or that change nothing, are refused.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small import backbone

from idp_tutorial.assembly.config import (
    RunConfig,
    RunOptions,
    config_for_method,
    methods_with_option,
    recorded_option,
    refuse_unread_options,
)
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.runs.record import make_fingerprint


@pytest.mark.parametrize("name", ALL_METHODS)
def test_a_config_is_rebuilt_from_its_options(name):
    cfg = RunConfig(name, seed=3)
    assert RunConfig(**cfg.to_dict()) == cfg == replace(cfg, steps=cfg.steps)
    assert hash(cfg) == hash(replace(cfg)) and cfg != replace(cfg, seed=4)


def test_replace_changes_options_of_the_method_too():
    cfg = RunConfig("lpt-npg", bottleneck=8)
    assert replace(cfg, seed=1).method_config == cfg.method_config
    other = cfg.with_options(layer=2, glove="unused")
    assert other.method_config.layer == 2 and other.method_config.bottleneck == 8
    assert cfg.with_method("id-spam").method_config.bottleneck == 8
    assert "bottleneck" not in cfg.with_method("lpt").to_dict()


def test_a_method_refuses_options_of_others():
    with pytest.raises(
        ValueError, match="'lpt' has no option 'bottleneck' .its own: .*prompt_length, layer"
    ):
        RunConfig("lpt", bottleneck=3)
    with pytest.raises(ValueError, match="'head-only' has no option 'layer'.*own: none"):
        RunConfig("head-only", layer=3)
    with pytest.raises(ValueError, match="unknown option.*'botleneck': did you mean 'bottleneck'"):
        RunConfig("lpt-npg", botleneck=3)
    with pytest.raises(ValueError, match="unknown option 'stepps': did you mean 'steps'"):
        RunOptions(stepps=3)


def test_a_record_without_an_option_has_the_default_of_its_method():
    assert recorded_option(dict(method="lpt-npg", bottleneck=None), "bottleneck") == 128
    assert recorded_option(dict(method="lpt"), "bottleneck") is None
    assert recorded_option(dict(method="lpt", beta2=0.98), "beta2") == 0.98
    assert recorded_option(dict(method="lpt"), "beta2") == 0.999


@pytest.mark.parametrize("name", [None, 3, ["lpt"], {}], ids=str)
def test_a_method_must_be_a_name(name):
    with pytest.raises(ValueError, match="unknown method"):
        RunConfig(method=name)


def test_a_plan_checks_the_family():
    cfg = RunConfig("lpt-appg", exclude_last_token=True)
    with pytest.raises(ValueError, match="needs a decoder, but backbone .*use a decoder"):
        cfg.method_config.plan(backbone(), cfg)
    assert cfg.method_config.plan(backbone("gpt2"), cfg)


@pytest.mark.parametrize(
    "kw,words",
    [
        (
            dict(prompt_dropout=float("nan")),
            "prompt_dropout must be at least 0, got nan",
        ),
        (dict(batch_size=10**23), "at most"),
        (dict(accumulate=10**7), "at most 1,000,000"),
        (dict(steps=-1), "at least 1"),
        (dict(seed=-1), "seed must be at least 0, got -1"),
        (dict(seed=2**40), "at most"),
        (dict(weight_decay=float("nan")), "weight_decay must be at least 0, got nan"),
        (dict(prompt_length=10**9), "at most"),
    ],
    ids=str,
)
def test_numbers_that_no_run_can_have(kw, words):
    with pytest.raises(ValueError, match=words):
        RunConfig("m-idpg-phm", **kw)


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(eps=-1.0), "eps must be a positive number, got -1.0"),
        (dict(eps=0.0), "eps must be a positive number, got 0.0"),
        (dict(eps=float("inf")), "eps must be at most .*, got inf"),
        (dict(eps=float("nan")), "eps must be a positive number, got nan"),
        (dict(eps="x"), "eps must be a positive number, got 'x'"),
        (dict(eps=None), "eps must be a positive number, got None"),
        (dict(beta2=1.5), "beta2 must be below 1, got 1.5"),
        (dict(beta2=1.0), "beta2 must be below 1, got 1.0"),
        (dict(beta2=-3), "beta2 must be at least 0, got -3"),
        (dict(beta2="x"), "beta2 must be a number, got 'x'"),
        (dict(warmup="x"), "warmup must be a number, got 'x'"),
        (dict(clip="x"), "clip must be a positive number, got 'x'"),
        (dict(clip=float("nan")), "clip must be a positive number, got nan"),
        (dict(weight_decay=None), "weight_decay must be a number, got None"),
        (dict(parameter_sharing="X"), "parameter_sharing must be 'S', 'M' .*got 'X'"),
        (dict(insertion="Q"), "insertion must be .*got 'Q'"),
        (dict(generator_input="z"), "generator_input must be .*got 'z'"),
        (dict(pooling="foo"), "pooling must be .*got 'foo'"),
        (dict(head="bar"), "head must be .*got 'bar'"),
        (dict(loss_vocab="q"), "loss_vocab must be .*got 'q'"),
        (dict(class_weight={"a": True}), "a positive number"),
        (dict(prompt_dropout=True), "prompt_dropout must be a number, got True"),
        (dict(steps=True), "steps must be a whole number, got True"),
        (dict(lr=True), "lr must be a positive number, got True"),
        (dict(standardise="no"), "standardise must be True or False, got 'no'"),
        (dict(two_layer_head=None), "two_layer_head must be True or False, got None"),
        (
            dict(no_decay_on_bias_and_norm=1),
            "no_decay_on_bias_and_norm must be True or False, got 1",
        ),
    ],
    ids=str,
)
def test_what_no_run_could_mean(kw, words):
    """Invalid values are refused by the config, whether its method uses them or not."""
    with pytest.raises(ValueError, match=words):
        RunConfig("m-idpg-phm", **kw)


def test_numbers_of_numpy_are_numbers():
    RunConfig(
        "s-idpg-phm",
        eps=np.float32(1e-6),
        beta2=np.float64(0.98),
        clip=np.float32(2),
        warmup=np.float64(0.1),
        prompt_length=np.int64(3),
        standardise=np.bool_(True),
        prompt_dropout=np.float32(0.2),
    )
    RunConfig(clip=float("inf"), beta2=0, warmup=0)


def test_one_of_several_methods_is_enough():
    refuse_unread_options(["head-only", "lpt"], RunOptions(layer=2))
    for kw in (
        dict(prompt_length=5),
        dict(layer=2),
        dict(bottleneck=8),
        dict(position=1),
        dict(prompt_dropout=0.2),
        dict(standardise=True),
        dict(glove="x"),
    ):
        with pytest.raises(
            ValueError,
            match="has no effect on head-only, fine-tuning: leave it out, or use a method",
        ):
            refuse_unread_options(["head-only", "fine-tuning"], RunOptions(**kw))
    for kw in (dict(template="paper"), dict(loss_vocab="labels")):
        with pytest.raises(ValueError, match="has no effect: it needs head='verbalizer'"):
            refuse_unread_options(["lpt"], RunOptions(**kw))
        refuse_unread_options(["lpt"], RunOptions(head="verbalizer", **kw))


@pytest.mark.parametrize(
    "methods,kw,words",
    [
        ("majority", dict(patience=3), "has no effect on majority"),
        ("majority", dict(lr=0.1), "option lr=0.1 has no effect on majority"),
        ("probe", dict(head_lr=0.1), "has no effect on probe"),
        ("lora", dict(cache="hidden"), "has no effect on"),
        ("lpt", dict(cache="sentence"), "has no effect on"),
        (
            "lpt",
            dict(head="verbalizer", pooling="cls"),
            "has no effect: a verbalizer predicts at its mask",
        ),
        ("majority", dict(cache="both"), "has no effect on"),
    ],
    ids=str,
)
def test_options_of_training_that_would_change_nothing(methods, kw, words):
    with pytest.raises(ValueError, match=words):
        refuse_unread_options([methods], RunOptions(**kw))
    refuse_unread_options([methods, "side-network", "lpt", "s-idpg-phm"], RunOptions(**kw))


@pytest.mark.parametrize(
    "kw",
    [
        dict(two_layer_head=True),
        dict(pooling="last"),
        dict(head_lr=0.5),
        dict(head="verbalizer"),
        dict(head_init="probe"),
        dict(loss_vocab="labels"),
        dict(tune_head_first=True),
    ],
    ids=str,
)
def test_a_task_that_is_answered_with_a_text_has_no_head(kw):
    fields = {k: v for k, v in kw.items() if k != "tune_head_first"}
    training_options = {k: v for k, v in kw.items() if k == "tune_head_first"}
    with pytest.raises(ValueError, match="task 'in-short' is a generation task"):
        refuse_unread_options(["lpt"], RunOptions(task="in-short", **fields), **training_options)


def test_what_a_task_of_texts_reads():
    """The template is used, and `pooling` determines M(x)."""
    refuse_unread_options(["lpt"], RunOptions(task="in-short", template="{s1} ->{mask}"))
    refuse_unread_options(["lpt", "s-idpg-phm"], RunOptions(task="in-short", pooling="cls"))


@pytest.mark.parametrize(
    "methods,kw",
    [
        ("lpt", dict(cache="hidden", layer=0)),
        ("adapterdrop", dict(cache="both", layer=0)),
        ("s-idpg-phm", dict(cache="sentence", sentence_pooling="noisy")),
        ("m-idpg-phm", dict(cache="both", sentence_pooling="noisy")),
    ],
    ids=str,
)
def test_a_cache_of_what_is_not_there(methods, kw):
    with pytest.raises(ValueError, match="has no effect on"):
        refuse_unread_options([methods], RunOptions(**kw))
    for more in (
        [methods, "head-only", "s-idpg-phm"],
        [methods, "side-network"],
        ["lpt", "s-idpg-phm", "probe"],
    ):
        refuse_unread_options(more, RunOptions(**{**kw, "cache": "both"}))
    refuse_unread_options(
        ["lpt", "adapterdrop"], RunOptions(cache="hidden", layer=0)
    )  # which keeps its half


def test_options_of_a_command_that_would_change_nothing():
    with pytest.raises(ValueError, match="option tune=True has no effect on majority, probe"):
        refuse_unread_options(
            ["majority", "probe"], RunOptions(), tune=True, learning_rates=(), save_every=None
        )
    with pytest.raises(ValueError, match="tune_head_first=True has no effect: a verbalizer"):
        refuse_unread_options(["lpt"], RunOptions(head="verbalizer"), tune_head_first=True)
    refuse_unread_options(
        ["lpt"], RunOptions(), tune=True, tune_head_first=True, learning_rates=(0.1,), save_every=0
    )
    with pytest.raises(ValueError, match="'probe'") as e:
        refuse_unread_options(["probe"], RunOptions(), allowed_methods=METHODS)
    assert "side-network" not in str(e.value)  # what the command would refuse next is not offered
    with pytest.raises(
        ValueError, match="head_lr=0.001 and tune_head_first=True exclude each other"
    ):
        refuse_unread_options(["lpt"], RunOptions(head_lr=1e-3), tune_head_first=True)


def test_a_layer_that_is_given_to_several_methods_moves_the_late_prompts():
    late = [m for m in METHODS if METHODS[m].insertion_point == "middle"]
    for m in late:
        both = ["adapterdrop", m, "probe"]
        cfgs = [config_for_method(RunOptions(layer=1), name, both) for name in both]
        assert [cfg.get("layer") for cfg in cfgs] == [None, 1, None]
    alone = config_for_method(RunOptions(layer=1), "adapterdrop", ["adapterdrop", "adapter"])
    assert alone.get("layer") == 1
    for methods, layers in ((["adapterdrop"], [2]), (["lpt", "adapterdrop"], [1, 2])):
        bb = backbone()
        cfg = config_for_method(RunOptions(layer=2), "adapterdrop", methods)
        cfg.method_config.plan(bb, cfg)
        assert _adapters(bb) == layers


def _adapters(bb):  # layers that have them
    return [
        i
        for i, layer in enumerate(bb.layers)
        if any("Adapter" in type(m).__name__ for m in layer.modules())
    ]


def test_an_option_goes_to_the_methods_that_have_it():
    options = RunOptions(bottleneck=8, prompt_length=3, steps=7)
    assert options.with_method("lpt-npg").get("bottleneck") == 8
    assert options.with_method("lpt").get("bottleneck") is None
    assert options.with_method("lpt").get("prompt_length") == 3
    assert options.with_method("head-only").steps == 7
    assert "lpt" not in methods_with_option("bottleneck")
    assert {*methods_with_option("glove")} == {"m-idpg-phm-glove"} < {*ALL_METHODS}


def test_the_config_of_a_method_cannot_be_given_as_an_object():
    cfg = RunConfig("lpt-npg", bottleneck=64)
    with pytest.raises(ValueError, match="unknown option 'method_config'"):
        RunConfig("lpt-npg", method_config=cfg.method_config)
    with pytest.raises(ValueError, match="method_config"):
        replace(cfg, method_config=RunConfig("lpt-npg").method_config)
    assert replace(cfg, steps=5).method_config == cfg.method_config


def test_options_of_methods_are_compared():
    assert RunOptions(bottleneck=64) == RunOptions(bottleneck=64) != RunOptions(bottleneck=128)
    assert hash(RunOptions(bottleneck=64)) == hash(RunOptions(bottleneck=64))
    default = RunConfig("lpt-npg")
    assert default == RunConfig("lpt-npg", bottleneck=default.get("bottleneck"))
    assert default != RunConfig("lpt-npg", bottleneck=default.get("bottleneck") + 1)


def test_a_class_weight_is_a_number():
    with pytest.raises(
        ValueError, match=r"class_weight\['a'\] must be a positive number, got None"
    ):
        RunConfig(class_weight={"a": None})


def test_a_path_becomes_a_string():
    cfg = RunConfig(backbone=Path("tiny"))
    assert cfg.backbone == "tiny" and cfg == RunConfig(backbone="tiny")
    assert make_fingerprint(cfg, {})["backbone"] == "tiny"


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_option_of_a_method_has_a_help_text(method):
    assert all(option.help for option in ALL_METHODS[method].options.values())

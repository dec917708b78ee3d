"""A config refuses what no run can have, and what its method does not have."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from small import backbone

from idp_tutorial.assembly.config import (
    RunConfig,
    RunOptions,
    describe_all_options,
    recorded_option,
)
from idp_tutorial.methods.method import ALL_METHODS, METHODS, LatePromptConfig, register
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.utils.records import config_to_record


@pytest.fixture
def gated(monkeypatch):
    """Register a method with an option of its own, for one test."""
    rows = dict(METHODS)

    @register(
        "gated",
        reference="this test",
        learning_rates=(1e-3, 1e-2, 1e-1),
        insertion_point="middle",
        kind="generated",
    )
    @dataclass(frozen=True, kw_only=True)
    class GatedConfig(LatePromptConfig):
        """Options of a method that is defined here."""

        gate: float = 0.5  # share of the hidden state

    yield GatedConfig
    METHODS.clear()
    METHODS.update(rows)


def test_a_method_from_outside_has_an_option_of_its_own(gated):
    cfg = RunConfig("gated", gate=0.1, layer=2, steps=5)
    assert cfg.method_config == gated(gate=0.1, layer=2)
    assert config_to_record(cfg)["gate"] == 0.1
    assert RunConfig(**cfg.to_dict()) == cfg
    option = describe_all_options()["gate"]
    assert option.help == "share of the hidden state; gated" and option.kind is float
    with pytest.raises(ValueError, match="method 'lpt' has no option 'gate'.*\\(gated\\)"):
        RunConfig("lpt", gate=0.1)
    with pytest.raises(ValueError, match="gate must be a number, got 'x'"):
        RunConfig("gated", gate="x")


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
    with pytest.raises(ValueError, match="'lpt' has no option 'bottleneck'.*prompt_length, layer"):
        RunConfig("lpt", bottleneck=3)
    with pytest.raises(ValueError, match="'head-only' has no option 'layer'.*options are none"):
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


def test_options_of_training_need_no_method():
    cfg = TrainingConfig(steps=6, epochs=2, batch_size=4, eval_every=3)
    assert cfg.resolve_epochs(10).steps == 5 and cfg.run_name == "model"
    assert RunConfig("lpt").run_name == "lpt"


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

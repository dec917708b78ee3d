"""Methods that are registered from outside."""

from dataclasses import dataclass

import pytest
from small import small_task
from small_models import small_backbone

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import (
    RunConfig,
    describe_all_options,
)
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.method_registry import LatePromptConfig, PromptConfig, register
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import config_to_record


@pytest.fixture
def gated(monkeypatch):
    """Register a method with an option of its own, for one test."""
    rows = dict(METHODS)

    @register("gated", reference="this test", learning_rates=(1e-3, 1e-2, 1e-1))
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
    with pytest.raises(ValueError, match="method 'lpt' has no option 'gate'.*such as gated"):
        RunConfig("lpt", gate=0.1)
    with pytest.raises(ValueError, match="gate must be a number, got 'x'"):
        RunConfig("gated", gate="x")


@pytest.mark.parametrize(
    "config_class,learning_rates,message",
    [
        (LatePromptConfig, "1e-3", "learning_rates must be a positive number, got '1'"),
        (LatePromptConfig, (1e-3, -1), "learning_rates must be a positive number, got -1"),
    ],
)
def test_a_method_with_odd_facts_is_not_registered(config_class, learning_rates, message):
    with pytest.raises(UserError, match=message):
        register("odd", learning_rates=learning_rates, reference="this test")(config_class)
    assert "odd" not in METHODS


@pytest.mark.parametrize(
    "facts,message",
    [
        (dict(insertion_point="middle", kind="odd"), "kind of method must be .*, got 'odd'"),
        (dict(insertion_point="odd", kind="static"), "insertion point must be .*, got 'odd'"),
    ],
)
def test_a_method_without_an_insertion_point_and_a_kind_is_not_registered(facts, message):
    with pytest.raises(UserError, match=message):
        register("odd", reference="this test", learning_rates=(1e-3,))(
            type("OddConfig", (PromptConfig,), facts)
        )
    assert "odd" not in METHODS


def test_a_method_may_have_one_learning_rate(monkeypatch):
    monkeypatch.setitem(METHODS, "one-rate", None)
    register("one-rate", learning_rates=(2e-3,), reference="this test")(LatePromptConfig)
    assert METHODS["one-rate"].default_learning_rate == 2e-3


def test_an_option_with_the_name_of_an_option_of_all_runs_is_refused(monkeypatch):
    monkeypatch.setitem(METHODS, "clash", None)

    @register("clash", learning_rates=(1e-3,), reference="this test")
    @dataclass(frozen=True, kw_only=True)
    class ClashConfig(LatePromptConfig):
        """Options of a method whose field `steps` would be confused with that of the run."""

        steps: int = 3  # steps of something else

    with pytest.raises(UserError, match="has an option 'steps', a name that .* rename the field"):
        RunConfig("clash")


@pytest.mark.parametrize(
    "method,options",
    [
        ("id-spam", {}),
        ("m-idpg-phm", {}),
        ("s-idpg-phm", dict(generator="residual")),
        ("s-idpg-phm", dict(generator="both")),
    ],
)
def test_a_method_that_needs_equal_widths_refuses_a_backbone_with_narrow_words(method, options):
    electra = small_backbone("electra")
    assert electra.d_embedding < electra.d
    with pytest.raises(UserError, match="word vectors and hidden states of equal width"):
        build_model(RunConfig(method, **options), electra, small_task())

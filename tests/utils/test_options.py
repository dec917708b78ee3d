"""Options are read from the fields, types and comments of dataclasses."""

import sys
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import pytest

from idp_tutorial.assembly.config import RunConfig, RunOptions, describe_all_options
from idp_tutorial.cli.main import load_command
from idp_tutorial.cli.train import train_command
from idp_tutorial.estimator import PromptClassifier
from idp_tutorial.utils.checks import Range, UserError
from idp_tutorial.utils.options import (
    OPTION_SYNONYMS,
    Probability,
    check_options,
    declared_options,
    find_option,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"


@dataclass(frozen=True, kw_only=True)
class Base:
    option_group: ClassVar[str] = "shapes"

    # width of the layer,
    # in units
    width: Annotated[int, Range(1, 100)] = 8
    name: str  # how it is called
    share: Probability | None = None  # a part of it

    def __post_init__(self):
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    option_group: ClassVar[str] = "colours"

    colour: Literal["red", "blue"] = "red"  # of the surface
    width: Annotated[int, Range(1, 100)] = 16
    is_open: bool = False  # a switch


def test_comments_groups_and_types_are_read():
    options = declared_options(Derived)
    assert [*options] == ["width", "name", "share", "colour", "is_open"]
    assert options["width"].help == "width of the layer, in units"
    assert options["width"].default == 16
    assert options["share"].is_optional and options["share"].kind is float
    assert options["colour"].choices == ("red", "blue")
    assert {name: option.group for name, option in options.items()} == dict(
        width="colours", name="shapes", share="shapes", colour="colours", is_open="colours"
    )


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(width=0), "width must be at least 1, got 0"),
        (dict(width=True), "width must be a whole number, got True"),
        (dict(width=2.5), "width must be a whole number, got 2.5"),
        (dict(share=float("nan")), "share must be at least 0, got nan"),
        (dict(share="x"), "share must be a number, got 'x'"),
        (dict(colour="green"), "colour must be 'red' or 'blue', got 'green'"),
        (dict(is_open=1), "is_open must be True or False, got 1"),
        (dict(name=3), "name must be a text, got 3"),
    ],
)
def test_values_of_another_type_or_range_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Derived(**{"name": "a", **change})


def test_numbers_of_numpy_become_numbers_of_python():
    config = Derived(name="a", width=np.int64(3), share=np.float32(0.5), is_open=np.bool_(True))
    assert [type(v) for v in (config.width, config.share, config.is_open)] == [int, float, bool]


def test_numbers_that_no_float_holds_are_refused_and_fractions_become_floats():
    with pytest.raises(UserError, match="clip must be a number of at most 308 digits"):
        RunOptions(clip=10**400)
    with pytest.raises(UserError, match="steps must be at most"):
        RunOptions(steps=10**400)
    assert RunOptions(clip=Fraction(1, 2)).clip == 0.5


def test_configs_with_dictionaries_are_equal_and_have_a_hash():
    first, second = (RunConfig("lpt", class_weight={"rare": 5}, layer=2) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert first != RunConfig("lpt", class_weight={"rare": 6}, layer=2)


@dataclass
class WithFactory:
    names: list[str] = field(default_factory=lambda: ["a"])  # some names


def test_a_default_that_a_function_makes_is_a_default():
    option = declared_options(WithFactory)["names"]
    assert option.default == ["a"] and option.help == "some names"


def test_a_class_whose_source_cannot_be_parsed_has_no_comments():
    class Indented:
        text = """
no indentation"""
        size: int = 3  # a number

    assert declared_options(dataclass(Indented))["size"].help == ""


def test_the_page_of_options_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.delitem(sys.modules, "options", raising=False)
    import options

    text = (DOCS / "options.md").read_text(encoding="utf-8")
    assert text == options.render(), "run python docs/options.py"
    assert "| `prompt_relu` | true, false |" in text and "### idp predict" in text


# ---- names of other libraries


@pytest.mark.parametrize(
    "name,option",
    [
        ("learning_rate", "lr"),
        ("num_virtual_tokens", "prompt_length"),
        ("num_train_epochs", "epochs"),
        ("max_steps", "steps"),
        ("per_device_train_batch_size", "batch_size"),
        ("gradient_accumulation_steps", "accumulate"),
        ("max_length", "max_len"),
        ("max_seq_length", "max_len"),
        ("model_name_or_path", "backbone"),
        ("random_state", "seed"),
        ("warmup_ratio", "warmup"),
        ("warmup-ratio", "warmup"),
        ("max_grad_norm", "clip"),
        ("r", "bottleneck"),
        ("bf16", "precision"),
        ("stepps", "steps"),
    ],
)
def test_names_of_other_libraries_lead_to_the_option(name, option):
    assert find_option(name, describe_all_options()) == option
    for build in (
        lambda: RunOptions(**{name: 1}),
        lambda: PromptClassifier(**{name: 1}),
        lambda: train_command._run({name: 1}),
    ):
        with pytest.raises(ValueError, match=f"'{option}'"):
            build()


@pytest.mark.parametrize("name", ["gamma", "load_best_model", "verbose", "tokenizer", "n_jobs"])
def test_a_name_without_a_similar_option_gets_no_suggestion(name):
    assert find_option(name, describe_all_options()) is None
    with pytest.raises(ValueError, match=rf"unknown option '{name}'. Known: "):
        RunOptions(**{name: 1})


def test_every_synonym_leads_to_an_option_of_a_command():
    options = {*describe_all_options(), *load_command("train").options()}
    assert {*OPTION_SYNONYMS.values()} <= options


def test_commands_and_files_name_the_option(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("learning_rate: 1e-3\n")
    for argv, words in (
        (["--learning_rate", "1e-3"], "unknown option 'learning_rate': did you mean 'lr'?"),
        (["--train-file", "a.csv"], "did you mean 'table'?"),
        (["--verbose"], "unknown option 'verbose'. Known: "),
        (["a.csv", "b.csv"], "idp train: unrecognized arguments: b.csv"),
        (["--table=a.csv"], "unrecognized arguments: --table=a.csv: give TABLE without its name"),
        (["--table", "a.csv", "--learning_rate", "1e-3"], "'learning_rate': did you mean 'lr'?"),
        (["--config", str(tmp_path / "a.yaml")], "'learning_rate': did you mean 'lr'?"),
    ):
        with pytest.raises(SystemExit) as error:
            train_command.main(argv)
        assert error.value.code == 2 and words in capsys.readouterr().err

"""Options that no method uses are refused.

Every method is built, and its reads are watched.
"""

from dataclasses import replace

import numpy as np
import pytest
from small import backbone, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.controls import CONTROL_METHODS
from idp_tutorial.assembly.options import (
    METHOD_OPTIONS,
    layer_for_method,
    refuse_unread_options,
)
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.utils.config import RunConfig


class Watched(RunConfig):
    """A config that notes which of the options are read."""

    seen = None

    def __getattribute__(self, name):
        if name in METHOD_OPTIONS and Watched.seen is not None:
            Watched.seen.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("name", [*METHODS, *CONTROL_METHODS])
def test_a_method_reads_the_options_that_it_is_said_to_read(name, monkeypatch):
    bb = backbone()
    cfg = RunConfig(name)
    if name in METHODS:
        defaults = {k: v(bb) if callable(v) else v for k, v in METHODS[name].defaults.items()}
        watched = Watched(**vars(replace(cfg, **defaults)))
        Watched.seen = set()
        METHODS[name].build_plan(bb, watched)
    else:
        watched = Watched(**vars(cfg))
        Watched.seen = set()
        build_model(watched, bb, small_task())
    seen, Watched.seen = Watched.seen, None
    if name in METHODS:
        seen -= {"prompt_length"} & {
            *METHODS[name].defaults
        }  # which always holds, whatever is given
    assert seen == {option for option, reads in METHOD_OPTIONS.items() if reads(name)}


@pytest.mark.parametrize("name", [None, 3, ["lpt"], {}], ids=str)
def test_a_method_that_is_no_name(name):
    with pytest.raises(ValueError, match="unknown method"):
        build_model(RunConfig(method=name), backbone(), small_task())
    with pytest.raises(ValueError, match="pooling must be"):
        RunConfig("lpt", prompt_length=2, pooling={})


def test_one_of_several_methods_is_enough():
    refuse_unread_options(["head-only", "lpt"], RunConfig(layer=2))
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
            refuse_unread_options(["head-only", "fine-tuning"], RunConfig(**kw))
    for kw in (dict(template="paper"), dict(loss_vocab="labels")):
        with pytest.raises(ValueError, match="has an effect on a verbalizer only"):
            refuse_unread_options(["lpt"], RunConfig(**kw))
        refuse_unread_options(["lpt"], RunConfig(head="verbalizer", **kw))


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
            "has no effect on a verbalizer, which predicts at its mask",
        ),
        ("majority", dict(cache="both"), "has no effect on"),
    ],
    ids=str,
)
def test_options_of_training_that_would_change_nothing(methods, kw, words):
    with pytest.raises(ValueError, match=words):
        refuse_unread_options([methods], RunConfig(**kw))
    refuse_unread_options([methods, "side-network", "lpt", "s-idpg-phm"], RunConfig(**kw))


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
    with pytest.raises(ValueError, match="task 'in-short' is answered with generated text"):
        refuse_unread_options(["lpt"], RunConfig(task="in-short", **fields), **training_options)


def test_what_a_task_of_texts_reads():
    """The template is used, and `pooling` determines M(x)."""
    refuse_unread_options(["lpt"], RunConfig(task="in-short", template="{s1} ->{mask}"))
    refuse_unread_options(["lpt", "s-idpg-phm"], RunConfig(task="in-short", pooling="cls"))


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
        refuse_unread_options([methods], RunConfig(**kw))
    for more in (
        [methods, "head-only", "s-idpg-phm"],
        [methods, "side-network"],
        ["lpt", "s-idpg-phm", "probe"],
    ):
        refuse_unread_options(more, RunConfig(**{**kw, "cache": "both"}))
    refuse_unread_options(
        ["lpt", "adapterdrop"], RunConfig(cache="hidden", layer=0)
    )  # which keeps its half


def test_pooling_without_the_last_word_is_for_decoders():
    with pytest.raises(
        ValueError, match="exclude_last_token=True needs a decoder, but backbone .*use a decoder"
    ):
        build_model(RunConfig("lpt-appg", exclude_last_token=True), backbone(), small_task())
    build_model(RunConfig("lpt-appg", exclude_last_token=True), backbone("gpt2"), small_task())


def test_options_of_a_command_that_would_change_nothing():
    with pytest.raises(ValueError, match="option tune=True has no effect on majority, probe"):
        refuse_unread_options(
            ["majority", "probe"], RunConfig(), tune=True, learning_rates=(), save_every=None
        )
    with pytest.raises(ValueError, match="tune_head_first=True has no effect on a verbalizer"):
        refuse_unread_options(["lpt"], RunConfig(head="verbalizer"), tune_head_first=True)
    refuse_unread_options(
        ["lpt"], RunConfig(), tune=True, tune_head_first=True, learning_rates=(0.1,), save_every=0
    )
    with pytest.raises(ValueError, match="'probe'") as e:
        refuse_unread_options(["probe"], RunConfig(), allowed_methods=METHODS)
    assert "side-network" not in str(e.value)  # what the command would refuse next is not offered
    with pytest.raises(
        ValueError, match="head_lr=0.001 and tune_head_first=True exclude each other"
    ):
        refuse_unread_options(["lpt"], RunConfig(head_lr=1e-3), tune_head_first=True)


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(prompt_dropout=float("nan")), "prompt_dropout must be at least 0, got nan"),
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
        RunConfig(**kw)


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(eps=-1.0), "eps must be at least 0, got -1.0"),
        (dict(eps=0.0), "eps must be a positive number, got 0.0"),
        (dict(eps=float("inf")), "eps must be a positive number, got inf"),
        (dict(eps=float("nan")), "eps must be at least 0, got nan"),
        (dict(eps="x"), "eps must be a number, got 'x'"),
        (dict(eps=None), "eps must be a number, got None"),
        (dict(beta2=1.5), "beta2, AdamW.*, must be at least 0 and below 1, got 1.5"),
        (dict(beta2=1.0), "beta2, .* below 1, got 1.0"),
        (dict(beta2=-3), "beta2 must be at least 0, got -3"),
        (dict(beta2="x"), "beta2 must be a number, got 'x'"),
        (dict(warmup="x"), "warmup must be a number, got 'x'"),
        (dict(clip="x"), "clip must be a number, got 'x'"),
        (dict(clip=float("nan")), "clip must be at least 0, got nan"),
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
        RunConfig(**kw)


def test_numbers_of_numpy_are_numbers():
    RunConfig(
        eps=np.float32(1e-6),
        beta2=np.float64(0.98),
        clip=np.float32(2),
        warmup=np.float64(0.1),
        prompt_length=np.int64(3),
        standardise=np.bool_(True),
        prompt_dropout=np.float32(0.2),
    )
    RunConfig(clip=float("inf"), beta2=0, warmup=0)


def test_the_message_for_a_misspelt_option_has_the_closest_name():
    with pytest.raises(ValueError, match="unknown option 'tun': did you mean 'tune'"):
        refuse_unread_options(["lpt"], RunConfig(), tun=True)


def test_a_layer_that_is_given_to_several_methods_moves_the_late_prompts():
    late = [m for m in METHODS if METHODS[m].insertion_point == "middle"]
    for m in late:
        both = ["adapterdrop", m, "probe"]
        assert [layer_for_method(name, both, 1) for name in both] == [None, 1, 1]
    assert layer_for_method("adapterdrop", ["adapterdrop", "adapter", "majority"], 1) == 1
    bb = backbone()
    METHODS["adapterdrop"](bb, RunConfig(layer=layer_for_method("adapterdrop", ["adapterdrop"], 2)))
    assert _adapters(bb) == [2]
    bb.active_edit.restore()
    METHODS["adapterdrop"](
        bb, RunConfig(layer=layer_for_method("adapterdrop", ["lpt", "adapterdrop"], 2))
    )
    assert _adapters(bb) == [*range(bb.n_layers // 2, bb.n_layers)]


def _adapters(bb):  # layers that have them
    return [
        i
        for i, layer in enumerate(bb.layers)
        if any("Adapter" in type(m).__name__ for m in layer.modules())
    ]

"""Options that no method of a comparison has, or that change nothing, are refused."""

import pytest
from small import backbone, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig, RunOptions, methods_with_option
from idp_tutorial.assembly.options import config_for_method, refuse_unread_options
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.methods.method import ALL_METHODS
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.training.examples import encode_for_model


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
        with pytest.raises(ValueError, match="has an effect on a (verbalizer|head at the mask)"):
            refuse_unread_options(["lpt"], RunOptions(**kw))
        refuse_unread_options(["lpt"], RunOptions(head="verbalizer", **kw))


def test_a_trained_head_can_predict_at_the_mask_of_a_template():
    options = dict(pooling="mask", template="Review: {s1} It is {mask}.")
    refuse_unread_options(["lpt"], RunOptions(**options))
    task = small_task("sentiment")
    cfg = RunConfig("head-only", task="sentiment", **options)
    model = build_model(cfg, backbone("roberta"), task)
    examples = encode_for_model(model, task, cfg, task.splits["test"][:1])
    words = model.backbone.tokenizer.decode(examples[0]["input_ids"])
    assert "review:" in words and "it is" in words and examples[0]["mask_position"] > 0
    assert isinstance(model.head, ClassificationHead)


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
    with pytest.raises(ValueError, match="task 'in-short' is answered with generated text"):
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


def test_pooling_without_the_last_word_is_for_decoders():
    with pytest.raises(
        ValueError, match="exclude_last_token=True needs a decoder, but backbone .*use a decoder"
    ):
        build_model(RunConfig("lpt-appg", exclude_last_token=True), backbone(), small_task())
    build_model(RunConfig("lpt-appg", exclude_last_token=True), backbone("gpt2"), small_task())


def test_options_of_a_command_that_would_change_nothing():
    with pytest.raises(ValueError, match="option tune=True has no effect on majority, probe"):
        refuse_unread_options(
            ["majority", "probe"], RunOptions(), tune=True, learning_rates=(), save_every=None
        )
    with pytest.raises(ValueError, match="tune_head_first=True has no effect on a verbalizer"):
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


def test_the_message_for_a_misspelt_option_has_the_closest_name():
    with pytest.raises(ValueError, match="unknown option 'tun': did you mean 'tune'"):
        refuse_unread_options(["lpt"], RunOptions(), tun=True)


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

"""Models built from a config: the head, the pooling, and what is refused."""

import pytest
import torch
from small import backbone, batch_of, config, model_of, refused, small_task

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.assembly.config import (
    RunConfig,
    RunOptions,
    refuse_unread_options,
)
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.training.examples import encode_for_model


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


def test_pooling_without_the_last_word_is_for_decoders():
    with pytest.raises(
        ValueError, match="exclude_last_token=True needs a decoder, but backbone .*use a decoder"
    ):
        build_model(RunConfig("lpt-appg", exclude_last_token=True), backbone(), small_task())
    build_model(RunConfig("lpt-appg", exclude_last_token=True), backbone("gpt2"), small_task())


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(method="lpt-ngp"), ["unknown method 'lpt-ngp'", "'lpt-npg'", "head-only"]),
        (dict(method="xyzzy"), ["unknown method 'xyzzy'", "Known: head-only"]),
        (dict(head="verbaliser"), ["head must be ", "got 'verbaliser'", "'verbalizer'"]),
        (dict(layer=3), ["between 0 and 2", "got 3"]),
        (dict(layer=-1), ["between 0 and 2", "got -1"]),
        (dict(prompt_length=0), ["prompt_length must be at least 1, got 0"]),
        (dict(bottleneck=0), ["bottleneck must be at least 1, got 0"]),
        (dict(method="prompt-tuning", position=5), ["between 0 and 4", "got 5"]),
        (
            dict(head="verbalizer", loss_vocab="all"),
            ["loss_vocab must be ", "got 'all'", "'full' or 'labels'"],
        ),
        (dict(pooling="first"), ["pooling must be ", "got 'first'", "'mean', 'cls'"]),
    ],
)
def test_what_cannot_be_built(kw, words):
    refused(lambda: build_model(config(**kw), backbone(), small_task()), *words)


def test_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="has no label words"):
        build_model(config(head="verbalizer"), backbone(), small_task("similarity"))
    bb = backbone()
    model = model_of("lpt", bb, head="verbalizer")
    with pytest.raises(ValueError, match="no 'mask' position.*template"):
        model(batch_of(bb))


@pytest.mark.parametrize("method", METHODS)
def test_trainable_parameters_are_float32(method):
    if method == "m-idpg-phm-glove":
        return  # reads a file
    cfg = config(method=method, backbone="tiny", dtype="bfloat16")
    model = build_model(cfg, load_config_backbone(cfg), small_task())
    assert {p.dtype for p in model.trained_parameters().values()} == {torch.float32}
    held = "float32" if method in ("fine-tuning", "efl", "bitfit") else "bfloat16"
    assert model.backbone.weights_info["weights_dtype"] == held


@pytest.mark.parametrize("method", ["prompt-tuning", "lpt-npg", "p-tuning-v2"])
def test_a_prompt_of_very_many_vectors_is_refused_before_it_is_built(method, monkeypatch):
    cfg = config(method=method, prompt_length=100_000)
    monkeypatch.setattr(type(cfg.method_config), "plan", lambda *args: pytest.fail("it is built"))
    with pytest.raises(ValueError, match="prompt_length=100,000 is more than 4,096 vectors"):
        build_model(cfg, backbone(), small_task())

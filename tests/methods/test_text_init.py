"""A static prompt begins from the word vectors, or from the keys and values, of a text."""

import pytest
import torch
from small import backbone
from small_models import SMALL_CONFIGS, random_batch, small_backbone

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.context import INPUT
from idp_tutorial.core.loop import run_layers
from idp_tutorial.methods.text_init import prompt_token_ids
from idp_tutorial.utils.checks import UserError

TEXT = "is this film good or bad"


def backbone_with_tokenizer(family):
    """Return a small backbone of any family, whose tokenizer knows one text."""
    bb = small_backbone(family)
    bb.tokenizer = lambda text, add_special_tokens: {"input_ids": [7, 9, 11, 8]}
    return bb


def build_plan(bb, method="prompt-tuning", **options):
    """Return the plan of a method."""
    cfg = RunConfig(method, **options)
    return cfg.method_config.plan(bb, cfg)


def test_a_long_text_is_cut_and_a_short_one_is_repeated(bbs):
    bb = bbs("roberta")
    ids = bb.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert prompt_token_ids(bb, TEXT, 2).tolist() == ids[:2]
    n = len(ids)
    assert prompt_token_ids(bb, TEXT, 2 * n + 1).tolist() == [*ids, *ids, ids[0]]


@pytest.mark.parametrize("family", ["roberta", "gpt2", "electra", "llama"])
def test_prompt_tuning_begins_from_the_word_vectors(family):
    bb = backbone_with_tokenizer(family)
    source = build_plan(bb, prompt_length=4, init="text", init_text=TEXT)[INPUT].source
    ids = [7, 9, 11, 8]
    torch.testing.assert_close(source.p.data, bb.word_embeddings.weight[ids], rtol=0, atol=0)
    with torch.no_grad():
        source.p.add_(1)
    assert not torch.equal(source.p[0], bb.word_embeddings.weight[ids[0]])  # it is a copy


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_keys_and_values_of_a_text_are_the_text_in_front_of_a_decoder(family):
    """Before training, P-tuning v2 computes what the text in front of the example would."""
    bb = backbone_with_tokenizer(family)
    options = dict(prompt_length=5, init="text", init_text=TEXT, prompt_dropout=0.0)
    plan = build_plan(bb, "p-tuning-v2", **options)
    batch = random_batch()
    ids = prompt_token_ids(bb, TEXT, 5).expand(len(batch["input_ids"]), -1)
    with_text = dict(
        input_ids=torch.cat([ids, batch["input_ids"]], 1),
        attention_mask=torch.cat([torch.ones_like(ids), batch["attention_mask"]], 1),
        token_type_ids=torch.cat([torch.zeros_like(ids), batch["token_type_ids"]], 1),
    )
    is_real = batch["attention_mask"] == 1
    with torch.no_grad():
        expected = run_layers(bb, with_text).h[:, 5:]
        h = run_layers(bb, batch, plan).h
    torch.testing.assert_close(h[is_real], expected[is_real], rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", [name for name in SMALL_CONFIGS if "deberta" not in name])
def test_every_family_with_keys_and_values_can_begin_from_a_text(family):
    bb = backbone_with_tokenizer(family)
    plan = build_plan(bb, "p-tuning-v2", prompt_length=4, init="text", init_text=TEXT)
    for layer in range(bb.n_layers):
        p = plan[layer].source.p
        assert p.shape == (4, bb.d_kv_prompt)
        assert p.requires_grad
        assert not torch.equal(p[0], p[1])


def test_the_default_is_a_random_prompt(bbs):
    bb = bbs("roberta")
    torch.manual_seed(3)
    source = build_plan(bb, prompt_length=4)[INPUT].source
    torch.manual_seed(3)
    torch.testing.assert_close(source.p.data, 0.02 * torch.randn(4, bb.d_embedding))


def test_the_record_has_the_text():
    options = RunConfig("prompt-tuning", init="text", init_text=TEXT).to_dict()
    assert (options["init"], options["init_text"]) == ("text", TEXT)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(init="text"), "needs a text such as"),
        (dict(init_text=TEXT), "init='random' does not fit init_text="),
        (dict(init="text", init_text=" "), "init_text is empty"),
        (dict(init="text", init_text=TEXT, insertion="add"), "insertion='add' has none"),
    ],
)
def test_options_that_exclude_each_other_are_refused(bbs, options, message):
    method = "p-tuning-v2" if "insertion" in options else "prompt-tuning"
    with pytest.raises(UserError, match=message):
        build_plan(bbs("gpt2"), method, **options)


def test_a_backbone_without_keys_and_values_or_tokenizer_is_refused(bbs):
    options = dict(method="p-tuning-v2", init="text", init_text=TEXT)
    with pytest.raises(UserError, match="insertion='replace' has none"):
        build_plan(bbs("deberta"), **options)
    bb = backbone("roberta")
    bb.tokenizer = None
    with pytest.raises(UserError, match="needs a tokenizer"):
        build_plan(bb, **options)

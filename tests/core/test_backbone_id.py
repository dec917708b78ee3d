"""The identity of a backbone: what changes it, and what does not."""

import hashlib
import json
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small import backbone, config, small_task
from tokenizers import Tokenizer

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import find_local_backbone, load_backbone
from idp_tutorial.core import backbone as backbone_module
from idp_tutorial.core.backbone import _DROPOUT_FIELDS, _FORWARD_FIELDS, backbone_id
from idp_tutorial.runs.record import RunStore
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.records import read_records, renew_digests

RESULTS = Path(__file__).resolve().parents[2] / "results"
# records of backbones that are trained in another run, and two of an earlier conversion
UNKNOWN = {"185a0cdcf5f93db9", "485b2cd85ac52f68", "75f9542cd71d71f8"}


def another_backbone(**kw):
    """Return a small backbone with a tokenizer of its own."""
    bb = backbone(**kw)
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
    assert backbone_id(bb) == expected == backbone_id(backbone(attn="eager"))


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
    bb = backbone()
    before = backbone_id(bb), backbone_id(bb, weights_only=True)
    bb.config.__dict__[field] = 0.375
    assert backbone_id(bb) != before[0]
    is_same = backbone_id(bb, weights_only=True) == before[1]
    assert is_same == (field in _DROPOUT_FIELDS)


def test_the_weights_alone_have_neither_tokenizer_nor_dropout():
    bb = backbone()
    expected = backbone_id(bb, weights_only=True)
    bb.tokenizer = None
    bb.config.hidden_dropout_prob = 0.4
    assert backbone_id(bb, weights_only=True) == expected
    assert backbone_id(bb) != backbone_id(backbone())


def test_the_weights_are_hashed_once_until_they_are_trained(monkeypatch):
    n_hashed = []

    def sha256(data=None):
        if data is None:  # a digest of weights
            n_hashed.append(1)
            return hashlib.sha256()
        return hashlib.sha256(data)

    monkeypatch.setattr(backbone_module, "hashlib", SimpleNamespace(sha256=sha256))
    cfg = config(method="fine-tuning", lr=1e-3, steps=2)
    bb = backbone()
    model = build_model(cfg, bb, small_task())
    before = {backbone_id(bb) for _ in range(3)}
    assert len(before) == len(n_hashed) == 1
    fit(model, small_task(), cfg)
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

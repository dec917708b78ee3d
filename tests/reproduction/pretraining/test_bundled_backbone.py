"""The corpus of the bundled backbones, and the folder that `save_backbone` writes."""

import hashlib
import json

import pytest
import torch

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.loop import run_layers
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.reproduction.pretraining.corpus import read_corpus, train_tokenizer
from idp_tutorial.reproduction.pretraining.language_modelling import create_language_model
from idp_tutorial.reproduction.pretraining.pretrain import save_backbone
from idp_tutorial.utils.files import read_manifest


def write_rows(file, *texts):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(json.dumps(dict(sentence1=t, label=0)) for t in texts))


def test_the_corpus_excludes_held_out_texts_and_repeats_short_ones(tmp_path):
    T = tmp_path / "tasks"
    (tmp_path / "t.txt").write_text("Held out.\nplain\nalso held\nx")
    write_rows(T / "a/train.jsonl", "short one", "long " * 70, "held out")
    write_rows(T / "a/test.jsonl", "held out!")
    write_rows(T / "b/validation.jsonl", "also held")
    write_rows(T / "a/k100/train.jsonl", "short one")
    write_rows(T / "a/k100/validation.jsonl", "a training row")
    write_rows(T / "sst2/train.jsonl", "cut from a sentence")
    write_rows(T / "sst2/validation.jsonl", "x")
    lines = read_corpus([tmp_path / "t.txt"], T)
    assert {line: lines.count(line) for line in lines} == {
        "plain": 1,
        "short one": 4,
        ("long " * 70).strip(): 1,
        "a training row": 4,
    }
    assert read_corpus([tmp_path / "t.txt"]) == ["Held out.", "plain", "also held", "x"]
    with pytest.raises(FileNotFoundError, match="no folder of tasks"):
        read_corpus([tmp_path / "t.txt"], tmp_path / "nowhere")


def test_a_saved_folder_is_loaded_as_a_backbone(tmp_path):
    tok = train_tokenizer([r["sentence1"] for r in make_rows("sentiment", "train", n=200)], 500)
    model = create_language_model(len(tok), 32, 1).eval()
    before = [p.clone() for p in model.parameters()]
    save_backbone(model, tok, tmp_path / "b")
    # saving does not round the model itself
    assert all(
        torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(before, model.parameters())
    )
    bb = load_backbone(str(tmp_path / "b"))
    for (n, a), (m, b) in zip(model.named_parameters(), bb.model.named_parameters()):
        assert n == m and b.dtype == torch.float32 and torch.equal(a.half().float(), b)
    ids = torch.tensor([tok("a cold beer").input_ids])
    batch = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids)
    )
    torch.testing.assert_close(
        bb.lm_logits(run_layers(bb, batch).h), model(ids).logits, atol=1e-2, rtol=0
    )
    assert (
        bb.tokenizer("a cold beer", "the soup").input_ids
        == tok("a cold beer", "the soup").input_ids
    )
    assert bb.has_lm_head and bb.max_tokens == 256
    manifest = read_manifest(tmp_path / "b")
    assert {*manifest} == {p.name for p in (tmp_path / "b").iterdir()} - {"SHA256SUMS"}
    assert all(
        sha256 == hashlib.sha256((tmp_path / "b" / name).read_bytes()).hexdigest()
        for name, sha256 in manifest.items()
    )
    assert not list(tmp_path.rglob("*.bin")) and bb.model.config.hidden_dropout_prob == 0.1


def test_a_damaged_file_of_a_saved_backbone_is_named(tmp_path):
    tok = train_tokenizer([r["sentence1"] for r in make_rows("sentiment", "train", n=200)], 500)
    save_backbone(create_language_model(len(tok), 32, 1), tok, tmp_path / "b")
    for file in read_manifest(tmp_path / "b"):
        original = (tmp_path / "b" / file).read_bytes()
        (tmp_path / "b" / file).write_bytes(
            original[:-3] + bytes([original[-3] ^ 1]) + original[-2:]
        )
        with pytest.raises(ValueError, match=f"{file} is damaged: it differs from SHA256SUMS"):
            load_backbone(str(tmp_path / "b"))
        (tmp_path / "b" / file).write_bytes(original)
    load_backbone(str(tmp_path / "b"))

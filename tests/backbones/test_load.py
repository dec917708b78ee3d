"""A backbone whose config, weights and tokenizer do not belong together is refused when opened."""

import json
import pathlib
import pickle
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import backbone, batch_of, model_of, toy_tokenizer
from transformers import AutoModelForSequenceClassification, T5Config, T5ForConditionalGeneration

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.loop import run_layers
from idp_tutorial.testing.small_models import (
    SMALL_CONFIGS,
    attention_implementations,
    small_backbone,
)
from idp_tutorial.utils.checks import UserError


def save(bb, folder, tokenizer=None):
    """Save model and tokenizer of a backbone without a manifest, as transformers does."""
    bb.model.save_pretrained(folder)
    (tokenizer or bb.tokenizer).save_pretrained(folder)
    return folder


def change_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def refused(folder, *words):
    with pytest.raises(UserError) as e:
        load_backbone(str(folder))
    for word in (f"backbone '{folder}'", *words):
        assert word in str(e.value), str(e.value)


# transformers cannot save DeBERTa's new head after resizing
@pytest.mark.parametrize("name", [n for n in SMALL_CONFIGS if n != "deberta-v2, new head"])
def test_what_transformers_saves_is_opened(name, tmp_path):
    bb = small_backbone(name, attention_implementations(name)[0])
    tokenizer = toy_tokenizer(causal=bb.causal)
    bb.model.resize_token_embeddings(len(tokenizer))
    again = load_backbone(str(save(bb, tmp_path, tokenizer)))
    assert again.n_layers == bb.n_layers and again.has_lm_head == bb.has_lm_head


@pytest.mark.parametrize("family,field", [("roberta", "num_hidden_layers"), ("gpt2", "n_layer")])
@pytest.mark.parametrize("n_layers,shown", [(2, "2"), (100_000, "100,000"), (10**12, "1,000,000")])
def test_another_number_of_layers_is_refused_before_a_model_is_built(
    family, field, n_layers, shown, tmp_path
):
    save(backbone(family), tmp_path)
    change_config(tmp_path, **{field: n_layers})
    start = time.monotonic()
    refused(tmp_path, shown, "layers, but its weights have 3. Correct the number of layers")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "field,value", [("hidden_dropout_prob", float("nan")), ("layer_norm_eps", float("inf"))]
)
def test_a_number_that_is_none_is_refused(field, value, tmp_path):
    save(backbone(), tmp_path)
    change_config(tmp_path, **{field: value})
    refused(tmp_path, f"has {field}={value}, and needs a")
    change_config(tmp_path, **{field: 0.1, "pad_token_id": -5})
    refused(tmp_path, "has pad_token_id=-5, and needs a token id")


def test_a_longest_text_that_is_no_number_is_refused(tmp_path):
    save(backbone(), tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": "9"}))
    refused(tmp_path, "has model_max_length='9', and needs a positive number")


@pytest.mark.parametrize("value", [16, 4 * 10**7])
@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"]
)
def test_other_sizes_are_refused_before_a_model_is_built(field, value, tmp_path, monkeypatch):
    save(backbone(), tmp_path)
    change_config(tmp_path, **{field: value})
    monkeypatch.setattr("idp_tutorial.backbones.load._load_with_lm_head", None)  # is not called
    refused(tmp_path, "describes a tensor roberta.", f"{value}", "but its weights have")


def test_the_number_of_layers_is_read_from_the_index_of_several_files(tmp_path):
    bb = backbone()
    bb.model.save_pretrained(tmp_path, max_shard_size="500KB")
    bb.tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert load_backbone(str(tmp_path)).n_layers == 3
    change_config(tmp_path, num_hidden_layers=2)
    refused(tmp_path, "says 2 layers, but its weights have 3")
    change_config(tmp_path, num_hidden_layers=3, hidden_size=16)
    refused(tmp_path, "describes a tensor roberta.")


def test_tensors_that_the_config_does_not_use_are_refused(tmp_path):
    folder = save(backbone(), tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["roberta.encoder.layer.1.adapter.weight"] = torch.zeros(3)
    weights["roberta.pooler.dense.weight"] = torch.zeros(32, 32)  # these may be left out
    weights["roberta.embeddings.position_ids"] = torch.zeros(1, 3)
    weights["classifier.weight"] = torch.zeros(2, 32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, "has 1 tensors that its config does not use (roberta.encoder.layer.1.adapter")
    del weights["roberta.encoder.layer.1.adapter.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_backbone(str(folder))


@pytest.mark.parametrize("name", ["bert", "distilbert", "electra", "gpt2"])
def test_heads_of_other_tasks_are_left_out(name, tmp_path):
    bb = small_backbone(name, attention_implementations(name)[0])
    tokenizer = toy_tokenizer(causal=bb.causal)
    bb.config.vocab_size = len(tokenizer)
    AutoModelForSequenceClassification.from_config(bb.config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_backbone(str(tmp_path)).n_layers == bb.n_layers


def test_the_decoder_of_t5_is_left_out(tmp_path):
    tokenizer = toy_tokenizer()
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_heads=4, vocab_size=len(tokenizer))
    model = T5ForConditionalGeneration(T5Config(num_layers=2, num_decoder_layers=3, **sizes))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_backbone(str(tmp_path)).n_layers == 2


# --- the tokenizer


def test_a_tokenizer_with_more_tokens_than_the_embeddings_is_refused(tmp_path):
    bb = backbone()
    bb.model.resize_token_embeddings(8192)
    tokenizer = load_backbone("tiny").tokenizer
    tokenizer.add_tokens(["idiosyncratic", "prompting"])
    folder = save(bb, tmp_path / "added", tokenizer)
    refused(folder, "token ids up to 8193", "only 8192 rows", "resize_token_embeddings")
    bb.model.resize_token_embeddings(900)
    refused(save(bb, tmp_path / "other"), "token ids up to 8191", "only 900 rows")


def test_a_special_token_beyond_the_embeddings_is_accepted(tmp_path):
    tokenizer = load_backbone("tiny").tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert len(load_backbone(str(save(backbone(), tmp_path, tokenizer))).tokenizer) == 8193


def test_ids_beyond_the_embeddings_are_refused_in_a_batch():
    for method in ("lpt-npg", "efl", "m-idpg-phm"):
        model = model_of(method, backbone())
        batch = batch_of(model.backbone)
        for token in (8192, -1):
            batch["input_ids"][2, 1] = token
            with pytest.raises(UserError, match=f"between 0 and 8191 .* got ids .*{token}"):
                model(batch)
    with pytest.raises(UserError, match="between 0 and 8191"):
        run_layers(model.backbone, batch)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_file_that_is_a_folder_or_a_broken_link_is_refused(file, tmp_path):
    folder = save(backbone(), tmp_path)
    path = folder / file
    path.unlink()
    path.mkdir()
    refused(folder, f"{file} of backbone", "is a folder, and must be a file")
    path.rmdir()
    path.symlink_to("nowhere")
    refused(folder, f"{file} of backbone", "a link that leads to no file")
    path.unlink()
    path.symlink_to(file)
    refused(folder, f"{file} of backbone", "a link that leads to no file")


class _Payload:
    """Object whose unpickling creates a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


def test_code_in_pickled_weights_is_not_run(tmp_path):
    folder = tmp_path / "model"
    save(backbone(), folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload(tmp_path / "ran"), 2))
    refused(folder, "cannot be read (UnpicklingError")
    assert not (tmp_path / "ran").exists()

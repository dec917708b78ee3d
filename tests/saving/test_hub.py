"""Saved models on the hub: what is sent, what is fetched, which version; the card.

The hub here is of this process.
"""

import errno
import json
import shutil
from pathlib import Path

import hub
import pytest
import torch
from transformers import AutoModel

from idp_tutorial import PromptClassifier
from idp_tutorial.cli.predict import predict_command
from idp_tutorial.huggingface import PromptModel, get_prompt_model
from idp_tutorial.saving import hub as hub_module
from idp_tutorial.saving.hub import (
    push_to_hub,
    resolve_model_folder,
)
from idp_tutorial.saving.prompt_files import from_pretrained
from idp_tutorial.training.evaluation import predict

ROWS = [dict(sentence1=s) for s in ("the soup was cold .", "tea")]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub on this machine, asked over HTTP by `huggingface_hub` itself."""
    server = hub.start_hub(monkeypatch, tmp_path / "cache")
    yield server
    server.shutdown()
    server.server_close()


def tokens(server, command):
    return {token for c, path, token in server.requests if c == command and "/me/" in path}


def test_there_and_back(saved_model, server, small_folder, capsys, tmp_path):
    folder, record = saved_model
    address = push_to_hub(folder, "me/tickets", token="hf_x", private=True, licence="cc-by-4.0")
    sent = server.commits[address.rpartition("/")[2]]
    assert server.private == {"me/tickets": True} and tokens(server, "POST") == {"Bearer hf_x"}
    assert sorted(sent) == ["README.md", "prompts.json", "prompts.safetensors"]
    for name, data in sent.items():
        assert str(small_folder).encode() not in data, name
    for words in (f"accuracy {record['score']:.1f}", "license: cc-by-4.0"):
        assert words.encode() in sent["README.md"]
    want = predict(*from_pretrained(folder), ROWS)
    assert predict(*from_pretrained("me/tickets", str(small_folder), token="hf_y"), ROWS) == want
    assert tokens(server, "GET") == {"Bearer hf_y"}
    (tmp_path / "in").write_text("tea\n")
    predict_command(model="me/tickets", texts=str(tmp_path / "in"), backbone=str(small_folder))
    assert json.loads(capsys.readouterr().out)["prediction"] == want[1]["label"]


def test_versions(saved_model, server, small_folder):
    folder, _ = saved_model
    address = push_to_hub(folder, "me/tickets", revision="v2").rpartition("/")[2]
    assert server.refs["me/tickets", "v2"] == address != server.refs["me/tickets", "main"]
    for name, load_options in (
        ("me/tickets", dict(revision="v2")),
        ("me/tickets@v2", {}),
        ("me/tickets", dict(revision=address)),
    ):
        from_pretrained(name, str(small_folder), **load_options)
    with pytest.raises(FileNotFoundError, match="no prompts.safetensors in"):
        from_pretrained("me/tickets")
    with pytest.raises(
        FileNotFoundError,
        match="no folder me/others, and the hub cannot be reached or has no such repository",
    ):
        from_pretrained("me/others")
    with pytest.raises(ValueError, match="only a repository of the hub has revisions"):
        from_pretrained(folder, revision="v2")


def test_an_estimator_goes_to_the_hub_as_it_is_saved(server, small_folder):
    texts = [f"text {i}" for i in range(24)]
    labels = [*"abc"] * 8
    clf = PromptClassifier(
        "lpt",
        backbone=str(small_folder),
        steps=2,
        evaluations=1,
        lr=1e-2,
        prompt_length=2,
        device="cpu",
    )
    clf.fit(texts, labels).push_to_hub("me/abc", private=True, licence="apache-2.0")
    again = PromptClassifier.from_pretrained("me/abc", revision="main")
    assert again.predict(texts).tolist() == clf.predict(texts).tolist() and again.backbone == str(
        small_folder
    )


def test_prompts_of_a_hugging_face_model_go_to_the_hub(server, small_folder):
    def load_model():
        return AutoModel.from_pretrained(small_folder, dtype=torch.float32)

    model = get_prompt_model(load_model(), "id-spam", num_labels=3, prompt_length=2).eval()
    model.add_prompt("late", "lpt", num_labels=2, prompt_length=4)
    batch = dict(input_ids=torch.tensor([[0, 5, 6, 2]]), attention_mask=torch.ones(1, 4).long())
    address = model.push_to_hub("me/prompts", private=True)
    sent = server.commits[address.rpartition("/")[2]]
    assert sorted(sent) == ["README.md", "prompts.json", "prompts.safetensors"]
    for name, data in sent.items():
        assert str(small_folder).encode() not in data, name
    card = sent["README.md"].decode()
    assert "PromptModel.from_pretrained(hf_model, 'me/prompts')" in card
    again = PromptModel.from_pretrained(load_model(), "me/prompts")
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    model.push_to_hub("me/late", "late")
    again.load_prompt("me/late", "late")
    again.set_prompt("late")
    model.set_prompt("late")
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    with pytest.raises(ValueError, match="prompt"):
        model.push_to_hub("me/other", "other")


def test_the_card_of_prompts_names_a_model_of_the_hub(server, small_folder):
    base = AutoModel.from_pretrained(small_folder, dtype=torch.float32)
    base.config._name_or_path = "FacebookAI/roberta-base"
    model = get_prompt_model(base, "lpt", num_labels=2)
    sent = server.commits[model.push_to_hub("me/prompts").rpartition("/")[2]]
    assert "base_model: FacebookAI/roberta-base" in sent["README.md"].decode()


def test_without_the_hub_its_cache_is_asked(saved_model, server, small_folder):
    push_to_hub(saved_model[0], "me/tickets")
    folder = resolve_model_folder("me/tickets")
    server.shutdown()
    server.server_close()
    assert resolve_model_folder("me/tickets") == folder
    with pytest.raises(FileNotFoundError, match="no folder me/other, .*cannot be reached"):
        resolve_model_folder("me/other")
    for name in ("nowhere", "a/b/c", "/gone/away", ".."):
        assert resolve_model_folder(name) == Path(name)  # never asked


def test_a_damaged_model_is_not_sent(saved_model, server, tmp_path):
    shutil.copytree(saved_model[0], tmp_path / "bad")
    data = bytearray((tmp_path / "bad/prompts.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "bad/prompts.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        push_to_hub(tmp_path / "bad", "me/bad")
    assert not server.requests


# --- the card


def test_an_error_of_this_machine_is_not_a_missing_repository(monkeypatch):
    def fill_disk(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_module, "is_hub_reachable", lambda: True)
    monkeypatch.setattr(hub_module, "snapshot_download", fill_disk)
    with pytest.raises(OSError, match="No space left"):
        resolve_model_folder("me/tickets")


def test_a_missing_repository_may_be_a_private_one(server):
    with pytest.raises(FileNotFoundError, match="or token= if private"):
        resolve_model_folder("me/secret")

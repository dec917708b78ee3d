"""Files of somebody else's model: limits of size, time and memory before a library reads them."""

import json
import shutil
import zipfile

import pytest
import torch
from small import refused, toy_tokenizer
from small_models import small_backbone

from idp_tutorial.backbones import untrusted_files
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.utils.checks import UserError


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """Return a folder with a small model."""
    bb = small_backbone("bert")
    tokenizer = toy_tokenizer()
    bb.model.resize_token_embeddings(len(tokenizer))
    folder = tmp_path_factory.mktemp("intact")
    bb.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(intact, tmp_path):
    """Return a copy of the folder, whose files may be changed."""
    return shutil.copytree(intact, tmp_path / "model")


def change_tokenizer(folder, **parts):
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))


def replace(pattern, content, kind="String"):
    return dict(type="Replace", pattern={kind: pattern}, content=content)


def sequence(*rules):
    return dict(type="Sequence", normalizers=list(rules))


PANICS = {  # a part of tokenizer.json: its value
    "pre_tokenizer": dict(
        type="Split", pattern=dict(Regex="(a+)+$"), behavior="Isolated", invert=False
    ),
    "normalizer": dict(type="Precompiled", precompiled_charsmap="AAAA"),
}


@pytest.mark.parametrize("part", PANICS)
def test_a_tokenizer_that_panics_is_refused_with_one_line(folder, part, capfd):
    change_tokenizer(folder, **{part: PANICS[part]})
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read .*Panic") as e:
        load_backbone(str(folder))
    assert "\n" not in str(e.value) and capfd.readouterr().err == ""


LONGER = {
    "normalizer": sequence(*[replace("q", "qq")] * 28),
    "a regular expression": sequence(*[replace("[qx]", "qq", "Regex")] * 28),
    "one rule": replace("q", "q" * 1000),
    "an empty pattern": sequence(*[replace("", "q" * 10)] * 3),
    "nested": sequence(*[sequence(*[replace("q", "qq")] * 4)] * 7),
}


@pytest.mark.parametrize("name", LONGER)
def test_rules_that_lengthen_a_text_many_times_are_refused(folder, name):
    """The letters do not occur in the texts of the trial: the growth is calculated."""
    change_tokenizer(folder, normalizer=LONGER[name])
    refused(lambda: load_backbone(str(folder)), "the rules of tokenizer.json make a text up to")


def test_a_template_that_repeats_the_text_is_refused(folder):
    item = {"Sequence": {"id": "A", "type_id": 0}}
    template = dict(type="TemplateProcessing", single=[item] * 100, pair=[], special_tokens={})
    change_tokenizer(folder, post_processor=template)
    refused(
        lambda: load_backbone(str(folder)), "the rules of tokenizer.json make a text up to 1e+02"
    )


def test_very_many_added_tokens_are_refused(folder):
    token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = [dict(id=i, content=f"t{i}", **token) for i in range(20_001)]
    change_tokenizer(folder, added_tokens=added)
    refused(lambda: load_backbone(str(folder)), "tokenizer.json has 20,001 added tokens")


def test_rules_of_usual_tokenizers_are_accepted(folder):
    change_tokenizer(folder, normalizer=sequence(replace(" ", "\u2581"), replace("``", '"')))
    load_backbone(str(folder))


def test_a_tokenizer_that_takes_too_long_or_too_much_is_refused(folder, monkeypatch):
    monkeypatch.setattr(untrusted_files, "_MAX_GROWTH", 1e99)
    monkeypatch.setattr(untrusted_files, "_TRIAL_SECONDS", 2)
    monkeypatch.setattr(untrusted_files, "_TRIAL_BYTES", 2**30)
    change_tokenizer(folder, normalizer=sequence(*[replace("a", "aa")] * 40))
    refused(lambda: load_backbone(str(folder)), "its tokenizer.json cannot be read (")


def test_a_header_of_many_megabytes_is_refused(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    n = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + n] + b" " * 80_000_000
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + n :])
    refused(lambda: load_backbone(str(folder)), "model.safetensors has 80,0", "its header")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "vocab.txt"])
def test_a_text_file_of_many_megabytes_is_refused(folder, file):
    with open(folder / file, "ab") as f:
        f.truncate(2**27)
    refused(lambda: load_backbone(str(folder)), f"{file} has 134,217,728 bytes")


def test_a_compressed_archive_of_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    stored = folder / "pytorch_model.bin"
    torch.save({"x": torch.zeros(1000)}, stored)
    with zipfile.ZipFile(stored) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(stored, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    refused(lambda: load_backbone(str(folder)), "pytorch_model.bin is compressed")

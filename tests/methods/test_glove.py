"""Tests of the mean of word vectors.

The file format and every way it can be damaged, words as IDPG's code finds them, and an encoder
that is the same in a column, on the fly, and restricted to a task.
"""

import string
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import backbone, batch_of, config, one, refused, small_task, write_glove
from torch import nn

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.data.encoding import collate
from idp_tutorial.methods.glove import (
    GloveEncoder,
    backbone_word_vectors,
    decode_text,
    find_glove_file,
    load_glove_encoder,
    read_glove,
    split_words,
)
from idp_tutorial.methods.idpg import PromptGenerator
from idp_tutorial.methods.idpg_multilayer import multilayer_idpg_plan
from idp_tutorial.methods.prompt_tuning import prompt_plan
from idp_tutorial.methods.sentence_vectors import SentenceVector
from idp_tutorial.training.evaluation import evaluate
from idp_tutorial.training.fit import fit

FAMILIES = ["roberta", "bert", "gpt2", "deberta"]
WORDS = [
    "the",
    "a",
    "film",
    "is",
    "it",
    "was",
    "not",
    "good",
    "bad",
    "great",
    "terrible",
    "wasnt",
    "dont",
    "1990s",
    "état",
    "of",
    "and",
    "to",
    "in",
    "with",
    "acting",
    "plot",
]


@pytest.fixture(scope="module")
def vectors():
    return np.random.default_rng(0).normal(size=(len(WORDS), 300)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(vectors, tmp_path_factory):
    """A folder with a file in the format of the real one."""
    folder = tmp_path_factory.mktemp("glove")
    write_glove({w: i for i, w in enumerate(WORDS)}, vectors, folder / "glove.6B.300d.txt")
    (folder / "glove.6B.50d.txt").write_text("the 1 2\n")
    return folder


@pytest.fixture(scope="module")
def bbs():
    return {f: backbone(f) for f in FAMILIES}


def slow(text, table):
    """The authors' loop: characters, words, one at a time."""
    total = np.zeros(len(next(iter(table.values()))))
    count = 0
    for token in text.split():
        letters = ""
        for c in token:
            if c not in string.punctuation:
                letters += c
        if letters.lower() in table:
            total = total + table[letters.lower()]
            count = count + 1
    return total / count if count else total


# --- the file


def test_the_format_of_the_real_file(folder, vectors):
    for where in (folder, str(folder), folder / "glove.6B.300d.txt"):
        index, v = read_glove(where)
        assert list(index) == WORDS and v.shape == (len(WORDS), 300) and v.dtype == np.float32
        np.testing.assert_allclose(v, vectors, atol=1e-6)
    first = (folder / "glove.6B.300d.txt").read_text(encoding="utf-8").split("\n")[0].split(" ")
    assert first[0] == "the" and len(first) == 301


def test_only_the_words_asked_for(folder, vectors):
    index, v = read_glove(folder, {"état", "film", "zyzzyva"})
    assert set(index) == {"état", "film"} and v.shape == (2, 300)
    for w in index:
        np.testing.assert_allclose(v[index[w]], vectors[WORDS.index(w)], atol=1e-6)
    assert read_glove(folder, set())[1].shape == (0, 300)


def test_words_with_spaces_and_blank_ends(tmp_path):
    (tmp_path / "v.txt").write_bytes(b"at 1 2 3\n. . . 4 5 6\nbe 7 8 9  \r\n\n")
    index, v = read_glove(tmp_path)
    assert index == {"at": 0, ". . .": 1, "be": 2} and v.tolist() == [
        [1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
    ]


def test_a_folder_needs_one_file_to_choose(folder, tmp_path):
    assert find_glove_file(folder).name == "glove.6B.300d.txt"  # though there is another
    for n, words in (
        (0, ["with one .txt file", "https://nlp.stanford.edu/data/glove.6B.zip"]),
        (2, ["with one .txt file"]),
    ):
        for i in range(n):
            (tmp_path / f"{i}.txt").write_text("a 1 2\n")
        with pytest.raises(FileNotFoundError) as e:
            find_glove_file(tmp_path)
        assert all(w in str(e.value) for w in words), str(e.value)


GOOD = b"the 0.1 0.2 0.3\nfilm 1 2 3\nis -1 -2e-3 0\n"


@pytest.mark.parametrize(
    "data,words",
    [
        (b"", ["is empty"]),
        (b"\n\n", ["is empty"]),
        (b"3 3\n" + GOOD, ["line 1", "b'3 3'", "delete a word2vec header"]),
        (b"PK\x03\x04", ["line 1", "is not a word with"]),
        (b"<html> <body>" + GOOD, ["line 1", "not a word with 4 numbers"]),
        (GOOD[:-8], ["line 3", "not a word with 3 numbers"]),
        (GOOD.replace(b"2 3", b"2 x"), ["line 2", "not a word with 3 numbers"]),
        (GOOD.replace(b"0.2", b"nan"), ["line 1", "not a word with 3 numbers"]),
        (GOOD.replace(b"2 3", b"2,5 3"), ["line 2", "not a word with 3 numbers"]),
        (GOOD.replace(b"film", b"f\xff\xfem"), ["line 2", "not a word with 3 numbers"]),
    ],
)
def test_a_damaged_file_says_where(data, words, tmp_path):
    (tmp_path / "v.txt").write_bytes(data)
    refused(lambda: read_glove(tmp_path / "v.txt"), "v.txt", *words)


def test_a_cut_is_found_beyond_the_words_asked_for(tmp_path):
    (tmp_path / "v.txt").write_bytes(GOOD[:-8])
    with pytest.raises(ValueError, match="line 3"):
        read_glove(tmp_path / "v.txt", {"the"})


def test_no_file_and_a_packed_one(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match="no GloVe vectors at .*missing.txt: give glove.6B.300d.txt",
    ):
        read_glove(tmp_path / "missing.txt")
    (tmp_path / "glove.6B.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match="give glove.6B.300d.txt, decompressed"):
        read_glove(tmp_path / "glove.6B.zip")


# --- words


@pytest.mark.parametrize(
    "text,words",
    [
        ("It wasn't half-bad, I'd say .", ["it", "wasnt", "halfbad", "id", "say"]),
        ("The 1990s' État!", ["the", "1990s", "état"]),
        (" . ... -- \t\n", []),
        ("a  b\u00a0c", ["a", "b", "c"]),
    ],
)
def test_words_are_found_as_the_authors_do(text, words):
    assert split_words(text) == words


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_become_their_text_again(family, bbs):
    tok = bbs[family].tokenizer
    task = small_task()
    pairs = small_task("entailment")
    for t in (task, pairs):
        for r, e in zip(t.splits["train"], t.encode(t.splits["train"], tok, 200)):
            assert split_words(decode_text(e["input_ids"], tok)) == split_words(
                " ".join(r[k] for k in ("sentence1", "sentence2") if k in r)
            )
    (r,) = task.splits["train"][:1]
    (e,) = task.encode(
        [r], tok, 200, "code"
    )  # under a template its words count, and the mask does not
    expected = [*split_words(r["sentence1"]), "it", "was"]
    assert split_words(decode_text(e["input_ids"], tok)) == expected
    (short,) = task.encode([r], tok, 8)
    assert (
        len(split_words(decode_text(short["input_ids"], tok))) <= 6
    )  # what is cut off is not read


# --- the encoder


def glove_of(bb, folder, **kw):
    return load_glove_encoder(folder, bb.tokenizer, **kw)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["sentiment", "entailment"])
def test_the_mean_over_known_words(family, name, bbs, folder, vectors):
    bb = bbs[family]
    task = small_task(name)
    table = dict(zip(WORDS, vectors))
    glove = glove_of(bb, folder)
    batch = batch_of(bb, task, 12)
    out = glove(run_layers(bb, batch, stop=0))
    assert out.shape == (12, 300) and out.dtype == torch.float32
    for r, z in zip(task.splits["train"], out):
        np.testing.assert_allclose(
            z, slow(" ".join(r[k] for k in ("sentence1", "sentence2") if k in r), table), atol=1e-5
        )
    assert (
        out.abs().sum(1).gt(0).sum() > 6 and "glove" not in batch
    )  # the caller's batch stays as it was


@pytest.mark.parametrize("family", FAMILIES)
def test_a_column_equals_looking_up_and_neither_depends_on_the_batch(family, bbs, folder):
    bb = bbs[family]
    task = small_task()
    glove = glove_of(bb, folder, noise=0.6)
    rows = task.encode(task.splits["train"][:8], bb.tokenizer, 60)
    plain = collate(rows, 1)
    column = collate(prepared := glove.prepare(rows), 1)
    computed = glove(run_layers(bb, plain, stop=0))
    assert torch.equal(computed, column["glove"]) and torch.equal(
        glove(run_layers(bb, column, stop=0)), computed
    )
    assert all("glove" not in r for r in rows) and [p["input_ids"] for p in prepared] == [
        r["input_ids"] for r in rows
    ]
    for i in range(8):
        assert torch.equal(glove(run_layers(bb, one(plain, i), stop=0))[0], computed[i])


def test_a_text_without_a_known_word(folder, bbs):
    tok = bbs["roberta"].tokenizer
    zeros = GloveEncoder(*read_glove(folder), tokenizer=tok)
    noise = GloveEncoder(*read_glove(folder), tokenizer=tok, noise=0.6)
    assert not zeros.embed_text("zyzzyva").any()
    a = noise.embed_text("zyzzyva")
    b = noise.embed_text("qwerty")
    assert (
        0.5 < a.std() < 0.7
        and a.dtype == np.float32
        and np.array_equal(a, noise.embed_text("zyzzyva"))
        and not np.array_equal(a, b)
    )
    np.testing.assert_array_equal(zeros.embed_text("the zyzzyva"), noise.embed_text("the"))


@pytest.mark.parametrize("noise", [0.0, 0.6, 2.0])
def test_a_run_says_what_such_a_text_gets(noise, folder, bbs):
    cfg = config(method="m-idpg-phm-glove", glove=str(folder), glove_noise=noise)
    model = build_model(cfg, bbs["roberta"], small_task())
    encoder = next(m for m in model.modules() if isinstance(m, GloveEncoder))
    rows = [dict(sentence1=s, label=0) for s in ("qwerty xyzzy", "a good film")]
    rows = encoder.prepare(small_task().encode(rows, bbs["roberta"].tokenizer, 60))
    unknown, known = [r["glove"] for r in rows]
    assert noise * 0.8 <= unknown.std() <= noise * 1.2 and bool(unknown.any()) == bool(noise)
    np.testing.assert_array_equal(
        known, load_glove_encoder(folder, bbs["roberta"].tokenizer).embed_text("a good film")
    )


def test_the_last_file_is_read_once(folder, tmp_path, monkeypatch):
    from idp_tutorial.methods import glove

    reads = []
    bb = backbone()
    file = tmp_path / "v.txt"
    file.write_bytes((folder / "glove.6B.300d.txt").read_bytes())
    monkeypatch.setattr(glove, "read_glove", lambda *args: reads.append(args) or read_glove(*args))
    cfg = config(method="m-idpg-phm-glove", glove=str(file))

    def encoder(cfg):
        return next(
            m for m in build_model(cfg, bb, small_task()).modules() if isinstance(m, GloveEncoder)
        )

    first = [encoder(replace(cfg, seed=s, lr=lr)) for s in (0, 1) for lr in (0.1, 0.2)]
    assert len(reads) == 1 and all(e.vectors is first[0].vectors for e in first)
    # the folder, and the file in it
    assert (
        load_glove_encoder(tmp_path, bb.tokenizer).vectors is first[0].vectors and len(reads) == 1
    )
    file.write_bytes(file.read_bytes().split(b"\n", 1)[1])
    assert "the" not in encoder(cfg).index and len(reads) == 2  # the file has changed
    file.write_text("damaged\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="is not a word with"):
            encoder(cfg)


def test_a_digest_names_the_vectors(vectors, folder):
    def digest(index, v):
        return GloveEncoder(index, v, None).state_digest()

    index = {w: i for i, w in enumerate(WORDS)}
    mine = digest(index, vectors)
    assert mine == digest(dict(index), vectors.copy())
    other = vectors.copy()
    other[-1, -1] += 1e-3
    assert (
        len(
            {
                mine,
                digest(index, other),
                digest({**index, "film": 3}, vectors),
                digest({w.upper(): i for w, i in index.items()}, vectors),
            }
        )
        == 4
    )
    assert (
        load_glove_encoder(folder, None).state_digest()
        == load_glove_encoder(folder / "glove.6B.300d.txt", None).state_digest()
    )


# --- without a file


@pytest.mark.parametrize("family", FAMILIES)
def test_a_backbones_own_vectors(family, bbs, tmp_path):
    bb = bbs[family]
    index, v = backbone_word_vectors(bb)
    assert (
        len(index) > 1000
        and v.shape == (len(index), bb.d)
        and sorted(index.values()) == list(range(len(index)))
    )
    for w in ("film", "great", "the"):
        (i,) = bb.tokenizer(" " + w, add_special_tokens=False).input_ids
        np.testing.assert_array_equal(v[index[w]], bb.word_embeddings.weight[i].numpy())
    assert all(split_words(w) == [w] for w in index)
    write_glove(index, v, tmp_path / "own.txt")
    again, u = read_glove(tmp_path)
    assert again == index
    np.testing.assert_allclose(u, v, atol=1e-6)


def test_the_bundled_vectors(bbs):
    glove = load_glove_encoder(None, bbs["gpt2"].tokenizer)
    tiny = load_backbone("tiny")
    assert glove.d == tiny.d and not list(glove.parameters()) and not glove.state_dict()
    np.testing.assert_array_equal(
        glove.embed_text("film"),
        tiny.word_embeddings.weight[
            tiny.tokenizer(" film", add_special_tokens=False).input_ids[0]
        ].numpy(),
    )
    film, movie, rivers = [
        glove.embed_text(s) for s in ("a good film", "the great movie", "three rivers of europe")
    ]
    assert film @ movie > film @ rivers


# --- in a model


def model_of(bb, glove, layer=None):
    torch.manual_seed(0)
    source = nn.Sequential(
        SentenceVector(glove, 0.1), PromptGenerator(glove.d, bb.d, t=3, m=8, n=4)
    )
    return PlannedModel(bb, ClassificationHead(bb.d, 2, "mean"), prompt_plan(bb, source))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_writes_prompts_and_its_generator_learns(family, folder):
    bb = backbone(family)
    task = small_task()
    model = model_of(bb, glove_of(bb, folder))
    batch = batch_of(bb, task, 6)
    model.loss(batch).backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in model.sources.parameters()
    ) and not any(p.grad is not None for p in bb.model.parameters())
    n = count_parameters(model)["prompt"]
    assert n == sum(p.numel() for p in model.sources.parameters()) > 0
    model.eval()
    out = model(batch)
    for i in range(6):
        torch.testing.assert_close(
            model(one({k: v for k, v in batch.items() if k != "glove"}, i))[0],
            out[i],
            atol=1e-5,
            rtol=0,
        )


def test_the_published_size(folder):
    bb = load_backbone("roberta-large", weights="meta")
    glove = load_glove_encoder(folder, bb.tokenizer)
    model = PlannedModel(
        bb,
        ClassificationHead(bb.d, 2),
        multilayer_idpg_plan(bb, 5, 16, generator_input="layer0", encoder=glove, d_in=glove.d, n=4),
    )
    assert count_parameters(model)["prompt"] == 144_704  # IDPG's "141K" is 144,704/1024


def test_one_lookup_serves_every_layer(folder, monkeypatch):
    bb = backbone()
    task = small_task()
    glove = load_glove_encoder(folder, bb.tokenizer)
    seen = []
    torch.manual_seed(0)
    plain = GloveEncoder.embed_text
    monkeypatch.setattr(
        GloveEncoder, "embed_text", lambda self, text: seen.append(text) or plain(self, text)
    )
    model = PlannedModel(
        bb,
        ClassificationHead(bb.d, 2, "mean"),
        multilayer_idpg_plan(bb, 3, 8, generator_input="layer0", encoder=glove, d_in=glove.d, n=4),
    )
    log = fit(model, task, config(steps=5, batch_size=32, lr=1e-3))
    assert len(seen) == 64 + 24 and len(log.losses) == 5


def test_fit_looks_each_text_up_once(folder, monkeypatch):
    bb = backbone()
    task = small_task()
    glove = glove_of(bb, folder)
    model = model_of(bb, glove)
    seen = []
    plain = GloveEncoder.embed_text
    monkeypatch.setattr(
        GloveEncoder, "embed_text", lambda self, text: seen.append(text) or plain(self, text)
    )
    log = fit(model, task, config(steps=9, batch_size=32, lr=1e-3))
    assert len(seen) == 64 + 24 and len(log.losses) == 9
    rows = task.encode(task.splits["test"], bb.tokenizer, 60)
    scores = [evaluate(model, r, task) for r in (rows, glove.prepare(rows))]
    assert scores[0] == scores[1]


def test_word_vectors_are_checked(tmp_path):
    def read(data):
        (tmp_path / "v.txt").write_bytes(data)
        return read_glove(tmp_path / "v.txt")

    index, v = read(b"\xef\xbb\xbfthe 1 2\n. . 3 4\nat name@x.com 5 6\n")
    assert [*index] == ["the", ". .", "at name@x.com"] and v.tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match="line 2: .* is not a word with 2 numbers"):
        read(b"the 1 2\na 1_0 3\n")
    with pytest.raises(ValueError, match="line 2: .* is not a word with 2 numbers"):
        read(b"the 1 2\na 1 2 3\n")

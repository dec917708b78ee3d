"""The text that a backbone is pretrained on."""

import json
import lzma

import numpy as np
import pytest
import torch

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.tasks import TASKS
from results.pretraining import corpus
from results.pretraining.corpus import (
    LABEL_WORDS,
    draw_windows,
    encode_stream,
    exclude_overlapping_lines,
    gather_windows,
    prepare_text,
    read_corpus,
    read_lines,
)


def test_encoded_text_is_framed_and_decodes_to_itself(tok, lines):
    for s in lines[:50]:
        ids = tok(s).input_ids
        assert tok.decode(ids[1:-1]).strip() == s.lower() and (ids[0], ids[-1]) == (
            tok.bos_token_id,
            tok.eos_token_id,
        )
        assert tok.unk_token_id not in ids
    non_ascii = "naïve 北京 🙂 ﬁ"
    # NFKC, bytes
    assert tok.decode(tok(non_ascii).input_ids[1:-1]).strip() == "naïve 北京 🙂 fi"
    assert tok.unk_token_id not in tok(non_ascii).input_ids
    a, b = (tok(s, add_special_tokens=False).input_ids for s in ("a cold beer", "the soup"))
    assert tok("a cold beer", "the soup").input_ids == [0, *a, 2, 2, *b, 2]
    assert [
        tok.bos_token_id,
        tok.pad_token_id,
        tok.eos_token_id,
        tok.unk_token_id,
        tok.mask_token_id,
    ] == [0, 1, 2, 3, 4]
    assert tok.cls_token_id == 0 and tok.sep_token_id == 2


@pytest.mark.parametrize("tokenizer_name", ["new", "tiny"])
def test_label_words_are_single_tokens(tokenizer_name, tok):
    tok = tok if tokenizer_name == "new" else load_backbone("tiny").tokenizer
    for w in LABEL_WORDS:
        assert len(tok(" " + w, add_special_tokens=False).input_ids) == 1, w
    for t in TASKS.values():
        if t.label_words:
            assert len({*t.word_ids(tok)}) == len(t.labels)


@pytest.mark.parametrize("tokenizer_name", ["new", "tiny"])
def test_mask_includes_the_space_before_it(tokenizer_name, tok):
    tok = tok if tokenizer_name == "new" else load_backbone("tiny").tokenizer

    def ids(s):
        return tok(s, add_special_tokens=False).input_ids

    prefix = ids("it was")
    assert ids("it was <mask>") == ids("it was<mask>") == [*prefix, tok.mask_token_id]
    assert ids("it was <mask> .") == [*prefix, tok.mask_token_id, *ids(" .")]


def test_lines_are_read_and_encoded_as_a_stream(tok, tmp_path):
    (tmp_path / "a.txt").write_text("one beer\n\n  two beers \n")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"a third\n"))
    assert list(read_lines(tmp_path / "a.txt", tmp_path / "b.txt.xz")) == [
        "one beer",
        "two beers",
        "a third",
    ]
    with pytest.raises(FileNotFoundError, match="no text file at .*one document a line"):
        list(read_lines(tmp_path / "c.txt"))
    s = encode_stream(["one beer", "two beers"] * 600, tok)  # more than one chunk
    assert (
        s.dtype == np.uint16
        and (s == tok.eos_token_id).sum() == 1200
        and s[:8].tolist() == s[len(s) // 2 :][:8].tolist()
    )
    assert (
        tok.decode(s[: len(s) // 600]).split() == ["one", "beer</s>", "two", "beers</s>"]
        and len(encode_stream([], tok)) == 0
    )


def test_windows_are_random_parts_of_the_stream(stream):
    def draw(seed, stream=stream, **kw):
        positions = draw_windows(len(stream), 2048, np.random.default_rng(seed), **kw)
        return gather_windows(stream, positions)

    x = draw(0, lengths=(64,), p=(1.0,))
    assert x.shape == (32, 64) and (x[:, 0] == 0).all() and x.dtype == torch.int64
    assert torch.equal(x, draw(0, lengths=(64,), p=(1.0,)))
    assert {draw(i).shape[1] for i in range(60)} == {32, 64, 128, 256}
    assert all(2048 - 256 < draw(i).numel() <= 2048 for i in range(20))
    text = stream.tolist()
    row = x[3, 1:].tolist()
    assert any(text[i : i + 63] == row for i in range(len(text)))
    assert draw(0, stream[:20]).shape[1] == 20  # a short stream is one window


def test_task_rows_are_read_as_sentences(tmp_path):
    rows = [
        dict(sentence1=" a pair ", sentence2="of texts", label=0),
        dict(sentence1="alone", label=1),
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "r.jsonl.xz").write_bytes(lzma.compress((tmp_path / "r.jsonl").read_bytes()))
    for name in ("r.jsonl", "r.jsonl.xz"):
        assert list(read_lines(tmp_path / name)) == ["a pair", "of texts", "alone"]


def test_lines_that_overlap_with_held_out_texts_are_excluded():
    held_out = "one two three four five six seven eight nine ten eleven twelve thirteen"
    cut = " ".join(held_out.split()[1:])
    # eleven consecutive words may be chance
    assert list(
        exclude_overlapping_lines(
            [
                held_out.upper() + "!",
                "so: " + cut + " and on",
                " ".join(held_out.split()[:11]),
                "other",
            ],
            [held_out],
        )
    ) == [" ".join(held_out.split()[:11]), "other"]
    # shorter than twelve words: the whole text
    assert list(
        exclude_overlapping_lines(["It is fine.", "it is fine too", ""], ["it is, fine"])
    ) == ["it is fine too", ""]


def test_text_is_prepared_once(lines, tmp_path):
    tok, a = prepare_text(lines, tmp_path, 700)
    tok2, b = prepare_text(lines, tmp_path, 700)  # loaded
    assert np.array_equal(a["stream"], b["stream"]) and tok.get_vocab() == tok2.get_vocab()
    assert (a["stream"] == 2).sum() == len(lines) and not (tmp_path / "text.tmp").exists()
    _, c = prepare_text(["only once", *lines[:50] * 2], tmp_path / "more", 700)
    # the end of the stream, which is held out, has texts that occur only once
    assert "only once" in prepare_text(["only once", *lines[:50] * 2], tmp_path / "more", 700)[
        0
    ].decode(c["stream"][-12:])
    for changes in (dict(lines=lines[1:]), dict(vocab_size=600), dict(seed=1)):
        with pytest.raises(ValueError, match="holds other text.*Use another folder"):
            prepare_text(**{**dict(lines=lines, out=tmp_path, vocab_size=700), **changes})


def test_the_tokenizer_is_trained_on_a_random_sample(tmp_path, monkeypatch):
    """Repeated texts come first in the stream, but not in the training texts of the tokenizer."""
    training_texts = []
    original = corpus.train_tokenizer

    def train_tokenizer(lines, vocab_size):
        training_texts.extend(lines)
        return original(lines, vocab_size)

    monkeypatch.setattr(corpus, "train_tokenizer", train_tokenizer)
    prepare_text([f"only once {i}" for i in range(200)] + ["repeated"] * 200, tmp_path, 400)
    assert len(training_texts) == 400 and 60 < training_texts[:200].count("repeated") < 140


def test_prepared_text_that_has_changed_is_prepared_again(lines, tmp_path):
    _, a = prepare_text(lines, tmp_path, 700)
    ids = np.array(a["stream"])
    data = bytearray((tmp_path / "stream.npy").read_bytes())
    data[-3] ^= 1
    del a
    (tmp_path / "stream.npy").write_bytes(data)
    with pytest.warns(
        UserWarning, match="stream.npy is damaged or missing: the text is prepared again"
    ):
        _, b = prepare_text(lines, tmp_path, 700)
    assert np.array_equal(ids, b["stream"])


def test_overlaps_are_found_in_any_script():
    assert [*exclude_overlapping_lines(["это тест", "a line"], ["Это тест!"])] == ["a line"]


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

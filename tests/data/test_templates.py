"""Templates: their slots, their tokens, and truncated sentences."""

import pytest
from small import YES_NO, YES_NO_PAIRS, YES_NO_ROWS
from superglue import BENCHMARKS

from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.data.templates import truncate_pair_lengths


def check_tokens(e, tokenizer, text):
    assert (
        e["input_ids"] == tokenizer(text).input_ids
        and e["input_ids"][e["mask_position"]] == tokenizer.mask_token_id
    )


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("name", [n for n, t in TASKS.items() if t.templates])
def test_pieces_are_the_tokens_of_the_filled_template(name, variant, bpe, wordpiece):
    t = TASKS[name]
    s1 = "the film isn't dull , it's a plane"
    s2 = "They are taking off ."
    row = dict(sentence1=s1, label=0) | (dict(sentence2=s2) if t.pair else {})
    for tok in (bpe, wordpiece):
        (e,) = t.encode([row], tok, 99, variant)
        check_tokens(e, tok, t.template(variant).format(s1=s1, s2=s2, mask=tok.mask_token))


def test_causal_template_ends_before_the_answer(gpt):
    (e,) = TASKS["rte"].encode(
        [dict(sentence1="the film is dull", sentence2="it was great", label=0)], gpt, 99, "paper"
    )
    assert e["input_ids"] == [
        gpt.bos_token_id,
        *gpt("the film is dull it was great They are").input_ids,
    ]
    assert e["mask_position"] == len(e["input_ids"]) - 1
    with pytest.raises(
        ValueError, match="must end in {mask} for a causal model.*move {mask} to the end"
    ):
        TASKS["trec"].encode([dict(sentence1="a film", label=0)], gpt, 99, "paper")


@pytest.mark.parametrize(
    "template,message",
    [
        ("{s1} was .", r"\['\{s1\}'\]"),
        ("{s1} {mask} {mask}", "exactly once"),
        ("was .", "none"),
        ("{s1} {mask} {s2}", "s2"),
    ],
)
def test_templates_need_their_slots(template, message, bpe):
    if "{" not in template:  # a string without a slot is taken for the name of a template
        with pytest.raises(ValueError, match="has no template"):
            YES_NO.encode(YES_NO_ROWS, bpe, 64, template)
    else:
        with pytest.raises(ValueError, match=message):
            YES_NO.encode(YES_NO_ROWS, bpe, 64, template)


@pytest.mark.parametrize("max_len", [9, 14, 40, 300])
def test_truncation_cuts_sentences_only(max_len, bpe):
    row = dict(sentence1="plane " * 80, sentence2="film " * 50, label=1)
    (e,) = YES_NO_PAIRS.encode([row], bpe, max_len, "{s1} ? {mask} , {s2}")
    text = bpe.decode(e["input_ids"]).replace("<s>", "").replace("</s>", "")
    n1 = text.count("plane")
    n2 = text.count("film")
    assert (
        len(e["input_ids"]) <= max_len and e["input_ids"][e["mask_position"]] == bpe.mask_token_id
    )
    assert text.index("?") < text.index("<mask>") < text.index(",")
    assert n1 > 0 and n2 > 0 and e["input_ids"][-1] == bpe.sep_token_id
    assert (n1, n2) == (80, 50) if max_len == 300 else abs(n1 - n2) <= 1  # both are one token


def test_truncated_pairs_use_the_whole_length():
    for n1, n2, total in [
        (a, b, c) for a in range(0, 40, 3) for b in range(0, 40, 4) for c in range(1, 60, 7)
    ]:
        a, b = truncate_pair_lengths(n1, n2, total)
        assert 0 <= a <= n1 and 0 <= b <= n2 and a + b == min(total, n1 + n2)
        if a < n1 and b < n2:
            assert abs(a - b) <= 1
        if a < n1:
            assert a >= b  # the longer one was cut
        if b < n2:
            assert b >= a - 1


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_question_survives_a_long_paragraph(superglue_folder, bbs, name, family):
    task = load_task(name, superglue_folder)
    tok = bbs(family).tokenizer
    rows = [{**r, "sentence1": r["sentence1"] * 9} for r in task.splits["test"]]
    for e, r in zip(task.encode(rows, tok, 40, "code"), rows):
        assert len(e["input_ids"]) <= 40 and (
            tok.mask_token_id is None or e["input_ids"][e["mask_position"]] == tok.mask_token_id
        )
        decoded = " ".join(tok.decode(e["input_ids"]).lower().split())
        # the second text is the shorter one, which is not truncated
        assert r["sentence2"].split()[-1].strip(".?").lower() in decoded


def test_real_sentences_encode_as_the_filled_template(bpe, wordpiece, data_dir):
    for name in ("mr", "rte"):
        t = load_task(name, data_dir)
        for tok in (bpe, wordpiece):
            rows = t.splits["test"][:100]
            for e, r in zip(t.encode(rows, tok, 2000, "code"), rows):
                check_tokens(
                    e,
                    tok,
                    t.template("code").format(
                        s1=r["sentence1"], s2=r.get("sentence2"), mask=tok.mask_token
                    ),
                )

"""Grammars: words, articles, and labels that are correct by construction."""

from random import Random

from idp_tutorial.data.grammars import (
    fix_articles_and_capitals,
    load_lexicon,
    make_entailment_row,
    make_similarity_row,
)


def test_no_adjective_is_both_good_and_bad():
    lexicon = load_lexicon("sentiment")
    assert not set(lexicon["good_adj"]) & set(lexicon["bad_adj"])


def test_articles_and_capitals_are_fixed():
    assert fix_articles_and_capitals("a owl. i saw it") == "An owl. I saw it"


def test_a_hypothesis_does_not_depend_on_the_label():
    for seed in range(20):
        entailed, not_entailed = [make_entailment_row(Random(seed), y, "train") for y in (0, 1)]
        assert entailed["sentence2"] == not_entailed["sentence2"]
        assert entailed["sentence1"] != not_entailed["sentence1"]


def test_equal_sentences_have_the_highest_similarity():
    rows = [make_similarity_row(Random(seed), 0, "train") for seed in range(300)]
    assert {row["label"] for row in rows} >= {0.0, 5.0}
    assert all(row["label"] >= 4 for row in rows if row["sentence1"] == row["sentence2"])

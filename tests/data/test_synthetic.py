"""Bundled tasks have distinct, disjoint, balanced and reproducible rows, and need word order."""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from idp_tutorial.data.synthetic import (
    SPLIT_SIZES,
    SYNTHETIC_TASKS,
    TWO_DOMAINS,
    SyntheticTask,
    all_noun_descriptors,
    assign_split,
    find_noun_descriptor,
    make_rows,
)


def texts(rows):
    return [r[k] for r in rows for k in ("sentence1", "sentence2") if k in r]


@pytest.mark.parametrize("name", SYNTHETIC_TASKS)
def test_rows_are_distinct_balanced_and_in_their_split(name):
    task = SYNTHETIC_TASKS[name]
    splits = {s: make_rows(name, s, 300) for s in SPLIT_SIZES}
    for split, rows in splits.items():
        assert len({tuple(r.values())[:-1] for r in rows}) == 300
        assert all(
            assign_split(s) == split
            and "{" not in s
            and "  " not in s
            and s[0].isupper()
            and s[-1] in ".?"
            for s in texts(rows)
        )
        last = "target" if name == "in-short" else "label"
        is_pair = name in ("entailment", "similarity")
        assert all(list(r) == ["sentence1"] + ["sentence2"] * is_pair + [last] for r in rows)
        if name == "in-short":
            assert sum(r["target"].endswith("good") for r in rows) == 150
        elif task.n_classes > 1:
            assert set(Counter(r["label"] for r in rows).values()) == {300 // task.n_classes}
        else:
            assert all(isinstance(r["label"], float) and 0 <= r["label"] <= 5 for r in rows)
    seeds = set(texts(make_rows(name, "train", 300, seed=7)))
    assert not seeds & set(texts(splits["test"]))  # another seed stays in its split


def test_rows_are_the_same_in_another_process():
    code = (
        "from idp_tutorial.data.synthetic import *; "
        "print([make_rows(n, 'test', 5, seed=3) for n in SYNTHETIC_TASKS])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "5"},
    ).stdout
    assert eval(out) == [make_rows(n, "test", 5, seed=3) for n in SYNTHETIC_TASKS]


def test_held_out_combinations_are_in_the_test_split_only():
    train, val, test = (
        [find_noun_descriptor(r["sentence1"]) for r in make_rows("domains", s)] for s in SPLIT_SIZES
    )
    assert (
        not any(c.is_held_out for c in train + val) and 100 < sum(c.is_held_out for c in test) < 250
    )
    assert {c.noun for c in test} <= {c.noun for c in train}
    nouns = {c.noun for c in all_noun_descriptors()}
    descriptors = {c.descriptor for c in all_noun_descriptors()}
    for r in make_rows("domains", "test"):  # one noun and one descriptor, which determine the label
        words = re.findall(r"\w+", r["sentence1"].lower())
        assert (
            sum(w in nouns for w in words) == 1
            and sum(w in descriptors for w in words) == 1
            and 4 <= len(words) <= 20
        )
        assert r["label"] == find_noun_descriptor(r["sentence1"]).is_positive


def test_every_descriptor_of_two_domains_is_good_in_one_domain():
    train, test = (
        [find_noun_descriptor(r["sentence1"]) for r in make_rows("two-domains", s)]
        for s in ("train", "test")
    )
    assert (
        {c.domain for c in train} == {c.domain for c in test} == {*TWO_DOMAINS["domain"]}
        and not any(c.is_held_out for c in train)
        and any(c.is_held_out for c in test)
    )
    for word in {
        c.descriptor for c in train
    }:  # every descriptor is good in one domain and bad in another
        assert (
            len({(c.domain, c.is_positive) for c in train if c.descriptor == word})
            == 2
            == len({c.is_positive for c in train if c.descriptor == word})
        )


def test_the_last_descriptor_decides_in_two_domains_order():
    for r in make_rows("two-domains-order", "test", 300):
        words = re.findall(r"\w+", r["sentence1"].lower())
        pair = sorted(
            (c for c in all_noun_descriptors() if c.noun in words and c.descriptor in words),
            key=lambda c: words.index(c.descriptor),
        )
        assert len(pair) == 2 and pair[0].is_positive != pair[1].is_positive == r["label"]


@pytest.mark.parametrize(
    "name,field,most",
    [
        ("domains", "sentence1", 58),
        ("two-domains", "sentence1", 58),
        ("two-domains-order", "sentence1", 58),
        ("entailment", "sentence2", 56),
        ("sentiment", "sentence1", 80),
    ],
)
def test_a_bag_of_words_does_not_solve_the_tasks(name, field, most):
    (x, y), (x_te, y_te) = (
        ([r[field] for r in rows], [r["label"] for r in rows])
        for rows in (make_rows(name, "train"), make_rows(name, "test"))
    )
    assert (
        100
        * make_pipeline(CountVectorizer(), LogisticRegression(max_iter=1000))
        .fit(x, y)
        .score(x_te, y_te)
        < most
    )


@pytest.mark.parametrize(
    "args,message",
    [
        (("domain", "train"), "unknown bundled task 'domain': did you mean 'domains'"),
        (("sst2", "train"), "unknown bundled task 'sst2'.* Known: sentiment, questions"),
        (("domains", "dev"), "split must be 'train', 'validation' or 'test', got 'dev'"),
    ],
)
def test_invalid_requests_raise_user_errors(args, message):
    with pytest.raises(ValueError, match=message):
        make_rows(*args)


def test_a_grammar_with_too_few_sentences_raises_an_error(monkeypatch):
    monkeypatch.setitem(
        SYNTHETIC_TASKS,
        "tiny",
        SyntheticTask(
            lambda rng, label, split: dict(sentence1=f"Sentence {rng.randrange(40)}.", label=label),
        ),
    )
    with pytest.raises(ValueError, match="only about [0-9]+ distinct rows .*, not 500"):
        make_rows("tiny", "validation")


def test_the_smallest_grammar_has_ten_times_the_default_rows():
    assert len({r["sentence1"] for r in make_rows("questions", "validation", 5000)}) == 5000

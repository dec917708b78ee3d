"""Few-shot samples: sizes, proportions, disjoint splits, whole questions."""

import random
from collections import Counter

import pytest
from small import YES_NO_ROWS, sentences_of
from superglue import groups_of

from idp_tutorial.data.few_shot import sample_rows, split_few_shot
from idp_tutorial.data.rows import group_by_question
from idp_tutorial.data.tasks import load_task


def test_stratified_samples_follow_lpts_code():
    rows = [dict(sentence1=str(i), label=0 if i < 79 else 1 if i < 95 else 2) for i in range(100)]
    for seed in range(5):
        # round(15.8), round(3.2), the rest
        assert Counter(r["label"] for r in sample_rows(rows, 20, seed)[0]) == {0: 16, 1: 3, 2: 1}
    assert sample_rows(rows, 20, 1) == sample_rows(rows, 20, 1) != sample_rows(rows, 20, 2)
    loose = {
        tuple(
            sorted(
                Counter(r["label"] for r in sample_rows(rows, 20, s, stratified=False)[0]).items()
            )
        )
        for s in range(20)
    }
    assert len(loose) > 3


def test_unstratified_samples_are_the_first_rows_of_a_shuffle():
    rows = [dict(sentence1=str(i), label=i % 3) for i in range(30)]
    rng = random.Random(5)
    want = list(rows)
    rng.shuffle(want)
    assert sample_rows(rows, 4, 5, stratified=False) == (want[:4], want[4:])


@pytest.mark.parametrize("shots", [1, 5, 11, 39])
def test_few_shot_splits_are_disjoint_and_have_exact_sizes(shots):
    rows = [dict(sentence1=str(i), label=i % 6) for i in range(40)]
    for stratified in (True, False):
        train, val = split_few_shot(rows, shots, 3, stratified)
        assert (
            len(train) == shots
            and len(val) == 40 - shots
            and not sentences_of(train) & sentences_of(val)
        )


def test_few_shot_validation_has_at_most_1000_rows():
    train, val = split_few_shot([dict(sentence1=str(i), label=i / 1000) for i in range(3000)], 100)
    assert (len(train), len(val)) == (100, 1000)
    for k in (0, 60, 99):
        with pytest.raises(
            ValueError, match=f"shots must be between 1 and 59 .* of 60 rows, .* got {k}"
        ):
            split_few_shot(YES_NO_ROWS, k)


def test_the_seed_determines_the_training_rows():
    rows = [dict(sentence1=f"t{i}", label=i % 2) for i in range(100)]
    a, b = [{r["sentence1"] for r in split_few_shot(rows, 10, s)[0]} for s in (0, 1)]
    assert a != b


@pytest.mark.parametrize("stratified", [True, False])
def test_draws_take_whole_questions(superglue_folder, stratified):
    rows = load_task("multirc", superglue_folder).splits["train"]
    n = len(group_by_question(rows))
    for seed in range(3):
        train, rest = split_few_shot(rows, 7, seed, stratified)
        assert (len(group_by_question(train)), len(group_by_question(rest))) == (7, n - 7) and not {
            *groups_of(train)
        } & {*groups_of(rest)}
        assert sorted(map(str, train + rest)) == sorted(map(str, rows))
    assert sample_rows(rows, 7, 0) != sample_rows(rows, 7, 1) and sample_rows(
        rows, 7, 0
    ) == sample_rows(rows, 7, 0)

"""Metrics: those of the papers, and those of MultiRC against slow references."""

import random
import warnings
from collections import defaultdict

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    balanced_accuracy_score,
    f1_score,
    log_loss,
    matthews_corrcoef,
)

from idp_tutorial.data.metrics import (
    METRICS,
    compute_metric,
    mean_question_f1,
)
from idp_tutorial.data.task import mark_best_candidates
from idp_tutorial.data.tasks import TASKS


def test_each_papers_mean_of_metrics():
    y = [1, 1, 1, 1, 0, 0]
    p = [1, 1, 1, 0, 0, 1]
    s = TASKS["mrpc"].score(p, y)
    assert TASKS["mrpc"].score(p, y, all_metrics=False) == dict([*s.items()][:1])
    assert next(iter(s)) == "accuracy+f1" == TASKS["qqp"].metric
    assert (
        s["f1"] == pytest.approx(75)
        and s["macro_f1"] == pytest.approx(62.5)
        and s["accuracy"] == pytest.approx(400 / 6)
    )
    assert s["accuracy+f1"] == pytest.approx((75 + 400 / 6) / 2) and s[
        "accuracy+macro_f1"
    ] == pytest.approx((62.5 + 400 / 6) / 2)
    assert (
        "f1" not in TASKS["trec"].score([0, 1, 5], [0, 1, 5])
        and next(iter(TASKS["trec"].score([0], [0]))) == "accuracy"
    )


def test_stsb_is_the_mean_of_two_correlations():
    s = TASKS["stsb"].score(torch.tensor([1.0, 2.0, 3.0, 10.0]), [0.0, 1.0, 2.0, 3.0])
    assert s["spearman"] == pytest.approx(100) and 80 < s["pearson"] < 90
    assert s["pearson+spearman"] == pytest.approx((s["pearson"] + 100) / 2)


def test_degenerate_predictions_give_no_nan_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(TASKS["stsb"].score([2.0] * 4, [0.0, 1.0, 2.0, 3.0]).values()) == {0.0}
        assert TASKS["mrpc"].score([0, 0], [1, 1])["accuracy+f1"] == 0
        assert all(np.isfinite(list(TASKS["rte"].score([0, 0], [0, 0]).values())))


@pytest.mark.parametrize(
    "p,y,match",
    [
        ([0, 1], [0], "both must be"),
        ([], [], "N at least 1"),
        ([0.0, float("nan")], [0, 1], "1 of 2 predictions are NaN.*learning rate"),
    ],
)
def test_invalid_predictions_are_reported(p, y, match):
    with pytest.raises(ValueError, match=match):
        compute_metric("accuracy", p, y)


def test_an_unknown_metric_is_reported():
    with pytest.raises(ValueError, match="unknown metric 'f2': use accuracy, f1"):
        compute_metric("accuracy+f2", [0], [0])
    assert set(METRICS) == {
        *("accuracy", "balanced_accuracy", "f1", "macro_f1", "mcc", "neg_log_loss"),
        *("micro_f1", "subset_accuracy", "pearson", "spearman", "exact", "f1_m"),
    }


# ---- questions with several rows


def slow_exact(p, y, g):
    correct = defaultdict(list)
    for a, b, q in zip(p, y, g):
        correct[q].append(a == b)
    return 100 * sum(all(v) for v in correct.values()) / len(correct)


def slow_f1_m(p, y, g):
    """Compute precision and recall; 1 for a question without true and predicted answers."""

    def f1(q):
        predicted, true = [
            {i for i, (v, k) in enumerate(zip(o, g)) if k == q and v == 1} for o in (p, y)
        ]
        if not predicted | true:
            return 1.0
        hits = len(predicted & true)
        precision = hits / len(predicted) if predicted else 0.0
        recall = hits / len(true) if true else 0.0
        return 2 * precision * recall / (precision + recall) if hits else 0.0

    return 100 * sum(map(f1, set(g))) / len(set(g))


def test_f1_m_is_the_mean_f1_of_the_questions():
    rng = random.Random(3)
    y, p, g = [[rng.choice(c) for _ in range(300)] for c in ((0, 0, 1), (0, 0, 1), range(90))]
    s = compute_metric("f1_m", p, y, g)
    order = rng.sample(range(300), 300)
    assert (
        s
        == pytest.approx(slow_f1_m(p, y, g))
        == pytest.approx(compute_metric("f1_m", *[[o[i] for i in order] for o in (p, y, g)]))
    )
    assert 10 < s < 60
    none = {q for q in g if not any(a or b for a, b, k in zip(p, y, g) if k == q)}
    sk = [
        f1_score(*[[v for v, k in zip(o, g) if k == q] for o in (y, p)], zero_division=0)
        for q in set(g)
    ]
    # scikit-learn and the benchmark's toolkit give these 0
    assert len(none) > 3 and s == pytest.approx(100 * (sum(sk) + len(none)) / len(sk))
    assert [
        mean_question_f1(*o, ["a"] * 2)
        for o in (([0, 0], [0, 0]), ([0, 1], [0, 0]), ([0, 0], [0, 1]), ([1, 1], [0, 1]))
    ] == [1.0, 0.0, 0.0, pytest.approx(2 / 3)]
    assert (
        mean_question_f1([True, False], [True, True], [0, 0]) == pytest.approx(2 / 3)
        and compute_metric("f1_m", [1, 0], [1, 0], [0, 0]) == 100
    )
    with pytest.raises(ValueError, match="metric 'f1_m' scores questions: pass the `group`"):
        compute_metric("f1_m", [1, 0], [1, 0])


def test_scores_equal_the_definitions_of_the_benchmark():
    rng = random.Random(0)
    y, p, g = [[rng.choice(c) for _ in range(200)] for c in ((0, 1), (0, 1), range(60))]
    s = TASKS["multirc"].score(p, y, g)
    assert next(iter(s)) == "f1+exact" and s["exact"] == pytest.approx(slow_exact(p, y, g))
    assert s["f1"] == pytest.approx(100 * f1_score(y, p)) and 5 < s["exact"] < 40
    assert s["f1_m"] == pytest.approx(slow_f1_m(p, y, g)) and "f1_m" not in TASKS["copa"].score(
        [0, 1], [0, 1], [0, 0]
    )
    assert s["f1+exact"] == pytest.approx((s["f1"] + s["exact"]) / 2)
    y3 = [0, 0, 1, 1, 2, 2]
    p3 = [0, 0, 1, 2, 2, 2]
    f = [1.0, 2 / 3, 0.8]
    s = TASKS["cb"].score(p3, y3)
    assert next(iter(s)) == "accuracy+macro_f1" and s["accuracy"] == pytest.approx(500 / 6)
    assert s["macro_f1"] == pytest.approx(100 * sum(f) / 3) and "exact" not in s
    assert [TASKS[n].metric for n in ("copa", "boolq", "wic")] == ["accuracy"] * 3


def test_for_pairs_accuracy_and_exact_agree():
    rng = random.Random(2)
    g = [i // 2 for i in range(80)]
    y = [int(i % 2 == rng.choice((0, 1))) for i in range(80)]
    for q in range(40):
        y[2 * q + 1] = 1 - y[2 * q]
    p = mark_best_candidates([rng.random() for _ in g], g)
    s = TASKS["copa"].score(p, y, g)
    assert (
        s["accuracy"]
        == pytest.approx(s["exact"])
        == pytest.approx(100 * sum(p[i] == y[i] == 1 for i in range(80)) / 40)
    )
    assert 30 < s["accuracy"] < 70


# ---- metrics that users choose


def random_classes(n=200, n_classes=3):
    """Return labels, predictions that are often correct, and probabilities."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, n_classes, n)
    probabilities = rng.dirichlet(np.ones(n_classes), n) + 0.5 * np.eye(n_classes)[labels]
    probabilities /= probabilities.sum(1, keepdims=True)
    return labels, probabilities.argmax(1), probabilities


@pytest.mark.parametrize(
    "name,function", [("mcc", matthews_corrcoef), ("balanced_accuracy", balanced_accuracy_score)]
)
def test_a_metric_of_classes_is_that_of_sklearn(name, function):
    labels, predictions, _ = random_classes()
    assert compute_metric(name, predictions, labels) == pytest.approx(
        100 * function(labels, predictions)
    )


def test_matthews_correlation_by_hand():
    # 3 true positives, 1 true negative, 1 false positive, 1 false negative
    p, y = [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0]
    assert compute_metric("mcc", p, y) == pytest.approx(100 * (3 * 1 - 1 * 1) / 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compute_metric("mcc", [1, 1, 1, 1, 1, 1], y) == 0
        assert compute_metric("balanced_accuracy", [2, 1], [1, 1]) == 50


def test_log_loss_is_negated_so_that_more_is_better():
    labels, predictions, probabilities = random_classes()
    score = compute_metric("neg_log_loss", predictions, labels, probabilities=probabilities)
    assert score == pytest.approx(-100 * log_loss(labels, probabilities)) and score < 0
    better = compute_metric("neg_log_loss", labels, labels, probabilities=np.eye(3)[labels])
    assert score < better <= 0
    with pytest.raises(ValueError, match="needs the probability of each class"):
        compute_metric("neg_log_loss", predictions, labels)
    with pytest.raises(ValueError, match="a log-loss has no mean with other metrics"):
        compute_metric("accuracy+neg_log_loss", predictions, labels, probabilities=probabilities)


def test_metrics_of_several_labels_by_hand():
    y = [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    p = [[1, 0, 0], [0, 1, 0], [0, 1, 0]]  # 2 true positives, 1 false positive, 1 false negative
    assert compute_metric("micro_f1", p, y) == pytest.approx(100 * 4 / 6)
    assert compute_metric("macro_f1", p, y) == pytest.approx(100 * (1 + 2 / 3 + 0) / 3)
    assert compute_metric("subset_accuracy", p, y) == pytest.approx(100 / 3)
    probabilities = np.where(np.array(y) == 1, 0.8, 0.4)
    by_hand = (3 * np.log(0.8) + 6 * np.log(0.6)) / 9
    score = compute_metric("neg_log_loss", p, y, probabilities=probabilities)
    assert score == pytest.approx(100 * by_hand)

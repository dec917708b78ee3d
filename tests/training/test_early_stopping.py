"""The best of several evaluations: the order of scores and losses, and patience."""

import pytest

from idp_tutorial.training.early_stopping import find_best_evaluation, should_stop_early


@pytest.mark.parametrize(
    "scores, losses, best",
    [
        ([50, 80, 70], [0.5, 0.5, 0.1], 1),  # a lower loss does not outweigh the score
        ([80, 80, 80], [0.5, 0.1, 0.3], 1),  # of equal scores the lowest loss
        ([80, 80], [0.2, 0.2], 0),  # of equal losses the first
        ([80, 80], [None, 0.2], 1),  # a known loss before an unknown one
    ],
)
def test_the_best_evaluation(scores, losses, best):
    history = [(10 * i, score) for i, score in enumerate(scores)]
    assert find_best_evaluation(history, losses) == best


@pytest.mark.parametrize(
    "patience, n_after_best, stops", [(2, 1, False), (2, 2, True), (None, 9, False)]
)
def test_patience_counts_the_evaluations_after_the_best_one(patience, n_after_best, stops):
    scores = [60, 90, *[80] * n_after_best]
    history = list(enumerate(scores))
    assert should_stop_early(history, [0.5] * len(scores), patience) is stops


def test_a_lower_loss_at_the_same_score_is_better():
    history = [(0, 90), (1, 90), (2, 90)]
    assert not should_stop_early(history, [0.3, 0.2, 0.1], 2)
    assert should_stop_early(history, [0.1, 0.2, 0.3], 2)


def test_a_run_without_evaluations_goes_on():
    assert not should_stop_early([], [], 1)

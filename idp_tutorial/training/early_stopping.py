"""The best of several evaluations, and when a run stops early.

Scores on a small validation split are often equal, so the validation loss decides between them.
"""

import math
from collections.abc import Sequence


def find_best_evaluation(
    history: Sequence[tuple[int, float]],  # (step, score) of every evaluation, at least one
    losses: Sequence[float | None],  # loss of every evaluation; None: not known
) -> int:  # index of the evaluation
    """Return the evaluation with the best score; of equal scores the one with the lowest loss.

    Of equal losses it is the first one.
    """

    def rank(index: int) -> tuple[float, float]:
        """Return what is greatest for the best evaluation."""
        loss = losses[index]
        return history[index][1], -math.inf if loss is None else -loss

    return max(range(len(history)), key=rank)


def should_stop_early(
    history: Sequence[tuple[int, float]],  # (step, score) of every evaluation
    losses: Sequence[float | None],  # loss of every evaluation; it decides between equal scores
    patience: int | None,  # evaluations without a better one before stopping; None: never stop
) -> bool:
    """Return whether the last `patience` evaluations were no better than the best before them."""
    if not patience or not history:
        return False
    return len(history) - 1 - find_best_evaluation(history, losses) >= patience

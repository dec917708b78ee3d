"""Advice from a comparison.

A reader of a table wants to know which method to use. `advise` answers in one sentence, from the
scores, the costs, and the intervals of differences on the same test examples.
"""

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.runs.statistics import estimate_contrast


class Advice(NamedTuple):
    """The method that a comparison recommends, and why."""

    method: str  # the method to use
    title: str  # one message, for a picture
    sentence: str


_CONTROLS_BY_COST = ("majority", "words", "probe", "side-network")


def _cost_rank(record: dict) -> tuple[bool, int, str]:
    """Return what a method costs: a control is cheaper than a prompt, and few parameters than many.

    Methods with equally many trained parameters are in the order of the names of their kinds.
    """
    method = record["method"]
    if method in _CONTROLS_BY_COST:
        return False, _CONTROLS_BY_COST.index(method), ""
    return True, sum(record["params"].values()), ALL_METHODS[method].kind


def _is_lower(estimate: dict | None) -> bool:
    """Return whether a difference is significantly below 0."""
    return estimate is not None and bool(estimate["high"] < 0)


def _join(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def advise(
    records: list[dict],  # of one comparison: one task, number of shots, backbone and head
    folder: Path | str | None = None,  # of the records and logits; None: each has a `folder`
) -> Advice:
    """Return which method to use, what is not worth its cost, and which differences are real.

    The method to use is the cheapest one that does not score significantly lower than the best:
    the 95 % interval of their difference, over the same test examples and over seeds, contains 0.
    Controls are the cheapest, in the order majority, words, probe, side-network; then the methods
    with the fewest trained parameters, which are what is trained, kept and loaded.
    """
    finished = [r for r in records if r["status"] == "done"]
    scores = pd.DataFrame(finished).groupby("method", sort=False).score.mean()
    best = str(scores.idxmax())
    differences: dict[str, dict | None] = {}
    for method in scores.index:
        if method != best:
            differences[method] = estimate_contrast(finished, method, best, folder)
    lower = [m for m, estimate in differences.items() if _is_lower(estimate)]
    ranks = {r["method"]: _cost_rank(r) for r in finished}
    choice = min((m for m in scores.index if m not in lower), key=ranks.__getitem__)

    def describe(method: str) -> str:
        """Return a method with its score."""
        return f"{method} ({scores[method]:.1f})"

    if choice == "majority":
        return Advice(
            choice,
            "No method scores significantly higher than the most frequent label",
            f"Do not use any of these yet: the best, {describe(best)}, is not significantly above "
            f"the most frequent label, {describe(choice)}; more labelled texts may change this.",
        )
    sentence = f"Use {describe(choice)}"
    title = f"{choice} scores highest"
    if choice != best:
        title = f"{choice} is enough: no method scores significantly higher"
        estimate = differences[choice]
        assert estimate is not None
        # the difference of the best; `+ 0` turns -0.0 into 0.0
        effect, low, high = (round(-estimate[k], 1) + 0 for k in ("effect", "high", "low"))
        sentence += (
            f": {describe(best)} scores higher, but the difference ({effect:.1f} points, 95 % "
            f"interval {low:.1f} to {high:.1f}) may be chance"
        )
    elif len(scores) > 1 and len(lower) == len(differences):
        sentence += ", which scores significantly higher than every other method"
    dearer = [m for m in scores.index if m not in (choice, best) and ranks[m] > ranks[choice]]
    if dearer:
        sentence += f"; not worth their cost here: {_join([*map(describe, dearer)])}"
    return Advice(choice, title, f"{sentence}.")

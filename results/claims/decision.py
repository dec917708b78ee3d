"""The verdict on a claim about a difference, from its interval and its number of runs."""

VERDICT_MEANINGS = {
    "seen": "the interval excludes 0, on the side of the claim",
    "opposite": "the interval excludes 0, on the other side",
    "not seen": "the interval contains 0, or the difference has the other sign without being "
    "significant; one as large as published would have been detected",
    "open": "not decided",
}
# points: the size of a claim's difference if the paper states none
_DEFAULT_CLAIMED_DIFFERENCE = 2.0
EQUIVALENCE_MARGIN = 1.0  # points: the largest difference of two methods that count as equal
# training examples up to which another few-shot sample is another experiment
_MAX_FEW_SHOT_EXAMPLES = 500


def has_enough_runs(
    estimate: dict | None,  # from `estimate_contrast`
) -> bool:
    """Return whether a contrast has enough runs for a verdict.

    Five runs are enough, and with few-shot samples 8 runs of 4 samples.
    """
    if estimate is None:
        return False
    is_few_shot = estimate.get("draws", 1) > 1 or any(
        shots and shots <= _MAX_FEW_SHOT_EXAMPLES for shots in estimate.get("shots", ())
    )
    if is_few_shot:
        return estimate["draws"] >= 4 and estimate["runs"] >= 8
    return estimate["runs"] >= 5


def _decide_equality(low: float, high: float, is_significant: bool) -> str:
    """Return the verdict on a claim that two methods are equal."""
    if low > -EQUIVALENCE_MARGIN and high < EQUIVALENCE_MARGIN:
        return "seen"
    if is_significant and (low > EQUIVALENCE_MARGIN or high < -EQUIVALENCE_MARGIN):
        return "opposite"
    return "open"


def decide_verdict(
    estimate: dict | None,  # from `estimate_contrast`
    published_difference: float | None = None,  # in points
    expected_sign: str = "",  # '>', '<' or '='; '': that of the published difference, or else '>'
    corrected_p: float | None = None,  # None: the p-value of `estimate`
) -> str:  # a key of `VERDICT_MEANINGS`
    """Return the verdict on a claim: 'seen', 'opposite', 'not seen' or 'open'."""
    if estimate is None or not has_enough_runs(estimate):
        return "open"
    low = estimate["low"]
    high = estimate["high"]
    is_significant = (estimate["p"] if corrected_p is None else corrected_p) < 0.05
    if expected_sign == "=":
        return _decide_equality(low, high, is_significant)
    is_negative = expected_sign == "<" or (not expected_sign and (published_difference or 0) < 0)
    sign = -1 if is_negative else 1
    if is_significant:
        return "seen" if sign * estimate["effect"] > 0 else "opposite"
    size = 0.0  # a score that is not a percentage has no typical difference
    if published_difference or estimate.get("points", True):
        size = abs(published_difference or _DEFAULT_CLAIMED_DIFFERENCE)
    # even if it is not significant after correction
    supports_claim = min(sign * low, sign * high) > 0
    return "not seen" if not supports_claim and estimate["detectable"] <= size else "open"

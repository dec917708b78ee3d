"""Verdicts on effects."""

import pytest
from claim_records import record

from idp_tutorial.runs.statistics import estimate_contrast
from results.claims.decision import decide_verdict


def test_a_few_shot_verdict_needs_four_samples_with_two_seeds():
    runs = [(d, s) for d in range(4) for s in range(2)]
    estimates = [
        estimate_contrast(
            [
                record(m, s, v, split_seed=d)
                for m, v in (("a", 90.0), ("b", 60.0))
                for d, s in runs[:n]
            ],
            "a",
            "b",
        )
        for n in (6, 8)
    ]
    assert [decide_verdict(f, 5.0) for f in estimates] == ["open", "seen"]
    assert estimates[1]["runs"] == 8


def test_one_few_shot_sample_gives_no_verdict():
    def verdict(k, seeds=5):
        rs = [record(m, s, v, shots=k) for m, v in (("a", 90.0), ("b", 60.0)) for s in range(seeds)]
        return decide_verdict(estimate_contrast(rs, "a", "b"), 5.0)

    assert [verdict(100), verdict(500), verdict(100, 9)] == ["open"] * 3
    assert verdict(1000) == verdict(None) == "seen"


def test_not_seen_needs_an_interval_without_the_claimed_difference():
    f = dict(effect=-1.9, low=-3.3, high=-0.4, p=0.01, detectable=2.1, runs=5)
    assert (
        decide_verdict(f, -5.0, corrected_p=0.07) == "open"
        and decide_verdict({**f, "high": 0.4}, -5.0, corrected_p=0.07) == "not seen"
    )
    assert (
        decide_verdict(f, 5.0, corrected_p=0.07) == "not seen"
        and decide_verdict(f, 5.0, corrected_p=0.04) == "opposite"
    )  # a difference of +5 points is excluded
    assert decide_verdict(f, 2.0, corrected_p=0.07) == "open"
    null = {**f, "high": 0.4, "p": 0.2, "detectable": 0.07}
    assert (
        decide_verdict(null) == "not seen" and decide_verdict({**null, "points": False}) == "open"
    )
    rs = [record(m, s, 60.0, bits=0.5 + s / 100) for m in "ab" for s in range(5)]
    assert (
        estimate_contrast(rs, "a @bits", "b @bits")["points"],
        estimate_contrast(rs, "a", "b")["points"],
    ) == (False, True)


@pytest.mark.parametrize(
    "estimate,expected,verdict",
    [
        (dict(effect=3.0, low=1.2, high=5.0, p=0.01, detectable=2.0, runs=5), 2.0, "seen"),
        (dict(effect=3.0, low=1.2, high=5.0, p=0.01, detectable=2.0, runs=5), -2.0, "opposite"),
        (dict(effect=3.0, low=1.2, high=5.0, p=0.01, detectable=2.0, runs=3), 2.0, "open"),
        (dict(effect=1.0, low=-2.0, high=4.0, p=0.4, detectable=4.0, runs=5), 5.0, "not seen"),
        (dict(effect=1.0, low=-2.0, high=4.0, p=0.4, detectable=4.0, runs=5), 2.0, "open"),
    ],
)
def test_a_verdict_follows_from_interval_and_claim(estimate, expected, verdict):
    assert decide_verdict(estimate, expected) == verdict

"""Effects and their intervals."""

import importlib.util

import numpy as np
import pytest
from claim_records import record
from scipy.stats import ttest_1samp

from idp_tutorial.runs import statistics
from idp_tutorial.runs.logits import write_run_arrays
from idp_tutorial.runs.statistics import (
    adjust_p_values_holm,
    estimate_contrast,
    paired_bootstrap,
    per_example_scores,
)
from idp_tutorial.utils.checks import UserError
from results.claims.decision import decide_verdict, has_enough_runs


def test_the_interval_contains_zero_without_an_effect_and_excludes_it_with_one():
    """With 60 experiments each; a 95 % interval may exclude 0 in a few."""
    rng = np.random.default_rng(1)

    def count_excluding_zero(gain):
        count = 0
        for i in range(60):
            difficulty = rng.random(120)
            a, b = [
                100.0 * (rng.random((5, 120)) < np.clip(difficulty + g, 0, 1)) for g in (gain, 0)
            ]
            f = paired_bootstrap(a, b, 400, i)
            count += not f["low"] <= 0 <= f["high"]
        return count

    assert count_excluding_zero(0) <= 9 and count_excluding_zero(0.25) >= 58


def _synthetic_results(rng, seeds, examples, example_std, seed_std, interaction_std):
    """Correct predictions (100 or 0) of two methods with equal expected accuracy."""
    difficulty = rng.normal(1.2, 1, examples)
    sizes = (
        (example_std, (1, examples)),
        (seed_std, (seeds, 1)),
        (interaction_std, (seeds, examples)),
    )
    parts = [rng.normal(0, std, (2, *size)) for std, size in sizes]
    return 100.0 * (difficulty + sum(parts) > 0)


@pytest.mark.parametrize(
    "stds", [(0, 0, 0.5), (0.5, 0, 0.5), (0, 0.05, 0.5), (0.5, 0.2, 0.5), (1, 0, 0.2)]
)
def test_the_interval_is_as_wide_as_its_sources_of_variance(stds):
    """Seeds, examples or their interaction: about 95 % of the intervals contain 0, not all."""
    rng = np.random.default_rng(0)
    estimates = [
        paired_bootstrap(*_synthetic_results(rng, 5, 300, *stds), 400, i) for i in range(200)
    ]
    assert 178 <= sum(f["low"] <= 0 <= f["high"] for f in estimates) <= 197
    if not any(stds[:2]):  # interaction only: Student's t over the seeds is correct
        t = [
            2 * 2.776 * (a - b).mean(1).std(ddof=1) / 5**0.5
            for a, b in (_synthetic_results(rng, 5, 300, *stds) for _ in range(200))
        ]
        width = np.mean([f["high"] - f["low"] for f in estimates])
        assert width == pytest.approx(np.mean(t), rel=0.15)


@pytest.mark.parametrize("n_values", [10, 400])
def test_the_interval_over_examples_is_that_of_their_mean(n_values):
    """Few different values and continuous ones, as of a correlation, are drawn in two ways."""
    values = np.random.default_rng(0).normal(1, 5, n_values)
    scores = np.tile(np.resize(values, 400), (3, 1))  # equal seeds: only the examples vary
    estimate = paired_bootstrap(scores, np.zeros_like(scores))
    half_width = 1.96 * scores[0].std() / 400**0.5
    assert estimate["high"] - estimate["low"] == pytest.approx(2 * half_width, rel=0.03)


def test_pairing_makes_the_interval_narrower():
    """Two methods that err on the same examples differ less by chance."""
    rng = np.random.default_rng(0)
    a = 100.0 * (rng.random((5, 200)) < 0.7)
    b = a.copy()
    b[:, :6] = 0
    f = paired_bootstrap(a, b)
    assert f["low"] >= 0 and f["effect"] == pytest.approx((a - b).mean())
    assert f["detectable"] < paired_bootstrap(a, 100.0 * (rng.random((5, 200)) < 0.7))["detectable"]
    with pytest.raises(ValueError, match="same seeds and examples"):
        paired_bootstrap([1.0], [2.0])


def test_holm_is_monotone_and_never_smaller():
    p = [0.001, 0.2, 0.01, 0.011]
    q = adjust_p_values_holm(p)
    assert q == pytest.approx([0.004, 0.2, 0.03, 0.03]) and all(x >= y for x, y in zip(q, p))


def test_few_seeds_make_a_wide_interval():
    """With three seeds an interval is wider than with nine, and 95 % of them contain 0."""
    rng = np.random.default_rng(0)
    excluding_zero = 0
    for i in range(100):
        f = paired_bootstrap(rng.normal(0, 1, (3, 1)), np.zeros((3, 1)), 400, i)
        excluding_zero += not f["low"] <= 0 <= f["high"]
    assert excluding_zero <= 12  # a bootstrap of three seeds without Student's t gives 30
    nine = np.tile([[-1.0], [0.0], [1.0]], (3, 1))
    three = nine[:3]
    wide = paired_bootstrap(three, 0 * three)
    assert wide["high"] > 1.5 * paired_bootstrap(nine, 0 * nine)["high"]


@pytest.mark.parametrize("n_seeds", [3, 5])
def test_the_interval_over_few_seeds_is_students(n_seeds):
    """Where only the seeds vary, it is the interval of a t-test, on average over experiments."""
    rng = np.random.default_rng(0)
    ratios = []
    for i in range(50):
        effects = rng.normal(0, 5, (n_seeds, 1))
        estimate = paired_bootstrap(effects, 0 * effects, 4000, i)
        low, high = ttest_1samp(effects[:, 0], 0).confidence_interval(0.95)
        ratios.append((estimate["high"] - estimate["low"]) / (high - low))
    assert np.mean(ratios) == pytest.approx(1, abs=0.03)


def test_settings_have_equal_weight():
    """A task with many examples has the weight of one with ten."""
    small = np.full((5, 10), 10.0)
    large = np.zeros((5, 1000))
    assert paired_bootstrap([small, large], [0 * small, large])["effect"] == 5.0


def test_a_contrast_uses_the_runs_that_both_sides_have():
    rs = [record("a", s, 80.0 + s) for s in range(3)] + [record("b", s, 78.0 + s) for s in range(2)]
    f = estimate_contrast(rs, "a", "b")
    assert (f["effect"], f["runs"], f["texts"]) == (2.0, 2, 0) and decide_verdict(f, 1.0) == "open"
    assert (
        estimate_contrast(rs, "a", "c") is None
        and decide_verdict(None) == "open"
        and not has_enough_runs(f)
    )
    known = estimate_contrast([{**r, "split_sizes": dict(test=10**9)} for r in rs], "a", "b")
    assert known["high"] - known["low"] < 1 < f["high"] - f["low"]  # 1,000 examples are a sample


def test_a_side_selects_records_by_conditions():
    rs = [record("lpt", s, 60.0 + l, layer=l, bits=l / 10) for s in range(5) for l in (0, 3, 6)]
    assert estimate_contrast(rs, "lpt layer=3", "lpt layer=0,6")["effect"] == 0
    assert estimate_contrast(rs, "lpt layer=6 @bits", "lpt layer=0 @bits")[
        "effect"
    ] == pytest.approx(0.6)
    with pytest.raises(ValueError, match="add a condition"):
        estimate_contrast(rs, "lpt", "lpt layer=0")
    both = rs + [{**r, "method": "npg", "score": r["score"] + r["layer"]} for r in rs]
    f = estimate_contrast(both, "npg", "lpt", extra_setting_fields=("layer",))
    assert (f["effect"], len(f["settings"])) == (3.0, 3)


def test_a_few_shot_sample_counts_once_for_all_its_seeds():
    gain = [20.0, 24.0, 6.0, 11.0]
    rs = [
        record(m, s, 60.0 + (m == "a") * (g + s), split_seed=d)
        for m in "ab"
        for d, g in enumerate(gain)
        for s in (0, 1)
    ]
    f = estimate_contrast(rs, "a", "b")
    want = paired_bootstrap(
        np.array([[g + 0.5] for g in gain]),
        np.zeros((4, 1)),
        standard_errors=[
            statistics._score_standard_error(
                rs[:2],
                [("score", np.mean([r["score"] for r in rs if r["method"] == m])) for m in "ab"],
            )
        ],
    )
    assert (f["runs"], f["draws"]) == (8, 4) and f["effect"] == pytest.approx(want["effect"])
    assert (f["low"], f["high"]) == pytest.approx((want["low"], want["high"]))


def test_standard_errors_of_a_record_widen_the_interval():
    def estimate(**more):
        rs = [
            record("a", s, 60.0, measurements=dict(top=55.0 + s % 2, bare=50.0), **more)
            for s in range(5)
        ]
        return estimate_contrast(rs, "a @measurements.top", "a @measurements.bare")

    alone = estimate()
    known = estimate(standard_errors={"measurements.top": 3.0})
    assert known["effect"] == alone["effect"] == pytest.approx(5.4) and (
        alone["points"],
        known["points"],
    ) == (False, True)
    assert (
        alone["high"] - alone["low"]
        < 3
        < known["high"] - known["low"]
        == pytest.approx(2 * 1.96 * 3, rel=0.15)
    )


def test_examples_of_one_task_are_resampled_together():
    rng = np.random.default_rng(0)
    d = rng.choice([-100.0, 0.0, 100.0], (1, 200), p=[0.1, 0.7, 0.2]).repeat(5, 0)

    def width(n, **kwargs):
        f = paired_bootstrap([d] * n, [0 * d] * n, **kwargs)
        return f["high"] - f["low"]

    assert width(4, example_sets=["t"] * 4) == pytest.approx(width(1), rel=0.1) and width(
        4
    ) < 0.7 * width(1)
    rs = [record(m, s, 60.0 + s, backbone=b) for m in "ab" for s in range(5) for b in ("x", "y")]
    one = estimate_contrast([r for r in rs if r["backbone"] == "x"], "a", "b")
    assert estimate_contrast(rs, "a", "b")["high"] == pytest.approx(one["high"], rel=0.1)
    apart = estimate_contrast([{**r, "task": r["backbone"]} for r in rs], "a", "b")
    assert apart["high"] < 0.8 * one["high"]


def test_nan_scores_and_bad_conditions_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        paired_bootstrap([[1.0, 2.0]] * 2, [[1.0, float("nan")]] * 2)
    with pytest.raises(ValueError, match="'layer' is not a condition"):
        estimate_contrast([], "lpt layer 15", "lpt")


def test_an_extra_seed_of_one_task_is_left_out():
    rs = [
        record(m, s, 50.0 + s, task=t)
        for m in "ab"
        for t, n in (("x", 5), ("y", 6))
        for s in range(n)
    ]
    estimate = estimate_contrast(rs, "a", "b")
    assert estimate["runs"] == 5 and [s["task"] for s in estimate["settings"]] == ["x", "y"]


def test_the_scores_of_examples_need_labels(tmp_path):
    logits = np.eye(2, dtype=np.float32)
    arrays = dict(test=logits, test_label=np.array([0, 0]), validation=logits)
    written = write_run_arrays(tmp_path / "logits/c.npz", "run", arrays)
    run = record("a", 0, 50.0, **written)
    assert per_example_scores(run, tmp_path).tolist() == [100.0, 0.0]
    with pytest.raises(UserError, match="c.npz/run has no labels of the validation split: train"):
        per_example_scores(run, tmp_path, "validation")


def test_a_missing_package_for_corrected_p_values_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"statsmodels is not installed.*\[experiments\]"):
        adjust_p_values_holm([0.1])

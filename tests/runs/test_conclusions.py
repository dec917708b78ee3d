"""The primary contrast, and advice."""

from pathlib import Path

import pandas as pd
import pytest
from claim_records import finished_record

from idp_tutorial.runs.conclusions import (
    advise,
)
from idp_tutorial.runs.statistics import (
    estimate_contrast,
)
from idp_tutorial.utils.records import read_records


def comparison(**scores):
    return [finished_record(m.replace("_", "-"), 0, score) for m, score in scores.items()]


# ---- advice


def stored_records(file, task):
    folder = Path(__file__).parents[2] / "results" / "claims"
    records = [r for r in read_records(folder / file) if r["task"] == task]
    return [r for r in records if r.get("split_seed", 0) == records[0].get("split_seed", 0)], folder


def test_advice_on_stored_records_names_the_cheapest_that_does_not_lose():
    records, folder = stored_records("controls-minilm.jsonl", "trec")
    advice = advise(records, folder)
    scores = pd.DataFrame(records).groupby("method").score.mean()
    assert advice.method == "probe" and f"probe ({scores['probe']:.1f})" in advice.sentence
    for method, score in scores.items():
        if method not in (advice.method, "majority"):  # the most frequent label costs less
            assert f"{method} ({score:.1f})" in advice.sentence
    difference = estimate_contrast(records, "side-network", "probe", folder)
    is_best = advice.title == "probe scores highest"
    assert is_best == (difference["effect"] <= 0)


def test_advice_does_not_call_a_difference_within_the_interval_real():
    cheap = [finished_record("probe", s, 80.0 + s % 2) for s in range(4)]
    dear = [finished_record("lora", s, 80.5 + s % 2, prompt=100) for s in range(4)]
    assert advise(cheap + dear).method == "probe"
    assert "may be chance" in advise(cheap + dear).sentence
    better = [finished_record("lora", s, 99.0 + s % 2, prompt=100) for s in range(4)]
    assert advise(cheap + better).method == "lora"
    assert "higher than every other" in advise(cheap + better).sentence


def test_the_best_is_not_called_significantly_higher_than_an_equal_that_costs_more():
    """The probe costs least and scores highest; LoRA is close, and the side network is not."""
    probe = [finished_record("probe", s, 80.5 + s % 2) for s in range(4)]
    close = [finished_record("lora", s, 80.0 + s % 2, prompt=100) for s in range(4)]
    far = [finished_record("side-network", s, 60.0 + s % 2, prompt=50) for s in range(4)]
    advice = advise(probe + close + far)
    assert advice.method == "probe" and "significantly" not in advice.sentence
    assert "significantly higher than every other method" in advise(probe + far).sentence


def test_of_equal_methods_the_one_with_fewest_parameters_is_advised():
    """A generator of many parameters costs more than LoRA; a control costs less than both."""

    def advised(**params):
        records = [
            finished_record(m.replace("_", "-"), s, 80.0 + s % 2, prompt=n)
            for m, n in params.items()
            for s in range(4)
        ]
        return advise(records).method

    assert advised(lpt_npg=300_000, lora=75_000, prompt_tuning=90_000) == "lora"
    assert advised(lora=75_000, prompt_tuning=75_000) == "prompt-tuning"  # static before weights
    assert advised(lora=1, side_network=50_000) == "side-network"
    assert advised(lora=1, side_network=0, probe=0, words=900_000) == "words"


@pytest.mark.parametrize(
    "file",
    [
        "claims/converged-trec-minilm.jsonl",
        "neighbours/two-domains/compare.jsonl",
        "neighbours/trec-random/compare.jsonl",
    ],
)
def test_advice_on_stored_records_names_the_smallest_that_does_not_lose(file):
    path = Path(__file__).parents[2] / "results" / file
    records = read_records(path)
    advice = advise(records, path.parent)
    sizes = {r["method"]: sum(r["params"].values()) for r in records}
    best = pd.DataFrame(records).groupby("method").score.mean().idxmax()
    for method, size in sizes.items():
        contrast = method != best and estimate_contrast(records, method, best, path.parent)
        is_lower = bool(contrast) and contrast["high"] < 0
        assert is_lower or size >= sizes[advice.method]
        assert not is_lower or method != advice.method


def test_advice_is_against_all_methods_that_the_most_frequent_label_equals():
    records = [finished_record(m, 0, 50.0) for m in ("majority", "lora", "lpt-npg")]
    advice = advise(records)
    assert advice.method == "majority" and "Do not use any" in advice.sentence

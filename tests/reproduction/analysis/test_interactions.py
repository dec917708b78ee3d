"""Interactions of a contrast with a setting, on records whose answer is known."""

from pathlib import Path

import numpy as np
import pytest

from idp_tutorial.reproduction.analysis.interactions import (
    collect_accuracies,
    estimate_contrast_in_setting,
    estimate_interaction,
)
from idp_tutorial.runs.logits import write_run_arrays
from idp_tutorial.utils.checks import UserError

N, SEEDS = 400, 4
RANDOM, PROBE = dict(head_init="random"), dict(head_init="probe")


def write_record(folder, method, setting, seed, accuracy, task="toy", **fields):
    """Store a run that is correct on the first `accuracy` of the examples."""
    labels = np.zeros(N, int)
    logits = np.zeros((N, 2), np.float32)
    logits[:, 1] = np.where(np.arange(N) < accuracy * N, -1, 1)
    run = f"{method}-{task}-{setting['head_init']}-{seed}"
    stored = write_run_arrays(
        folder / "logits" / "runs.npz", run, dict(test=logits, test_label=labels)
    )
    return dict(method=method, task=task, seed=seed, **setting, **stored, **fields)


@pytest.fixture
def runs(tmp_path):
    """A gain of ten points with a random head, and of two with a probe's."""
    records = []
    for seed in range(SEEDS):
        for setting, gain in ((RANDOM, 0.10), (PROBE, 0.02)):
            records.append(write_record(tmp_path, "a", setting, seed, 0.7 + gain))
            records.append(write_record(tmp_path, "b", setting, seed, 0.7))
    return records, tmp_path


def test_the_interaction_is_the_difference_of_two_contrasts(runs):
    records, folder = runs
    random = estimate_contrast_in_setting(records, "a", "b", RANDOM, folder)
    probe = estimate_contrast_in_setting(records, "a", "b", PROBE, folder)
    interaction = estimate_interaction(records, "a", "b", RANDOM, PROBE, folder)
    assert random["effect"] == pytest.approx(10) and probe["effect"] == pytest.approx(2)
    assert interaction["effect"] == pytest.approx(8)
    assert interaction["low"] > 4 and interaction["tasks"] == ["toy"]
    swapped = estimate_interaction(records, "a", "b", PROBE, RANDOM, folder)
    assert swapped["effect"] == pytest.approx(-8)


def test_runs_without_logits_are_left_out(runs):
    records, folder = runs
    search = dict(method="a", task="toy", seed=0, head_init="random", lr=9.0)
    accuracies = collect_accuracies([*records, search], "a", RANDOM, folder)
    assert accuracies["toy"].shape == (SEEDS, N) and accuracies["toy"].mean() == pytest.approx(80)


def test_two_learning_rates_of_one_seed_are_refused(runs):
    records, folder = runs
    records.append({**records[0], "lr": 1.0})
    with pytest.raises(UserError, match="two runs with seed 0"):
        collect_accuracies(records, "a", RANDOM, folder)


def test_a_missing_seed_is_named(runs):
    records, folder = runs
    with pytest.raises(UserError, match="have 3 and 4 runs on toy"):
        estimate_contrast_in_setting(records[1:], "a", "b", RANDOM, folder)


def test_no_common_task_has_no_estimate(runs):
    records, folder = runs
    assert estimate_interaction(records, "a", "c", RANDOM, PROBE, Path(folder)) is None
    assert estimate_contrast_in_setting(records, "a", "c", RANDOM, folder) is None

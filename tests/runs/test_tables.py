"""Tables of records: means and standard deviations over the seeds of one comparison."""

import pytest

from idp_tutorial.runs.tables import (
    format_table,
    pivot_methods_by_task,
    plot_scores,
    results_table,
)


def rec(**kw):
    return {
        **dict(
            status="done",
            task="a",
            shots=None,
            backbone="b",
            head="c",
            method="m",
            metric="accuracy",
            validation=1.0,
            params=dict(prompt=1, head=2, backbone=0),
            ms_per_step=1.0,
            peak_memory_mb=1.0,
            steps=1,
            lr=0.1,
        ),
        **kw,
    }


def test_standard_deviation_over_seeds_and_gain():
    two = [rec(score=s, seed=i) for i, s in enumerate((70.0, 80.0))]
    t = results_table(two)
    assert (t.score[0], t.seeds[0]) == (75.0, 2) and t["std"][0] == pytest.approx(50**0.5)
    assert (
        pivot_methods_by_task([*two, rec(method="base", score=65.0, seed=0)], "base").loc["m", "a"]
        == 10.0
        and pivot_methods_by_task(two).loc["m", "a"] == "75.0 ± 7.1"
    )


def test_a_cell_has_records_of_one_comparison():
    one = rec(score=70.0, seed=0)
    two = rec(score=60.0, seed=0, method="n")
    for f in (results_table, pivot_methods_by_task):
        with pytest.raises(ValueError, match="'m' has more than one record with seed 0"):
            f([one, two, {**one, "layer": 3}])
    with pytest.raises(ValueError, match="2 different settings"):
        plot_scores([one, {**one, "task": "b"}])
    t = results_table([one, two])
    assert "60.0" in format_table(t[t.method == "n"])  # a table may be filtered


def test_a_table_needs_a_finished_run():
    for table in (results_table, pivot_methods_by_task):
        with pytest.raises(ValueError, match="finished runs"):
            table([dict(status="diverged", method="lpt", task="t")])

"""Tables and pictures of records."""

import matplotlib.pyplot as plt
import pytest
from claim_records import finished_record

from idp_tutorial.runs.tables import (
    format_table,
    plot_scores,
    results_table,
    write_results,
)
from idp_tutorial.utils.records import read_records

RECORDS = [
    finished_record("head-only", 0, 70.0),
    finished_record("lpt", 0, 78.0, prompt=1280),
    finished_record("lpt", 1, 82.0, prompt=1280),
]


def diverged_record(method, seed):
    record = finished_record(method, seed, 0.0) | dict(status="diverged")
    return {k: v for k, v in record.items() if k not in ("score", "validation", "params")}


def test_a_row_has_mean_and_standard_deviation_over_seeds():
    table = results_table(RECORDS)
    assert table.score.tolist() == [70.0, 80.0] and table.prompt_params.tolist() == [0, 1280]
    assert table["std"][1] == pytest.approx(8**0.5)


def test_a_table_states_diverged_seeds_and_edges_of_grids():
    records = [*RECORDS, diverged_record("lpt", 2), diverged_record("lora", 0)]
    records[0] = {**records[0], "lr_at_grid_edge": True}
    lines = format_table(results_table(records)).splitlines()
    assert "80.0 ± 2.8 (1 diverged)" in lines[3] and lines[2].endswith("1.0e-02*")
    assert lines[-1].split()[:3] == ["lora", "diverged", "–"]


def test_a_picture_has_a_labelled_row_for_each_method():
    records = [*RECORDS, finished_record("fine-tuning", 0, 84.0, prompt=2_000_000)]
    records += [finished_record(f"method {i}", 0, 78.0 + i, prompt=1280) for i in range(4)]
    ax = plot_scores(records)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == [*dict.fromkeys(r["method"] for r in records)]
    dots = [line for line in ax.lines if line.get_marker() == "o" and line.get_markersize() == 8]
    table = results_table(records)
    assert [float(dot.get_xdata()[0]) for dot in dots] == table.score.tolist()


def test_records_table_and_picture_are_written(tmp_path):
    write_results(RECORDS, tmp_path / "compare")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "compare.csv",
        "compare.jsonl",
        "compare.png",
    ]
    records = read_records(tmp_path / "compare.jsonl")
    assert [{k: r[k] for k in RECORDS[0]} for r in records] == RECORDS


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


def test_a_row_has_records_of_one_comparison():
    one = rec(score=70.0, seed=0)
    two = rec(score=60.0, seed=0, method="n")
    with pytest.raises(ValueError, match="'m' has more than one record with seed 0"):
        results_table([one, two, {**one, "layer": 3}])
    with pytest.raises(ValueError, match="2 different settings") as refused:
        plot_scores([one, {**one, "task": "b" * 10_000}])
    assert len(str(refused.value)) < 1000
    t = results_table([one, two])
    assert "60.0" in format_table(t[t.method == "n"])  # a table may be filtered


def test_a_table_needs_a_finished_run():
    with pytest.raises(ValueError, match="finished runs"):
        results_table([dict(status="diverged", method="lpt", task="t")])


def test_a_written_picture_leaves_no_figure_open(tmp_path):
    before = plt.get_fignums()
    write_results(RECORDS, tmp_path / "compare")
    assert plt.get_fignums() == before

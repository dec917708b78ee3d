"""Generated minus static by layer, on records whose differences are known."""

import json
from pathlib import Path

import numpy as np
import pytest
from claim_records import record

from idp_tutorial.runs.logits import write_run_arrays
from idp_tutorial.utils.checks import UserError
from results.depth.who_reads import (
    contrast_by_depth,
    contrast_by_step,
    contrast_with_control,
    estimate_slope,
    mechanism_table,
    read_depth_records,
    select_chosen_runs,
)

N = 400
WHY = Path(__file__).resolve().parents[3] / "results/why"
needs_records = pytest.mark.skipif(
    not WHY.exists(), reason="results/why is not in this installation"
)


def write_run(folder, method, layer, seed, n_right, lr=0.1, **fields):
    """Store a run that is correct on the first `n_right` of the texts."""
    logits = np.zeros((N, 2), np.float32)
    logits[:, 1] = np.where(np.arange(N) < n_right, -1, 1)
    run = f"{method}-{layer}-{seed}-{lr}"
    arrays = dict(test=logits, test_label=np.zeros(N, int))
    stored = write_run_arrays(folder / "logits/runs.npz", run, arrays)
    score = 100 * n_right / N
    values = dict(layer=layer, lr=lr, n_layers=8, validation=score) | fields
    return record(method, seed, score, **stored, **values)


def write_file(folder, records):
    """Store records as a file, and return it."""
    file = folder / "runs.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


@pytest.fixture
def runs(tmp_path):
    """NPG gains 5 points for each layer less above it; three seeds differ by a few texts."""
    records = []
    for layer in (0, 2, 4, 6):
        for seed in range(3):
            static = 200 + 4 * seed
            records.append(write_run(tmp_path, "lpt", layer, seed, static))
            gain = -20 if layer == 0 else 5 * layer / 2
            n_right = round(static + gain * N / 100)
            records.append(write_run(tmp_path, "lpt-npg", layer, seed, n_right))
    return read_depth_records(write_file(tmp_path, records))


def test_the_difference_before_each_layer_is_paired(runs):
    table = contrast_by_depth(runs).set_index("layer")
    assert table.effect.tolist() == pytest.approx([-20, 5, 10, 15])
    assert table.layers_above.tolist() == [8, 6, 4, 2] and set(table.runs) == {3}
    assert (table.low <= table.effect).all() and (table.effect <= table.high).all()
    assert table.static[2] == pytest.approx(51) and table.generated[2] == pytest.approx(56)


def test_the_slope_is_the_gain_for_each_layer_less_above(runs):
    slope = estimate_slope(runs)
    assert slope["effect"] == pytest.approx(2.5) and slope["layers"] == [2, 4, 6]
    assert slope["runs"] == 3 and slope["p"] < 0.01 and slope["low"] > 0
    # with layer 0, the line of least squares through -20, 5, 10 and 15
    expected = np.polyfit([0, 2, 4, 6], [-20, 5, 10, 15], 1)[0]
    assert estimate_slope(runs, layers=[0, 2, 4, 6])["effect"] == pytest.approx(expected)


def test_no_slope_where_the_gain_is_the_same_before_all_layers(tmp_path):
    records = []
    for layer in (2, 4, 6):
        for seed in range(5):
            jitter = (layer * 7 + seed * 3) % 5
            records.append(write_run(tmp_path, "lpt", layer, seed, 200 + 2 * jitter))
            records.append(write_run(tmp_path, "lpt-npg", layer, seed, 240 + 2 * seed))
    slope = estimate_slope(read_depth_records(write_file(tmp_path, records)))
    assert abs(slope["effect"]) < 1 and slope["low"] < 0 < slope["high"] and slope["p"] > 0.05


def test_a_slope_needs_two_layers_and_a_shared_seed(runs):
    assert estimate_slope([r for r in runs if r["layer"] == 4]) is None
    assert estimate_slope([r for r in runs if r["method"] == "lpt"]) is None
    other_seeds = [{**r, "seed": r["seed"] + 10 * (r["layer"] == 4)} for r in runs]
    assert estimate_slope(other_seeds, layers=[2, 4]) is None


def test_validation_chooses_the_learning_rate_with_the_first_two_seeds(tmp_path):
    records = [
        write_run(tmp_path, "lpt", 2, seed, 200, lr=lr, validation=validation)
        for lr, validations in ((0.1, (50, 60, 10)), (1.0, (50, 50)), (3.0, (99,)))
        for seed, validation in enumerate(validations)
    ]
    records.append(
        write_run(tmp_path, "lpt", 2, 1, 200, lr=9.0) | dict(status="diverged", message="m")
    )
    records.append(write_run(tmp_path, "s-idpg-phm", None, 0, 200))
    records.append(write_run(tmp_path, "fine-tuning", None, 0, 200))
    read = read_depth_records(write_file(tmp_path, records), tmp_path / "none.jsonl")
    assert {r["method"]: r["layer"] for r in read} == {"lpt": 2, "s-idpg-phm": 0}
    chosen = select_chosen_runs(read)
    assert {cell: [*by_seed] for cell, by_seed in chosen.items()} == {("lpt", 2): [0, 1, 2]}
    assert {r["lr"] for r in chosen["lpt", 2].values()} == {0.1}


def test_the_contrast_by_step_has_students_interval(tmp_path):
    curves = {"lpt": [50, 60], "lpt-npg": [60, 61]}
    records = [
        write_run(
            tmp_path,
            method,
            4,
            seed,
            200,
            history=[[10, a + seed * (method == "lpt-npg")], [20, b]],
        )
        for method, (a, b) in curves.items()
        for seed in range(3)
    ]
    table = contrast_by_step(read_depth_records(write_file(tmp_path, records)), 4)
    assert table.step.tolist() == [10, 20] and table.effect.tolist() == pytest.approx([11, 1])
    # the standard error of 10, 11 and 12 is 1 / √3, the quantile of Student's t 4.303
    assert table.high[0] - 11 == pytest.approx(4.303 / 3**0.5, abs=0.001)
    assert table.low[1] == table.high[1] == pytest.approx(1)


def test_measurements_are_averaged_over_seeds(tmp_path):
    values = dict(
        accuracy=80,
        effective_dimension=3,
        prompt_probe=70,
        follows_prompt=60,
        follows_text=20,
    )
    lines = [
        dict(method="lpt-npg", layer=4, lr=0.1, seed=s, common_share=0.2 + 0.1 * s, **values)
        for s in (0, 1, 1)  # a line that was written twice counts once
    ]
    file = tmp_path / "readers-t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = mechanism_table(file, tmp_path / "none.jsonl").to_dict("records")
    assert row["common_share"] == pytest.approx(0.25) and row["seeds"] == 2
    assert mechanism_table(tmp_path / "none.jsonl").empty


@needs_records
def test_the_stored_runs_of_smollm2_give_the_numbers_of_the_pages():
    records = read_depth_records(WHY / "layers-trec-600.jsonl")
    table = contrast_by_depth(records).set_index("layers_above")
    assert table.static.round(1).to_dict() == {15: 90.0, 6: 87.2, 1: 67.5}
    assert table.generated.round(1).to_dict() == {15: 92.6, 6: 92.4, 1: 89.6}
    assert table.effect.round(1).to_dict() == {15: 2.6, 6: 5.3, 1: 22.1}
    slope = estimate_slope(records)
    assert slope["layers"] == [15, 24, 29] and slope["p"] < 0.01 and slope["low"] > 0.5
    steps = contrast_by_step(records, 15).set_index("step").effect.round(1)
    assert steps[[240, 360, 480, 600]].tolist() == [6.6, 4.5, 2.9, 1.9]


def test_a_generated_prompt_is_compared_with_a_control(tmp_path, runs):
    probe = write_run(tmp_path, "probe", None, 0, N // 2)
    controls = tmp_path / "controls.jsonl"
    controls.write_text(json.dumps(probe) + "\n")
    table = contrast_with_control(runs, controls)
    by_depth = contrast_by_depth(runs).set_index("layer")
    assert table.layer.tolist() == by_depth.index.tolist() and (table.control == 50).all()
    expected = by_depth.generated - 50
    assert table.effect.tolist() == pytest.approx(expected.tolist())
    assert ((table.low <= table.effect) & (table.effect <= table.high)).all()
    with pytest.raises(UserError, match="has no run of 'words'"):
        contrast_with_control(runs, controls, "words")
    controls.write_text(
        json.dumps(probe | dict(status="diverged", message="the loss is nan")) + "\n"
    )
    with pytest.raises(UserError, match="has no run of 'probe'"):
        contrast_with_control(runs, controls)

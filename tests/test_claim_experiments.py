"""The experiments behind the claims."""

import importlib.util
import sys
from pathlib import Path

import pytest

from idp_tutorial.runs.statistics import has_per_example_results, per_example_scores
from idp_tutorial.utils.records import read_records

SCRIPT = Path(__file__).resolve().parents[1] / "results/claims/run.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="results are not in this installation")


@pytest.fixture(scope="module")
def run_claim_experiment():
    """Return the command of the script."""
    spec = importlib.util.spec_from_file_location("claim_experiments", SCRIPT)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    yield sys.modules[spec.name].run_claim_experiment
    del sys.modules[spec.name]


def small_run(backbone):
    """Return the options of a run of two steps."""
    options = ["--steps", "2", "--evaluations", "1", "--precision", "no"]
    return ["--backbone", str(backbone), *options]


@pytest.mark.long
@pytest.mark.parametrize(
    "experiment,task,options,n_runs",
    [
        pytest.param("methods", "sentiment", ["--lr", "1e-3"], 1, marks=pytest.mark.slow),
        (
            "fewshot",
            "sentiment-k8",
            [
                "--learning_rates",
                "1e-3",
                "--split_seeds",
                "2",
                "--set",
                "head=classification,prompt_length=2",
            ],
            2,
        ),
        ("layers", "sentiment", ["--lr", "1e-3", "--layers", "1,2"], 2),
        ("controls", "sentiment-k8", ["--split_seeds", "2"], 2),
    ],
)
def test_an_experiment_is_run_and_not_repeated(
    experiment, task, options, n_runs, run_claim_experiment, small_folder, tmp_path
):
    out = tmp_path / "r.jsonl"
    methods = "majority" if experiment == "controls" else "lpt-npg"
    argv = [experiment, task, "--methods", methods, "--seeds", "1", "--out", str(out), *options]
    argv += small_run(small_folder)
    run_claim_experiment.main(argv)
    records = read_records(out)
    assert [r["status"] for r in records] == ["done"] * n_runs
    assert all(has_per_example_results(r, tmp_path) for r in records)
    run_claim_experiment.main(argv)  # nothing is left to run
    assert len(read_records(out)) == n_runs


@pytest.mark.long
def test_the_gain_of_stage_1_is_recorded(run_claim_experiment, small_folder, tmp_path):
    out = tmp_path / "r.jsonl"
    argv = ["supplemented", "questions-k8", "--first", "sentiment-k8", "--lr", "1e-3"]
    argv += ["--methods", "s-idpg-phm", "--seeds", "2"]
    argv += ["--folder", str(tmp_path / "tuned"), "--out", str(out), *small_run(small_folder)]
    for _ in range(2):  # again: the same
        run_claim_experiment.main(argv)
        records = read_records(out)
        gains = read_records(tmp_path / "gains-r.jsonl")
        assert [bool(r["init_from"]) for r in records] == [False, False, True, True] and [
            r["seed"] for r in gains
        ] == [0, 1]
    for r, before, after in zip(gains, records[:2], records[2:], strict=True):
        assert r["score"] == pytest.approx(after["score"] - before["score"]) and r[
            "backbone"
        ] == str(small_folder)
        assert per_example_scores(r, tmp_path).mean() == pytest.approx(r["score"], abs=1e-4)
        assert (
            per_example_scores(r, tmp_path)
            == per_example_scores(after, tmp_path) - per_example_scores(before, tmp_path)
        ).all()

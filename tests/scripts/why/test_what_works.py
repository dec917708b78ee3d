"""The data of the lab's first page, on records whose differences are known.

Interactions of a contrast with a setting, on records whose answer is known.
"""

import argparse
import importlib.util
import json
from collections import Counter
from concurrent.futures import Executor, Future
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from idp_tutorial.runs.logits import has_logits, load_logits, write_run_arrays
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import read_records
from results.why.what_works import (
    CONTRASTS,
    FEW_SHOT_TASKS,
    MATCHED_PLACES,
    POOLING_CONTRASTS,
    POOLING_SETTINGS,
    TRAINED_HEAD,
    MatchedPlace,
    collect_scores,
    draw_matched_places,
    estimate_contrast_in_setting,
    estimate_interaction,
    estimate_main_effect,
    estimate_mean_contrast,
    find_collapsed_runs,
    matched_place_table,
    pooling_table,
    read_controls,
    read_factorial,
    summarise_matched_places,
)

CLAIMS = Path(__file__).resolve().parents[3] / "results/claims.csv"


N = 60
ACCURACY = {"m-idpg-phm": 0.8, "prompt-tuning": 0.7, "s-idpg-phm": 0.7, "lpt": 0.6, "lpt-npg": 0.9}
N_LONG, SEEDS = 400, 4
RANDOM, PROBE = dict(head_init="random"), dict(head_init="probe")


def write_record(folder, method, setting, seed, accuracy, task="toy", **fields):
    """Store a run that is correct on the first `accuracy` of the examples."""
    labels = np.zeros(N_LONG, int)
    logits = np.zeros((N_LONG, 2), np.float32)
    logits[:, 1] = np.where(np.arange(N_LONG) < accuracy * N_LONG, -1, 1)
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


def test_a_main_effect_is_the_mean_of_its_interactions(tmp_path):
    """The gain is 10 and 6 points with a random head, 2 and 0 with a probe's."""
    gains = {("random", 0.1): 0.10, ("random", None): 0.06, ("probe", 0.1): 0.02}
    gains["probe", None] = 0.0
    records = []
    for (head, rate), gain in gains.items():
        setting = dict(head_init=head, head_lr=rate)
        for seed in range(SEEDS):
            for method, accuracy in (("a", 0.7 + gain), ("b", 0.7)):
                run = write_record(tmp_path / str(rate), method, setting, seed, accuracy)
                file, _, key = run["logits"].rpartition("/")
                records.append(run | dict(logits=f"{rate}/{file}/{key}"))
    random, probe = (
        [dict(head_init=head, head_lr=rate) for rate in (0.1, None)] for head in ("random", "probe")
    )
    with_random = estimate_mean_contrast(records, "a", "b", random, tmp_path)
    main = estimate_main_effect(records, "a", "b", random, probe, tmp_path)
    assert with_random["effect"] == pytest.approx(8)
    assert main["effect"] == pytest.approx(7) and main["low"] > 3
    assert estimate_main_effect(records, "a", "c", random, probe, tmp_path) is None


def test_a_collapsed_run_is_found():
    runs = [
        dict(seed=0, history=[[1, 50], [2, 83], [3, 21]]),
        dict(seed=1, history=[[1, 50], [2, 83], [3, 64]]),
        dict(seed=2),
    ]
    assert [run["seed"] for run in find_collapsed_runs(runs)] == [0]


def test_runs_without_logits_are_left_out(runs):
    records, folder = runs
    search = dict(method="a", task="toy", seed=0, head_init="random", lr=9.0)
    accuracies = collect_scores([*records, search], "a", RANDOM, folder)
    assert accuracies["toy"].shape == (SEEDS, N_LONG)
    assert accuracies["toy"].mean() == pytest.approx(80)


def test_two_learning_rates_of_one_seed_are_refused(runs):
    records, folder = runs
    records.append({**records[0], "lr": 1.0})
    with pytest.raises(UserError, match="two runs with seed 0"):
        collect_scores(records, "a", RANDOM, folder)


def test_a_missing_seed_is_named(runs):
    records, folder = runs
    with pytest.raises(UserError, match="have 3 and 4 runs on toy"):
        estimate_contrast_in_setting(records[1:], "a", "b", RANDOM, folder)


def test_no_common_task_has_no_estimate(runs):
    records, folder = runs
    assert estimate_interaction(records, "a", "c", RANDOM, PROBE, Path(folder)) is None
    assert estimate_contrast_in_setting(records, "a", "c", RANDOM, folder) is None


@pytest.mark.parametrize(("task", "task_name"), [("trec", "TREC"), ("cr", "CR")])
def test_a_pooling_table_says_where_a_contrast_is_larger(tmp_path, task, task_name):
    """Every prompt adds 10 points to the head alone at the mean; M-IDPG adds 30 at `<s>`."""
    records = []
    for pooling, setting in POOLING_SETTINGS.items():
        for method in ("head-only", *ACCURACY):
            accuracy = 0.6 if method == "head-only" else 0.7
            if method == "m-idpg-phm" and setting["pooling"] == "cls":
                accuracy = 0.9
            logits = np.zeros((N, 2), np.float32)
            logits[:, 1] = np.where(np.arange(N) < accuracy * N - 0.5, -1, 1)
            arrays = dict(test=logits, test_label=np.zeros(N, int))
            for seed in range(2):
                run = f"{method}-{pooling}-{seed}"
                stored = write_run_arrays(tmp_path / "logits/runs.npz", run, arrays)
                records.append(dict(method=method, task=task, seed=seed, **setting, **stored))
    table = pooling_table(records, tmp_path).set_index("contrast")
    assert [*table.index] == [*POOLING_CONTRASTS]
    m_idpg = table.loc["M-IDPG − head alone"]
    assert [m_idpg[f"{task_name}, {name}"] for name in POOLING_SETTINGS] == pytest.approx([10, 30])
    assert m_idpg.difference == pytest.approx(20)
    assert table.difference["M-IDPG − prompt tuning"] == pytest.approx(20)
    assert table.difference["NPG − head alone"] == pytest.approx(0)
    control = dict(task=task, method="probe", score=75.0)
    table = pooling_table(records, tmp_path, [control]).set_index("contrast")
    probe = table.loc["probe − head alone"]
    assert [probe[f"{task_name}, {name}"] for name in POOLING_SETTINGS] == pytest.approx([15, 15])
    assert np.isnan(probe.p)


WHY = CLAIMS.with_name("why")


@pytest.mark.skipif(not WHY.exists(), reason="results/why is not in this installation")
def test_the_controls_have_the_test_examples_of_the_factorials():
    controls = read_controls(WHY)
    tasks = {"trec", "subj", *FEW_SHOT_TASKS}
    assert {r["task"] for r in controls if r["method"] == "probe"} == tasks
    for task in tasks:
        name = "task" if task in FEW_SHOT_TASKS else "head"
        runs = [r for r in read_factorial(WHY, name=name) if r["task"] == task]
        run = next(r for r in runs if has_logits(r, WHY))
        labels = load_logits(run, WHY)["test_label"]
        for control in controls:
            if control["task"] == task:
                arrays = load_logits(control, WHY.with_name("claims"))
                assert np.array_equal(arrays["test_label"], labels)
                assert control["split_sizes"] == run["split_sizes"]


@pytest.fixture(scope="module")
def places():
    """Return the contrasts at the same place, from the stored records."""
    return matched_place_table(CLAIMS.parent)


@pytest.mark.skipif(not WHY.exists(), reason="results/why is not in this installation")
def test_with_a_head_no_generated_prompt_is_above_a_static_one_at_its_place(places):
    assert len(places) == len(MATCHED_PLACES) == 30
    assert summarise_matched_places(places) == dict(
        contrasts=22, above=0, below=6, at_or_below=18, below_2=20
    )
    others = places[~places.group.isin(TRAINED_HEAD)]
    assert others.effect.round(1).tolist() == [2.6, 5.3, 22.1, 1.3, 3.0, 4.3, 24.3, 11.8]
    assert (others.low > 0).tolist() == [False, *[True] * 7]
    half_way = places[places.setting == "15 layers above"].iloc[0]
    assert half_way.paper == pytest.approx(2.4) and half_way.runs == 5
    figure = draw_matched_places(places)
    assert len(figure.axes[0].get_yticks()) == places.group.nunique()
    plt.close(figure)


@pytest.mark.skipif(not WHY.exists(), reason="results/why is not in this installation")
def test_with_a_converged_head_the_papers_differences_are_within_a_point():
    records = read_factorial(WHY)
    probe, random = (
        [dict(pooling="mean", head_init=head, head_lr=rate) for rate in (1e-3, None)]
        for head in ("probe", "random")
    )
    for pair, _, _ in CONTRASTS.values():
        estimate = estimate_mean_contrast(records, *pair, probe, WHY)
        assert estimate["tasks"] == ["subj", "trec"]
        assert round(max(-estimate["low"], estimate["high"]), 1) <= 1.0
    late = estimate_main_effect(records, "lpt", "prompt-tuning", random, probe, WHY)
    assert [round(late[key], 1) for key in ("effect", "low", "high")] == [1.3, 0.5, 2.0]


def test_a_place_counts_a_run_once_and_leaves_out_the_search(tmp_path):
    for lr, change, seeds in ((0.1, 0, 3), (0.3, 0.1, 1)):  # the search has one seed of .3
        folder = tmp_path / f"runs/{lr}"
        values = dict(lr=lr, status="done", score=0.0, metric="accuracy", shots=None, schema=3)
        values |= dict(backbone="b", split_seed=0)
        records = [
            write_record(folder, method, RANDOM, seed, accuracy + change, **values)
            for method, accuracy in (("lpt-npg", 0.8), ("lpt", 0.7))
            for seed in range(seeds)
        ]
        lines = [json.dumps(record) for record in [*records, records[0]]]
        (folder / "runs.jsonl").write_text("\n".join(lines))
    place = MatchedPlace("input", "s", "lpt-npg", "lpt", "runs/*/*.jsonl", RANDOM)
    (row,) = matched_place_table(tmp_path, [place]).to_dict("records")
    assert row["effect"] == pytest.approx(10) and row["runs"] == 3 and np.isnan(row["paper"])
    with pytest.raises(UserError, match="no runs of both lpt-npg and lora"):
        matched_place_table(tmp_path, [place._replace(b="lora")])


# file: methods, or pairs of a method and a layer, that were not run, as PLAN.md says
FACTORIAL_FILES = {
    "head-trec-310": (),
    "head-subj-310": (),
    "task-cr-310": (),
    "task-mr-310": (),
    "task-sst2-310": (),
    "task-stsb-310": (),
    "readout-trec-310": (),
    "readout-subj-310": ("prompt-tuning", "lpt-npg", "m-idpg-phm", "s-idpg-phm", "lpt"),
    "confirmation-trec-310": (),
    "same-readout-trec-310": (),
    "first-layer-trec-310": (),
    "first-token-1000-cr-310": (),
    "late-1000-cr-310": (),
    "edges-trec-310": (),
    "id-spam-trec-310": (),
    "layers-trec-600": (("lpt", 27), ("lpt-npg", 27)),
}


needs_records = pytest.mark.skipif(
    not WHY.exists(), reason="results/why is not in this installation"
)


@pytest.fixture
def factorial():
    """Return the script results/why/factorial.py as a module."""
    spec = importlib.util.spec_from_file_location("factorial", WHY / "factorial.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_records
@pytest.mark.parametrize(("file", "missing"), FACTORIAL_FILES.items())
def test_the_stored_factorials_are_complete_and_would_train_nothing_again(factorial, file, missing):
    name = file.rsplit("-", 2)[0]
    records = read_records(WHY / f"{file}.jsonl")
    cells = list(factorial.list_cells(name))
    incomplete = {cell for cell in cells if not factorial.is_complete(name, cell, records)}
    expected = {cell for cell in cells if {cell[0], (cell[0], cell[3])} & {*missing}}
    assert incomplete == expected
    assert {factorial.record_cell(record) for record in records} == {*cells} - incomplete
    runs = [factorial.run_key(record) for record in records]
    assert len(runs) == len({*runs})
    for cell in {*cells} - incomplete:
        of_cell = [r for r in records if factorial.record_cell(r) == cell]
        seeds = Counter(record["lr"] for record in of_cell)
        final = max(seeds, key=lambda lr: seeds[lr])
        assert {seeds[lr] for lr in seeds if lr != final} <= {factorial.TUNING_SEEDS}
        assert {record["lr"] for record in of_cell if "logits" in record} == {final}


class AtOnce(Executor):
    """Run each call when it is submitted; stop before the call with this number."""

    def __init__(self, stop=None):
        self.stop, self.calls = stop, 0

    def submit(self, function, *args):
        self.calls += 1
        if self.calls == self.stop:
            raise KeyboardInterrupt
        future = Future()
        future.set_result(function(*args))
        return future


@pytest.fixture
def fake_training(factorial, monkeypatch):
    """Train nothing: a run's validation score depends on its learning rate. Return the runs."""
    template = next(r for r in read_records(WHY / "layers-trec-600.jsonl") if r["method"] == "lpt")
    trained = []

    def run_seeds(cfg, task, selection, seeds, store, first_seed=0):
        stored = {r["seed"]: r for r in factorial.read_existing_records(store.file)}
        for seed in range(first_seed, first_seed + seeds):
            if seed not in stored:
                values = dict(method=cfg.method, lr=cfg.lr, seed=seed, layer=cfg.get("layer"))
                status = "diverged" if cfg.lr in diverging else "done"
                values |= dict(
                    validation=-abs(cfg.lr - 0.3), logits="logits/a.npz/run", status=status
                )
                stored[seed] = store.add(template | values | dict(lr_selection=selection))
                trained.append((cfg.method, cfg.get("layer"), cfg.lr, seed))
        return [stored[seed] for seed in range(first_seed, first_seed + seeds)]

    diverging = set()
    for name, function in dict(
        run_seeds=run_seeds,
        load_task=lambda *args: None,
        has_logits=lambda record, folder: "logits" in record,
        load_logits=lambda record, folder: {},
        write_run_arrays=lambda file, run, arrays: dict(
            logits="logits/b.npz/run", logits_digest="0"
        ),
    ).items():
        monkeypatch.setattr(factorial, name, function)
    return trained, diverging


def factorial_options(folder, **changes):
    """Return the options of a call of factorial.py for SmolLM2's layers 15 and 24."""
    options = dict(name="layers", task="trec", steps=600, backbone="minilm", precision="bf16")
    options |= dict(methods=["lpt"], initial_heads=None, layers=[15, 24], data="data", cache=None)
    options |= dict(shots=None)
    return argparse.Namespace(**{**options, "out": folder, **changes})


def call_factorial(factorial, options, stop=None):
    """Run and join the cells of a call; return its records."""
    file = factorial.records_file(options)
    cells = factorial.select_cells(options, factorial.read_existing_records(file))
    factorial.run_cells(AtOnce(stop), options, cells)
    factorial.join_parts(options, cells)
    return factorial.read_existing_records(file)


@needs_records
def test_a_factorial_trains_each_rate_twice_and_the_best_with_all_seeds(
    factorial, fake_training, tmp_path
):
    trained, _ = fake_training
    records = call_factorial(factorial, factorial_options(tmp_path))
    rates = factorial.STATIC_LEARNING_RATES
    expected = {("lpt", k, lr, seed) for k in (15, 24) for lr in rates for seed in (0, 1)}
    expected |= {("lpt", k, 0.3, seed) for k in (15, 24) for seed in (2, 3, 4)}
    assert {*trained} == expected and len(trained) == len(expected) == len(records)
    assert {r["lr"] for r in records if "logits" in r} == {0.3}
    assert {r["lr_selection"].partition(" (")[0] for r in records} == {"best of 5"}
    assert call_factorial(factorial, factorial_options(tmp_path)) == records
    assert len(trained) == len(expected)


@needs_records
@pytest.mark.parametrize("stop", [2, 11, 13, "join"])
def test_an_interrupted_factorial_trains_and_stores_no_run_twice(
    factorial, fake_training, tmp_path, monkeypatch, stop
):
    trained, _ = fake_training
    options = factorial_options(tmp_path)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if stop == "join":
            patch.setattr(factorial, "write_run_arrays", interrupt)  # after some records
        call_factorial(factorial, options, None if stop == "join" else stop)
    call_factorial(factorial, factorial_options(tmp_path, layers=[24]))  # of the other cell
    records = call_factorial(factorial, options)
    assert len(trained) == len({*trained}) == len(records) == 26
    assert len({factorial.run_key(record) for record in records}) == 26


@needs_records
def test_a_factorial_says_what_it_cannot_do(factorial, fake_training, tmp_path):
    _, diverging = fake_training
    options = factorial_options(tmp_path)
    with pytest.raises(UserError, match="no cell of layers has these options"):
        factorial.select_cells(factorial_options(tmp_path, layers=[3]), [])
    diverging.update(factorial.STATIC_LEARNING_RATES)
    with pytest.raises(UserError, match="15.*diverged at every learning rate: add lower ones"):
        call_factorial(factorial, options)
    diverging.clear()
    other = factorial_options(tmp_path / "other")
    records = call_factorial(factorial, other)
    other.precision = "no"
    with pytest.raises(UserError, match="has runs with precision 'bf16', and this call has 'no'"):
        factorial.select_cells(other, records)
    with pytest.raises(UserError, match="0 selected learning rates of lpt.*readout --task trec"):
        confirmation = factorial_options(tmp_path, name="confirmation", layers=None)
        factorial.list_learning_rates(confirmation, ("lpt", "probe", None, None))

"""Comparisons: every method is tuned alike, and what is stored is not run again."""

import importlib.util
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from small import Killed, backbone, small_task, write_glove

from idp_tutorial.assembly.build import build_model
from idp_tutorial.core.planned_model import trained_state
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.runs import compare as comparison
from idp_tutorial.runs.compare import (
    choose_backbone,
    compare,
    compare_and_write,
    compare_methods,
    estimate_training,
    run_seeds,
    seconds_of_runs,
    steps_within,
)
from idp_tutorial.runs.defaults import DEFAULT_METHODS, DEFAULT_OPTIONS
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.record import RunStore
from idp_tutorial.runs.statistics import estimate_contrast
from idp_tutorial.runs.tables import (
    format_table,
    results_table,
    write_results,
)
from idp_tutorial.training.fit import TrainingRun
from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.records import SCHEMA_VERSION, read_records
from idp_tutorial.utils.tensor_files import PROMPTS_FILE, save_tensors
from results.depth.layer_sweep import sweep_table


def test_every_method_is_tuned_alike(cfg, fakes):
    trained, tested = fakes(
        lambda c: float(c.lr == METHODS[c.method].learning_rates[2])
    )  # the best on validation is not the best on test
    records = compare_methods([*METHODS], cfg(lr=None), seeds=2, tune_learning_rates=True)
    for m in METHODS:
        # seed 0 of the best learning rate is not trained again
        grid = METHODS[m].learning_rates
        assert [(r[1], r[3]) for r in trained if r[0] == m] == [
            *[(lr, 0) for lr in grid],
            (grid[2], 1),
        ]
    assert tested == [(m, METHODS[m].learning_rates[2], s) for m in METHODS for s in (0, 1)]
    runs = [(r["method"], r["lr"], r["seed"]) for r in records]
    assert runs == [(m, METHODS[m].learning_rates[2], s) for m in METHODS for s in (0, 1)]
    assert len(records) == 2 * len(METHODS) and all(
        "best of 3 on validation" in r["lr_selection"] for r in records
    )
    trained.clear()
    given = compare_methods(["lpt"], cfg(lr=0.5), seeds=1, tune_learning_rates=True)
    assert trained == [("lpt", 0.5, None, 0)] and given[0]["lr_selection"] == "given"
    trained.clear()
    given = compare_methods(["lpt"], cfg(lr=None), seeds=1, tune_learning_rates=False)
    assert (
        trained == [("lpt", METHODS["lpt"].default_learning_rate, None, 0)]
        and given[0]["lr_selection"] == "default"
    )


@pytest.mark.grid
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_killed_comparison_is_resumed(cfg, fakes, tmp_path, tuned, half):
    out = tmp_path / "a" / "r.jsonl"
    base = cfg(lr=None)

    def go(seeds=2, base=base, **kw):
        return compare_methods(["lpt", "lpt-npg"], base, seeds, tuned, out, **kw)

    fakes(lambda c: c.lr)
    whole = go()
    lines = out.read_text().splitlines()
    out.write_text("\n".join(lines[:2]) + "\n" + (lines[2][:-20] if half else ""))
    trained, _ = fakes(lambda c: c.lr)
    again = go()
    assert [(r["method"], r["seed"], r["lr"]) for r in again] == [
        (r["method"], r["seed"], r["lr"]) for r in whole
    ]
    # the learning rate of the other method is in the file
    assert len(trained) == (4 if tuned else 2) and {r[0] for r in trained} == {"lpt-npg"}
    assert len(out.read_text().splitlines()) == 4
    trained, _ = fakes(lambda c: c.lr)
    go()
    assert not trained
    assert len(go(3)) == 6 and [r[3] for r in trained] == [
        2,
        2,
    ]  # one more seed only, at the same learning rate
    for other in (
        dict(steps=4),
        dict(prompt_length=3),
        dict(weight_decay=0.5),
        dict(standardise=True),
    ):
        trained, _ = fakes(lambda c: c.lr)
        go(base=cfg(**{"lr": None, **other}))
        assert trained  # another config is another run


@pytest.mark.long
def test_a_kill_loses_no_more_than_the_steps_since_an_evaluation(cfg, tmp_path, monkeypatch):
    """A kill in the search of the learning rate, and one in the run of the next seed."""
    base = cfg(lr=None, steps=4, eval_every=2)
    steps = []
    original_step = TrainingRun.step

    def compare(name):
        return compare_methods(["lpt"], base, 2, True, tmp_path / name)

    whole = compare("whole.jsonl")
    for kill in (7, 14):
        steps.clear()

        def step(run, kill=kill):
            steps.append(run.cfg.seed)
            if len(steps) == kill:
                raise Killed
            original_step(run)

        with monkeypatch.context() as patch:
            patch.setattr(TrainingRun, "step", step)
            with pytest.raises(Killed):
                compare(f"killed-{kill}.jsonl")
            again = compare(f"killed-{kill}.jsonl")
        n_whole = 4 * (3 + 1)  # three learning rates with seed 0, one with seed 1
        assert len(steps) - 1 <= n_whole + base.eval_every
        for name in ("lr", "seed", "validation", "score", "learning_rates_tried"):
            values = [json.dumps([r.get(name) for r in records]) for records in (whole, again)]
            assert values[0] == values[1], name
        assert not list(tmp_path.glob(".*-checkpoints"))


def test_a_run_without_training_is_not_repeated(cfg, tmp_path, messages):
    out = tmp_path / "r.jsonl"

    def go():
        messages.clear()
        compare_methods(
            ["head-only"],
            cfg(head="verbalizer", shots=12, task="questions"),
            1,
            False,
            out,
        )
        return len(messages)

    assert (go(), go()) == (1, 0) and len(out.read_text().splitlines()) == 1


def test_other_data_of_the_same_name_are_another_task(cfg, fakes, tmp_path, monkeypatch):
    out = tmp_path / "r.jsonl"

    def go(n):
        monkeypatch.setattr(comparison, "load_config_task", lambda cfg: small_task(train=n))
        return compare_methods(["lpt"], cfg(), 1, False, out)

    trained, _ = fakes(lambda c: 1.0)
    go(64)
    go(64)
    assert len(trained) == 1
    go(32)
    assert len(trained) == 2


def test_the_learning_rate_of_the_head_is_chosen_first(cfg, fakes):
    trained, _ = fakes(lambda c: -abs(c.lr - (0.1 if c.method == "head-only" else 0.005)))
    head = [("head-only", lr, None, 0) for lr in METHODS["head-only"].learning_rates]
    npg = [("lpt-npg", lr, 0.1, 0) for lr in METHODS["lpt-npg"].learning_rates]
    records = compare_methods(["lpt-npg", "head-only"], cfg(lr=None), seeds=1, tune_head_first=True)
    # the run of head-only is that of the choice
    assert trained == head + npg and [(r["lr"], r["head_lr"]) for r in records] == [
        (0.005, 0.1),
        (0.1, None),
    ]
    trained.clear()
    compare_methods(["lpt-npg"], cfg(lr=None), seeds=1, tune_head_first=True)
    assert trained == head + npg
    trained.clear()
    compare_methods(
        ["lpt-npg", "head-only"],
        cfg(lr=None, head_lr=1e-3),
        seeds=1,
        tune_learning_rates=False,
    )  # given
    assert trained == [
        ("lpt-npg", METHODS["lpt-npg"].default_learning_rate, 1e-3, 0),
        ("head-only", METHODS["head-only"].default_learning_rate, None, 0),
    ]
    trained.clear()
    compare_methods(
        ["lpt-npg", "head-only"],
        cfg(lr=None),
        seeds=1,
        tune_learning_rates=False,
        tune_head_first=True,
    )
    assert trained == [
        *head,
        ("lpt-npg", METHODS["lpt-npg"].default_learning_rate, 0.1, 0),
        ("head-only", METHODS["head-only"].default_learning_rate, None, 0),
    ]
    trained.clear()
    compare_methods(
        ["lpt-npg"],
        cfg(lr=None, head="verbalizer"),
        seeds=1,
        tune_head_first=True,
    )
    assert {r[2] for r in trained} == {None} and {r[0] for r in trained} == {
        "lpt-npg"
    }  # a verbalizer has no head to train


def test_a_comparison_without_seeds_or_of_an_unknown_method_is_refused(cfg):
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        compare_methods(["lpt"], cfg(), seeds=0)
    with pytest.raises(ValueError, match="unknown method 'ltp'"):
        compare_methods(["ltp"], cfg())


def test_a_repeated_method_runs_once(cfg, fakes):
    trained, _ = fakes(lambda c: 1.0)
    assert len(compare_methods(["lpt", "lpt"], cfg(), 1, False)) == len(trained) == 1


def test_a_layer_that_is_given_leaves_adapterdrop_at_its_half(cfg, fakes):
    fakes(lambda c: 1.0)

    def layers(*methods):
        return [r.get("layer") for r in compare_methods([*methods], cfg(layer=2), 1, False)]

    assert layers("adapterdrop", "lpt-npg", "lpt") == [None, 2, 2] and layers(
        "adapterdrop", "adapter"
    ) == [2, None]


def test_a_comparison_uses_the_split_seed(cfg, monkeypatch):
    monkeypatch.setattr(comparison, "run_seeds", lambda cfg, task, *a: [task])
    want, other = [load_task("sentiment", None, 8, i).splits["train"] for i in (3, 0)]
    (task,) = compare_methods(["lpt"], cfg(shots=8, split_seed=3))
    assert task.splits["train"] == want != other


def test_tuning_is_with_seed_0(cfg, fakes):
    trained, _ = fakes(lambda c: 1.0)
    compare_methods(["lpt"], cfg(lr=None, seed=7), seeds=1)
    assert {r[3] for r in trained} == {0}


def test_other_rows_or_weights_are_another_run(cfg, task, tmp_path, messages):
    """Names, sizes and settings are equal; only the rows or the weights differ."""
    out = tmp_path / "c.jsonl"

    def scores(task, **kw):
        c = cfg(method="head-only", lr=0.1, **kw)
        return run_seeds(c, task, "given", 1, RunStore(out))

    turned = replace(
        task,
        splits={
            s: [{**r, "label": 1 - r["label"]} for r in rows] for s, rows in task.splits.items()
        },
    )
    first = scores(task)
    assert scores(task)[0]["provenance"] == first[0]["provenance"] and len(messages) == 1
    (other,) = scores(turned)
    assert len(messages) == 2 and other["digests"]["data"] != first[0]["digests"]["data"]
    assert other["logits"] != first[0]["logits"] and len([*(tmp_path / "logits").iterdir()]) == 2
    bb = tmp_path / "bb"
    shutil.copytree(cfg().backbone, bb, ignore=shutil.ignore_patterns("SHA256SUMS"))
    weights = safetensors.torch.load_file(bb / "model.safetensors")
    for n in (3, 3, 4):  # written again with other weights before the third
        if n == 4:
            name = next(k for k in weights if "word_embeddings" in k)
            safetensors.torch.save_file(
                {**weights, name: weights[name] + 1}, bb / "model.safetensors", {"format": "pt"}
            )
        scores(task, backbone=str(bb))
        assert len(messages) == n


@pytest.mark.parametrize("field", ["glove", "init_from"])
def test_other_contents_of_a_file_are_another_run(
    field, cfg, task, tmp_path, monkeypatch, messages
):
    """Word vectors and initial prompts are compared by digest."""
    words = sorted({w for r in task.splits["train"] for w in r["sentence1"].lower().split()})

    def one(folder, sign):
        if field == "glove":
            (tmp_path / folder).mkdir(exist_ok=True)
            vectors = sign * np.arange(8.0 * len(words)).reshape(-1, 8) % 7
            write_glove(
                {w: i for i, w in enumerate(words)}, vectors, tmp_path / folder / "glove.txt"
            )
            return cfg(
                method="m-idpg-phm-glove", glove=str(tmp_path / folder / "glove.txt"), lr=0.1
            )
        first = tmp_path / folder / "first"
        first.mkdir(parents=True, exist_ok=True)
        first_stage = build_model(cfg(), backbone(max_position_embeddings=258), task)
        tensors = {n: p.detach() + 0.1 * sign for n, p in trained_state(first_stage).items()}
        save_tensors(first / PROMPTS_FILE, tensors, {})
        return cfg(init_from=str(first), lr=0.1)

    out = tmp_path / "c.jsonl"

    def scores(c):
        return run_seeds(c, task, "given", 1, RunStore(out))[0]

    r = scores(one("a", 1))
    assert {*r["digests"]} == {"weights", "data", field} and len(r["digests"][field]) == 16
    assert (
        scores(one("b", 1))["logits"] == r["logits"] and len(messages) == 1
    )  # the folder does not matter
    other = scores(one("b", -1))
    assert (
        len(messages) == 2
        and other["digests"][field] != r["digests"][field]
        and other["logits"] != r["logits"]
    )
    assert scores(one("b", -1))["provenance"] == other["provenance"] and len(messages) == 2
    diverged = Experiment(one("b", -1), task).record_divergence("why")
    assert diverged["digests"] == other["digests"]


def test_a_run_that_patience_ended_is_not_repeated(cfg, task, tmp_path, messages):
    out = tmp_path / "c.jsonl"
    one = cfg(method="lpt", lr=1e-9, steps=40, eval_every=1, patience=2)
    for _ in range(2):
        (r,) = run_seeds(one, task, "given", 1, RunStore(out))
    assert len(messages) == 1 and r["steps"] == 40 > r["steps_done"]


@pytest.mark.long
def test_a_seed_that_diverges_does_not_end_a_comparison(cfg, tmp_path, monkeypatch, messages):
    """It is not repeated by a second call; table and sweep leave it out."""
    calls = []
    bad = {1}
    real = Experiment.fit

    def trained(self, checkpoint_dir=None):
        calls.append(self.cfg.seed)
        if self.cfg.seed in bad:
            raise FloatingPointError("the loss is nan at step 2")
        return real(self)

    monkeypatch.setattr(Experiment, "fit", trained)
    base = cfg(lr=1e-2, steps=2, eval_every=2)
    out = tmp_path / "a.jsonl"
    for _ in range(2):
        records = compare_methods(["lpt"], base, 3, out=out)
        assert calls == [0, 1, 2] and [r["status"] for r in records] == ["done", "diverged", "done"]
    assert "seed 1  lr 1.0e-02  diverged: the loss is nan at step 2" in messages[1]
    assert results_table(records).seeds.tolist() == [2] == sweep_table(records).seeds.tolist()
    assert len(write_results(records, tmp_path / "table")) == 1
    bad.add(0)  # also the first one
    for _ in range(2):
        records = compare_methods(["lpt"], replace(base, lr=2e-2), 3, out=out)
        assert [r["status"] for r in records] == ["diverged", "diverged", "done"] and calls == [
            0,
            1,
            2,
            0,
            1,
            2,
        ]
    assert "(2 diverged)" in format_table(results_table(records))


def test_a_method_that_diverges_with_every_learning_rate_has_one_record(cfg, tmp_path, wild):
    """It lists what was tried; the next method is trained; a second call trains nothing."""
    base = cfg(lr=None, steps=2, eval_every=2)
    out = tmp_path / "a.jsonl"
    for _ in range(2):
        records = compare_methods(["fine-tuning", "lpt"], base, 2, out=out)
        assert [(r["method"], r["seed"], r["status"]) for r in records] == [
            ("fine-tuning", 0, "diverged"),
            ("lpt", 0, "done"),
            ("lpt", 1, "done"),
        ]
        assert len(wild) == 3 + 3 + 1 and read_records(out) == json.loads(json.dumps(records))
    diverged = records[0]
    assert (
        diverged["learning_rates_tried"]
        == [[lr, "diverged"] for lr in METHODS["fine-tuning"].learning_rates]
        and diverged["lr"] is None
    )
    assert (
        diverged["versions"]["torch"] == torch.__version__
        and diverged["schema"] == SCHEMA_VERSION
        and diverged["provenance"]["started_at"]
    )
    assert (
        "with every learning rate of" in diverged["message"]
        and diverged["tuning_seconds"] >= 0 == diverged["seconds"]
    )
    assert diverged["digests"] == records[1]["digests"]
    table = write_results(records, tmp_path / "table")
    row = format_table(table).splitlines()[2]
    assert row.split()[:3] == ["fine-tuning", "diverged", "–"] and table.seeds.tolist() == [0, 2]
    compare_methods(
        ["fine-tuning"], replace(base, weight_decay=0.3), 2, out=out
    )  # another config is another run
    assert len(wild) == 7 + 3


def test_a_diverged_run_is_repeated_with_other_weights(cfg, task, tmp_path, wild):
    """The digest of the weights is part of a record."""
    bb = tmp_path / "bb"
    shutil.copytree(cfg().backbone, bb, ignore=shutil.ignore_patterns("SHA256SUMS"))
    one = cfg(method="fine-tuning", lr=0.1, backbone=str(bb))
    store = RunStore(None)
    for n in (1, 1, 2):
        if n == 2:
            weights = safetensors.torch.load_file(bb / "model.safetensors")
            name = next(k for k in weights if "word_embeddings" in k)
            safetensors.torch.save_file(
                {**weights, name: weights[name] + 1}, bb / "model.safetensors", {"format": "pt"}
            )
        run_seeds(one, task, "given", 1, store)
        assert len(wild) == n


def test_seeds_may_begin_later(cfg, task, tmp_path):
    store = RunStore(tmp_path / "runs.jsonl")
    one = cfg(method="head-only", lr=0.01)
    first = run_seeds(one, task, "given", 3, store)
    later = run_seeds(one, task, "given", 2, store, first_seed=2)
    assert [record["seed"] for record in later] == [2, 3]
    assert later[0] == first[2] and len(read_records(store.file)) == 4


@pytest.mark.long
def test_a_comparison_in_which_everything_diverged(cfg, tmp_path, wild):
    """Its records are stored, its error is that of the first; a second call trains nothing."""
    for _ in range(2):
        with pytest.raises(
            FloatingPointError,
            match="'fine-tuning' diverged on 'sentiment' with every learning rate",
        ):
            compare_and_write(
                ["fine-tuning"],
                replace(cfg(method="fine-tuning", lr=None, shots=24), method_options={}),
                2,
                True,
                tmp_path / "out",
            )
        assert len(wild) == 3
    (diverged,) = read_records(tmp_path / "out" / "compare.jsonl.part")
    assert diverged["status"] == "diverged" and not (tmp_path / "out" / "compare.csv").exists()
    table = compare_and_write(
        ["fine-tuning", "lpt"],
        cfg(lr=None, shots=24, bottleneck=None),
        1,
        True,
        tmp_path / "out",
    ).table
    assert (
        len(wild) == 6
        and table.diverged.tolist() == [1, 0]
        and not (tmp_path / "out" / "compare.jsonl.part").exists()
    )


@pytest.mark.long
def test_several_splits_make_one_table(cfg, tmp_path, messages):
    """Each split has its own examples and all seeds; a second call trains nothing."""
    base = cfg(lr=1e-2, shots=24, bottleneck=None)
    table = compare_and_write(
        ["majority", "lpt"], base, 2, False, tmp_path / "out", split_seeds=2
    ).table
    assert table.seeds.tolist() == [4, 4] and table.draws.tolist() == [2, 2]
    assert len(messages) == 8
    runs = read_records(tmp_path / "out" / "compare.jsonl")
    assert {(r["split_seed"], r["seed"]) for r in runs} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len({r["digests"]["data"] for r in runs}) == 2
    estimate = estimate_contrast(runs, "lpt", "majority", tmp_path / "out")
    assert (estimate["runs"], estimate["draws"]) == (4, 2)
    messages.clear()
    compare_and_write(["majority", "lpt"], base, 2, False, tmp_path / "out", split_seeds=2)
    assert not messages
    with pytest.raises(ValueError, match="more than one record with seed"):
        results_table([*runs, runs[0]])


def test_several_splits_of_the_same_examples_are_refused(cfg, tmp_path):
    with pytest.raises(ValueError, match="split_seeds=4 needs shots"):
        compare_and_write(["majority"], cfg(), 1, False, tmp_path / "out", split_seeds=4)
    (tmp_path / "sentiment" / "k24").mkdir(parents=True)
    with pytest.raises(ValueError, match="would give the same few-shot set"):
        compare_and_write(
            ["majority"],
            cfg(shots=24, data=str(tmp_path)),
            1,
            False,
            tmp_path / "out",
            split_seeds=4,
        )
    with pytest.raises(ValueError, match="split_seeds"):
        compare_and_write(["majority"], cfg(shots=24), 1, False, tmp_path / "out", split_seeds=0)
    assert not (tmp_path / "out").exists()


def test_packages_of_the_picture_are_looked_for_before_training(cfg, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name)
    )
    monkeypatch.setattr(comparison, "dry_run_comparison", lambda *a: pytest.fail("was started"))
    with pytest.raises(ValueError, match=r"matplotlib is not installed.*idp_tutorial\[experiments"):
        compare_and_write(["lpt"], cfg(), 1, False, tmp_path)


def test_steps_fit_into_the_time(cfg):
    base = replace(cfg(), steps=200, eval_every=50, batch_size=10)
    sizes = dict(train=100, validation=30, test=30)
    times = dict(lpt=0.4, lora=0.6)
    # a step of both methods takes 1 s, and scoring 150 rows takes 15 batches of a third of it
    assert steps_within(100, times, 1, sizes, base) == (0.7 * 100 - 5, 4)
    assert steps_within(200, times, 2, sizes, base) == (0.7 * 100 - 5, 4)
    assert steps_within(10_000, times, 1, sizes, base) == (200, 4)
    for steps, n_evaluations in ((65, 4), (200, 1)):
        needed = seconds_of_runs(steps, n_evaluations, times, 2, sizes, base)
        assert needed == pytest.approx(2 * (steps + n_evaluations + 1))


def test_evaluations_are_left_out_before_steps(cfg):
    """Scoring 300 rows of long texts takes as long as ten steps."""
    base = replace(cfg(), steps=200, eval_every=50, batch_size=10)
    sizes = dict(train=100, validation=300, test=300)
    for seconds, expected in ((62 / 0.7, (22, 3)), (61 / 0.7, (21, 3)), (41 / 0.7, (21, 1))):
        assert steps_within(seconds + 0.1, dict(lpt=1.0), 1, sizes, base) == expected
    # 20 steps and one evaluation are the fewest
    assert steps_within(1, dict(lpt=1.0), 1, sizes, base) == (20, 1)


def test_an_estimate_trains_on_two_descriptions_and_evaluates_all(cfg, monkeypatch):
    """Of `efl`; the memory is that of the longest examples, the time that of others."""
    task = small_task("questions")  # of six labels
    lengths = []

    def measure(model, task, cfg, *batches):
        lengths.append([max(len(e["input_ids"]) for e in batch) for batch in batches])
        return 1.0, 5.0

    monkeypatch.setattr(comparison, "measure_step", measure)

    def evaluation_seconds(method):
        run = cfg(method=method, steps=4, eval_every=2, batch_size=4)
        estimate = estimate_training(run, task)
        assert estimate["ms_per_step"] == 1000 and estimate["memory_mb"] == 5
        return estimate["seconds"] - 4

    n_scored = 2 * len(task.splits["validation"]) + len(task.splits["test"])
    assert evaluation_seconds("fine-tuning") == pytest.approx(n_scored / 4 / 3)
    assert evaluation_seconds("efl") == pytest.approx(3 * n_scored / 4 / 3)
    assert all(longest > typical for longest, typical, _ in lengths)


def test_a_step_is_measured_in_the_precision_of_the_run(cfg):
    task = small_task("questions")
    memory = {}
    for precision in ("no", "bf16"):
        estimate = estimate_training(cfg(method="lpt", precision=precision), task)
        memory[precision] = estimate["memory_mb"]
        assert estimate["params"]["prompt"] > 0 and estimate["seconds"] > 0
    assert memory["bf16"] != memory["no"]  # saved tensors have half the bytes


def test_a_comparison_that_continues_keeps_the_steps_that_its_time_allowed(
    cfg, tmp_path, monkeypatch, messages
):
    """The quick rows come first; the table keeps the order that was asked for."""
    monkeypatch.setattr(comparison, "steps_within", lambda *args: (2, 1))
    base = replace(cfg(lr=1e-2, bottleneck=None), steps=8, eval_every=4)
    methods = ["lpt", "words", "majority"]
    table = compare_and_write(methods, base, 1, False, tmp_path / "out", minutes=1).table
    assert [*table.method] == methods and table.steps[0] == 2
    assert (tmp_path / "out" / "report" / "report.md").exists()
    n_messages = len(messages)
    monkeypatch.setattr(comparison, "steps_within", lambda *args: (5, 1))
    again = compare_and_write(methods, base, 1, False, tmp_path / "out", minutes=1).table
    assert again.steps[0] == 2 and not any("seed 0" in m for m in messages[n_messages:])


# ---- own texts in Python


TICKETS = [
    (f"{word} {i}", topic)
    for topic, words in dict(
        billing=("the invoice is wrong", "refund my card"),
        login=("the password fails", "i cannot sign in"),
    ).items()
    for word in words
    for i in range(15)
]
TEXTS, LABELS = map(list, zip(*TICKETS))


@pytest.fixture
def own_tasks():
    """Forget the tasks of tables after a test."""
    tasks = dict(TASKS)
    yield
    for name in TASKS.keys() - tasks.keys():
        del TASKS[name]


def test_own_texts_are_compared_in_python(own_tasks, tmp_path, messages):
    folder = tmp_path / "tickets"
    options = dict(methods=["words", "prompt-tuning"], backbone="tiny", steps=4, device="cpu")
    result = compare((TEXTS, LABELS), folder, **options)
    assert [*result.table.method] == ["words", "prompt-tuning"]
    assert result.table.steps[1] == 4 and result.advice.method in options["methods"]
    assert str(result).endswith(result.advice.sentence) and "95 % interval" in str(result)
    assert {p.name for p in folder.glob("[!.]*")} >= {
        *("compare.jsonl", "compare.csv", "compare.png", "report")
    }
    assert result.advice.sentence in (folder / "report" / "report.md").read_text()
    assert len([m for m in messages if "seed 0" in m]) == 2
    messages.clear()
    again = compare((TEXTS, LABELS), folder, **options)
    assert again.table.equals(result.table) and not [m for m in messages if "seed 0" in m]
    assert again.advice == result.advice


def test_epochs_take_the_place_of_the_default_steps(own_tasks, tmp_path):
    options = dict(methods=["prompt-tuning"], backbone="tiny", device="cpu", batch_size=12)
    result = compare((TEXTS, LABELS), tmp_path, epochs=1, **options)
    (record,) = result.records
    assert record["steps"] == 4 and len(record["history"]) == 4
    assert record["prompt_length"] == 5 and "minutes" not in record


def test_texts_and_labels_of_different_lengths_are_refused(own_tasks, tmp_path):
    with pytest.raises(ValueError, match="expected length 60 but got length 59"):
        compare((TEXTS, LABELS[1:]), tmp_path / "out", backbone="tiny")
    with pytest.raises(ValueError, match="1 of 60 rows"):
        compare((TEXTS, [None, *LABELS[1:]]), tmp_path / "out", backbone="tiny")
    assert not (tmp_path / "out").exists()


def test_the_example_of_the_page_on_reports(own_tasks, tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[2] / "docs" / "reports_and_metrics.md"
    code = re.search(
        r"```python\n(from idp_tutorial import compare\n.*?)```", page.read_text(), re.S
    )[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DEFAULT_OPTIONS, "steps", 2)
    monkeypatch.setattr(comparison, "choose_backbone", lambda is_own_task: ("tiny", ""))
    exec(code, dict(texts=TEXTS, labels=LABELS))
    printed = capsys.readouterr().out
    assert all(method in printed for method in DEFAULT_METHODS)
    assert (tmp_path / "tickets" / "compare.jsonl").exists()


@pytest.mark.parametrize("installed,online", [(True, True), (False, True), (False, False)])
def test_a_real_backbone_is_chosen_for_own_texts(installed, online, monkeypatch):
    folder = Path("minilm") if installed else None
    monkeypatch.setattr(comparison, "find_local_backbone", lambda name, verify: folder)
    monkeypatch.setattr(comparison, "is_hub_reachable", lambda: online)
    assert choose_backbone(is_own_task=False)[0] == "tiny"
    if installed or online:
        name, reason = choose_backbone(is_own_task=True)
        assert name == ("minilm" if installed else "roberta-base") and f"backbone {name}," in reason
    else:
        with pytest.raises(UserError, match=r"pip install 'idp_tutorial\[backbones\]'"):
            choose_backbone(is_own_task=True)

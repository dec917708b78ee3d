"""Runs, learning-rate searches and comparisons: their records, repetitions and use of test data."""

import json
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from small import backbone, config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.core.prompted_model import trained_state
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.glove import write_glove
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.reproduction.analysis.layer_sweep import plot_sweep, sweep_table
from idp_tutorial.runs import compare as comparison
from idp_tutorial.runs import record
from idp_tutorial.runs.compare import compare_and_write, compare_methods, run_seeds
from idp_tutorial.runs.conclusions import describe_primary_contrast, summarise_comparison
from idp_tutorial.runs.experiment import Experiment, run_experiment, train_and_save
from idp_tutorial.runs.record import build_record
from idp_tutorial.runs.store import RunStore
from idp_tutorial.runs.tables import (
    format_table,
    pivot_methods_by_task,
    plot_scores,
    results_table,
    write_results,
)
from idp_tutorial.runs.tune import (
    choose_head_learning_rate,
    choose_learning_rate,
    tune_learning_rate,
)
from idp_tutorial.training.fit import TrainLog, fit
from idp_tutorial.utils import provenance, records
from idp_tutorial.utils.records import SCHEMA_VERSION, config_to_record, read_records
from idp_tutorial.utils.tensor_files import PROMPTS_FILE, save_tensors

TIME = ("ms_per_step", "peak_memory_mb", "provenance", "learning_rates_tried", "lr_at_grid_edge")


@pytest.fixture(scope="module")
def cfg(small_folder):
    return lambda **kw: config(**{**dict(backbone=str(small_folder), steps=3), **kw})


@pytest.fixture(scope="module")
def task():
    return small_task()


def timeless(r):
    return {k: v for k, v in r.items() if k not in TIME}


def test_the_fields_of_a_record(cfg, task, tmp_path):
    r = run_experiment(cfg(shots=64), task, tmp_path / "new/records.jsonl")
    assert {
        *[
            "method",
            "task",
            "backbone",
            "shots",
            "seed",
            "metric",
            "score",
            "params",
            "ms_per_step",
            "peak_memory_mb",
            "steps",
            "versions",
        ]
    } <= r.keys()
    assert (
        {*r["params"]} == {"prompt", "head", "backbone"}
        and r["params"]["head"] == 2 * 32 + 2
        and r["params"]["backbone"] == 0
    )
    assert (r["method"], r["task"], r["shots"], r["seed"], r["metric"], r["steps"], r["lr"]) == (
        "lpt-npg",
        "sentiment",
        64,
        0,
        "accuracy",
        3,
        1e-2,
    )
    assert (
        0 <= r["score"] <= 100
        and r["score"] == r["scores"]["accuracy"]
        and r["ms_per_step"] > 0
        and r["peak_memory_mb"] > 0
    )
    assert r["validation"] == max(s for _, s in r["history"]) and r["split_sizes"] == dict(
        train=64, validation=24, test=24
    )
    assert (
        r["versions"]["torch"] == torch.__version__
        and {"python", "transformers", "idp_tutorial"} <= r["versions"].keys()
    )
    again = json.loads(json.dumps(r, allow_nan=False))
    assert (
        read_records(tmp_path / "new/records.jsonl") == [again] and len(results_table([again])) == 1
    )


@pytest.mark.parametrize("method", METHODS)
def test_equal_configs_give_equal_records(method, cfg, task):
    a = run_experiment(cfg(method=method), task)
    torch.rand(3)
    assert timeless(a) == timeless(run_experiment(cfg(method=method), task))
    assert timeless(a) != timeless(run_experiment(cfg(method=method, seed=1), task))


def test_a_run_does_not_change_later_runs(cfg, task):
    before = run_experiment(cfg(method="lpt"), task)
    run_experiment(cfg(method="fine-tuning", lr=0.05), task)
    run_experiment(cfg(method="prompt-tuning", precision="bf16", accumulate=2), task)
    assert timeless(run_experiment(cfg(method="lpt"), task)) == timeless(before)


def test_a_record_has_the_name_of_the_given_task(cfg, task, tmp_path):
    mine = replace(task, name="mine")
    assert run_experiment(cfg(task="trec"), mine)["task"] == "mine"
    assert train_and_save(cfg(task="trec"), tmp_path / "run", mine)["task"] == "mine"


def test_default_learning_rates(cfg, task):
    for m in METHODS:
        assert (
            run_experiment(cfg(method=m, lr=None, steps=1), task)["lr"]
            == METHODS[m].default_learning_rate
        )
    untrained = run_experiment(cfg(method="head-only", head="verbalizer"), task)
    assert untrained["steps_done"] == 0


@pytest.mark.parametrize("name,k", [("questions", 12), ("entailment", 10), ("similarity", 8)])
def test_few_shot_runs_of_bundled_tasks(name, k, cfg):
    r = run_experiment(cfg(task=name, shots=k, steps=1, batch_size=4, eval_every=1))
    assert r["split_sizes"] == {"train": k, "validation": 1000, "test": 1000} and r["metric"] == (
        "pearson+spearman" if name == "similarity" else "accuracy"
    )


@pytest.fixture
def no_test_split(monkeypatch, task):
    """Return a task and a list that grows whenever its test split is read."""
    reads = []

    class Watched(list):
        def __iter__(self):
            reads.append(1)
            return super().__iter__()

        def __getitem__(self, i):
            reads.append(1)
            return super().__getitem__(i)

    watched = small_task()
    watched.splits["test"] = Watched(task.splits["test"])
    return watched, reads


def test_tuning_never_reads_the_test_split(cfg, no_test_split):
    task, reads = no_test_split
    tune_learning_rate(cfg(method="lpt"), task, METHODS["lpt"].learning_rates)
    assert not reads
    run_experiment(cfg(method="lpt"), task)
    assert reads  # a read is recorded


@pytest.fixture
def fakes(monkeypatch):
    """Replace training; return a function that returns lists of the trained and the tested runs.

    A trained run is (method, learning rate, the head's learning rate, seed).
    """

    def make(validation):
        trained = []
        tested = []

        def fit_quickly(self):
            c = self.cfg
            trained.append((c.method, c.lr, c.head_lr, c.seed))
            if (v := validation(c)) == "diverges":
                raise FloatingPointError("nan")
            return None, TrainLog(v)

        def score(self, model, log, score_test=True, records_file=None):
            c = self.cfg
            if score_test:
                tested.append((c.method, c.lr, c.seed))
            return build_record(
                c,
                self.digests(score_test),
                self.task.split_sizes(),
                self.start_time,
                metric="accuracy",
                score=100.0 - c.lr if score_test else None,
                validation=log.validation,
            )

        monkeypatch.setattr(Experiment, "fit", fit_quickly)
        monkeypatch.setattr(Experiment, "score", score)
        return trained, tested

    return make


def test_tune_takes_the_best_on_validation(cfg, task, fakes):
    scores = {1e-3: 50.0, 1e-2: 60.0, 1e-1: 60.0, 1.0: "diverges"}
    trained, tested = fakes(lambda c: scores[c.lr])
    assert (
        tune_learning_rate(cfg(), task, [*scores])["lr"] == 1e-2
        and [r[1] for r in trained] == [*scores]
        and not tested
    )
    # the test split is read for the best learning rate only
    assert tune_learning_rate(cfg(), task, [*scores], score_test=True)["score"] == 100 - 1e-2 and [
        r[1] for r in tested
    ] == [1e-2]
    with pytest.raises(
        FloatingPointError,
        match=r"'lpt-npg' diverged on 'sentiment' with every learning rate of \[1.0\]",
    ):
        tune_learning_rate(cfg(), task, [1.0])


def test_the_record_of_tuning_is_the_record_of_the_run(cfg, task):
    assert timeless(tune_learning_rate(cfg(), task, (1e-2, 1e-2), score_test=True)) == timeless(
        run_experiment(cfg(lr=1e-2), task)
    )


def test_every_method_is_tuned_alike(cfg, fakes):
    trained, tested = fakes(
        lambda c: float(c.lr == METHODS[c.method].learning_rates[2])
    )  # the best on validation is not the best on test
    records = compare_methods(
        [*METHODS], cfg(lr=None), seeds=2, tune_learning_rates=True, report=lambda s: None
    )
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
    given = compare_methods(
        ["lpt"], cfg(lr=0.5), seeds=1, tune_learning_rates=True, report=lambda s: None
    )
    assert trained == [("lpt", 0.5, None, 0)] and given[0]["lr_selection"] == "given"
    trained.clear()
    given = compare_methods(
        ["lpt"], cfg(lr=None), seeds=1, tune_learning_rates=False, report=lambda s: None
    )
    assert (
        trained == [("lpt", METHODS["lpt"].default_learning_rate, None, 0)]
        and given[0]["lr_selection"] == "default"
    )


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_killed_comparison_is_resumed(cfg, fakes, tmp_path, tuned, half):
    out = tmp_path / "a" / "r.jsonl"
    base = cfg(lr=None)

    def go(seeds=2, base=base, **kw):
        return compare_methods(["lpt", "lpt-npg"], base, seeds, tuned, out, lambda s: None, **kw)

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


def test_a_damaged_record_file_is_refused_and_a_cut_line_removed(tmp_path):
    out = tmp_path / "r.jsonl"
    out.write_text('{"seed": 0}\nnot a record\n{"half')
    with pytest.raises(ValueError, match="r.jsonl, line 2 is not a record"):
        records.read_existing_records(out)
    out.write_text('{"seed": 0}\n{"half')
    assert (
        records.read_existing_records(out) == [{"seed": 0}] and out.read_text() == '{"seed": 0}\n'
    )
    out.write_text('{"seed": 0}\n{"seed": 1}')
    # the last line is complete except for its newline
    assert (
        records.read_existing_records(out) == [{"seed": 0}, {"seed": 1}]
        and out.read_text() == '{"seed": 0}\n{"seed": 1}\n'
    )


def test_a_run_without_training_is_not_repeated(cfg, tmp_path):
    out = tmp_path / "r.jsonl"

    def go():
        messages = []
        compare_methods(
            ["head-only"],
            cfg(head="verbalizer", shots=12, task="questions"),
            1,
            False,
            out,
            messages.append,
        )
        return len(messages)

    assert (go(), go()) == (1, 0) and len(out.read_text().splitlines()) == 1


def test_other_data_of_the_same_name_are_another_task(cfg, fakes, tmp_path, monkeypatch):
    out = tmp_path / "r.jsonl"

    def go(n):
        monkeypatch.setattr(comparison, "load_task", lambda *a: small_task(train=n))
        return compare_methods(["lpt"], cfg(), 1, False, out, lambda s: None)

    trained, _ = fakes(lambda c: 1.0)
    go(64)
    go(64)
    assert len(trained) == 1
    go(32)
    assert len(trained) == 2


@pytest.mark.parametrize(
    "kw,words",
    [
        (
            dict(method="lpt-ngp"),
            ["unknown method 'lpt-ngp'", "did you mean 'lpt-npg'?", "Known: head-only"],
        ),
        (dict(head="verbalisr"), ["head must be ", "got 'verbalisr'", "'verbalizer'"]),
        (dict(task="sentimnt"), ["unknown task 'sentimnt'", "'sentiment'"]),
        (dict(backbone="tinny"), ["no backbone 'tinny'", "Did you mean 'tiny'?"]),
        (dict(layer=9), ["between 0 and 2", "got 9"]),
        (dict(template="oral", head="verbalizer"), ["no template 'oral'"]),
    ],
)
def test_unknown_names_are_refused(kw, words, cfg, tmp_path):
    with pytest.raises(ValueError) as e:
        run_experiment(cfg(**kw), append_to=tmp_path / "records.jsonl")
    assert all(w in str(e.value) for w in words), str(e.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(steps=0), ["steps must be at least 1, got 0"]),
        (dict(batch_size=0), ["batch_size must be at least 1, got 0"]),
        (dict(accumulate=0), ["accumulate must be at least 1, got 0"]),
        (dict(eval_every=0), ["eval_every must be at least 1, got 0"]),
        (dict(lr=0.0), ["lr must be a positive number, got 0.0"]),
        (dict(lr=-1.0), ["lr must be a positive number, got -1.0"]),
        (dict(lr=float("nan")), ["lr must be a positive number, got nan"]),
        (dict(device="gpu"), ["device must be ", "got 'gpu'", "'auto' or 'cpu'"]),
        (dict(precision="half"), ["precision must be ", "got 'half'", "'bf16'"]),
    ],
)
def test_invalid_numbers_are_refused(kw, words):
    with pytest.raises(ValueError) as e:
        config(**kw)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_the_learning_rate_of_the_head_is_chosen_first(cfg, fakes):
    trained, _ = fakes(lambda c: -abs(c.lr - (0.1 if c.method == "head-only" else 0.005)))
    head = [("head-only", lr, None, 0) for lr in METHODS["head-only"].learning_rates]
    npg = [("lpt-npg", lr, 0.1, 0) for lr in METHODS["lpt-npg"].learning_rates]
    records = compare_methods(
        ["lpt-npg", "head-only"], cfg(lr=None), seeds=1, tune_head_first=True, report=lambda s: None
    )
    # the run of head-only is that of the choice
    assert trained == head + npg and [(r["lr"], r["head_lr"]) for r in records] == [
        (0.005, 0.1),
        (0.1, None),
    ]
    trained.clear()
    compare_methods(["lpt-npg"], cfg(lr=None), seeds=1, tune_head_first=True, report=lambda s: None)
    assert trained == head + npg
    trained.clear()
    compare_methods(
        ["lpt-npg", "head-only"],
        cfg(lr=None, head_lr=1e-3),
        seeds=1,
        tune_learning_rates=False,
        report=lambda s: None,
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
        report=lambda s: None,
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
        report=lambda s: None,
    )
    assert {r[2] for r in trained} == {None} and {r[0] for r in trained} == {
        "lpt-npg"
    }  # a verbalizer has no head to train


def test_the_head_has_its_own_learning_rate(cfg, task):
    def moved(**kw):
        r = build_model(c := cfg(method="lpt", steps=3, **kw), backbone(), task)
        old = {n: p.detach().clone() for n, p in r.trained_parameters().items()}
        fit(r, task, c)
        return [
            max(
                (p - old[n]).abs().max().item()
                for n, p in r.trained_parameters().items()
                if n.startswith(part)
            )
            for part in ("head", "sources")
        ]

    both = moved(lr=1e-2)
    head = moved(lr=1e-6, head_lr=1e-2)
    prompt = moved(lr=1e-2, head_lr=1e-6)
    assert (
        head[0] == pytest.approx(both[0], rel=0.2)
        and head[1] < 1e-5
        and prompt[0] < 1e-5
        and prompt[1] == pytest.approx(both[1], rel=0.2)
    )
    with pytest.raises(ValueError, match="head_lr must be a positive number, got 0"):
        cfg(head_lr=0.0)


def test_a_comparison_without_seeds_or_of_an_unknown_method_is_refused(cfg):
    with pytest.raises(ValueError, match="seeds must be at least 1"):
        compare_methods(["lpt"], cfg(), seeds=0)
    with pytest.raises(ValueError, match="unknown method 'ltp'"):
        compare_methods(["ltp"], cfg())


# --- tables


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


def test_a_repeated_method_runs_once(cfg, fakes):
    trained, _ = fakes(lambda c: 1.0)
    assert (
        len(compare_methods(["lpt", "lpt"], cfg(), 1, False, report=lambda s: None))
        == len(trained)
        == 1
    )


def test_a_layer_that_is_given_leaves_adapterdrop_at_its_half(cfg, fakes):
    fakes(lambda c: 1.0)

    def layers(*methods):
        return [
            r["layer"]
            for r in compare_methods([*methods], cfg(layer=2), 1, False, report=lambda s: None)
        ]

    assert layers("adapterdrop", "lpt-npg", "lpt") == [None, 2, 2] and layers(
        "adapterdrop", "adapter"
    ) == [2, 2]


def test_records_name_files_without_their_folders(cfg, tmp_path):
    c = cfg(data="a/data", glove="b/own.txt", init_from="c/first", cache_dir="d")
    r = config_to_record(c)
    assert [r[k] for k in ("data", "glove", "init_from", "cache_dir")] == [
        "data",
        "own.txt",
        "first",
        None,
    ]
    assert config_to_record(cfg(backbone=str(tmp_path)))["backbone"] == tmp_path.name
    assert config_to_record(cfg(backbone="org/model"))["backbone"] == "org/model"


def test_a_backbone_in_half_precision_is_refused():
    bb = backbone()
    bb.model.half()
    with pytest.raises(
        ValueError,
        match="weights in torch.float16, .* load it without dtype=, or with dtype='bfloat16'",
    ):
        build_model(config(), bb, small_task())


# --- the split seed and the seed are used


def test_a_comparison_uses_the_split_seed(cfg, monkeypatch):
    monkeypatch.setattr(comparison, "run_seeds", lambda cfg, task, *a: [task])
    want, other = [load_task("sentiment", None, 8, i).splits["train"] for i in (3, 0)]
    (task,) = compare_methods(["lpt"], cfg(shots=8, split_seed=3))
    assert task.splits["train"] == want != other


def test_a_run_uses_the_split_seed(cfg, monkeypatch):
    class SeenError(Exception):
        pass

    def see(self):
        raise SeenError(self.task)

    monkeypatch.setattr(Experiment, "fit", see)
    with pytest.raises(SeenError) as e:
        run_experiment(cfg(shots=8, split_seed=3))
    assert (
        e.value.args[0].splits["train"]
        == load_task("sentiment", None, 8, 3).splits["train"]
        != load_task("sentiment", None, 8).splits["train"]
    )


def test_tuning_is_with_seed_0(cfg, fakes):
    trained, _ = fakes(lambda c: 1.0)
    compare_methods(["lpt"], cfg(lr=None, seed=7), seeds=1, report=lambda s: None)
    assert {r[3] for r in trained} == {0}


def test_a_control_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="majority.* is a control and has no prompt to save"):
        train_and_save(config(method="majority"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_other_rows_or_weights_are_another_run(cfg, task, tmp_path):
    """Names, sizes and settings are equal; only the rows or the weights differ."""
    out = tmp_path / "c.jsonl"
    ran = []

    def scores(task, **kw):
        c = cfg(method="head-only", lr=0.1, **kw)
        return run_seeds(c, task, "given", 1, RunStore(out), ran.append)

    turned = replace(
        task,
        splits={
            s: [{**r, "label": 1 - r["label"]} for r in rows] for s, rows in task.splits.items()
        },
    )
    first = scores(task)
    assert scores(task)[0]["provenance"] == first[0]["provenance"] and len(ran) == 1
    (other,) = scores(turned)
    assert len(ran) == 2 and other["digests"]["data"] != first[0]["digests"]["data"]
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
        assert len(ran) == n


def test_logits_of_other_weights_do_not_replace_the_old_ones(cfg, task, tmp_path):
    """The folders of two backbones have the same name; each record has its own logits."""
    out = tmp_path / "c.jsonl"
    logits = []
    bb = shutil.copytree(
        cfg().backbone, tmp_path / "a" / "bb", ignore=shutil.ignore_patterns("SHA256SUMS")
    )
    other = shutil.copytree(bb, tmp_path / "b" / "bb")
    weights = safetensors.torch.load_file(bb / "model.safetensors")
    name = next(k for k in weights if "word_embeddings" in k)
    safetensors.torch.save_file(
        {**weights, name: weights[name] + 1}, other / "model.safetensors", {"format": "pt"}
    )
    for folder in (bb, other, bb):
        r = run_experiment(cfg(method="head-only", lr=0.1, backbone=str(folder)), task, out)
        logits.append((r["logits"], np.load(tmp_path / r["logits"])["test"]))
    (a, one), (b, two), (c, same) = logits
    assert (
        a == c != b
        and (one == same).all()
        and not (one == two).all()
        and (np.load(tmp_path / a)["test"] == one).all()
    )


@pytest.mark.parametrize("field", ["glove", "init_from"])
def test_other_contents_of_a_file_are_another_run(field, cfg, task, tmp_path, monkeypatch):
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
    ran = []

    def scores(c):
        return run_seeds(c, task, "given", 1, RunStore(out), ran.append)[0]

    r = scores(one("a", 1))
    assert {*r["digests"]} == {"weights", "data", field} and len(r["digests"][field]) == 16
    assert (
        scores(one("b", 1))["logits"] == r["logits"] and len(ran) == 1
    )  # the folder does not matter
    other = scores(one("b", -1))
    assert (
        len(ran) == 2
        and other["digests"][field] != r["digests"][field]
        and other["logits"] != r["logits"]
    )
    assert scores(one("b", -1))["provenance"] == other["provenance"] and len(ran) == 2
    diverged = Experiment(one("b", -1), task).record_divergence("why")
    assert diverged.digests == other["digests"]


def test_a_finished_model_is_not_replaced_by_one_with_other_word_vectors(cfg, task, tmp_path):
    """The same run may replace it; one with other contents of that file is refused."""

    def train(sign, folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        write_glove(
            dict(a=0, the=1), sign * np.arange(16.0).reshape(2, 8), tmp_path / folder / "glove.txt"
        )
        c = cfg(method="m-idpg-phm-glove", glove=str(tmp_path / folder / "glove.txt"))
        return train_and_save(c, tmp_path / "run", task, save_every=0)

    assert train(1, "a")["score"] == train(1, "b")["score"]
    with pytest.raises(ValueError, match="holds another run .glove was '"):
        train(-1, "b")


def test_a_run_that_patience_ended_is_not_repeated(cfg, task, tmp_path):
    out = tmp_path / "c.jsonl"
    ran = []
    one = cfg(method="lpt", lr=1e-9, steps=40, eval_every=1, patience=2)
    for _ in range(2):
        (r,) = run_seeds(one, task, "given", 1, RunStore(out), ran.append)
    assert len(ran) == 1 and r["steps"] == 40 > r["steps_done"]


def test_numbers_of_the_wrong_type_are_refused(cfg):
    for kw, words in (
        (dict(steps=2.5), "steps must be a whole number, got 2.5"),
        (dict(prompt_length="5"), "prompt_length must be a whole number, got '5'"),
        (dict(shots=8.0), "shots must be a whole number, got 8.0"),
        (dict(steps=None), "steps must be a whole number, got None"),
        (dict(lr="1e-3"), "lr must be a positive number, got '1e-3'"),
    ):
        with pytest.raises(ValueError, match=words):
            cfg(**kw)


def test_a_seed_that_diverges_does_not_end_a_comparison(cfg, tmp_path, monkeypatch):
    """It is not repeated by a second call; table, picture and sweep leave it out."""
    calls = []
    bad = {1}
    real = Experiment.fit

    def trained(self):
        calls.append(self.cfg.seed)
        if self.cfg.seed in bad:
            raise FloatingPointError("the loss is nan at step 2")
        return real(self)

    monkeypatch.setattr(Experiment, "fit", trained)
    base = cfg(lr=1e-2, steps=2, eval_every=2)
    out = tmp_path / "a.jsonl"
    messages = []
    for _ in range(2):
        records = compare_methods(["lpt"], base, 3, out=out, report=messages.append)
        assert calls == [0, 1, 2] and [r["status"] for r in records] == ["done", "diverged", "done"]
    assert "seed 1  lr 1.0e-02  diverged: the loss is nan at step 2" in messages[1]
    assert results_table(records).seeds.tolist() == [2] == sweep_table(records).seeds.tolist()
    assert len(write_results(records, tmp_path / "table")) and len(plot_sweep(records).lines) == 2
    bad.add(0)  # also the first one
    for _ in range(2):
        records = compare_methods(
            ["lpt"], replace(base, lr=2e-2), 3, out=out, report=messages.append
        )
        assert [r["status"] for r in records] == ["diverged", "diverged", "done"] and calls == [
            0,
            1,
            2,
            0,
            1,
            2,
        ]
    assert "(2 diverged)" in format_table(results_table(records))


@pytest.fixture
def wild(monkeypatch):
    """Let fine-tuning and lr=9 diverge; return the list of the runs that were started."""
    calls = []
    real = Experiment.fit

    def train(self, *args):
        c = self.cfg
        calls.append((c.method, c.lr, c.seed))
        if c.method == "fine-tuning" or c.lr == 9.0:
            raise FloatingPointError("the loss is nan at step 2")
        return real(self, *args)

    monkeypatch.setattr(Experiment, "fit", train)
    return calls


def test_a_method_that_diverges_with_every_learning_rate_has_one_record(cfg, tmp_path, wild):
    """It lists what was tried; the next method is trained; a second call trains nothing."""
    base = cfg(lr=None, steps=2, eval_every=2)
    out = tmp_path / "a.jsonl"
    for _ in range(2):
        records = compare_methods(["fine-tuning", "lpt"], base, 2, out=out, report=list)
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
        ["fine-tuning"], replace(base, prompt_length=3), 2, out=out, report=list
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
        run_seeds(one, task, "given", 1, store, report=list)
        assert len(wild) == n


def test_a_run_that_diverges_leaves_a_record(cfg, task, tmp_path, wild):
    with pytest.raises(FloatingPointError, match="nan at step 2"):
        run_experiment(cfg(lr=9.0), task, tmp_path / "a.jsonl")
    (diverged,) = read_records(tmp_path / "a.jsonl")
    assert (diverged["status"], diverged["lr"], diverged["message"]) == (
        "diverged",
        9.0,
        "the loss is nan at step 2",
    )
    assert {*diverged["versions"]} == {"python", *records.RECORDED_PACKAGES}
    assert diverged["split_sizes"]["test"] == 24
    with pytest.raises(FloatingPointError):
        train_and_save(cfg(lr=9.0), tmp_path / "run", task)
    assert read_records(tmp_path / "run" / "record.jsonl")[0]["status"] == "diverged"
    train_and_save(cfg(lr=1e-2), tmp_path / "run", task)
    assert read_records(tmp_path / "run" / "record.jsonl")[0]["status"] == "done"


def test_a_failed_search_is_not_repeated(cfg, task, tmp_path, monkeypatch):
    ran = []

    def trained(self):
        ran.append(self.cfg.method)
        raise FloatingPointError("nan")

    monkeypatch.setattr(Experiment, "fit", trained)
    for choose, n in (
        (lambda: choose_head_learning_rate(cfg(), task, records_file=tmp_path / "a.jsonl"), 3),
        (lambda: choose_learning_rate(cfg(lr=None, shots=8), (1.0, 2.0), tmp_path, list), 2),
    ):
        ran.clear()
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="with every learning rate of"):
                choose()
            assert len(ran) == n
    for _ in range(2):  # the heads of the others would have no learning rate
        with pytest.raises(FloatingPointError, match="'head-only' diverged"):
            compare_methods(
                ["head-only", "lpt"],
                cfg(lr=None),
                1,
                out=tmp_path / "b.jsonl",
                tune_head_first=True,
                report=list,
            )
        assert ran[-3:] == ["head-only"] * 3 and len(ran) == 5
    assert [r["status"] for r in read_records(tmp_path / "b.jsonl")] == ["diverged"]


def test_a_choice_is_repeated_for_other_weights(cfg, task, tmp_path, monkeypatch):
    ran = []
    real = Experiment.fit
    monkeypatch.setattr(Experiment, "fit", lambda self: ran.append(self.cfg.lr) or real(self))

    def choose():
        ran.clear()
        choose_head_learning_rate(
            cfg(steps=1, eval_every=1), task, records_file=tmp_path / "a.jsonl"
        )
        return len(ran)

    assert (choose(), choose()) == (3, 0)
    monkeypatch.setattr(record, "backbone_fingerprint", lambda bb: "others")
    assert choose() == 3


def test_a_comparison_in_which_everything_diverged(cfg, tmp_path, wild):
    """Its records are stored, its error is that of the first; a second call trains nothing."""
    for _ in range(2):
        with pytest.raises(
            FloatingPointError,
            match="'fine-tuning' diverged on 'sentiment' with every learning rate",
        ):
            compare_and_write(
                ["fine-tuning"],
                cfg(lr=None, shots=24, bottleneck=None),
                2,
                True,
                tmp_path / "out",
                list,
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
        list,
    )
    assert (
        len(wild) == 6
        and table.diverged.tolist() == [1, 0]
        and not (tmp_path / "out" / "compare.jsonl.part").exists()
    )


def test_a_table_needs_a_finished_run():
    for table in (results_table, pivot_methods_by_task):
        with pytest.raises(ValueError, match="finished runs"):
            table([dict(status="diverged", method="lpt", task="t")])


def test_a_repository_that_contains_the_package_is_ignored(tmp_path, monkeypatch):
    for arguments in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    (tmp_path / "provenance.py").write_text("")
    monkeypatch.setattr(provenance, "files", lambda name: tmp_path)
    assert provenance.git_state.__wrapped__() == dict(commit=None, worktree_clean=None)
    subprocess.run(["git", "add", "provenance.py"], cwd=tmp_path, check=True)
    assert len(provenance.git_state.__wrapped__()["commit"]) == 40


def test_a_command_names_no_folder_of_this_machine(monkeypatch, tmp_path):
    argv = [
        tmp_path / "idp_run",
        f"--data={tmp_path / 'data'}",
        "--out",
        tmp_path / "a.jsonl",
        "--template",
        "{s1} a=b",
    ]
    monkeypatch.setattr(provenance.sys, "argv", [*map(str, argv), "--shots", "8"])
    assert (
        provenance.format_command_line()
        == "idp_run --data=data --out a.jsonl --template {s1} a=b --shots 8"
    )


def test_several_splits_make_one_table(cfg, tmp_path):
    """Each split has its own examples and all seeds; a second call trains nothing."""
    base = cfg(lr=1e-2, shots=24, bottleneck=None)
    messages = []
    table = compare_and_write(
        ["majority", "lpt"], base, 2, False, tmp_path / "out", messages.append, split_seeds=2
    )
    assert table.seeds.tolist() == [4, 4] and table.draws.tolist() == [2, 2] and len(messages) == 8
    assert (
        summarise_comparison(table.assign(method=["lpt", "lpt-npg"])).count("4 runs of 2 draws")
        == 1
    )
    runs = read_records(tmp_path / "out" / "compare.jsonl")
    assert {(r["split_seed"], r["seed"]) for r in runs} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len({r["digests"]["data"] for r in runs}) == 2
    assert "4 runs of 2 draws" in describe_primary_contrast(
        runs, "lpt - majority", tmp_path / "out"
    )
    messages.clear()
    compare_and_write(
        ["majority", "lpt"], base, 2, False, tmp_path / "out", messages.append, split_seeds=2
    )
    assert not messages
    with pytest.raises(ValueError, match="more than one record with seed"):
        results_table([*runs, runs[0]])


def test_several_splits_of_the_same_examples_are_refused(cfg, tmp_path):
    with pytest.raises(ValueError, match="split_seeds=4 needs shots=..."):
        compare_and_write(["majority"], cfg(), 1, False, tmp_path / "out", split_seeds=4)
    (tmp_path / "sentiment" / "k24").mkdir(parents=True)
    with pytest.raises(ValueError, match="each split seed would give the same"):
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

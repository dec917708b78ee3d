"""Searches of a learning rate: the test split is not read, and a choice is stored."""

import pytest
from small import config, small_task, without_times

from idp_tutorial.runs import record as run_records
from idp_tutorial.runs.compare import compare_methods
from idp_tutorial.runs.experiment import Experiment, run_experiment
from idp_tutorial.runs.learning_rate_search import (
    choose_head_learning_rate,
    choose_learning_rate,
    extend_learning_rate_grid,
    search_learning_rate,
    try_learning_rates,
)
from idp_tutorial.runs.record import build_record
from idp_tutorial.training.fit import TrainLog
from idp_tutorial.utils.records import read_records


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
    search_learning_rate(cfg(method="lpt"), task)
    assert not reads
    run_experiment(cfg(method="lpt"), task)
    assert reads  # a read is recorded


def test_tune_takes_the_best_on_validation(cfg, task, fakes):
    scores = {1e-3: 50.0, 1e-2: 60.0, 1e-1: 60.0, 1.0: "diverges"}
    trained, tested = fakes(lambda c: scores[c.lr])
    assert (
        search_learning_rate(cfg(), task, tuple(scores))["lr"] == 1e-2
        and [r[1] for r in trained] == [*scores]
        and not tested
    )
    # the test split is read for the best learning rate only
    best = search_learning_rate(cfg(), task, tuple(scores), score_test=True)
    assert best["score"] == 100 - 1e-2 and [r[1] for r in tested] == [1e-2]
    diverged = search_learning_rate(cfg(), task, (1.0,))
    message = "'lpt-npg' diverged on 'sentiment' with every learning rate of [1.0]"
    assert diverged["status"] == "diverged" and message in diverged["message"]


def test_the_record_of_tuning_is_the_record_of_the_run(cfg, task):
    assert without_times(
        search_learning_rate(cfg(), task, (1e-2, 1e-2), score_test=True)
    ) == without_times(run_experiment(cfg(lr=1e-2), task))


def test_a_failed_search_is_not_repeated(cfg, task, tmp_path, monkeypatch):
    ran = []

    def trained(self, checkpoint_dir=None):
        ran.append(self.cfg.method)
        raise FloatingPointError("nan")

    monkeypatch.setattr(Experiment, "fit", trained)
    for choose, n in (
        (lambda: choose_head_learning_rate(cfg(), task, records_file=tmp_path / "a.jsonl"), 3),
        (lambda: choose_learning_rate(cfg(lr=None, shots=8), (1.0, 2.0), tmp_path), 2),
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
            )
        assert ran[-3:] == ["head-only"] * 3 and len(ran) == 5
    assert [r["status"] for r in read_records(tmp_path / "b.jsonl")] == ["diverged"]


def test_a_choice_is_repeated_for_other_weights(cfg, task, tmp_path, monkeypatch):
    ran = []
    real = Experiment.fit
    monkeypatch.setattr(
        Experiment, "fit", lambda self, checkpoint_dir=None: ran.append(self.cfg.lr) or real(self)
    )

    def choose():
        ran.clear()
        choose_head_learning_rate(
            cfg(steps=1, eval_every=1), task, records_file=tmp_path / "a.jsonl"
        )
        return len(ran)

    assert (choose(), choose()) == (3, 0)
    monkeypatch.setattr(run_records, "backbone_digest", lambda cfg: "others")
    assert choose() == 3


def test_a_learning_rate_grid_is_extended_beyond_its_edge():
    """The new learning rate is beyond the first or the last one by the same factor."""
    assert extend_learning_rate_grid(1e-2, [1e-3, 1e-2]) == [0.1] and extend_learning_rate_grid(
        1e-3, [1e-2, 1e-3]
    ) == [1e-4]
    assert (
        extend_learning_rate_grid(3e-3, [1e-3, 3e-3, 1e-2])
        == []
        == extend_learning_rate_grid(0.1, [0.1])
    )


def test_a_learning_rate_is_chosen_once_for_a_run(monkeypatch, tmp_path):
    trained = []

    def fit_quickly(self, checkpoint_dir=None):
        trained.append(self.cfg.lr)
        return None, TrainLog(self.cfg.lr)

    monkeypatch.setattr(Experiment, "fit", fit_quickly)
    monkeypatch.setattr(
        Experiment,
        "score",
        lambda self, model, log, score_test, file: build_record(
            self.cfg, self.digests(score_test), self.task.split_sizes(), 0.0
        ),
    )
    cfg = config(method="lpt", task="sentiment", shots=8, lr=None)
    grid = [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0]
    for _ in range(2):
        chosen, details = choose_learning_rate(cfg, (1e-3, 1e-2), tmp_path)
        assert trained == grid  # the second call trains nothing
    assert chosen.lr == 100.0 and details["lr_at_grid_edge"]
    assert [lr for lr, _ in details["learning_rates_tried"]] == grid


def test_a_grid_is_extended_while_its_edge_is_best():
    grids = []
    for n_extra in (0, 1, 4):
        trials = try_learning_rates(lambda lr: (None, TrainLog(-abs(lr - 1))), (0.01, 0.1), n_extra)
        grids.append(trials.learning_rates)
    assert grids == [[0.01, 0.1], [0.01, 0.1, 1.0], [0.01, 0.1, 1.0, 10.0]]


@pytest.mark.parametrize("losses,best", [((0.3, 0.1, 0.2), 0.1), ((None, None, None), 0.01)])
def test_of_learning_rates_with_equal_scores_the_lowest_loss_is_chosen(losses, best):
    by_rate = dict(zip((0.01, 0.1, 1.0), losses, strict=True))
    trials = try_learning_rates(
        lambda lr: (None, TrainLog(90.0, validation_loss=by_rate[lr])), by_rate
    )
    assert trials.lr == best and trials.log.validation_loss == by_rate[best]

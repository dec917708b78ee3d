"""Fixtures of the tests of runs: small configs, and training that is replaced."""

import pytest
from small import config, small_task

from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.runs.record import build_record
from idp_tutorial.training.fit import TrainLog


@pytest.fixture(scope="module")
def cfg(small_folder):
    return lambda **kw: config(**{**dict(backbone=str(small_folder), steps=3), **kw})


@pytest.fixture(scope="module")
def task():
    return small_task()


@pytest.fixture
def fakes(monkeypatch):
    """Replace training; return a function that returns lists of the trained and the tested runs.

    A trained run is (method, learning rate, the head's learning rate, seed).
    """

    def make(validation):
        trained = []
        tested = []

        def fit_quickly(self, checkpoint_dir=None):
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


@pytest.fixture
def wild(monkeypatch):
    """Let fine-tuning and lr=9 diverge; return the list of the runs that were started."""
    calls = []
    real = Experiment.fit

    def train(self, *args, **kw):
        c = self.cfg
        calls.append((c.method, c.lr, c.seed))
        if c.method == "fine-tuning" or c.lr == 9.0:
            raise FloatingPointError("the loss is nan at step 2")
        return real(self, *args, **kw)

    monkeypatch.setattr(Experiment, "fit", train)
    return calls

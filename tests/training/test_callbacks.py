"""Callbacks of transformers, logs and the progress bar of a training run."""

import importlib.util
import subprocess
import sys

import pytest
from small import config, small_task, stop_at
from tqdm import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.training.callbacks import make_log_callbacks
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.checks import UserError

TASK = small_task()


@pytest.fixture
def train(small_folder):
    """A function that trains a small model for six steps, with an evaluation every two."""

    def go(callbacks=(), checkpoint_dir=None, progress=None, **kw):
        options = dict(method="lpt", lr=1e-2, steps=6, eval_every=2)
        cfg = config(backbone=str(small_folder), **{**options, **kw})
        model = build_model(cfg, load_config_backbone(cfg), TASK)
        return fit(
            model,
            TASK,
            cfg,
            callbacks=callbacks,
            checkpoint_dir=checkpoint_dir,
            progress=progress,
        )

    return go


class Recorder(TrainerCallback):
    """A callback that records its calls, and may stop the training."""

    def __init__(self, last_step=None):
        self.last_step = last_step
        self.events = []
        self.logs = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        assert args.max_steps == state.max_steps == 6 and args.learning_rate == 1e-2
        assert next(model.parameters()) is not None
        self.events.append("begin")

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(state.global_step)
        if state.global_step == self.last_step:
            control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append((state.global_step, logs))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.events.append("evaluate")

    def on_save(self, args, state, control, **kwargs):
        self.events.append("save")

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append("end")


def test_a_callback_sees_every_event(train, tmp_path):
    recorder = Recorder()
    log = train([recorder], tmp_path)
    evaluation = ["evaluate", "save"]
    expected = ["begin", 1, 2, *evaluation, 3, 4, *evaluation, 5, 6, *evaluation, "end"]
    assert recorder.events == expected
    scores = [(step, logs[f"eval_{TASK.metric}"]) for step, logs in recorder.logs]
    assert scores == log.history
    assert recorder.logs[1][1]["loss"] == pytest.approx(sum(log.losses[2:4]) / 2)


def test_a_callback_stops_the_training(train):
    recorder = Recorder(last_step=3)
    log = train([recorder])
    assert log.steps == 3 and [step for step, _ in log.history] == [2, 3]
    assert recorder.events[-3:] == [3, "evaluate", "end"]


def test_early_stopping_of_transformers_works(train):
    log = train([EarlyStoppingCallback(1, 100.0)], steps=20)  # no score improves by 100
    assert log.steps == 4


@pytest.mark.parametrize("killed_at", [3, 5, 7])
def test_a_resumed_run_stops_as_early_as_one_that_was_not_killed(
    killed_at, train, tmp_path, monkeypatch
):
    def early():
        return [EarlyStoppingCallback(3, 100.0)]

    whole = train(early(), steps=20)
    assert whole.steps == 8  # the first evaluation sets the best score
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as m:
        stop_at(m, killed_at)
        train(early(), tmp_path, steps=20)
    resumed = train(early(), tmp_path, steps=20)
    assert resumed.steps == whole.steps and resumed.losses == whole.losses


def test_callbacks_do_not_change_the_training(train):
    assert train([Recorder()]).losses == train().losses


def test_a_callback_is_made_of_a_class(train):
    assert train([Recorder]).steps == 6


@pytest.mark.parametrize(
    "callbacks", [None, Recorder(), Recorder, "early", b"", {}, {"early": Recorder()}, [print]]
)
def test_callbacks_are_a_list(train, callbacks):
    with pytest.raises(UserError, match=r"must be a list of .*: write callbacks=\[\.\.\.\]"):
        train(callbacks)


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_clear_error(package):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(UserError, match=f"log_with='{package}' needs the package {package}: pip"):
        make_log_callbacks(package)


def test_tensorboard_writes_an_events_file(train, tmp_path):
    pytest.importorskip("tensorboard")
    train(make_log_callbacks("tensorboard"), tmp_path)
    assert len([*tmp_path.glob("runs/*/events.out.tfevents.*")]) == 1


def test_tqdm_disable_hides_the_bar_in_notebooks(train, monkeypatch):
    bars = []

    def make_bar(**options):
        bars.append(options)
        return tqdm(**options)

    monkeypatch.setattr("idp_tutorial.training.fit.tqdm", make_bar)
    for value in ("1", "0"):
        monkeypatch.setenv("TQDM_DISABLE", value)
        train()
    assert [bar["disable"] for bar in bars] == [True, None]


def test_a_progress_bar_is_shown_when_asked_for(train, capsys):
    train()  # stderr is not a terminal
    assert capsys.readouterr().err == ""
    log = train(progress=True)
    bar = capsys.readouterr().err
    assert "6/6" in bar and f"loss={log.losses[-1]:.3f}" in bar
    assert f"validation={log.history[-1][1]:.1f}" in bar


def test_a_notebook_without_ipywidgets_has_no_warning():
    """The kernel is imitated by the one attribute that tqdm reads."""
    program = """
import sys, types, IPython
kernel = types.SimpleNamespace(config={"IPKernelApp": {}})
IPython.get_ipython = lambda: kernel
sys.modules["ipywidgets"] = None
import idp_tutorial
from tqdm.auto import tqdm
"""
    pytest.importorskip("IPython")
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_run_that_a_callback_ended_is_not_continued(train, tmp_path, monkeypatch):
    """The second start returns the log of the first."""
    first = train([EarlyStoppingCallback(1, 100.0)], tmp_path, steps=20)
    calls = stop_at(monkeypatch, None)
    for callbacks in ([EarlyStoppingCallback(1, 100.0)], []):
        again = train(callbacks, tmp_path, steps=20)
        assert again.steps == first.steps == 4 and again.history == first.history and not calls

"""Lines of progress appear now and then, and only from the main process."""

from types import SimpleNamespace

from idp_tutorial.cli import progress
from idp_tutorial.cli.progress import ProgressLines, TrainingProgress


def test_a_line_is_printed_when_enough_time_has_passed(monkeypatch, capsys):
    seconds = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    lines = ProgressLines()
    for t in (1.0, 29.0, 31.0, 40.0, 60.0, 62.0):
        seconds[0] = t
        lines.report(f"{t:g} s")
    assert capsys.readouterr().err.splitlines() == ["31 s", "62 s"]


def test_the_main_process_prints_step_and_score(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.0)
    for is_main in (True, False):
        callback = TrainingProgress("lpt on mood")
        state = SimpleNamespace(global_step=3, max_steps=2000, is_world_process_zero=is_main)
        callback.on_step_end(None, state, None)
        callback.on_evaluate(None, state, None, metrics={"eval_accuracy": 81.25})
        callback.on_step_end(None, state, None)
    assert capsys.readouterr().err.splitlines() == [
        "lpt on mood: step 3 of 2,000",
        "lpt on mood: step 3 of 2,000, validation 81.2",
    ]

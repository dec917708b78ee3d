"""Check `results/crossing/forced_answers.py`, which asks what the layers above can say."""

import importlib
from pathlib import Path

import pytest

from idp_tutorial.data.tasks import load_task

CROSSING = Path(__file__).parents[3] / "results/crossing"

pytestmark = pytest.mark.skipif(
    not CROSSING.exists(), reason="results/crossing is not in this installation"
)


@pytest.fixture
def forced_answers(monkeypatch):
    """Return the script as a module."""
    monkeypatch.syspath_prepend(CROSSING)
    return importlib.import_module("forced_answers")


def test_all_texts_get_the_answer_and_the_task_is_unchanged(forced_answers):
    task = load_task("questions")
    before = [row["label"] for row in task.splits["test"]]
    with_label_3 = forced_answers.with_one_label(task, 3)
    for split, rows in with_label_3.splits.items():
        assert {row["label"] for row in rows} == {3}
        assert [row["sentence1"] for row in rows] == [
            row["sentence1"] for row in task.splits[split]
        ]
    assert [row["label"] for row in task.splits["test"]] == before and len({*before}) == 6


def test_an_answer_is_forced_before_the_last_layer_of_tiny(forced_answers, monkeypatch):
    monkeypatch.setattr(forced_answers, "STEPS", 30)
    monkeypatch.setattr(forced_answers, "LEARNING_RATES", (3.0,))
    task = load_task("questions")
    assert forced_answers.score_forced_answer(task, "tiny", 7, 1) > 50

"""The check of answers: what is correct, what advice a wrong answer gets."""

import pytest

from idp_tutorial.reproduction.exercises import ANSWERS, Answer, _compute_digest, check


@pytest.fixture(autouse=True)
def exercises(monkeypatch):
    digest = _compute_digest("99.1", 960)
    monkeypatch.setitem(ANSWERS, "99.1", Answer(digest, "Count the biases."))
    monkeypatch.setitem(ANSWERS, "99.2", Answer([65, 100], "Train longer."))


@pytest.mark.parametrize(
    ("exercise", "answer", "printed"),
    [
        ("99.1", 960, "99.1: correct.\n"),
        ("99.1", 960.0, "99.1: correct.\n"),
        ("99.1", 961, "99.1: not yet. Count the biases.\n"),
        ("99.1", "many", "99.1: not yet. Count the biases.\n"),
        ("99.1", ..., ""),
        ("99.2", 70, "99.2: correct.\n"),
        ("99.2", 60.0, "99.2: not yet. Train longer.\n"),
        ("99.2", (70, 71), "99.2: the answer is a number, not (70, 71). Train longer.\n"),
        ("99.2", None, "99.2: the answer is a number, not None. Train longer.\n"),
    ],
)
def test_an_answer_is_checked(exercise, answer, printed, capsys):
    check(exercise, answer)
    assert capsys.readouterr().out == printed


def test_the_digest_of_an_answer_depends_on_the_exercise():
    assert _compute_digest("99.1", 960) != _compute_digest("99.2", 960)


def test_an_unknown_exercise_is_an_error():
    with pytest.raises(KeyError, match="98"):
        check("98.1", 3)

"""The answers to the exercises of the course, as digests and ranges, and their check.

The answers are in `assets/exercises.json`. The only correct answer is stored as a digest, so that
reading the file gives none away. Where several answers are correct, a range is stored. It goes at
least five points beyond the score of the solution, or up to 100: another machine rounds otherwise,
and another correct solution may draw other random numbers.
"""

import hashlib
import json
from typing import Any, NamedTuple

from idp_tutorial.utils.digests import asset_path


class Answer(NamedTuple):
    """Expected answer to an exercise, and advice after a wrong one."""

    expected: str | list[float]  # digest of the only answer, or the lowest and highest
    advice: str  # one sentence


# chapter and number of the exercise → answer
ANSWERS: dict[str, Answer] = {
    exercise: Answer(**answer)
    for exercise, answer in json.loads(asset_path("exercises.json").read_text("utf-8")).items()
}


def _compute_digest(exercise: str, answer: object) -> str:
    """Return a digest of an answer; a float counts to two decimals, a list as a tuple."""
    if isinstance(answer, list):
        answer = tuple(answer)
    if isinstance(answer, float):
        answer = round(answer, 2)
        answer = int(answer) if answer.is_integer() else answer
    text = answer.strip().lower() if isinstance(answer, str) else repr(answer)
    return hashlib.sha256(f"{exercise} {text}".encode()).hexdigest()[:12]


def _is_correct(exercise: str, answer: Any, expected: str | list[float]) -> bool:
    if isinstance(expected, str):
        return _compute_digest(exercise, answer) == expected
    try:
        return expected[0] <= float(answer) <= expected[1]
    except (TypeError, ValueError):
        return False


def check(
    exercise: str,  # chapter and number of the exercise, such as '04.2'
    answer: Any = ...,  # a number, a word or a tuple of them; `...`: no answer yet
) -> None:
    """Print whether the answer to an exercise is correct, and what to look at if not.

    Without an answer, print nothing. The solutions give the reasons. Raises: `KeyError` for an
    exercise that does not exist.
    """
    expected, advice = ANSWERS[exercise]
    if answer is ...:
        return
    if _is_correct(exercise, answer, expected):
        print(f"{exercise}: correct.")
    elif isinstance(expected, list) and not isinstance(answer, int | float):
        print(f"{exercise}: the answer is a number, not {answer!r}. {advice}")
    else:
        print(f"{exercise}: not yet. {advice}")

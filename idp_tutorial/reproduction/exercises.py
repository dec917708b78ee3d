"""The answers to the exercises of the course, as digests and ranges, and their check.

The only correct answer is stored as a digest, so that reading this file gives none away. Where
several answers are correct, a range is stored. It goes at least five points beyond the score of
the solution, or up to 100: another machine rounds otherwise, and another correct solution may
draw other random numbers.
"""

import hashlib
from typing import Any, NamedTuple

__all__ = ["check"]


class Answer(NamedTuple):
    """Expected answer to an exercise, and advice after a wrong one."""

    expected: str | tuple[float, float]  # digest of the only answer, or the lowest and highest
    advice: str  # one sentence


# chapter and number of the exercise → answer
ANSWERS: dict[str, Answer] = {
    "00.1": Answer(
        "71ef98662cde", "Five vectors, each as wide as a hidden state; the head is not counted."
    ),
    "00.2": Answer(
        (75, 100), "Train `GeneratedPrompt(t=1)` as long as the chapter trains five vectors."
    ),
    "00.3": Answer((62, 82), "Give the accuracy of the static prompt with its head, in percent."),
    "01.1": Answer(
        "6ab52d1e65a8", "The two sentences are cut to three tokens; each token has one vector."
    ),
    "01.2": Answer(
        (55, 68), "Only the position that the head reads changes; the accuracy is in percent."
    ),
    "01.3": Answer(
        "d43b58773fbe", "Look at position 0, and count layers: the embeddings are 0 layers."
    ),
    "02.1": Answer(
        "20af2ef70cb2", "Inserted vectors are positions of the sequence; keys and values are not."
    ),
    "02.2": Answer("593631aa423a", "A score of -9 gives the third position almost no weight."),
    "02.3": Answer((68, 84), "Give the accuracy before layer 4, in percent."),
    "03.1": Answer(
        "b3a95e066db3",
        "The loss of one example is the negative logarithm of its label's probability.",
    ),
    "03.2": Answer(
        "242d68555839",
        "Run the three controls with `questions`, and name the one that scores highest.",
    ),
    "03.3": Answer(
        (86, 98), "Concatenate two word vectors, and train as long as `score_small_network` does."
    ),
    "04.1": Answer(
        "c7a7a374e39f", "A head has weights and biases; a verbalizer reads rows of a frozen table."
    ),
    "04.2": Answer("65cd7012ba04", "Count the sentences whose correct word has the higher logit."),
    # another way to search finds another pair of words; the range begins at chance
    "04.3": Answer((50, 75), "Score the pair that you chose on the test sentences, in percent."),
    "05.1": Answer("bebf357fec44", "Add the rule, the blocks and the bias."),
    "05.2": Answer("5f2df4a42d30", "How many dimensions does the rule of the quaternions have?"),
    "05.3": Answer("1baff9d34c63", "Zero both factors, and take the maximum over the four units."),
    "05.4": Answer((0, 1e-5), "Load the parameters of `PHM(8, 12, 4)` into your layer first."),
    "06.1": Answer("3a5930f4f033", "A text has five vectors; a stored M(x) needs no first pass."),
    "06.2": Answer((55, 90), "Give the accuracy of the linear classifier in percent."),
    "06.3": Answer(
        (40, 62), "Standardise nothing, train as long as the chapter, and give percent."
    ),
    "06.4": Answer("f3004ea28b63", "Two rules, two sets of blocks, and the biases b₁ and b₂."),
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


def _is_correct(exercise: str, answer: Any, expected: str | tuple[float, float]) -> bool:
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
    elif isinstance(expected, tuple) and not isinstance(answer, int | float):
        print(f"{exercise}: the answer is a number, not {answer!r}. {advice}")
    else:
        print(f"{exercise}: not yet. {advice}")

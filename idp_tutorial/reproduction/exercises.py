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
    "00.3": Answer(
        (40, 60),
        "Run the cell with `read_above` again; score the prompt that is trained, in percent.",
    ),
    "00.4": Answer(
        (80, 100), "Standardise the means of the word vectors; give the accuracy in percent."
    ),
    "01.1": Answer(
        "6ab52d1e65a8", "The two sentences are cut to three tokens; each token has one vector."
    ),
    "01.2": Answer(
        (55, 68), "Only the position that the head reads changes; the accuracy is in percent."
    ),
    "01.3": Answer(
        "3528c1e0fade", "Compare the first eight positions with those of the unpadded sentence."
    ),
    "01.4": Answer(
        "2d6c51fba572", "Look at position 0, and count layers: the embeddings are 0 layers."
    ),
    "02.1": Answer(
        "20af2ef70cb2", "Inserted vectors are positions of the sequence; keys and values are not."
    ),
    "02.2": Answer("593631aa423a", "A score of -9 gives the third position almost no weight."),
    "02.3": Answer("c5f541a62d7b", "A word reads only positions that the mask shows it."),
    "02.4": Answer((68, 84), "Give the accuracy before layer 4, in percent."),
    "03.1": Answer(
        "b3a95e066db3",
        "The loss of one example is the negative logarithm of its label's probability.",
    ),
    "03.2": Answer(
        "242d68555839",
        "Run the three controls with `questions`, and name the one that scores highest.",
    ),
    "03.3": Answer(
        (40, 60), "The default learning rate is 0.01; give the test accuracy in percent."
    ),
    "03.4": Answer(
        (86, 98), "Concatenate two word vectors, and train as long as `score_small_network` does."
    ),
    "04.1": Answer("024c5b6d6e48", "Eight tokens and five vectors; a vector has 1,024 numbers."),
    "04.2": Answer((60, 82), "Train `t=20` for the 240 steps of the chapter; give percent."),
    "04.3": Answer((10, 45), "Only `lr` changes; give the accuracy, not the share of a class."),
    "04.4": Answer((38, 70), "One vector for each token of the text; train it for 60 steps."),
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
    "07.1": Answer(
        "68598af704a7", "Two vectors of the model's width for each prompt vector and layer."
    ),
    "07.2": Answer((30, 62), "Train the seed 0 plan for 100 steps on 500 questions, in percent."),
    "07.3": Answer((0.01, 20), "Take the largest difference at the words, after the last layer."),
    "07.4": Answer("31c0a1c7676e", "Two generators, each with one bias; nothing for each layer."),
    "08.1": Answer(
        "16c1d29fde90", "Count two passes for each layer above the prompt, none below it."
    ),
    "08.2": Answer((69, 80), "Train seed 0 before layer 7, and give the accuracy in percent."),
    "08.3": Answer("80867a3125ae", "Before layer 0 no layer has read anything yet."),
    "08.4": Answer("9f802e118fbb", "Cut the padding off first, then pool three values to five."),
    "09.1": Answer("16a2047dfa77", "Only one of the two inputs contains positions."),
    "09.2": Answer((83, 94), "Train the mean with seed 0 and rate 0.03; give percent."),
    "09.3": Answer(
        (100, 300), "Divide the norm of the difference by the norm of the prompt alone."
    ),
    "09.4": Answer("533d75ca9d9f", "Multiply both matrices; count what is left."),
    "10.1": Answer(
        "75ab86842ded", "One matrix and its bias grow with the prompt; the other stays."
    ),
    "10.2": Answer("1af60032d718", "Compare the counts of both PHM methods for n=4 and n=16."),
    "10.3": Answer((2.2, 2.6), "Divide the bytes of both prompts by those of the late one alone."),
    "10.4": Answer(
        (15, 25),
        "16 texts, 14 tokens each on average, at 11.6 tokens in a millisecond for 72 passes.",
    ),
    "11.1": Answer(
        "e40ee601e218", "Raise n until `visible_difference(1.2, n)` is at most one point."
    ),
    "11.2": Answer(
        (6, 8.5), "Reorder the texts of one method only; give the upper end minus the lower."
    ),
    "11.3": Answer(
        "95b1f9c51438", "The best seed of PHM minus the best seed of each ID-SPAM, in points."
    ),
    "11.4": Answer(
        "997d88af7f04",
        "The products go back to the old order, and never decrease along the sorted p-values.",
    ),
    "12.1": Answer(
        "7061abf25cd0",
        "Two matrices and two biases; statistics that no gradient changes do not count.",
    ),
    "12.2": Answer((50, 72), "Give the accuracy on the test rows of the new file, in percent."),
    "12.3": Answer(
        (40, 60), "Roll the prompts within each batch, and use the trained model as it is."
    ),
    "12.4": Answer(
        (60, 100), "Train before layer 6 for 300 steps, and give the accuracy in percent."
    ),
    "13.1": Answer("f3ea7f68426b", "Two matrices with biases; the prompt enters half-way."),
    "13.2": Answer(
        (60, 90), "Train on the first 1,000 questions, and test on the next 200, in percent."
    ),
    "13.3": Answer(
        (15, 40), "Roll the prompts of the 200 questions by one, and give the accuracy in percent."
    ),
    "13.4": Answer("454989dada2b", "Two matrices, two biases, and nothing else."),
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

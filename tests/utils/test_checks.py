"""Numbers between limits, and unknown names with the known name that was probably meant."""

import math

import numpy as np
import pytest

from idp_tutorial.utils.checks import (
    Range,
    UserError,
    check_name,
    closest_match,
)


@pytest.mark.parametrize(
    "check,words",
    [
        (lambda: Range().check(math.nan, "n"), "n must be a number, got nan"),
        (lambda: Range().check(True, "n"), "n must be a number, got True"),
        (lambda: Range(3, is_low_excluded=True).check(3, "n"), "n must be greater than 3, got 3"),
        (lambda: Range(0, 1, "a part", False, True).check(1, "n"), r"below 1, got 1 \(a part\)"),
        (lambda: Range(1, hint="a size").check(0, "n"), r"n must be at least 1, got 0 \(a size\)"),
        (lambda: Range(1, 10**6).check(10**7, "n"), "n must be at most 1,000,000, got 10000000"),
        (lambda: Range(0, 1e40, "", True).check(0, "n"), "n must be a positive number, got 0"),
        (
            lambda: Range(0, 1e40, "", True).check(math.inf, "n"),
            "n must be at most 1e[+]40, got inf",
        ),
        (lambda: Range(0, 1e40, "", True).check("x", "n"), "n must be a positive number, got 'x'"),
    ],
)
def test_numbers_beyond_their_limits_are_refused(check, words):
    with pytest.raises(UserError, match=words):
        check()


def test_numbers_between_their_limits_are_returned():
    assert Range(0).check(math.inf, "n") == math.inf
    assert Range(0).check(np.float32(0.5), "n") == 0.5


@pytest.mark.parametrize(
    "name,known,closest",
    [
        ("ltp", ["smop", "lpt", "lpt-npg"], "lpt"),
        ("elf", ["efl", "dept"], "efl"),
        ("smpo", ["smop", "lpt"], "smop"),
        ("lroa", ["lora", "lora-all"], "lora"),
        ("prompt_lenght", ["prompt_dropout", "prompt_length"], "prompt_length"),
        ("abc", ["lpt", "efl"], None),
        ("out", ["lpt", "task"], None),
        ("learning_rate", ["plain_draw", "lr"], None),
    ],
)
def test_the_closest_name_is_found_or_none(name, known, closest):
    assert closest_match(name, known) == closest


def test_two_letters_in_the_wrong_order_are_pointed_out():
    with pytest.raises(
        UserError, match="unknown method 'ltp': did you mean 'lpt'.*Known: smop, lpt"
    ):
        check_name("ltp", ["smop", "lpt"], "method")

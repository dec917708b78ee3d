"""Unknown names are refused with the known name that was probably meant."""

import pytest

from idp_tutorial.utils.checks import UserError, check_name, closest_match


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

"""Schemas: the first field that does not fit is named, with what it must be."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import torch

from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.schemas import Count, Finite, Rule, check_schema, check_structure


@dataclass
class _Inner:
    name: Annotated[str, Rule("a short text", lambda text: len(text) < 4)]
    sizes: dict[str, Count] = field(default_factory=dict)


@dataclass
class _Outer:
    kind: Literal["a", "b"]
    inner: _Inner
    score: Finite | None
    pairs: list[tuple[int, float]] = field(default_factory=list)
    flag: bool = False
    anything: Any = None


GOOD = dict(kind="a", inner=dict(name="x", sizes=dict(n=3)), score=0.5, pairs=[[1, 2.0]], more=1)


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(kind="c"), "kind must be 'a' or 'b', got 'c': save it again"),
        (dict(inner=None), "inner must be an object, got None"),
        (dict(inner={}), "inner.name is missing: save it again"),
        (dict(inner=dict(name="long")), "inner.name must be a short text.*got 'long'"),
        (dict(inner=dict(name="x", sizes=dict(n=-1))), "inner.sizes.n must be a whole.*got -1"),
        (dict(score=float("nan")), "score must be a finite number or null, got nan"),
        (dict(score=10**400), "score must be a number or null, got 1000"),
        (dict(score=True), "score must be a number or null, got True"),
        (dict(pairs=[[1, 2.0], [1]]), r"pairs\[1\] must be 2 values, got \[1\]"),
        (dict(pairs={}), "pairs must be a list, got {}"),
        (dict(flag=0), "flag must be True or False, got 0"),
        (dict(kind="x" * 10**6), "got 'xxx"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_field_that_does_not_fit_is_named(change, words):
    with pytest.raises(UserError, match=words) as e:
        check_schema(_Outer, {**GOOD, **change}, "file.json", "save it again")
    assert str(e.value).startswith("file.json: ") and len(str(e.value)) < 300


def test_the_documentation_shows_a_rule_without_its_function():
    assert str(Finite).endswith("Rule(expected='a finite number')]")


def test_what_fits_is_returned():
    assert check_schema(_Outer, GOOD, "a") is GOOD
    assert check_schema(dict[str, list[int]], {"a": [1]}, "a") == {"a": [1]}


def test_a_state_must_have_the_structure_of_the_object():
    example = dict(t=torch.ones(2), groups=[dict(lr=0.1, name="a", fused=None)], pair=(1, None))
    state = dict(t=torch.zeros(2), groups=[dict(lr=2, name="b", fused=True)], pair=(7, 0.5))
    assert check_structure(state, example, "a") is state
    for change in (
        dict(t=torch.zeros(3)),
        dict(t=torch.zeros(2, dtype=torch.long)),
        dict(t=[0, 0]),
        dict(groups=[]),
        dict(groups=[dict(lr=None, name="b", fused=True)]),
        dict(groups=[dict(lr=float("inf"), name="b", fused=True)]),
        dict(groups=[dict(lr=1, name="b")]),
        dict(groups=[dict(lr=1, name=3, fused=True)]),
        dict(pair=[7, 0.5]),
        dict(pair=(7, {})),
        dict(more=1),
    ):
        with pytest.raises(UserError, match="a: .*delete it to start this run again"):
            check_structure({**state, **change}, example, "a")

"""Run the examples in CONTRIBUTING.md exactly as they are written."""

import re
from pathlib import Path

import pytest

from idp_tutorial.families.family import FAMILIES
from idp_tutorial.methods.all_methods import METHODS

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"<!-- recipe: (\w+)\b[^>]*-->\n```python\n(.*?)```", TEXT, re.S))


def run_recipe(name):
    """Run a recipe; return the names and the methods that it defines, which are then removed."""
    before = dict(METHODS)
    namespace = {"__name__": f"recipe_{name}"}
    try:
        exec(compile(RECIPES[name], f"CONTRIBUTING.md: {name}", "exec"), namespace)
        return namespace, {m: row for m, row in METHODS.items() if m not in before}
    finally:
        for m in METHODS.keys() - before.keys():
            del METHODS[m]


def test_contributing_has_both_recipes():
    assert RECIPES.keys() == {"method", "family"}


@pytest.mark.long
def test_the_recipe_for_a_method_trains_it(capsys):
    namespace, added = run_recipe("method")
    assert [*added] == ["gated-mean"]
    assert added["gated-mean"].trains_upper_layers_only
    assert namespace["record"]["params"]["prompt"] == 2 * 10 * 192
    assert namespace["record"]["score"] > 55
    assert "gated-mean" not in METHODS


def test_the_recipe_for_a_family_registers_it():
    """The recipe itself asserts that the outputs equal those of Hugging Face."""
    assert "ernie" not in FAMILIES
    try:
        namespace, _ = run_recipe("family")
        assert type(namespace["bb"]) is namespace["ErnieBackbone"]
        assert FAMILIES["ernie"].backbone_class is namespace["ErnieBackbone"]
    finally:
        FAMILIES.pop("ernie", None)

"""`docs/differences.md` names options that exist and effects that its table of effects has."""

import re
from pathlib import Path

from idp_tutorial.assembly.config import describe_all_options
from idp_tutorial.methods.all_methods import METHODS

TEXT = (Path(__file__).resolve().parents[1] / "docs/differences.md").read_text(encoding="utf-8")
DIFFERENCES, EFFECTS = TEXT.split("\n## Measured effects\n")


def table_rows():
    """Return the cells of each row of the tables with a column of effects."""
    sections = DIFFERENCES.split("\n## How to read the tables\n")[1]
    lines = [line for line in sections.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines if not line.startswith("| subject")]


def test_every_option_that_is_named_exists():
    arguments = {"residual", "mask_padding"}  # of classes
    names = {*describe_all_options(), *METHODS, *arguments}
    named = set()
    for cells in table_rows():
        assert len(cells) in (4, 5), cells
        for code in re.findall(r"\(([^()]*`[^()]*)\)", cells[-2]):
            named |= {*re.findall(r"`(\w+)(?:=[^`]*)?`", code)}
    assert len(named) > 30
    assert named - names <= {"E", "p"}


def test_every_effect_of_a_row_is_measured():
    measured = set(re.findall(r"\| ([+-]\d+\.\d) \(", EFFECTS))
    named = [number for cells in table_rows() for number in re.findall(r"[+-]\d+\.\d", cells[-1])]
    assert len(named) > 15
    assert {*named} - measured == {"-0.7"}  # of a claim, which the row links


def test_every_effect_has_an_interval_around_it():
    rows = re.findall(r"\| ([+-]\d+\.\d) \(([+-]\d+\.\d) … ([+-]\d+\.\d)\) \|", EFFECTS)
    assert len(rows) == 26
    assert all(float(low) < float(effect) < float(high) for effect, low, high in rows)

"""The glossary lists every method and option letter once, under a name that exists."""

import re
from pathlib import Path

from idp_tutorial.assembly.config import describe_all_options
from idp_tutorial.methods.all_methods import METHODS

PAGE = Path(__file__).resolve().parents[1] / "nbs/course/glossary.md"
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.M | re.S))


def first_cells(section):
    """Return the first cells of the rows of all tables of a section, without the headings."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    return [line.split(" | ")[0].strip("| ") for line in lines]


def test_every_method_is_listed_once():
    listed = re.findall(r"^\| `([\w-]+)` \|", SECTIONS["Methods"], re.M)
    assert sorted(listed) == sorted(METHODS)


def test_every_symbol_is_listed_once():
    symbols = [s for cell in first_cells("Symbols") for s in re.findall(r"`(\w+)`", cell)]
    assert {"t", "m", "d", "k", "B", "T"} <= {*symbols}
    assert len(symbols) == len({*symbols})
    terms = [
        cell for section in ("Terms", "Terms of the result pages") for cell in first_cells(section)
    ]
    assert len(terms) == len({*terms})


def test_options_of_symbols_exist():
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \|", SECTIONS["Symbols"], re.M)
    assert len(rows) > 4 and {*rows} <= {*describe_all_options()}

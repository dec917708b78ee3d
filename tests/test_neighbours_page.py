"""The scores of the page about other libraries are those of the records."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_scores_are_those_of_the_records():
    spec = importlib.util.spec_from_file_location("neighbours", ROOT / "docs/neighbours.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.render_page() == page.FILE.read_text(encoding="utf-8")
    assert "| `shadow` |" in page.render_table()

"""The scores of the page about other libraries are those of the records."""

import importlib.util
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]


def load_page():
    spec = importlib.util.spec_from_file_location("neighbours", ROOT / "docs/neighbours.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    return page


def test_the_scores_are_those_of_the_records():
    page = load_page()
    assert page.render_page() == page.FILE.read_text(encoding="utf-8")
    random, text = page.load_scores("trec-random"), page.load_scores("trec-text")
    gains = [mean(text[method]) - mean(random[method]) for method in text]
    assert page.gains_of_a_text() == [min(gains), sorted(gains)[1], max(gains)]


def test_only_static_prompts_stay_at_chance_on_two_domains():
    scores = load_page().load_scores("two-domains")
    static = {"prompt-tuning", "p-tuning-v2", "cartridge"}
    assert {method for method, values in scores.items() if mean(values) < 55} == static
    assert all(min(scores[method]) > 85 for method in {*scores} - static)
    assert {len(values) for values in scores.values()} == {5}

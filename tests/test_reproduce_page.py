"""`docs/reproduce.md` is what its script makes of the package's own data."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("reproduce_page", ROOT / "docs/reproduce.py")
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)


@pytest.fixture(scope="module")
def text():
    return page.render_page()


def test_the_page_is_what_the_script_makes(text):
    assert text == page.FILE.read_text(encoding="utf-8"), "run `python docs/reproduce.py`"


def test_every_published_table_has_one_row(text):
    names = re.findall(r"^\| ((?:idpg|lpt|id-spam)-\w+) \|", text, re.M)
    assert sorted(names) == sorted(page.load_published_tables().table)


def test_the_prose_has_at_most_900_words(text):
    prose = re.sub(r"^\|.*$|```.*?```", "", text, flags=re.M | re.S)
    assert len(prose.split()) <= 900


def test_a_published_speed_gives_the_published_time_of_a_step():
    """LPT's fine-tuning of RoBERTa-large makes 11.6 tokens in a millisecond."""
    cost = page.step_cost("fine-tuning", 24, T=256, d=1024).total
    assert page.layer_tokens_per_ms("roberta-large") / cost == pytest.approx(11.6)


def test_memory_of_late_prompts_is_that_of_lpts_tables():
    for layer, published in ((6, 13.4), (12, 10.1), (18, 6.7)):
        cfg = page.RunConfig("lpt-npg", backbone="roberta-large", layer=layer, batch_size=16)
        assert page.estimate_memory(cfg) == pytest.approx(published, abs=0.2)


def test_estimates_cover_sweeps_and_leave_out_other_commands():
    command = (
        "idp sweep --task rte --methods lpt-npg --backbone roberta-large --prompt_length 5 "
        "--steps 10 --batch_size 16 --learning_rates 1e-3,1e-2 --seeds 5"
    )
    assert page.estimate_command(command).runs == 24 * 6
    assert page.estimate_command("idp bench --backbone roberta-large") is None

"""The scores that the papers print."""

import pytest

from idp_tutorial.reproduction.papers.published_scores import (
    METHOD_NAMES,
    load_published_scores,
    load_published_tables,
)


def test_every_published_table_has_a_command_and_a_note():
    t = load_published_tables()
    assert len(t) == 39 and t.table.is_unique
    assert (
        t.command.str.match(r"(idp \w+|python -m results\.[\w.]+) ").all()
        and (t.note.str.len() > 0).all()
    )
    assert {*load_published_scores().table} <= {*t.table}


def test_published_scores_agree_with_the_papers():
    t = load_published_scores("idpg-1")
    mean = t[(t.method == "M-IDPG-PHM") & (t.task != "Avg")]["mean"].mean()
    assert mean == pytest.approx(91.85, abs=0.06)
    assert {*load_published_scores("lpt-2").method} <= METHOD_NAMES.keys()
    with pytest.raises(ValueError, match="unknown table of scores"):
        load_published_scores("lpt-22")

"""The scores that the papers print."""

import pytest
from claim_records import record

from idp_tutorial.reproduction.papers.published_scores import (
    METHOD_NAMES,
    load_published_scores,
    load_published_tables,
    merge_published_scores,
)


def test_every_published_table_has_a_command_and_a_note():
    t = load_published_tables()
    assert len(t) == 39 and t.table.is_unique
    assert t.command.str.match(r"idp \w+ ").all() and (t.note.str.len() > 0).all()
    assert {*load_published_scores().table} <= {*t.table}


def test_published_scores_agree_with_the_papers():
    t = load_published_scores("idpg-1")
    mean = t[(t.method == "M-IDPG-PHM") & (t.task != "Avg")]["mean"].mean()
    assert mean == pytest.approx(91.85, abs=0.06)
    s = merge_published_scores(
        [{**record("lpt-npg", i, 50.0 + i), "task": "sst2"} for i in range(2)], "lpt-2"
    )
    row = s[(s.method == "LPT w/ NPG") & (s.task == "SST-2")].iloc[0]
    assert (row["mean"], row["our mean"], row["runs"]) == (92.7, 50.5, 2) and s[
        "our mean"
    ].notna().sum() == 1
    assert {*load_published_scores("lpt-2").method} <= METHOD_NAMES.keys()
    with pytest.raises(ValueError, match="unknown table of scores"):
        load_published_scores("lpt-22")

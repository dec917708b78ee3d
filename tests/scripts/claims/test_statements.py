"""Statements that the papers' own tables decide."""

import pytest

from idp_tutorial.reproduction.papers.published_scores import load_published_scores
from results.claims.statements import (
    STATEMENT_CHECKS,
    check_statement,
    printed_differences,
)

DIFFERS = {
    "idpg-four-best",
    "idpg-87k",
    "idpg-k500",
    "idpg-fewer",
    "lpt-memory",
    "lpt-298",
    "spam-second",
    "spam-lora-3of6",
    "spam-superglue-large",
    "spam-converge",
    "spam-comparable",
}


@pytest.mark.parametrize("name", STATEMENT_CHECKS)
def test_a_statement_agrees_with_its_table_or_differs(name):
    check = check_statement(name)
    assert check.recomputed and check.agrees == (name not in DIFFERS)


def test_a_difference_is_read_for_each_task():
    differences = printed_differences("lpt-4: LPT w/o PG − Prompt Tuning; backbone=GPT2-large")
    assert differences["trec"] == 11.0 and set(differences) == {
        "trec",
        "subj",
        "mrpc",
        "rte",
        "Avg",
    }
    one = printed_differences("lpt-2: LPT w/ NPG − Model Tuning; task=TREC")
    assert one == {"trec": -0.4}
    assert printed_differences("id-spam-6: ID-SPAM − LPT")["sst2→imdb"] == 22.0


def test_cells_that_do_not_exist_are_refused():
    for cells in ("lpt-1: NPG − LPT w/o PG", "lpt-1: LPT w/ NPG", "lpt-1: LPT w/ NPG − LoRA; x=1"):
        with pytest.raises(ValueError, match="cannot be read"):
            printed_differences(cells)


def test_a_changed_cell_changes_the_verdict(monkeypatch):
    from results.claims import statements

    scores = load_published_scores()
    is_cell = (scores.table == "id-spam-2") & (scores.method == "ID-SPAM") & (scores.task == "RTE")
    changed = scores.assign(mean=scores["mean"].mask(is_cell, 0.0))
    monkeypatch.setattr(
        statements, "load_published_scores", lambda table: changed[changed.table == table]
    )
    assert not check_statement("spam-4of6").agrees
    assert not check_statement("spam-lora-5of6").agrees


def test_times_of_id_spam_are_those_of_its_tables():
    times = load_published_scores("id-spam-15")
    means = times.groupby("method")["mean"].mean().round(1)
    assert means["LPT"] == 619.2 and means["ID-SPAM"] == 577.0
    assert len(load_published_scores("id-spam-14")) == 12

"""The scores of the course, and what its chapters share."""

import pytest

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.reproduction.course import (
    build_score_table,
    encode_course_sentences,
    load_course_scores,
    load_short_task,
    store_or_compare_scores,
    train_and_test_plan,
)


def test_the_four_sentences_are_labelled():
    batch = encode_course_sentences(load_backbone("tiny"))
    assert batch["label"].tolist() == [1, 0, 0, 1] and len(batch["input_ids"]) == 4


def test_a_short_run_returns_model_score_and_log(tmp_path, monkeypatch):
    monkeypatch.setenv("IDP_CACHE", str(tmp_path))
    task = load_short_task(n_train=64, n_validation=32, n_test=32)
    model, score, log = train_and_test_plan(load_backbone("tiny"), {}, task, steps=8)
    assert 0 <= score <= 100 and len(log.losses) == 8 and not model.sources


def test_several_scores_are_stored_and_one_is_compared(tmp_path):
    file = tmp_path / "scores.json"

    def store(chapter, method, *scores):
        return store_or_compare_scores(chapter, method, list(scores), file=file)

    assert store("05", "ours", 90.0).endswith("nothing is stored yet") and not file.exists()
    assert store("05", "ours", 88.0, 90.0, 92.0).endswith("stored, 90.0 ± 2.0 (3 seeds)")
    store("04", "control", 50.0, 50.0)
    assert store("05", "ours", 91.0).endswith("91.0 in this run; 90.0 ± 2.0 (3 seeds) stored")
    assert [r["method"] for r in load_course_scores(file)] == ["control", "ours"]
    with pytest.raises(ValueError, match="Measure it again"):
        store("05", "ours", 60.0)


def test_the_table_ends_with_a_chapter_and_the_controls(tmp_path):
    file = tmp_path / "scores.json"
    for chapter, method in (("05", "prompt tuning"), ("04", "side network"), ("09", "IDPG")):
        store_or_compare_scores(chapter, method, [50.0, 52.0], file=file)
    table = build_score_table("05", file)
    assert [row[1] for row in table.rows] == ["prompt tuning", "side network"]
    assert repr(table).splitlines()[0].split() == [
        "chapter",
        "method",
        "two-domains",
        "two-domains-order",
    ]
    cells = [cell.strip() for cell in table._repr_markdown_().splitlines()[2].split("|")[1:-1]]
    assert cells == ["05", "prompt tuning", "51.0 ± 1.4 (2 seeds)", "not measured"]

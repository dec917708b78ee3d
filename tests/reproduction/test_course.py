"""The scores of the course, and what its chapters share."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.reproduction.course import (
    STATIC_OUTPUTS_VARIABLE,
    build_results_table,
    build_score_table,
    encode_course_sentences,
    format_scores,
    load_course_scores,
    load_records,
    load_short_task,
    show_panel,
    show_slider,
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


def test_stored_results_have_a_row_a_method_or_say_that_they_are_missing(tmp_path):
    records = Path(__file__).resolve().parents[2] / "results"
    files = {
        "prompt-tuning": "claims/converged-trec-minilm.jsonl",
        "probe": "claims/controls-minilm.jsonl",
    }
    table = build_results_table(files, "trec", folder=records)
    assert list(table.index) == list(files)
    assert table.loc["prompt-tuning"].tolist() == ["1,920", "93.8 ± 0.4 (5 seeds)"]
    assert build_results_table(files, "trec", folder=tmp_path).startswith("not stored here")


def test_stored_records_are_selected_by_their_values_and_by_their_logits():
    folder = Path(__file__).resolve().parents[2] / "results/why"
    searched = load_records("layers-trec-600.jsonl", folder, method="lpt", layer=15)
    final = load_records("layers-trec-600.jsonl", folder, with_logits=True, method="lpt", layer=15)
    assert len({r["lr"] for r in searched}) == 5
    assert [(r["lr"], r["seed"]) for r in final] == [(0.1, seed) for seed in range(5)]


def test_several_scores_are_stored_and_one_is_compared(tmp_path):
    file = tmp_path / "scores.json"

    def store(chapter, method, *scores):
        return store_or_compare_scores(chapter, method, list(scores), file=file)

    assert store("05", "ours", 90.0).endswith("nothing is stored yet") and not file.exists()
    assert store("05", "ours", 88.0, 90.0, 92.0).endswith("stored, 90.0 ± 2.0 (3 seeds)")
    store("04", "control", 50.0, 50.0)
    assert store("05", "ours", 91.0).endswith("91.0 in this run; 90.0 ± 2.0 (3 seeds) stored")
    assert [r["method"] for r in load_course_scores(file)] == ["control", "ours"]


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ([98.0, 48.8, 96.0, 95.8, 93.8], "learnt in 4 of 5 (93.8–98.0)"),
        ([54.2, 58.2, 64.6, 70.4, 51.8], "learnt in 1 of 5 (70.4)"),
        ([90.2, 84.2, 87.8, 88.4, 82.6], "86.6 ± 3.1 (5 seeds)"),
        ([49.2, 50.8, 50.8, 60.0, 48.2], "51.8 ± 4.7 (5 seeds)"),
        ([48.8], "48.8 (one run)"),
    ],
)
def test_runs_of_which_only_some_learn_are_counted(scores, text):
    assert format_scores(scores) == text


def test_a_deterministic_control_has_no_deviation(tmp_path):
    file = tmp_path / "scores.json"
    assert store_or_compare_scores("03", "probe", [53.6] * 5, file=file).endswith("stored, 53.6")
    assert store_or_compare_scores("03", "probe", [53.6], file=file).endswith("; 53.6 stored")
    assert build_score_table("03", file).rows == [("03", "probe", "53.6", "not measured")]


@pytest.mark.parametrize("score", [60.0, 99.0])
def test_a_score_far_from_the_stored_one_gives_a_hint(tmp_path, score):
    file = tmp_path / "scores.json"
    store_or_compare_scores("05", "ours", [80.0, 82.0], file=file)
    line = store_or_compare_scores("05", "ours", [score], file=file)
    assert f"{score} in this run" in line and "81.0 ± 1.4 (2 seeds) stored" in line
    assert "Hint: this is more than 12 points from the stored score" in line


def test_the_table_has_the_rows_of_a_chapter_and_then_the_controls(tmp_path):
    file = tmp_path / "scores.json"
    methods = [
        ("05", "prompt tuning"),
        ("04", "network on word vectors"),
        ("03", "head"),
        ("09", "IDPG"),
    ]
    for chapter, method in methods:
        store_or_compare_scores(chapter, method, [50.0, 52.0], file=file)
    table = build_score_table("05", file)
    assert [row[1] for row in table.rows] == ["prompt tuning", "network on word vectors"]
    assert len(build_score_table(file=file).rows) == 4
    assert repr(table).splitlines()[0].split() == [
        "chapter",
        "method",
        "two-domains",
        "two-domains-order",
    ]
    cells = [cell.strip() for cell in table._repr_markdown_().splitlines()[2].split("|")[1:-1]]
    assert cells == ["05", "prompt tuning", "51.0 ± 1.4 (2 seeds)", "not measured"]


@pytest.mark.parametrize("reason", ["missing", "stored outputs"])
def test_a_slider_is_one_call_without_ipywidgets_and_in_stored_outputs(reason, monkeypatch):
    monkeypatch.setitem(
        sys.modules,
        "ipywidgets",
        None if reason == "missing" else SimpleNamespace(SelectionSlider=None, interact=None),
    )
    monkeypatch.setenv("IDP_STATIC_OUTPUTS", "1")
    if reason == "missing":
        monkeypatch.delenv("IDP_STATIC_OUTPUTS")
    calls = []

    def draw(layer=3):
        calls.append(layer)

    show_slider(draw, layer=range(5))
    assert calls == [3]


def test_a_slider_sets_one_argument_and_begins_at_its_default(monkeypatch):
    calls = []
    sliders = []

    def interact(function, value):
        sliders.append(value)
        function(4)

    widgets = SimpleNamespace(
        SelectionSlider=lambda options, value, description: (options, value, description),
        interact=interact,
    )
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    monkeypatch.delenv("IDP_STATIC_OUTPUTS", raising=False)

    def draw(layer=3, n_layers=24):
        calls.append((layer, n_layers))

    show_slider(draw, layer=range(5))
    assert sliders == [([0, 1, 2, 3, 4], 3, "layer")]
    assert calls == [(4, 24)]


def parse_attributes(html):
    """Return the attributes of the first element."""
    elements = []
    parser = HTMLParser()
    parser.handle_starttag = lambda _tag, attributes: elements.append(dict(attributes))
    parser.feed(html)
    return elements[0]


def test_a_panel_is_shown_alone_and_without_access_to_the_notebook(tmp_path, monkeypatch):
    monkeypatch.delenv(STATIC_OUTPUTS_VARIABLE, raising=False)
    file = tmp_path / "panels.html"
    file.write_text('<body data-panel=""><p>"quoted" & <b></body>', encoding="utf-8")
    attributes = parse_attributes(show_panel("how deep", file).value)
    assert attributes["srcdoc"] == '<body data-panel="pg-deep"><p>"quoted" & <b></body>'
    assert attributes["sandbox"] == "allow-scripts"


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_panel_without_its_file_or_in_a_stored_output_is_an_address(
    tmp_path, monkeypatch, capsys, is_stored
):
    file = tmp_path / "panels.html"
    monkeypatch.delenv(STATIC_OUTPUTS_VARIABLE, raising=False)
    if is_stored:
        monkeypatch.setenv(STATIC_OUTPUTS_VARIABLE, "1")
        file.write_text("<body></body>", encoding="utf-8")
    assert show_panel("how deep", file) is None
    assert capsys.readouterr().out.strip().endswith("playground.html#pg-deep")

"""The report: calibration, tables, errors and files, against numbers worked out by hand."""

import csv
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from sklearn.metrics import matthews_corrcoef

from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.runs import report as report_module
from idp_tutorial.runs.report import (
    bin_by_confidence,
    expected_calibration_error,
    make_report,
    write_report,
)
from idp_tutorial.utils.checks import UserError

TOPIC = Task("topics", labels=("bill", "mail"))
TEXTS = ["the bill | please", "a parcel", "two <b>letters</b>", "an invoice"]
ROWS = [dict(sentence1=text, label=label) for text, label in zip(TEXTS, (0, 1, 1, 0))]
LIKELY_BILL = (0.9, 0.8, 0.05, 0.3)  # rows 2 and 4 are wrong, with confidences .8 and .7


def predictions_of(probabilities, labels=("bill", "mail")):
    """Return predictions as `predict` returns them, from the probabilities of the first label."""
    return [
        dict(label=labels[int(p <= 0.5)], probabilities=dict(zip(labels, (p, 1 - p))))
        for p in probabilities
    ]


def read_csv(path):
    with open(path, newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def test_calibration_error_is_the_weighted_mean_distance_of_the_bins():
    # fifteen bins; .8 is the upper edge of its bin
    confidence = [0.95, 0.95, 0.78, 0.8, 0.52, 1.0]
    is_correct = [1, 0, 1, 1, 0, 1]
    bins = bin_by_confidence(confidence, is_correct)
    assert bins["count"].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 3]
    by_hand = (3 * abs(0.96666667 - 2 / 3) + 2 * abs(0.79 - 1) + 1 * abs(0.52 - 0)) / 6
    assert expected_calibration_error(bins) == pytest.approx(100 * by_hand)
    assert np.isnan(bins.accuracy[0])  # an empty bin has no accuracy


def test_probability_zero_is_in_the_first_bin():
    bins = bin_by_confidence([0.0, 1.0], [0, 1])
    assert bins["count"].iloc[[0, -1]].tolist() == [1, 1] and bins["count"].sum() == 2
    assert expected_calibration_error(bins) == 0


@pytest.mark.parametrize("extra", [(), ("unseen",), ("unseen", "never")], ids=len)
def test_scores_and_table_of_classes_have_the_same_macro_average(extra):
    task = Task("topics", labels=("bill", "mail", *extra))
    predictions = predictions_of(LIKELY_BILL)
    for prediction in predictions:
        prediction["probabilities"] |= dict.fromkeys(extra, 0.0)
    report = make_report(task, ROWS, predictions)
    table = report.classes.set_index("label")
    assert table.f1["macro avg"] == pytest.approx(report.scores["macro_f1"])
    assert report.scores["macro_f1"] == pytest.approx(50)  # two classes, each with F1 1/2
    assert table.support[[*extra]].tolist() == [0] * len(extra)


def test_scores_of_classes_are_those_worked_out_by_hand():
    report = make_report(TOPIC, ROWS, predictions_of(LIKELY_BILL))
    predicted = [0, 0, 1, 1]
    scores = report.scores
    assert scores["accuracy"] == scores["balanced_accuracy"] == scores["macro_f1"] == 50
    assert scores["mcc"] == pytest.approx(100 * matthews_corrcoef([0, 1, 1, 0], predicted))
    assert scores["log_loss"] == pytest.approx(-np.log([0.9, 0.2, 0.95, 0.3]).mean())
    # confidences .9, .8, .95 and .7, each alone in its bin of width 1/15 but .95 and .9
    assert scores["ece"] == pytest.approx(100 * (0.1 + 0.8 + 0.05 + 0.7) / 4)
    assert report.classes.iloc[0].tolist() == ["bill", 50, 50, 50, 2]
    assert report.classes.label.tolist() == ["bill", "mail", "macro avg", "weighted avg"]
    assert report.confusion.to_numpy().tolist() == [[1, 1], [1, 1]]


def test_errors_begin_with_the_most_confident_one():
    errors = make_report(TOPIC, ROWS, predictions_of(LIKELY_BILL)).errors
    assert errors.row.tolist() == [2, 4]
    assert errors.confidence.tolist() == pytest.approx([80, 70])
    assert errors["probability mail"].tolist() == pytest.approx([20, 70])
    assert errors.iloc[0][["text", "label", "prediction"]].tolist() == ["a parcel", "mail", "bill"]


def test_the_files_of_a_report_agree_with_it(tmp_path):
    report = write_report(TOPIC, ROWS, predictions_of(LIKELY_BILL), tmp_path / "new/report", "T")
    folder = tmp_path / "new/report"
    names = {"scores", "classes", "confusion", "calibration", "errors"}
    assert {p.name for p in folder.iterdir()} == {
        *(f"{name}.csv" for name in names),
        *("report.md", "confusion.png", "calibration.png"),
    }
    scores = {row["score"]: float(row["value"]) for row in read_csv(folder / "scores.csv")}
    assert scores == pytest.approx(report.scores, rel=1e-5)
    assert read_csv(folder / "confusion.csv")[1] == dict(label="mail", bill="1", mail="1")
    assert [row["row"] for row in read_csv(folder / "errors.csv")] == ["2", "4"]
    assert sum(int(row["count"]) for row in read_csv(folder / "calibration.csv")) == 4
    for name in ("confusion", "calibration"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "report.md").read_text()
    assert "# T\n" in text and "| accuracy (%) | 50.0 |" in text
    assert "![Confusion matrix](confusion.png)" in text
    assert "| 2 | a parcel | mail | bill | 80.0 |" in text
    assert len(re.findall(r"\| 50\.0 \| 50\.0 \| 50\.0 \| 2 \|", text)) == 2


def test_cells_of_a_table_cannot_break_it():
    rows = [{**ROWS[1], "sentence1": "a | b\n<img> " + "long " * 40}]
    text = make_report(TOPIC, rows, predictions_of([0.8])).to_markdown()
    (line,) = [line for line in text.splitlines() if "&lt;img>" in line]
    assert "a \\| b &lt;img>" in line and len(line) < 160


def test_scores_and_counts_are_aligned_to_the_right():
    lines = make_report(TOPIC, ROWS[:1], predictions_of([0.9])).to_markdown().splitlines()
    assert lines[lines.index("| score | value |") + 1] == "| --- | --: |"
    classes = lines.index("## Classes") + 2
    assert lines[classes + 1].count("--:") == lines[classes].count("|") - 2


def test_a_class_may_have_the_name_of_a_score():
    names = ("accuracy", "macro avg")
    task = Task("odd", labels=names)
    report = make_report(task, ROWS, predictions_of(LIKELY_BILL, names))
    assert report.classes.label.tolist() == [*names, "macro avg", "weighted avg"]
    assert report.classes.support.tolist() == [2, 2, 4, 4]


def test_a_report_without_errors_says_so():
    text = str(make_report(TOPIC, ROWS[:1], predictions_of([0.9])))
    assert "## Misclassified rows\n\nNone." in text


def test_numbers_have_errors_and_correlations(tmp_path):
    task = Task("days", metric="pearson")
    labels = [1.0, 2.0, 4.0]
    values = [1.0, 2.5, 2.0]
    rows = [dict(sentence1="a", sentence2="b", label=label) for label in labels]
    report = write_report(task, rows, [dict(value=v) for v in values], tmp_path)
    assert report.scores["mae"] == pytest.approx(2.5 / 3)
    assert report.scores["rmse"] == pytest.approx((4.25 / 3) ** 0.5)
    assert report.scores["pearson"] == pytest.approx(100 * np.corrcoef(labels, values)[0, 1])
    assert report.scores["spearman"] == pytest.approx(50)
    assert report.errors.row.tolist() == [3, 2, 1]  # the largest first
    files = {p.name for p in tmp_path.iterdir()}
    assert files == {"report.md", "scores.csv", "errors.csv", "scatter.png"}
    assert "| 3 | a | b | 4 | 2 | -2 |" in (tmp_path / "report.md").read_text()


def test_several_labels_have_a_row_in_the_table_each(tmp_path):
    names = ("late", "rude", "wet")
    task = Task("complaints", labels=names, metric="micro_f1", multi_label=True)
    rows = [dict(sentence1=f"text {i}", label=v) for i, v in enumerate([[1, 0, 1], [0, 0, 0]])]
    probabilities = [(0.9, 0.2, 0.4), (0.1, 0.7, 0.3)]
    predictions = [
        dict(label=[n for n, p in zip(names, ps) if p > 0.5], probabilities=dict(zip(names, ps)))
        for ps in probabilities
    ]
    report = write_report(task, rows, predictions, tmp_path)
    # one true positive, one false positive, one false negative
    assert report.scores["micro_f1"] == pytest.approx(50)
    assert report.scores["macro_f1"] == pytest.approx(100 / 3)
    assert report.scores["subset_accuracy"] == 0
    assert report.classes.label.tolist() == [*names, "micro avg", "macro avg", "weighted avg"]
    assert report.calibration["count"].sum() == 6
    assert report.errors.row.tolist() == [2, 1]  # 'rude' with .7, no 'wet' with .6
    assert report.errors.confidence.tolist() == pytest.approx([70, 60])
    assert report.errors.labels.tolist() == ["", "late|wet"]
    assert not (tmp_path / "confusion.csv").exists()
    assert "predicted probability" not in (tmp_path / "report.md").read_text()


def test_without_matplotlib_a_report_has_one_sentence_and_no_picture(tmp_path, monkeypatch):
    def refuse(*packages):
        raise UserError("matplotlib is not installed: install it with pip.")

    write_report(TOPIC, ROWS, predictions_of(LIKELY_BILL), tmp_path)
    monkeypatch.setattr(report_module, "require_packages", refuse)
    write_report(TOPIC, ROWS, predictions_of(LIKELY_BILL), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "No pictures: matplotlib is not installed" in text and "![" not in text
    assert not [*tmp_path.glob("*.png")]  # those of the earlier report are removed


def test_a_report_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(UserError, match="got 4 rows and 1 predictions"):
        make_report(TOPIC, ROWS, predictions_of([0.9]))
    with pytest.raises(UserError, match="at least one labelled row"):
        write_report(TOPIC, [], [], tmp_path / "r")
    with pytest.raises(UserError, match="generates texts"):
        make_report(TASKS["in-short"], ROWS, ROWS)
    assert not (tmp_path / "r").exists()


def test_forty_classes_and_odd_names_can_be_drawn(tmp_path):
    names = ("$a_1$", *(f"class {i}" for i in range(40)))
    task = Task("many", labels=names)
    prediction = dict(label="$a_1$", probabilities=dict.fromkeys(names, 1 / 41))
    report = write_report(task, ROWS[:1], [prediction], tmp_path)
    assert (tmp_path / "confusion.png").stat().st_size > 1000
    assert "Rows are labels" not in report.to_markdown()  # too many for a table
    assert isinstance(report.confusion, pd.DataFrame)


def test_a_picture_of_forty_classes_has_those_with_the_most_errors():
    """Names that are cut stay different, and a cell has the percentage of its label."""
    names = tuple(f"a question of a customer about the topic {i}" for i in range(40))
    task = Task("many", labels=names)
    rows = [dict(sentence1="a text", label=i) for i in range(40) for _ in range(4)]
    answers = [names[row["label"]] for row in rows]
    answers[4 * 30] = names[7]  # one of the four rows of class 30
    predictions = [dict(label=a, probabilities=dict.fromkeys(names, 1 / 40)) for a in answers]
    report = make_report(task, rows, predictions)
    figure = Figure()
    report_module._draw_confusion(report, figure)
    (ax,) = figure.axes
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len({*labels}) == len(labels) == 20 and "20 of 40 classes" in ax.get_title()
    cells = {(text.get_position(), text.get_text()) for text in ax.texts}
    column, row = (next(i for i, n in enumerate(labels) if n.startswith(f"{k}: ")) for k in (8, 31))
    assert ((column, row), "25") in cells and ((row, row), "75") in cells
    assert max(figure.get_size_inches()) < 12


def test_a_picture_of_few_classes_has_all_of_them():
    figure = Figure()
    report_module._draw_confusion(make_report(TOPIC, ROWS, predictions_of(LIKELY_BILL)), figure)
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_xticklabels()] == ["bill", "mail"]
    assert "classes" not in ax.get_title()


def test_the_title_of_curves_names_the_best_evaluation():
    history = [(5, 60.0), (10, 80.0), (15, 80.0)]
    runs = dict(lpt=dict(history=history, losses=[1.0]), lora=dict(history=[(5, 70.0)]))
    figure = Figure(layout="constrained")
    report_module._draw_curves(runs, figure)
    assert figure.get_suptitle() == "best on validation: lpt, 80.0 at step 10"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["lpt", "lora"]

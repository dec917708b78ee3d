"""The report of a trained model: scores, tables, pictures and errors on labelled rows.

A report is made from predictions, as `predict` returns them, and the labels of the same rows. For
classes it has precision, recall and F1 of each class, the confusion matrix, the calibration, and
the misclassified rows, the most confident first; for numbers it has the errors and correlations.

All numbers are in percent, except the log-loss, which is in nats, and the errors of numbers, which
are in the units of the labels. Calibration compares the confidence of predictions with how often
they are correct, in `N_BINS` bins of equal width. The expected calibration error is the mean
distance of the two, each bin weighted by its number of predictions (Guo et al. 2017, equation 5).
Where a row may have several labels, the probability of every label of every row is compared with
how often rows have that label.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from idp_tutorial.data.metrics import compute_metric
from idp_tutorial.data.task import TEXT_COLUMNS, Task
from idp_tutorial.data.user_data import format_labels
from idp_tutorial.utils.checks import UserError, require_packages
from idp_tutorial.utils.durable_files import write_atomically

N_BINS = 15  # bins of equal width from 0 to 1
REPORT_FILE = "report.md"
_MAX_ERRORS = 20  # errors in `report.md`; `errors.csv` has all
_MAX_CONFUSION_CLASSES = 12  # a larger confusion matrix is no table of `report.md`
_MAX_DRAWN_CLASSES = 20  # the picture of a larger one has the classes with the most errors
_TABLE_FILES = ("scores", "classes", "confusion", "calibration", "errors")
_PICTURE_FILES = ("confusion", "calibration", "scatter", "curves")
_SCORE_NAMES = {  # name in `scores.csv`: name in the text
    "accuracy": "accuracy (%)",
    "balanced_accuracy": "balanced accuracy (%)",
    "subset_accuracy": "rows with all labels correct (%)",
    "micro_f1": "micro F1 (%)",
    "macro_f1": "macro F1 (%)",
    "mcc": "Matthews correlation (%)",
    "log_loss": "log-loss (nats)",
    "ece": "expected calibration error (%)",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "pearson": "Pearson correlation (%)",
    "spearman": "Spearman correlation (%)",
}


# ---- calibration


def bin_by_confidence(
    confidence: Any,  # probabilities `[N]`
    is_correct: Any,  # 1 where the prediction is correct `[N]`
) -> pd.DataFrame:  # `low`, `high`, `count`, and in percent `confidence` and `accuracy`
    """Return the number of predictions, mean confidence and accuracy of each of `N_BINS` bins.

    The bins have equal width; a bin contains its upper edge.
    """
    edges = np.linspace(0, 1, N_BINS + 1)
    confidence = np.clip(np.asarray(confidence, float), 0, 1)
    bins = pd.cut(confidence, edges, labels=False, include_lowest=True)
    accuracy = np.asarray(is_correct, float)
    values = pd.DataFrame(dict(confidence=confidence, accuracy=accuracy))
    means = 100 * values.groupby(bins).mean().reindex(range(N_BINS))  # NaN for an empty bin
    count = np.bincount(bins, minlength=N_BINS)
    return pd.DataFrame(dict(low=100 * edges[:-1], high=100 * edges[1:], count=count)).join(means)


def expected_calibration_error(
    bins: pd.DataFrame,  # from `bin_by_confidence`
) -> float:  # in percent
    """Return the mean distance of confidence and accuracy, weighted by the counts of the bins."""
    distance = (bins.confidence - bins.accuracy).abs().fillna(0)
    return float((bins["count"] * distance).sum() / bins["count"].sum())


# ---- the report


@dataclass(frozen=True)
class Report:
    """Scores and tables of a model's predictions for labelled rows."""

    title: str
    n_rows: int
    kind: str  # 'classes', 'labels' (any number in a row) or 'numbers'
    scores: dict[str, float]  # in percent; `log_loss`, `mae` and `rmse` in their units
    # misclassified rows, the most confident first; for numbers all rows, the largest error first
    errors: pd.DataFrame
    classes: pd.DataFrame | None = None  # precision, recall, F1 and support of each class
    confusion: pd.DataFrame | None = None  # rows are labels, columns predictions
    calibration: pd.DataFrame | None = None  # from `bin_by_confidence`

    def to_markdown(
        self,
        pictures: Sequence[str] = (),  # names of files beside the text
        max_errors: int = _MAX_ERRORS,  # largest number of errors to list
        note: str = "",  # a sentence at the end
        introduction: str = "",  # Markdown below the title
    ) -> str:
        """Return the report as Markdown."""
        scores = []
        for name, value in self.scores.items():
            digits = 3 if name in ("log_loss", "mae", "rmse") else 1
            scores.append(dict(score=_SCORE_NAMES[name], value=f"{value:.{digits}f}"))
        score_table = _format_table(pd.DataFrame(scores), numbers=["value"])
        parts = [f"# {self.title}", *filter(None, [introduction])]
        parts += [f"{self.n_rows:,} rows.", score_table]
        if "curves.png" in pictures:
            parts += ["## Learning curves", *_picture("curves", pictures, "Learning curves")]
        if self.classes is not None:
            parts += [f"## {self.kind.capitalize()}", _format_table(self.classes)]
        if self.confusion is not None:
            parts.append("## Confusion matrix")
            if len(self.confusion) <= _MAX_CONFUSION_CLASSES:
                parts.append("Rows are labels, columns are predictions.")
                parts.append(_format_table(self.confusion.rename_axis("label").reset_index()))
            parts += _picture("confusion", pictures, "Confusion matrix")
        if self.calibration is not None:
            parts += ["## Calibration", _CALIBRATION_TEXT[self.kind].format(n=N_BINS)]
            parts += _picture("calibration", pictures, "Reliability diagram")
        if self.kind == "numbers":
            parts += _picture("scatter", pictures, "Predictions and labels")
        parts += self._describe_errors(max_errors)
        return "\n\n".join([*parts, *([note] if note else [])]) + "\n"

    def _describe_errors(self, max_errors: int) -> list[str]:
        is_classes = self.kind != "numbers"
        heading = "## Misclassified rows" if is_classes else "## Largest errors"
        if not len(self.errors):
            return [heading, "None."]
        shown = self.errors.head(max_errors)
        order = "the most confident first" if is_classes else "the largest first"
        more = f"{len(shown)} of {len(self.errors)}, {order}; all are in `errors.csv`."
        shown = shown[[c for c in shown if not c.startswith("probability ")]]
        # numbers are in the units of the labels, whatever they are
        return [heading, more, _format_table(shown, ".1f" if is_classes else ".4g")]

    def __str__(self) -> str:
        return self.to_markdown(max_errors=5)


_CALIBRATION_TEXT = {
    "classes": "The confidence of a prediction is the probability of the predicted class. In each "
    "of {n} bins of equal width it is compared with the proportion of correct predictions; the "
    "expected calibration error is the mean distance, weighted by the number of predictions.",
    "labels": "In each of {n} bins of equal width the probability of a label is compared with the "
    "proportion of rows that have it; the expected calibration error is the mean distance, "
    "weighted by the number of probabilities.",
}


def _format_cell(value: Any, float_format: str) -> str:
    """Return a value as the text of a cell of a Markdown table."""
    if isinstance(value, float):
        return "–" if np.isnan(value) else f"{value:{float_format}}"
    text = " ".join(str(value).split())
    text = text if len(text) <= 100 else f"{text[:99]}…"
    return text.replace("|", "\\|").replace("<", "&lt;")


def _format_table(
    table: pd.DataFrame,
    float_format: str = ".1f",
    numbers: Sequence[str] = (),  # columns whose texts are numbers
) -> str:
    """Return a Markdown table; numbers are aligned to the right.

    `tabulate`, which pandas would use, is not among the requirements of every installation.
    """
    is_number = [name in numbers or t.kind in "if" for name, t in table.dtypes.items()]
    lines = [[*table.columns], ["--:" if number else "---" for number in is_number]]
    lines += table.astype(object).to_numpy().tolist()
    rows = []
    for line in lines:
        rows.append(" | ".join(_format_cell(value, float_format) for value in line))
    return "\n".join(f"| {row} |" for row in rows)


def _picture(name: str, pictures: Sequence[str], text: str) -> list[str]:
    file = f"{name}.png"
    return [f"![{text}]({file})"] if file in pictures else []


# ---- tables


def _text_columns(rows: Sequence[dict]) -> dict[str, list]:
    """Return the number and the texts of the rows, under the names of their columns."""
    texts: dict[str, list] = {}
    for name in TEXT_COLUMNS:
        if name in rows[0]:
            texts[name] = [row[name] for row in rows]
    if len(texts) == 1:
        (single,) = texts.values()
        texts = {"text": single}
    return {"row": [*range(1, len(rows) + 1)], **texts}


def _score_classes(
    task: Task, labels: np.ndarray, predictions: np.ndarray, probabilities: np.ndarray
) -> dict[str, float]:
    names = ["accuracy", "balanced_accuracy", "macro_f1", "mcc"]
    if task.multi_label:
        names = ["micro_f1", "macro_f1", "subset_accuracy"]
    scores = {name: compute_metric(name, predictions, labels) for name in names}
    normalised = probabilities  # float32 sums differ from 1 in the last digits
    if not task.multi_label:
        normalised = probabilities / probabilities.sum(1, keepdims=True)
    log_loss = -compute_metric("neg_log_loss", predictions, labels, probabilities=normalised) / 100
    return {**scores, "log_loss": log_loss}


def _tabulate_classes(task: Task, labels: np.ndarray, predictions: np.ndarray) -> pd.DataFrame:
    """Return the data of scikit-learn's classification report, in percent.

    Averages are over the classes of the labels and predictions, as in the scores: a class that
    has neither is in the table, with zeros, and in no average.
    """
    from sklearn.metrics import classification_report

    def report(classes: Sequence[int]) -> dict[str, dict[str, float]]:
        """Return the rows of some classes, and their averages."""
        return classification_report(
            labels,
            predictions,
            labels=classes,
            target_names=[f"class {i}" for i in classes],  # a label may be called 'accuracy'
            output_dict=True,
            zero_division=0,
        )

    classes = range(len(task.labels))
    averages = ["macro avg", "weighted avg"]
    if task.multi_label:
        averages.insert(0, "micro avg")
    used = classes if task.multi_label else np.union1d(labels, predictions).tolist()
    by_class = report(classes)
    by_average = report(used)
    rows = [by_class[f"class {i}"] for i in classes] + [by_average[name] for name in averages]
    table = pd.DataFrame(rows)
    return pd.DataFrame(
        dict(
            label=[*task.labels, *averages],
            precision=100 * table.precision,
            recall=100 * table.recall,
            f1=100 * table["f1-score"],
            support=table.support.astype(int),
        )
    )


def _report_classes(task: Task, rows: Sequence[dict], predictions: Sequence[dict]) -> dict:
    """Return the fields of the report of a task whose rows have one class, or several labels."""
    from sklearn.metrics import confusion_matrix

    labels = np.array([row["label"] for row in rows])
    probabilities = np.array([[*p["probabilities"].values()] for p in predictions], float)
    fields: dict[str, Any]
    if task.multi_label:
        predicted = np.array([task.label_indicators(p["label"]) for p in predictions])
        # of the decisions for a row that are wrong, the one that the model is surest of
        confidences = np.where(predicted == 1, probabilities, 1 - probabilities)
        confidence = np.where(predicted != labels, confidences, 0).max(1)
        is_wrong = (predicted != labels).any(1)
        columns: dict[str, Any] = {
            "labels": [format_labels(task.label_names(row)) for row in labels],
            "predictions": [format_labels(task.label_names(row)) for row in predicted],
        }
        bins = bin_by_confidence(probabilities.ravel(), labels.ravel())
        fields = dict(kind="labels")
    else:
        index = {name: i for i, name in enumerate(task.labels)}
        predicted = np.array([index[p["label"]] for p in predictions])
        confidence = probabilities[np.arange(len(rows)), predicted]
        is_wrong = predicted != labels
        names = np.array(task.labels, object)
        columns = {"label": names[labels], "prediction": names[predicted]}
        bins = bin_by_confidence(confidence, ~is_wrong)
        counts = confusion_matrix(labels, predicted, labels=range(len(task.labels)))
        confusion = pd.DataFrame(counts, index=task.labels, columns=task.labels)
        fields = dict(kind="classes", confusion=confusion)
    columns = {**_text_columns(rows), **columns, "confidence": 100 * confidence}
    columns |= {f"probability {name}": 100 * p for name, p in zip(task.labels, probabilities.T)}
    errors = pd.DataFrame(columns)[is_wrong]
    scores = _score_classes(task, labels, predicted, probabilities)
    return dict(
        **fields,
        scores={**scores, "ece": expected_calibration_error(bins)},
        classes=_tabulate_classes(task, labels, predicted),
        calibration=bins,
        errors=errors.sort_values("confidence", ascending=False, kind="stable"),
    )


def _report_numbers(rows: Sequence[dict], predictions: Sequence[dict]) -> dict:
    """Return the fields of the report of a regression."""
    labels = np.array([row["label"] for row in rows], float)
    predicted = np.array([p["value"] for p in predictions], float)
    difference = predicted - labels
    scores = dict(
        mae=float(np.abs(difference).mean()),
        rmse=float(np.sqrt((difference**2).mean())),
        pearson=compute_metric("pearson", predicted, labels),
        spearman=compute_metric("spearman", predicted, labels),
    )
    columns = {"label": labels, "prediction": predicted, "error": difference}
    table = pd.DataFrame({**_text_columns(rows), **columns})
    order = np.argsort(-np.abs(difference), kind="stable")
    return dict(kind="numbers", scores=scores, errors=table.iloc[order])


def require_reportable(
    task: Task,
) -> None:
    """Raise `UserError` for a task that generates texts, which has no classes and no numbers."""
    if task.is_generation:
        raise UserError(
            f"task {task.name!r} generates texts, and a report needs classes or numbers: leave "
            "report out."
        )


def make_report(
    task: Task,
    rows: Sequence[dict],  # labelled rows, as in `task.splits`
    predictions: Sequence[dict],  # of the same rows, from `predict`
    title: str | None = None,  # None: the name of the task
) -> Report:
    """Compute scores and tables of predictions for labelled rows.

    Raises: `UserError` without rows, and for a task that generates texts.
    """
    require_reportable(task)
    if not len(rows) or len(rows) != len(predictions):
        raise UserError(
            f"a report needs at least one labelled row and one prediction for each, got "
            f"{len(rows)} rows and {len(predictions)} predictions."
        )
    if task.is_regression:
        fields = _report_numbers(rows, predictions)
    else:
        fields = _report_classes(task, rows, predictions)
    return Report(title or task.name, len(rows), **fields)


# ---- pictures


def _shorten_names(names: Sequence[Any]) -> list[str]:
    """Return names of at most 24 characters; those that become equal get a number."""
    texts = [str(name) for name in names]
    short = [text if len(text) <= 24 else f"{text[:23]}…" for text in texts]
    return [f"{i}: {s}" if short.count(s) > 1 else s for i, s in enumerate(short, 1)]


def _draw_confusion(report: Report, figure: Any) -> None:
    """Draw the confusion matrix of the classes with the most errors, in percent of each label."""
    assert report.confusion is not None
    counts = report.confusion.to_numpy()
    n_errors = counts.sum(0) + counts.sum(1) - 2 * counts.diagonal()
    shown = np.sort(np.argsort(-n_errors, kind="stable")[:_MAX_DRAWN_CLASSES])
    share = (100 * counts / counts.sum(1, keepdims=True).clip(min=1))[np.ix_(shown, shown)]
    # `$` in a name is a dollar sign, not the beginning of a formula
    names = [name.replace("$", r"\$") for name in _shorten_names(report.confusion.columns)]
    size = 0.42 * len(shown) + 1.8  # inches
    figure.set_size_inches(size + 0.4, size)
    ax = figure.add_subplot()
    ax.imshow(share, cmap="Blues", vmin=0, vmax=100)
    for (row, column), value in np.ndenumerate(share.round()):
        if value:
            color = "white" if value > 50 else "black"
            ax.text(column, row, f"{value:.0f}", color=color, ha="center", va="center", fontsize=9)
    labels = [names[i] for i in shown]
    ax.set_xticks(range(len(shown)), labels, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(len(shown)), labels)
    title = f"{report.n_rows:,} rows, accuracy {report.scores['accuracy']:.1f} %"
    if len(shown) < len(counts):
        title += f"\nthe {len(shown)} of {len(counts)} classes with the most errors"
    ax.set(xlabel="predicted", ylabel="true (in % of the label)", title=title)


def _draw_calibration(report: Report, figure: Any) -> None:
    """Draw a reliability diagram, and below it how many predictions each bin has."""
    bins = report.calibration
    assert bins is not None
    is_classes = report.kind == "classes"
    figure.set_size_inches(4.6, 5.2)
    ax, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    ax.plot([0, 100], [0, 100], "--", color="gray", lw=1, label="perfect calibration")
    ax.plot(bins.confidence, bins.accuracy, "o-", ms=4, label="mean of a bin")
    title = f"expected calibration error {report.scores['ece']:.1f} %"
    observed = "correct predictions (%)" if is_classes else "rows with the label (%)"
    ax.set(xlim=(0, 100), ylim=(0, 102), ylabel=observed, title=title)
    ax.legend(loc="upper left")
    below.bar(bins.low, bins["count"], 0.92 * (bins.high - bins.low), align="edge", color="gray")
    below.set(
        xlabel="confidence (%)" if is_classes else "predicted probability of a label (%)",
        ylabel="predictions" if is_classes else "labels",
    )


def _draw_scatter(report: Report, figure: Any) -> None:
    """Draw predicted numbers against labels."""
    from sklearn.metrics import PredictionErrorDisplay

    figure.set_size_inches(4.6, 4.4)
    ax = figure.add_subplot()
    display = PredictionErrorDisplay(y_true=report.errors.label, y_pred=report.errors.prediction)
    display.plot(ax=ax, kind="actual_vs_predicted", scatter_kwargs=dict(alpha=0.4, s=16))
    scores = report.scores
    title = f"Pearson {scores['pearson']:.1f} %, mean absolute error {scores['mae']:.3g}"
    ax.set(xlabel="prediction", ylabel="label", title=title)


def _draw_curves(curves: Mapping[str, Mapping[str, Any]], figure: Any) -> None:
    """Draw the training loss and the validation score of runs over their steps."""
    figure.set_size_inches(7.5, 3.2)
    loss_axes, score_axes = figure.subplots(1, 2)
    best = max(  # the first of the evaluations with the highest score
        ((score, -step, name) for name, run in curves.items() for step, score in run["history"]),
    )
    for name, run in curves.items():
        losses = run.get("losses") or []
        steps = run.get("steps_done") or len(losses)
        ends = np.linspace(0, steps, len(losses) + 1)[1:]
        loss_axes.plot(ends, losses, lw=1)
        score_axes.plot(*zip(*run["history"]), "o-", ms=3, lw=1, label=name)
    loss_axes.set(xlabel="step", ylabel="training loss")
    score_axes.set(xlabel="step", ylabel="validation score (%)")
    figure.suptitle(f"best on validation: {best[2]}, {best[0]:.1f} at step {-best[1]}")
    if len(curves) > 1:
        figure.legend(loc="outside right center", fontsize=8)


def _draw_pictures(
    report: Report, curves: Mapping[str, Mapping[str, Any]]
) -> dict[str, bytes]:  # file name: PNG
    """Draw the pictures of a report; raise `UserError` without matplotlib."""
    require_packages("matplotlib")
    from matplotlib.figure import Figure

    runs = {name: run for name, run in curves.items() if run.get("history")}
    drawings: dict[str, tuple[Callable, bool]] = dict(
        confusion=(_draw_confusion, report.confusion is not None),
        calibration=(_draw_calibration, report.calibration is not None),
        scatter=(_draw_scatter, report.kind == "numbers"),
        curves=(lambda _, figure: _draw_curves(runs, figure), bool(runs)),
    )
    pictures = {}
    for name, (draw, is_wanted) in drawings.items():
        if is_wanted:
            figure = Figure(layout="constrained")
            draw(report, figure)
            content = io.BytesIO()
            figure.savefig(content, format="png", dpi=150)
            pictures[f"{name}.png"] = content.getvalue()
    return pictures


# ---- files


def write_report(
    task: Task,
    rows: Sequence[dict],  # labelled rows, as in `task.splits`
    predictions: Sequence[dict],  # of the same rows, from `predict`
    folder: Path | str,  # created if needed; a report in it is replaced
    title: str | None = None,  # None: the name of the task
    introduction: str = "",  # Markdown below the title
    # name of a method → its record, whose `losses` and `history` are drawn
    curves: Mapping[str, Mapping[str, Any]] = {},
) -> Report:
    """Write a report: `report.md`, tables as CSV, and pictures as PNG if matplotlib is installed.

    Tables are `scores.csv`, `classes.csv`, `confusion.csv`, `calibration.csv` and `errors.csv`;
    pictures are `confusion.png`, `calibration.png`, for numbers `scatter.png`, and `curves.png`.
    """
    report = make_report(task, rows, predictions, title)
    note = ""
    files: dict[str, bytes] = {}
    try:
        files |= _draw_pictures(report, curves)
    except UserError as error:  # matplotlib is not installed
        note = f"No pictures: {error}"
    text = report.to_markdown([*files], note=note, introduction=introduction)
    for name in _TABLE_FILES:
        table = getattr(report, name)
        if name == "scores":
            table = pd.DataFrame(table.items(), columns=["score", "value"])
        if table is not None:
            csv = table.to_csv(index=name == "confusion", index_label="label", float_format="%.6g")
            files[f"{name}.csv"] = csv.encode()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / REPORT_FILE).exists():  # of an earlier report, perhaps of another kind of task
        all_files = [f"{n}.csv" for n in _TABLE_FILES] + [f"{n}.png" for n in _PICTURE_FILES]
        for name in {*all_files} - {*files}:
            (folder / name).unlink(missing_ok=True)
    for name, data in files.items():
        write_atomically(folder / name, data)
    write_atomically(folder / REPORT_FILE, text.encode())  # last: it names the other files
    return report

"""The command `idp predict`: one prediction for each text of a file, with a saved prompt.

The reader reads tables, JSON lines and plain lines. The text of a row is in the column that is
named, else in `sentence1`, or in the column that the model was trained on. A row keeps all its
columns, and the prediction is added to it.
"""

import csv
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal

from idp_tutorial.cli.commands import CommandOptions, command, print_report, refuse_given
from idp_tutorial.data.config import TextConfig
from idp_tutorial.utils.checks import Range, UserError, check_writable_folder
from idp_tutorial.utils.durable_files import open_atomically
from idp_tutorial.utils.options import declared_options

__all__ = [
    "PREDICTION_COLUMNS",
    "WINDOW_SIZE",
    "select_text_columns",
    "make_row_writer",
    "PredictOptions",
    "predict_command",
]


PREDICTION_COLUMNS = "prediction", "probabilities", "generated"  # columns that are added to a row
# Rows that are read, sorted by length and predicted together. With 1,024 rows and batches of 128,
# a tenth of the computed positions is padding; with 4,096 rows, three in a hundred.
WINDOW_SIZE = 4096


def _choose_column(
    row: dict, where: str, given: str | None, candidates: Iterable[str | None]
) -> str | None:
    """Return the column that was given, or the first candidate in the row."""
    if given and given not in row:
        raise UserError(
            f"{where}: no column {given!r} among {', '.join(row)}: name another with text= or "
            "text2=."
        )
    return given or next((c for c in candidates if c and c in row), None)


def select_text_columns(
    rows: Iterable[tuple[str, dict]],  # (description of its place, row), as `iterate_rows` yields
    task: Any,  # a `Task`
    text: str | None = None,  # column of the text; None: sentence1, the column of training, or text
    text2: str | None = None,  # column of the second text; None: sentence2, or that of training
    skip_empty: bool = False,  # leave out rows without a text, and log how many they are
) -> Iterator[tuple[dict, dict]]:
    """Yield each row, and its texts under the names of the task.

    Raises: `UserError` that counts the rows without a text, after all rows are read.
    """
    from idp_tutorial.data.rows import is_empty_text, skip_empty_texts
    from idp_tutorial.training.evaluation import require_text_columns

    trained = task.source_columns
    candidates: dict[str, tuple] = {"sentence1": (text, ("sentence1", trained[0], "text"))}
    if task.pair:
        candidates["sentence2"] = (text2, ("sentence2", trained[1]))
    empty: list[str] = []  # places of the rows without a text
    n_rows = 0
    for where, row in rows:
        n_rows += 1
        if taken := [column for column in PREDICTION_COLUMNS if column in row]:
            raise UserError(
                f"{where} already has a column {taken[0]!r}, which the prediction would replace: "
                "rename it."
            )
        chosen = {name: _choose_column(row, where, *names) for name, names in candidates.items()}
        columns = {name: column for name, column in chosen.items() if column}
        if not task.allow_empty_text and any(is_empty_text(row[c]) for c in columns.values()):
            empty.append(where)
        elif not empty or skip_empty:  # otherwise the remaining rows are only counted
            texts = {name: row[column] for name, column in columns.items()}
            if "group" in row:
                texts["group"] = row["group"]
            require_text_columns(task, texts if "sentence1" in texts else row, where)
            yield row, texts
    skip_empty_texts(empty, n_rows, "the column of texts", skip_empty)


def _output_format(out: str, given: str | None) -> str:
    """Return 'csv' or 'jsonl': as `out_format` says, or by the extension of the file."""
    extension = Path(out).suffix.lower()
    if not given and extension in (".tsv", ".parquet", ".xlsx", ".gz", ".xz"):
        raise UserError(
            f"out={out}: predictions are written as uncompressed CSV or JSON lines: use the "
            "extension .csv or .jsonl, or give out_format."
        )
    return given or ("csv" if extension == ".csv" else "jsonl")


def _open_output(out: str) -> AbstractContextManager[IO]:
    """Open standard output or a file, which appears when it is complete."""
    if out != "-":
        return open_atomically(out, "w", encoding="utf-8", newline="")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # in every locale
    return nullcontext(sys.stdout)


def _to_json_value(value: Any) -> Any:
    """Return a value as JSON has it: null for NaN, and dates as ISO 8601."""
    if isinstance(value, dict):
        return {k: _to_json_value(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_to_json_value(v) for v in value]
    if isinstance(value, float) and math.isnan(value):  # Parquet has it for missing values
        return None
    return value.isoformat() if hasattr(value, "isoformat") else value


def _flatten_row(row: dict) -> dict:
    """Return a row with one column for each probability, and several labels as one text."""
    from idp_tutorial.data.user_data import format_labels

    flat = dict(row)
    for label, probability in flat.pop("probabilities", {}).items():
        column = f"probability {label}"
        if column in row:
            raise UserError(
                f"a row already has a column {column!r}, which the prediction would replace: "
                "rename it."
            )
        flat[column] = probability
    if isinstance(flat.get("prediction"), list):
        flat["prediction"] = format_labels(flat["prediction"])
    return flat


def _to_text(value: Any) -> str:
    """Return the text of a value that JSON does not have, such as a decimal number."""
    if isinstance(value, bytes):
        raise TypeError("bytes are not a text")
    return str(value)


def make_row_writer(
    file: IO,  # open for text
    format: str,  # 'csv', with the columns of the first row, or 'jsonl'
) -> Callable[[dict], None]:
    """Return a function that writes a row to a file."""
    table: csv.DictWriter[str] | None = None

    def write_row(row: dict) -> None:
        """Write a row as a line of JSON or CSV."""
        nonlocal table
        values = _flatten_row(row) if format == "csv" else _to_json_value(row)
        try:
            if format == "jsonl":
                text = json.dumps(values, ensure_ascii=False, allow_nan=False, default=_to_text)
                print(text, file=file)
                return
            if table is None:
                table = csv.DictWriter(file, list(values), restval="", lineterminator="\n")
                table.writeheader()
            table.writerow(values)
        except TypeError as e:  # bytes
            raise UserError(
                f"{row!r:.80} cannot be written as jsonl ({e}): remove the column."
            ) from None
        except ValueError as e:  # infinity, or a column that the first row lacks
            other = "jsonl" if format == "csv" else "csv"
            raise UserError(
                f"{row!r:.80} cannot be written as {format} ({e}): use out_format={other}."
            ) from None

    return write_row


def _refuse_unused(options: "PredictOptions", task: Any, cfg: Any) -> None:
    """Check that the model can use the options that were given."""
    if not options.report:
        refuse_given(options, "label", "without report")
    if not task.labels:
        refuse_given(options, "proba", f"by task {task.name!r}, which has no classes")
    if not task.pair:
        refuse_given(options, "text2", f"by task {task.name!r}, which has one text")
    if "glove" not in declared_options(type(cfg.method_config)):
        refuse_given(options, "glove", f"by method {cfg.method!r}")


def _predicted_columns(prediction: dict, task: Any, with_probabilities: bool) -> dict:
    """Return the columns that are added to a row."""
    if task.is_generation:
        return prediction
    columns = dict(prediction=prediction.get("label", prediction.get("value")))
    if with_probabilities and "probabilities" in prediction:
        columns["probabilities"] = prediction["probabilities"]
    return columns


def _parse_row_label(task: Any, row: dict, label: str | None, where: str) -> Any:
    """Return the label of a row as the task has it: an index, a number, or indicators."""
    from idp_tutorial.data.rows import convert_label
    from idp_tutorial.data.user_data import parse_label, parse_labels

    column = label or next((c for c in ("label", *task.columns[2:3]) if c in row), None)
    if column not in row:
        raise UserError(
            f"{where}: no column {column or 'label'!r} among {', '.join(row)}, and a report needs "
            "labels: name the column in label=, or leave report out."
        )
    value = row[column]
    if task.is_regression:
        return parse_label(value, where, regression=True)
    parsed: Any = parse_labels(value, where) if task.multi_label else parse_label(value, where)
    if parsed not in task.labels and str(parsed).isdecimal():
        parsed = int(parsed)
    return convert_label(task, parsed, where)


@dataclass(frozen=True, kw_only=True)
class PredictOptions(TextConfig, CommandOptions):
    """Options of `idp predict`."""

    option_group: ClassVar[str] = "this command"

    model: str = "runs/train"  # folder that `idp train` wrote, or a model on the hub, NAME/MODEL
    # CSV, TSV, Parquet, Excel, JSON, or lines that are JSON or text; '-': standard input
    texts: str = "-"
    backbone: str | None = None  # folder of the backbone, if it is not found by its name
    glove: str | None = None  # file or folder of GloVe vectors, if the model was trained with some
    out: str = "-"  # file of predictions; '-': standard output
    # format of the predictions (default: by the extension of out, else jsonl)
    out_format: Literal["csv", "jsonl"] | None = None
    proba: bool = False  # add the probability of every class
    # folder for a report on rows with labels: scores of each class, confusion matrix, calibration
    # and misclassified rows
    report: str | None = None
    # largest number of texts in a batch; on a CPU, long texts make smaller batches
    batch_size: Annotated[int, Range(1, 10**6)] = 128
    # dtype of the backbone's weights (default: that of training)
    dtype: Literal["float32", "bfloat16"] | None = None
    device: Literal["auto", "cpu"] = "auto"  # a GPU if there is one, or the CPU


@command(PredictOptions)
def predict_command(options: PredictOptions, base: Any) -> None:
    """Predict texts: each line of the output is the row with its prediction.

    idp predict --model tickets --texts new.csv --text message --proba --out answers.csv
    """
    output_format = _output_format(options.out, options.out_format)
    if options.report:
        check_writable_folder(options.report, "report=")
    with _open_output(options.out) as file:  # an error, before the model is loaded
        task, labelled, predictions, title = _predict_file(
            options, make_row_writer(file, output_format)
        )
    if options.report:  # the predictions are complete, even if the report cannot be written
        from idp_tutorial.runs.report import write_report

        write_report(task, labelled, predictions, options.report, title)
        print_report(options.report, sys.stderr if options.out == "-" else sys.stdout)


def _predict_file(
    options: PredictOptions, write_row: Callable[[dict], None]
) -> tuple[Any, list[dict], list[dict], str]:
    """Predict the texts of a file; return the task, rows, predictions and title of the report."""
    import torch

    from idp_tutorial.data.file_readers import iterate_rows
    from idp_tutorial.runs.report import require_reportable
    from idp_tutorial.saving.prompt_files import from_pretrained
    from idp_tutorial.training.evaluation import predict

    trained, task, cfg = from_pretrained(
        options.model, options.backbone, glove=options.glove, dtype=options.dtype
    )
    _refuse_unused(options, task, cfg)
    labelled: list[dict] = []
    all_predictions: list[dict] = []
    if options.report:
        require_reportable(task)
    if options.device == "auto" and torch.cuda.is_available():
        trained.to("cuda")
    read = iterate_rows(options.texts, options.format, task.pair, options.encoding, options.sep)
    rows = select_text_columns(read, task, options.text, options.text2, options.skip_empty)
    batch_size = options.batch_size
    # the rows of a question must be predicted together
    window_size = None if task.grouping == "choose" else max(WINDOW_SIZE, 8 * batch_size)
    while window := [*islice(rows, window_size)]:
        predictions = predict(trained, task, cfg, [t for _, t in window], batch_size)
        for (row, texts), prediction in zip(window, predictions):
            write_row({**row, **_predicted_columns(prediction, task, options.proba)})
            if options.report:
                where = f"row {len(labelled) + 1}"
                label = _parse_row_label(task, row, options.label, where)
                labelled.append({**texts, "label": label})
                all_predictions.append(prediction)
    return task, labelled, all_predictions, f"{cfg.method} on {Path(options.texts).name}"

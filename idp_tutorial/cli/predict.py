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
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal

from idp_tutorial.cli.commands import CommandOptions, command, print_report, refuse_given
from idp_tutorial.cli.progress import ProgressLines
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
# files of a saved model that predicting reads, or that cannot be made again
_MODEL_FILES = ("prompts.*", "record.jsonl", "README.md", "SHA256SUMS", "checkpoint-*")


def _choose_column(
    row: dict, where: str, given: str | None, candidates: Iterable[str | None]
) -> str | None:
    """Return the column that was given, or the first candidate in the row."""
    if given and given not in row:
        columns = ", ".join(row)
        raise UserError(
            f"{where}: no column {given!r} among {columns}: name it in text= or text2=."
        )
    return given or next((c for c in candidates if c and c in row), None)


def select_text_columns(
    rows: Iterable[tuple[str, dict]],  # (description of its place, row), as `iterate_rows` yields
    task: Any,  # a `Task`
    text: str | None = None,  # column of the text; None: sentence1, the column of training, or text
    text2: str | None = None,  # column of the second text; None: sentence2, or that of training
    skip_empty: bool = False,  # leave out rows without a text, and log how many they are
    source: str | None = None,  # name of a table whose columns have their names once
    faults: Any = None,  # a `RowFaults`, which the reader of the rows adds to
) -> Iterator[tuple[dict, dict]]:
    """Yield each row, and its texts under the names of the task.

    Raises: `UserError` that names all faults of the rows, after all rows are read.
    """
    from idp_tutorial.data.rows import is_empty_text, log_skipped
    from idp_tutorial.data.table_checks import RowFaults
    from idp_tutorial.training.evaluation import require_text_columns

    faults = faults or RowFaults()

    trained = task.source_columns
    candidates: dict[str, tuple] = {"sentence1": (text, ("sentence1", trained[0], "text"))}
    if task.pair:
        candidates["sentence2"] = (text2, ("sentence2", trained[1]))
    empty = faults.without_text
    n_rows = 0
    for where, row in rows:
        n_rows += 1
        place = source or where
        if taken := [column for column in PREDICTION_COLUMNS if column in row]:
            raise UserError(f"{place} already has a column {taken[0]!r}: rename it.")
        only = row if source and len(row) == 1 else ()  # the only column of a table has the texts
        chosen = {
            name: _choose_column(row, place, given, [*usual, *only])
            for name, (given, usual) in candidates.items()
        }
        columns = {name: column for name, column in chosen.items() if column}
        if not task.allow_empty_text and any(is_empty_text(row[c]) for c in columns.values()):
            empty.append(where)
            continue
        texts = {name: row[column] for name, column in columns.items()}
        if "group" in row:
            texts["group"] = row["group"]
        try:
            require_text_columns(task, texts if "sentence1" in texts else row, where)
        except UserError as e:
            faults.add("text", e)
        if not faults.counts and (not empty or skip_empty):  # otherwise all is only counted
            yield row, texts
    n_rows += faults.counts.get("row", 0)
    if skip_empty:
        log_skipped("skip_empty", empty, n_rows)
        empty.clear()
    if message := faults.describe(source or "the input", n_rows, "the column of texts"):
        raise UserError(message)


def _output_format(out: str, given: str | None) -> str:
    """Return 'csv' or 'jsonl': as `out_format` says, or by the extension of the file."""
    extension = Path(out).suffix.lower()
    if not given and extension in (".tsv", ".parquet", ".xlsx", ".gz", ".xz"):
        raise UserError(f"out={out}: use the extension .csv or .jsonl, or give out_format.")
    return given or ("csv" if extension == ".csv" else "jsonl")


def _open_output(out: str, encoding: str = "utf-8") -> AbstractContextManager[IO]:
    """Open standard output or a file, which appears when it is complete."""
    if out != "-":
        return open_atomically(out, "w", encoding=encoding, newline="")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding=encoding)  # in every locale
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

    flat = {name: value for name, value in row.items() if name != "probabilities"}
    for label, probability in row.get("probabilities", {}).items():
        column = f"probability {label}"
        if column in row:
            raise UserError(f"a row already has a column {column!r}: rename it.")
        flat[column] = probability
    if isinstance(flat.get("prediction"), list):
        flat["prediction"] = format_labels(flat["prediction"])
    return flat


def _to_text(value: Any) -> str:
    """Return the text of a value that JSON does not have, such as a decimal number."""
    if isinstance(value, bytes):
        raise TypeError("bytes are not a text")
    return str(value)


def _make_csv_table(file: IO, columns: list[str], dialect: Any) -> "csv.DictWriter[str]":
    """Write the first lines of a CSV in a dialect, and return the writer of its rows."""
    if dialect.has_byte_order_mark:
        file.write("\ufeff")
    if dialect.has_separator_line:
        file.write(f"sep={dialect.delimiter}{dialect.line_end}")
    table = csv.DictWriter(
        file, columns, "", delimiter=dialect.delimiter, lineterminator=dialect.line_end
    )
    table.writeheader()
    return table


def make_row_writer(
    file: IO,  # open for text
    format: str,  # 'csv', with the columns of the first row, or 'jsonl'
    dialect: Any = None,  # a `TableDialect` of CSV, which is read when the first row is written
) -> Callable[..., None]:
    """Return a function that writes a row to a file.

    With `is_header` it writes the names of the columns only, for a table without rows.
    """
    from idp_tutorial.data.file_readers import TableDialect

    tables: list[csv.DictWriter[str]] = []  # the writer, once there is a row

    def write_csv(row: dict, is_header: bool) -> None:
        """Write a row as a line of CSV, after the first lines."""
        values = _flatten_row(row)
        if not tables:
            tables.append(_make_csv_table(file, [*values], dialect or TableDialect()))
        if not is_header:
            tables[0].writerow(values)

    def write_row(row: dict, is_header: bool = False) -> None:
        """Write a row as a line of JSON or CSV."""
        try:
            if format == "csv":
                write_csv(row, is_header)
            elif not is_header:
                values = _to_json_value(row)
                text = json.dumps(values, ensure_ascii=False, allow_nan=False, default=_to_text)
                print(text, file=file)
        except UserError:
            raise
        except (TypeError, ValueError) as e:  # bytes, infinity, a new column, or an encoding
            other = "jsonl" if format == "csv" else "csv"
            raise UserError(
                f"{row!r:.80} cannot be written as {format} ({e}): use out_format={other}, or "
                "remove the column."
            ) from None

    return write_row


def _refuse_replaced_input(options: "PredictOptions") -> None:
    """Refuse an output that would replace the texts, the model or the backbone that is read."""
    used = [Path(options.texts), Path(options.glove or "-")]
    for folder, names in ((options.model, _MODEL_FILES), (options.backbone, ("*",))):
        used += [file for name in names for file in Path(folder or "/dev/null").glob(name)]
    outputs = {"out": Path(options.out)}
    if options.report:
        outputs["report"] = Path(options.report) / Path(options.texts).name
    for option, output in outputs.items():
        if output.is_file() and any(file.is_file() and file.samefile(output) for file in used):
            raise UserError(
                f"{option}={getattr(options, option)}: {output} is read by this command, which "
                "would replace it: give another name."
            )


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
            f"{where}: no column {column or 'label'!r} among {', '.join(row)}: name the labels in "
            "label=, or leave report out."
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
    from idp_tutorial.data.file_readers import TableDialect, detect_format

    output_format = _output_format(options.out, options.out_format)
    if options.report:
        check_writable_folder(options.report, "report=")
    _refuse_replaced_input(options)
    dialect = TableDialect()
    is_csv = output_format == "csv" and detect_format(options.texts, options.format) == "csv"
    encoding = (options.encoding if is_csv else None) or "utf-8"
    with _open_output(options.out, encoding) as file:  # an error, before the model is loaded
        write_row = make_row_writer(file, output_format, dialect if is_csv else None)
        task, labelled, predictions, title = _predict_file(options, write_row, dialect)
    if options.report:  # the predictions are complete, even if the report cannot be written
        from idp_tutorial.runs.report import write_report

        write_report(task, labelled, predictions, options.report, title)
        print_report(options.report, sys.stderr if options.out == "-" else sys.stdout)


def _read_rows(options: PredictOptions, task: Any, dialect: Any) -> Iterator[tuple[dict, dict]]:
    """Return the rows of the file, each with its texts."""
    from idp_tutorial.data.file_readers import has_header, iterate_rows
    from idp_tutorial.data.table_checks import RowFaults

    faults = RowFaults()
    read = iterate_rows(
        options.texts,
        options.format,
        task.pair,
        options.encoding,
        options.sep,
        dialect,
        partial(faults.add, "row"),
    )
    source = "standard input" if options.texts == "-" else options.texts
    return select_text_columns(
        read,
        task,
        options.text,
        options.text2,
        options.skip_empty,
        source if has_header(options.texts, options.format) else None,
        faults,
    )


def _empty_output_row(header: list[str], task: Any, with_probabilities: bool) -> dict:
    """Return a row with the columns that predictions for a table have."""
    row: dict[str, Any] = dict.fromkeys(header, "")
    if task.is_generation:
        return {**row, "generated": ""}
    row["prediction"] = ""
    if with_probabilities:
        row["probabilities"] = dict.fromkeys(task.labels, "")
    return row


def _predict_file(
    options: PredictOptions,
    write_row: Callable[..., None],
    dialect: Any,  # a `TableDialect`, which is told how the texts are written
) -> tuple[Any, list[dict], list[dict], str]:
    """Predict the texts of a file; return the task, rows, predictions and title of the report."""
    from idp_tutorial.core.devices import find_device
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
    if options.device == "auto":
        trained.to(find_device())
    rows = _read_rows(options, task, dialect)
    progress = ProgressLines()
    n_predicted = 0
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
        n_predicted += len(window)
        progress.report(f"{n_predicted:,} texts are predicted")
    if not n_predicted and dialect.header:
        write_row(_empty_output_row(dialect.header, task, options.proba), is_header=True)
    return task, labelled, all_predictions, f"{cfg.method} on {Path(options.texts).name}"

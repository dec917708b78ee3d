"""The command `idp predict`: one prediction for each text of a file, with a saved prompt.

The reader reads tables, JSON lines and plain lines. The text of a row is in the column that is
named, else in `sentence1`, or in the column that the model was trained on. A row keeps all its
columns, and the prediction is added to it.
"""

import csv
import json
import math
import sys
from collections.abc import Iterator
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

PREDICTION_COLUMNS = "prediction", "probabilities", "generated"  # columns that are added to a row
# Rows that are read, sorted by length and predicted together. With 1,024 rows and batches of 128,
# a tenth of the computed positions is padding; with 4,096 rows, three in a hundred.
WINDOW_SIZE = 4096
# files of a saved model that predicting reads, or that cannot be made again
_MODEL_FILES = ("prompts.*", "record.jsonl", "README.md", "SHA256SUMS", "checkpoint-*")


def read_texts(
    path: str,  # a file of texts; '-': standard input
    task: Any,  # a `Task`
    given: TextConfig,  # how the file is read, and the columns that were named
    dialect: Any = None,  # a `TableDialect`, which is told how the table is written
    with_label: bool = False,  # do the texts have the `label` of their row?
) -> Iterator[tuple[dict, dict]]:
    """Yield each row of a file, and its texts under the names of the task.

    Raises: `UserError` that names all faults of the rows, after all rows are read.
    """
    from idp_tutorial.data.file_readers import has_header, iterate_rows
    from idp_tutorial.data.table_checks import RowFaults
    from idp_tutorial.data.user_data import iterate_texts

    faults = RowFaults("standard input" if path == "-" else path)
    records = iterate_rows(
        path,
        given.format,
        task.pair,
        given.encoding,
        given.sep,
        dialect,
        partial(faults.add, "row"),
    )
    is_table = has_header(path, given.format)
    texts_of_rows = iterate_texts(
        records,
        faults,
        given,
        is_table,
        task.allow_empty_text,
        trained=task.source_columns,
        pair=task.pair,
        with_label=with_label,
        n_positional=int(is_table),  # the only column of a table has the texts
    )
    for where, row, texts in texts_of_rows:
        if taken := [column for column in PREDICTION_COLUMNS if column in row]:
            raise UserError(
                f"{path if is_table else where} already has a column {taken[0]!r}, which the "
                "prediction would replace: rename it."
            )
        if "group" in row:
            texts["group"] = row["group"]
        if not faults.messages and (given.skip_empty or not faults.missing):
            yield dict(row), texts  # otherwise the faults are only counted
    if given.skip_empty:
        faults.skip("text", "skip_empty")
    faults.refuse()


def _output_format(out: str, given: str | None) -> str:
    """Return 'csv' or 'jsonl': as `out_format` says, or by the extension of the file."""
    extension = Path(out).suffix.lower()
    if not given and extension in (".tsv", ".parquet", ".xlsx", ".gz", ".xz"):
        raise UserError(
            f"out={out}: use the extension .csv or .jsonl, or give out_format=csv or "
            "out_format=jsonl."
        )
    return given or ("csv" if extension == ".csv" else "jsonl")


def _open_output(out: str, encoding: str = "utf-8") -> AbstractContextManager[IO]:
    """Open standard output or a file, which appears when it is complete."""
    if out != "-":
        return open_atomically(out, "w", encoding=encoding, newline="")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding=encoding)  # in every locale
    return nullcontext(sys.stdout)


def _without_nan(value: Any) -> Any:
    """Return a value with null for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_nan(v) for v in value]
    is_nan = isinstance(value, float) and math.isnan(value)  # Parquet has it for missing values
    return None if is_nan else value


def _to_text(value: Any) -> str:
    """Return the text of a value that JSON does not have, such as a date or a decimal number."""
    if isinstance(value, bytes):
        raise TypeError("bytes are not a text")
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _flatten_row(row: dict) -> dict:
    """Return a row with one column for each probability, and several labels as one text."""
    from idp_tutorial.data.user_data import format_labels

    flat = dict(row)
    probabilities = flat.pop("probabilities", {})
    added = {f"probability {label}": value for label, value in probabilities.items()}
    if taken := [column for column in added if column in row]:
        raise UserError(
            f"a row already has a column {taken[0]!r}, which the prediction would replace: rename "
            "it."
        )
    if isinstance(flat.get("prediction"), list):
        flat["prediction"] = format_labels(flat["prediction"])
    return flat | added


class RowWriter:
    """Writes rows as JSON lines, or as CSV with the columns of the first row."""

    def __init__(
        self,
        file: IO,  # open for text
        format: str,  # 'csv' or 'jsonl'
        # a `TableDialect` for CSV, which is read when the first row is written
        dialect: Any = None,
    ) -> None:
        self.file = file
        self.format = format
        self.dialect = dialect
        self.table: csv.DictWriter[str] | None = None

    def write(self, row: dict) -> None:
        """Write a row as a line."""
        try:
            if self.format == "csv":
                self.write_header(row).writerow(_flatten_row(row))
            else:
                options: dict[str, Any] = dict(ensure_ascii=False, allow_nan=False)
                print(json.dumps(_without_nan(row), default=_to_text, **options), file=self.file)
        except (TypeError, ValueError) as e:  # bytes, infinity, another column, or an encoding
            if isinstance(e, UserError):
                raise
            other = "jsonl" if self.format == "csv" else "csv"
            raise UserError(
                f"{row!r:.80} cannot be written as {self.format} ({e}): remove the column, or use "
                f"out_format={other}."
            ) from None

    def write_header(self, row: dict) -> "csv.DictWriter[str]":
        """Write the first lines of a CSV table with the columns of a row, unless it has them."""
        from idp_tutorial.data.file_readers import TableDialect

        if self.table is None:
            dialect = self.dialect or TableDialect()
            separator = f"sep={dialect.delimiter}{dialect.line_end}"
            self.file.write("\ufeff" * dialect.has_byte_order_mark)
            self.file.write(separator * dialect.has_separator_line)
            options: dict[str, Any] = dict(
                delimiter=dialect.delimiter, lineterminator=dialect.line_end
            )
            self.table = csv.DictWriter(self.file, [*_flatten_row(row)], **options)
            self.table.writeheader()
        return self.table


def _refuse_replaced_input(options: "PredictOptions") -> None:
    """Refuse an output that would replace the texts, the model or the backbone that is read."""
    used = [Path(options.texts), Path(options.glove or "-")]
    for folder, names in ((options.model, _MODEL_FILES), (options.backbone, ("*",))):
        used += [file for name in names for file in Path(folder or "/dev/null").glob(name)]
    outputs = dict(out=options.out)
    if options.report:
        outputs["report"] = str(Path(options.report) / Path(options.texts).name)
    for option, output in outputs.items():
        written = Path(output)
        if written.is_file() and any(f.is_file() and f.samefile(written) for f in used):
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
        return {"generated": prediction["generated"]}
    columns = dict(prediction=prediction.get("label", prediction.get("value")))
    if with_probabilities and "probabilities" in prediction:
        columns["probabilities"] = prediction["probabilities"]
    return columns


def _parse_row_label(task: Any, value: Any, where: str) -> Any:
    """Return the label of a row as the task has it: an index, a number, or indicators."""
    from idp_tutorial.data.rows import convert_label
    from idp_tutorial.data.user_data import parse_label

    parsed = parse_label(value, where, task.is_regression, task.multi_label)
    if task.is_regression:
        return parsed
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
        writer = RowWriter(file, output_format, dialect if is_csv else None)
        task, labelled, predictions, title = _predict_file(options, writer, dialect)
    if options.report:  # the predictions are complete, even if the report cannot be written
        from idp_tutorial.runs.report import write_report

        write_report(task, labelled, predictions, options.report, title)
        print_report(options.report, sys.stderr if options.out == "-" else sys.stdout)


def _empty_output_row(header: list[str], task: Any, with_probabilities: bool) -> dict:
    """Return a row with the columns that predictions for a table have."""
    prediction = {"generated": ""} if task.is_generation else {"label": ""}
    probabilities = {"probabilities": dict.fromkeys(task.labels, "")}
    columns = _predicted_columns(prediction | probabilities, task, with_probabilities)
    return dict.fromkeys(header, "") | columns


def _predict_file(
    options: PredictOptions,
    writer: RowWriter,
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
    rows = read_texts(options.texts, task, options, dialect, bool(options.report))
    progress = ProgressLines()
    n_predicted = 0
    batch_size = options.batch_size
    # the rows of a question must be predicted together
    window_size = None if task.grouping == "choose" else max(WINDOW_SIZE, 8 * batch_size)
    while window := [*islice(rows, window_size)]:
        labels = [texts.pop("label", None) for _, texts in window]
        predictions = predict(trained, task, cfg, [texts for _, texts in window], batch_size)
        for (row, texts), label, prediction in zip(window, labels, predictions):
            writer.write({**row, **_predicted_columns(prediction, task, options.proba)})
            if options.report:
                label = _parse_row_label(task, label, f"row {len(labelled) + 1}")
                labelled.append({**texts, "label": label})
                all_predictions.append(prediction)
        n_predicted += len(window)
        progress.report(f"{n_predicted:,} texts are predicted")
    if not n_predicted and dialect.header and writer.format == "csv":
        writer.write_header(_empty_output_row(dialect.header, task, options.proba))
    return task, labelled, all_predictions, f"{cfg.method} on {Path(options.texts).name}"

"""Check rows, convert records of benchmarks to rows, and group the rows of a question.

A row is a dictionary with `sentence1`, for pairs `sentence2`, and `label`, or `target` for a task
that generates text. `check_row` checks it against its task.

A benchmark has its own columns, and sometimes its own label values: SST-2 has a `sentence`, TREC
writes `DESC` where this package writes 2. The `columns` of a task are therefore format strings
(`'{premise}'`, or `'{word}: {text}'` to join two columns). Where that is not enough, `convert_row`
of a task converts a record to rows: COPA asks which of two sentences is the cause or effect of a
third, MultiRC asks several questions about a paragraph with several answers each, and WiC marks a
word inside its sentences. Rows of one question have the same `group`.
"""

import re
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from idp_tutorial.data.task import Task
from idp_tutorial.utils.checks import UserError, is_number


def _to_indicators(task: Task, label: Any) -> list[int] | None:
    """Return an indicator for each label of the task, from a list of names or of indicators."""
    if not isinstance(label, (list, tuple, set)):
        return None
    if len(label) == len(task.labels) and all(value in (0, 1) for value in label):
        return [int(value) for value in label]
    is_known = all(name in task.labels for name in label)
    return task.label_indicators([*label]) if is_known else None


def _to_index(task: Task, label: Any) -> int | None:
    """Return the index of a class, from its index or its name."""
    # if the classes are called '1', '2', '3', the integer 1 is a name, not an index
    is_numeric_name = type(label) is int and all(n.isdecimal() for n in task.labels)
    name = str(label) if is_numeric_name else label
    if name in task.labels:
        return task.labels.index(name)
    return int(name) if name in range(len(task.labels)) else None


def convert_label(
    task: Task,  # the task of the row
    label: Any,  # a number, an index, a class name, or a list of names or indicators
    where: str,  # file and line, for the error message
) -> float | int | list[int]:
    """Return the number of a regression, the index of a class, or indicators of several labels."""
    names = ", ".join(task.labels)
    number: float | list[int] | None = None
    if task.is_regression:
        low, high = task.label_range
        needed = f"a number from {low} to {high}"
        if is_number(label) and low <= label <= high:
            number = float(label)
    elif task.multi_label:
        needed = f"a list of label names, or of 0 and 1 for each label ({names})"
        number = _to_indicators(task, label)
    else:
        needed = f"an index from 0 to {len(task.labels) - 1} or a class name ({names})"
        number = _to_index(task, label)
    if number is None:
        raise UserError(
            f"{where}: label must be {needed} for task {task.name!r}, got {label!r:.60}."
        )
    return number


def is_utf8(
    text: str,
) -> bool:
    """Return whether UTF-8 can encode a text, and whether it has no NUL character.

    JSON and Python strings may contain lone surrogates, which are halves of characters. A NUL
    character is a sign of UTF-16 that was read as another encoding.
    """
    return "\0" not in text and not re.search("[\ud800-\udfff]", text)


def require_utf8(
    text: str,  # the text to check
    source: str,  # its location, for the error message
) -> str:  # `text`
    """Return a text that `is_utf8`; raise `UserError` for others."""
    if not is_utf8(text):
        problem = "NUL character" if "\0" in text else "lone surrogate, half of a character"
        raise UserError(f"{source} contains a {problem}: write the text again as UTF-8.")
    return text


def is_empty_text(
    text: Any,  # a value of a text column
) -> bool:
    """Return whether a text is missing (None, NaN), or has no character but spaces."""
    if isinstance(text, str):
        return not text.strip()
    is_nan = isinstance(text, Real) and text != text
    return text is None or is_nan or type(text).__name__ == "NAType"  # of pandas


def require_text(
    value: Any,  # a value of a row or of a record
    name: str,  # its column, perhaps after its file and line, for the error message
    allow_empty: bool = False,  # accept a text of spaces or of no character
) -> str:
    """Return a text; raise `UserError` if it is missing, empty or not a string."""
    if not isinstance(value, str) or not (value.strip() or allow_empty):
        needed = "a text" if allow_empty else "a text that is not empty"
        raise UserError(f"{name} must be {needed}, got {value!r:.60}: correct or remove the row.")
    return require_utf8(value, name)


def check_row(
    task: Task,  # the task that the row belongs to
    # `sentence1`, perhaps `sentence2`, `label`, and `group` where several rows form one question
    row: dict,
    where: str,  # file and line, for error messages
    hint: str = "",  # text that is added to the message about missing columns
) -> dict:  # the columns of the task; a class name is replaced by its index
    """Check a row and keep the columns of its task; raise `UserError` if it is invalid."""
    texts = [*task.text_columns]
    group = ["group"] if task.grouping else []
    required = [*texts, *group, "target" if task.is_generation else "label"]
    if missing := [column for column in required if row.get(column) is None]:
        raise UserError(
            f"{where}: no {' and no '.join(missing)} among {', '.join(row)}. "
            f"Task {task.name!r} needs {', '.join(required)} in every row{hint}."
        )
    if group and not isinstance(row["group"], (str, int, float)):
        raise UserError(f"{where}: group must be a number or a text, got {row['group']!r:.60}.")
    if row.get("sentence2") and not task.pair:
        raise UserError(
            f"{where}: there is a sentence2, but task {task.name!r} is defined without pair=True."
        )
    if task.is_generation:
        texts.append("target")
    checked = {c: require_text(row[c], f"{where}: {c}", task.allow_empty_text) for c in texts}
    checked |= {column: row[column] for column in group}
    if task.is_generation:
        return checked
    return checked | {"label": convert_label(task, row["label"], where)}


def _read_texts(record: dict, *columns: str) -> list[str]:
    """Return the texts in columns of a record, which may be empty."""
    return [require_text(record[column], column, allow_empty=True) for column in columns]


def convert_copa_row(
    # `premise`, `choice1`, `choice2`, `question` ('cause' or 'effect'), `label` (0 if choice1 is
    # correct, 1 if choice2 is)
    record: dict,
    number: int,  # number of the record, which becomes the group
) -> list[dict]:  # two rows with `sentence1`, `sentence2`, `label`, `group`
    """Convert a COPA question to a row for each of its two candidates (Roemmele et al. 2011)."""
    premise, *choices = _read_texts(record, "premise", "choice1", "choice2")
    if record["question"] not in ("cause", "effect") or record["label"] not in (0, 1):
        raise UserError(
            "in COPA, question must be 'cause' or 'effect', and label 0 or 1, got "
            f"{record['question']!r:.40} and {record['label']!r:.40}."
        )
    question = f"{premise} What was the {record['question']}?"
    correct = record["label"]
    return [
        dict(sentence1=question, sentence2=choice, label=int(i == correct), group=number)
        for i, choice in enumerate(choices)
    ]


def convert_multirc_row(
    # a `passage` with questions and their answers, or (on the hub) one answer with `paragraph`,
    # `question`, `answer`, `label` and `idx`
    record: dict,
    number: int,  # number of the record
) -> list[dict]:  # a row for each answer, with `sentence1`, `sentence2`, `label`, `group`
    """Convert a MultiRC record to a row for each answer (Khashabi et al. 2018)."""
    answers = []  # question, answer, label, group
    if "passage" in record:
        (paragraph,) = _read_texts(record["passage"], "text")
        for j, question in enumerate(record["passage"]["questions"]):
            for answer in question["answers"]:
                texts = [*_read_texts(question, "question"), *_read_texts(answer, "text")]
                answers.append((*texts, answer["label"], f"{number}-{j}"))
    else:
        paragraph, *texts = _read_texts(record, "paragraph", "question", "answer")
        group = f"{record['idx']['paragraph']}-{record['idx']['question']}"
        answers.append((*texts, record["label"], group))
    return [
        dict(sentence1=paragraph, sentence2=f"{question} {answer}", label=label, group=group)
        for question, answer, label, group in answers
    ]


def _mark_span(record: dict, i: int) -> str:
    """Return sentence `i` (1 or 2) of a WiC record with stars around the word."""
    (sentence,) = _read_texts(record, f"sentence{i}")
    start = int(record[f"start{i}"])
    end = int(record[f"end{i}"])
    if not 0 <= start < end <= len(sentence):
        raise UserError(
            f"start{i}={start} and end{i}={end} of word {record['word']!r} must be positions in "
            f"sentence{i}, from 0 to {len(sentence)}, with start before end."
        )
    return f"{sentence[:start]}* {sentence[start:end]} *{sentence[end:]}"


def convert_wic_row(
    # `word`, `sentence1`, `sentence2`, `label`, and the character positions of the word: `start1`,
    # `end1`, `start2`, `end2`
    record: dict,
    number: int,  # number of the record, unused
) -> list[dict]:  # one row with `sentence1`, `sentence2`, `label`
    """Convert a WiC record to a row with the word marked in both sentences.

    Source: Pilehvar and Camacho-Collados 2019.
    """
    (word,) = _read_texts(record, "word")
    positions = ("start1", "end1", "start2", "end2")
    if missing := [column for column in positions if column not in record]:  # not rows either
        raise UserError(f"no {missing[0]} for word {word!r}, whose position a record of WiC gives.")
    marked = [_mark_span(record, i) for i in (1, 2)]
    return [dict(sentence1=f"{word} : {marked[0]}", sentence2=marked[1], label=record["label"])]


def _convert_benchmark_row(task: Task, record: dict, number: int) -> list[dict]:
    """Convert a record of the benchmark to rows; `KeyError` names a column that is missing."""
    if task.convert_row:
        return task.convert_row(record, number)
    first, second, label_column = task.columns
    texts = [first, second or ""] if task.pair else [first]
    _read_texts(record, *re.findall(r"{(\w+)}", "".join(texts)))
    row: dict[str, Any] = {
        name: text.format(**record) for name, text in zip(task.text_columns, texts)
    }
    label = record[label_column]
    row["label"] = task.hub_labels.index(label) if label in task.hub_labels else label
    return [row]


def convert_and_check_row(
    task: Task,  # the task that the record belongs to
    record: dict,  # a parsed line, in the schema of this package or of the benchmark
    number: int,  # its number in the file, blank lines not counted
    where: str,  # file and line, for error messages
    is_from_hub: bool = False,  # the record has the schema of the benchmark, in any case
) -> list[dict]:  # checked rows; several where a record is a question with several rows
    """Convert a record in either schema to checked rows."""
    has_row_schema = not (is_from_hub or task.convert_row) and (
        task.columns[0] == "{sentence1}" or "sentence1" in record
    )
    rows = [record]
    hint = ""
    if not has_row_schema:
        try:
            rows = _convert_benchmark_row(task, record, number)
        except KeyError as e:
            hint = f", or the columns of the benchmark, of which {e} is missing"
        except (AttributeError, TypeError, ValueError) as e:
            raise UserError(
                f"{where}: {str(e).rstrip('.')}: use the file of {task.name!r} as distributed."
            ) from e
    return [check_row(task, row, where, hint) for row in rows]


def group_by_question(
    rows: Sequence[dict],  # rows, with or without a `group`
) -> list[list]:  # the rows of each question, in the order of their first row
    """Group rows with the same `group`; a row without a group is a question by itself."""
    questions: dict[Any, list[dict]] = {}
    for i, row in enumerate(rows):
        key = ("group", row["group"]) if "group" in row else i
        questions.setdefault(key, []).append(row)
    return list(questions.values())


def check_one_correct_candidate(
    rows: Sequence[dict],  # rows with `group` and a label 0 or 1
    where: str,  # file or split, for error messages
) -> None:
    """Raise `UserError` unless every question has several candidates and one is correct."""
    for question in group_by_question(rows):
        n_correct = sum(row["label"] for row in question)
        if len(question) < 2 or n_correct != 1:
            raise UserError(
                f"{where}: {n_correct} of the {len(question)} candidates of question "
                f"{question[0]['group']!r} are labelled correct: label one of at least two."
            )


def convert_and_check_rows(
    task: Task,  # the task that the records belong to
    records: Iterable[tuple[str, dict]],  # each with its file and line, for error messages
    source: str,  # file or split, for error messages
    is_from_hub: bool = False,  # the records have the schema of the benchmark, in any case
) -> list[dict]:
    """Convert the records of a split in either schema to checked rows."""
    rows: list[dict] = []
    for number, (where, record) in enumerate(records, 1):
        rows += convert_and_check_row(task, record, number, where, is_from_hub)
    if task.grouping == "choose":
        check_one_correct_candidate(rows, source)
    return rows

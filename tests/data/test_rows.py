"""Rows: checked values, records of benchmarks, and questions with several rows."""

import json
import random
from collections import Counter

import pytest
from small import YES_NO, YES_NO_PAIRS, write_splits
from superglue import FOLDERS, NLI, generate_lines

from idp_tutorial.data.rows import (
    check_row,
    convert_and_check_row,
    convert_copa_row,
    convert_multirc_row,
    convert_wic_row,
    group_by_question,
)
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS, load_task

# ---- values


NOT_TEXTS = [None, 3, 2.5, True, [], ["a"], {"a": 1}]


FOREIGN = {
    "mnli": dict(premise="a", hypothesis="b", label=0),
    "boolq": dict(question="a", passage="b", label=1),
    "copa": dict(premise="a", choice1="b", choice2="c", question="cause", label=0),
    "multirc": dict(
        paragraph="a", question="b", answer="c", label=1, idx=dict(paragraph=0, question=0)
    ),
    "wic": dict(
        word="a", sentence1="a", sentence2="a", start1=0, end1=1, start2=0, end2=1, label=1
    ),
}


TEXTS = [
    (name, c)
    for name, r in FOREIGN.items()
    for c, v in r.items()
    if isinstance(v, str) and v != "cause"
]


@pytest.mark.parametrize("name,column", TEXTS)
@pytest.mark.parametrize("value", NOT_TEXTS, ids=repr)
def test_benchmark_columns_must_be_texts(name, column, value):
    assert convert_and_check_row(TASKS[name], FOREIGN[name], 1, "f, line 1")
    with pytest.raises(ValueError, match="f, line 7: "):
        convert_and_check_row(TASKS[name], FOREIGN[name] | {column: value}, 7, "f, line 7")


@pytest.mark.parametrize("value", NOT_TEXTS, ids=repr)
def test_row_columns_must_be_texts(value):
    with pytest.raises(ValueError, match="f, line 7: "):
        check_row(YES_NO, dict(sentence1=value, label=0), "f, line 7")


@pytest.mark.parametrize("y,index", [(1, 0), (3, 2), ("1", 0), ("3", 2)])
def test_an_integer_label_is_a_class_name_if_the_names_are_integers(y, index):
    task = Task("stars", labels=("1", "2", "3"))
    assert check_row(task, dict(sentence1="a", label=y), "f")["label"] == index
    with pytest.raises(
        ValueError, match=r"label must be an index .* a class name \(1, 2, 3\) .* got 0"
    ):
        check_row(task, dict(sentence1="a", label=0), "f")
    assert check_row(YES_NO, dict(sentence1="a", label=1), "f")["label"] == 1


@pytest.mark.parametrize("label", [5.1, -0.1, "3", None, True, float("nan")])
def test_regression_labels_must_be_in_their_range(label):
    with pytest.raises(
        ValueError, match="no label" if label is None else "must be a number from 0.0 to 5.0"
    ):
        check_row(TASKS["stsb"], dict(sentence1="a", sentence2="b", label=label), "here")


def test_pairs_need_a_second_sentence():
    with pytest.raises(
        ValueError,
        match="here: no sentence2 among sentence1, label. Task 'pair' needs sentence1, "
        "sentence2, label",
    ):
        check_row(YES_NO_PAIRS, dict(sentence1="a", label=0), "here")


# ---- records of SuperGLUE


def test_copa_asks_for_each_choice():
    line = dict(
        premise="The cup broke.",
        choice1="It fell.",
        choice2="It was blue.",
        question="cause",
        label=1,
    )
    a, b = convert_copa_row(line, 4)
    assert a == dict(
        sentence1="The cup broke. What was the cause?", sentence2="It fell.", label=0, group=4
    )
    assert (b["sentence2"], b["label"], b["group"]) == ("It was blue.", 1, 4)
    assert [
        r["label"] for r in convert_copa_row(line | dict(label=False, question="effect"), 0)
    ] == [1, 0]


def test_multirc_groups_by_question_not_by_paragraph(superglue_folder):
    rows = load_task("multirc", superglue_folder).splits["test"]
    lines = generate_lines("multirc", 12, 1)
    assert (
        len(group_by_question(rows))
        == sum(len(l["passage"]["questions"]) for l in lines)
        > len(lines)
    )
    assert len(rows) == sum(len(q["answers"]) for l in lines for q in l["passage"]["questions"])
    for q in group_by_question(rows):
        assert (
            len({r["sentence1"] for r in q}) == 1
            and len({r["sentence2"].split("?")[0] for r in q}) == 1
        )


def test_multirc_flat_rows_of_one_question_need_not_be_neighbours():
    rows = [
        r
        for l in random.Random(0).sample(generate_lines("multirc", 9, 0, True), 20)
        for r in convert_multirc_row(l, 0)
    ]
    assert len(group_by_question(rows)) == len({r["group"] for r in rows}) < len(rows)


def test_wic_marks_the_word_that_is_meant():
    (line,) = generate_lines("wic", 1)
    (r,) = convert_wic_row(line, 0)
    word = line["word"]
    assert r["sentence2"].count("*") == 2 and r["sentence2"].endswith(f"not that * {word} *.")
    assert r["sentence1"] == f"{word} : I saw the * {word} * number 0."
    assert (
        r["sentence2"].replace("* ", "").replace(" *", "") == line["sentence2"]
    )  # nothing else changes


def test_cb_has_three_names_and_boolq_has_booleans(superglue_folder):
    cb = load_task("cb", superglue_folder)
    boolq = load_task("boolq", superglue_folder)
    assert (
        cb.labels == NLI
        and Counter(r["label"] for r in cb.splits["test"]) == {0: 4, 1: 4, 2: 4}
        and not cb.grouping
    )
    for r in cb.splits["test"]:
        assert (
            cb.labels[r["label"]]
            == NLI[
                ("fell", "never", "gift").index(
                    next(w for w in ("never", "gift", "fell") if w in r["sentence2"])
                )
            ]
        )
    assert (
        [r["label"] for r in boolq.splits["test"][:4]]
        == [0, 1, 0, 1]
        == ["fell" in r["sentence2"] for r in boolq.splits["test"][:4]]
    )


@pytest.mark.parametrize(
    "name,change,match",
    [
        (
            "copa",
            lambda l: l.pop("choice2"),
            r"COPA/train.jsonl, line 3: no sentence1 and no sentence2 and no group among "
            r".* Task 'copa' needs sentence1, sentence2, group, label in every row, or the columns "
            r"of the benchmark, of which 'choice2' is missing",
        ),
        (
            "copa",
            lambda l: l.update(label=2),
            "line 3: in COPA, .* label 0 or 1, got .* and 2: use the file of",
        ),
        ("copa", lambda l: l.update(question="why"), "question must be 'cause' .* got 'why' and"),
        (
            "copa",
            lambda l: l.update(choice1=" "),
            "line 3: sentence2 must be a text that is not empty, got ' '",
        ),
        (
            "cb",
            lambda l: l.update(label="maybe"),
            r"line 3: label must be an index from 0 to 2 or a class name \(entailment, "
            r"contradiction, neutral\) for task 'cb', got 'maybe'",
        ),
        (
            "cb",
            lambda l: l.pop("hypothesis"),
            "no sentence1 and no sentence2 among .* of which 'hypothesis' is missing",
        ),
        ("boolq", lambda l: l.pop("passage"), "of which 'passage' is missing"),
        ("boolq", lambda l: l.pop("label"), "of which 'label' is missing"),
        ("boolq", lambda l: l.update(label="yes"), "line 3: label must be .* got 'yes'"),
        ("wic", lambda l: l.pop("start2"), r"line 3: no start2 for word '\w+'"),
        (
            "wic",
            lambda l: l.update(end1=999),
            r"line 3: start1=10 and end1=999 of word '\w+' must be positions in "
            r"sentence1, from 0 to \d+",
        ),
        ("wic", lambda l: l.update(end2=l["start2"]), "with start before end"),
        ("multirc", lambda l: l["passage"].pop("text"), "of which 'text' is missing"),
        (
            "multirc",
            lambda l: l.update(passage="A text."),
            "use the file of 'multirc' as distributed",
        ),
        (
            "multirc",
            lambda l: l["passage"]["questions"][0]["answers"][0].update(label=2),
            "line 3: label must be an index from 0 to 1 .* for task 'multirc', got 2",
        ),
    ],
)
def test_invalid_lines_are_reported_with_their_number(tmp_path, name, change, match):
    lines = generate_lines(name)
    change(lines[2])
    write_splits(tmp_path / FOLDERS[name], train=lines, val=generate_lines(name))
    with pytest.raises(ValueError, match=match):
        load_task(name, tmp_path)


# ---- questions


def test_a_question_needs_candidates(tmp_path):
    rows = [r for i, l in enumerate(generate_lines("copa", 9)) for r in convert_copa_row(l, i)]
    write_splits(tmp_path / "copa", train=rows[:-1], test=rows)
    with pytest.raises(
        ValueError, match="train.jsonl: . of the 1 candidates of question 8 are lab"
    ):
        load_task("copa", tmp_path)
    for ys, n in (((1, 1), 2), ((0, 0), 0)):
        write_splits(
            tmp_path / "copa", train=rows[:-2] + [{**r, "label": y} for r, y in zip(rows[-2:], ys)]
        )
        with pytest.raises(ValueError, match=f"{n} of the 2 candidates of question 8 are labelled"):
            load_task("copa", tmp_path)
    write_splits(
        tmp_path / "copa", train=[{k: v for k, v in r.items() if k != "group"} for r in rows]
    )
    with pytest.raises(ValueError, match="line 1: no group among sentence1, sentence2, label"):
        load_task("copa", tmp_path)


@pytest.mark.parametrize("group", [[1], {"a": 1}], ids=str)
def test_a_group_is_a_number_or_a_text(group, tmp_path):
    row = dict(sentence1="a", sentence2="b", label=1, group=group)
    (tmp_path / "copa").mkdir()
    for split in ("train", "validation"):
        (tmp_path / f"copa/{split}.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="line 1.*: group must be"):
        load_task("copa", tmp_path)

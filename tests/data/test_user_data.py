"""Tables of the user: columns, splits that are held out, and messages."""

import json
from collections import Counter

import pandas as pd
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from idp_tutorial.data.config import TableConfig, TextConfig
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.data.user_data import (
    _read_source,
    format_labels,
    hold_out_rows,
    iterate_records,
    load_table_task,
    parse_label,
    register_table_task,
    resolve_columns,
    sort_class_names,
)


def test_an_unknown_option_of_a_table_is_refused():
    with pytest.raises(ValueError, match="unknown option 'txt': did you mean 'text'"):
        load_table_task("tickets.csv", txt="message")


def test_a_separator_that_does_not_fit_is_named(tmp_path):
    (tmp_path / "semi.csv").write_text("text;label\na;b\n")
    with pytest.raises(ValueError, match="no column 'text' among text;label: .* separator .* sep="):
        load_table_task(tmp_path / "semi.csv", sep=",")
    (tmp_path / "comma.csv").write_text("text,label\na,b\n")
    with pytest.raises(ValueError, match="no column 'text' among text,label: .* separator .* sep="):
        load_table_task(tmp_path / "comma.csv", sep="tab")


def test_a_folder_of_splits(tmp_path):
    (tmp_path / "mine").mkdir()
    rows = [dict(text=f"text {i}", label=i % 2) for i in range(20)]
    Dataset.from_list(rows).to_parquet(tmp_path / "mine/train.parquet")
    (tmp_path / "mine/dev.jsonl").write_text("\n".join(map(json.dumps, rows[:4])))
    task, missing_splits = load_table_task(tmp_path / "mine")
    assert missing_splits == ["test"] and {s: len(r) for s, r in task.splits.items()} == dict(
        train=18, validation=4, test=2
    )
    assert task.labels == ("0", "1") and task.name == "mine"
    (tmp_path / "mine/test.tsv").write_text("text\tlabel\na\t\nb\t\n")
    with pytest.warns(UserWarning, match="The test rows of .* have no labels"):
        assert load_table_task(tmp_path / "mine")[1] == ["test"]
    (tmp_path / "mine/dev.jsonl").write_text('{"text": "a", "label": 7}')
    with (
        pytest.raises(
            ValueError, match="validation rows: label must be .* a class name .0, 1. .* got '7'"
        ),
        pytest.warns(UserWarning),
    ):
        load_table_task(tmp_path / "mine")


def test_two_files_of_one_split_are_refused(tmp_path):
    for name in ("train.csv", "validation.csv", "dev.csv"):
        (tmp_path / name).write_text("text,label\na,0\nb,1\n")
    with pytest.raises(
        ValueError,
        match="has several tables for the split 'validation' .dev.csv, validation.csv.: keep",
    ):
        load_table_task(str(tmp_path))


def test_a_missing_class_label_is_reported(tmp_path):
    labels = ClassLabel(names=["no", "yes"])
    features = Features(dict(text=Value("string"), label=labels))
    rows = [dict(text=f"t{i}", label=i % 2) for i in range(20)]

    def read(label):
        rows_ = Dataset.from_list([*rows, dict(text="last", label=label)], features=features)
        rows_, faults = _read_source(rows_, TableConfig())
        faults.refuse()
        return rows_

    for label in (None, -1):
        with pytest.raises(ValueError, match=r"1 of 21 rows has no label \(dataset, row 21\)"):
            read(label)
    assert read(1)[-1]["label"] == "yes"


def test_empty_texts_are_counted_and_can_be_left_out(tmp_path, caplog):
    lines = ["text,label", *(f"text {i},{'ab'[i % 2]}" for i in range(20))]
    for i in range(3, 19, 2):
        lines[i] = f'" ",{"ab"[i % 2]}'
    (tmp_path / "a.csv").write_text("\n".join(lines))
    words = (
        r"8 of 20 rows have no text in column 'text' \(.*a.csv, line 4, line 6, line 8, line 10, "
        r"line 12 …\): write the texts or remove these rows .skip_empty"
    )
    with pytest.raises(ValueError, match=words):
        load_table_task(tmp_path / "a.csv")
    task, _ = load_table_task(tmp_path / "a.csv", skip_empty=True)
    assert sum(map(len, task.splits.values())) == 12
    (message,) = caplog.messages
    assert message.startswith(f"skip_empty left out 8 of 20 rows ({tmp_path}/a.csv, line 4, line")
    caplog.clear()
    rows = [dict(text=f"text {i}" if i else None, label="ab"[i % 2]) for i in range(20)]
    with pytest.raises(ValueError, match=r"1 of 20 rows has no text .*dataset, row 1\)"):
        load_table_task(Dataset.from_list(rows))
    blank = Dataset.from_list([dict(text="", label="a")] * 4)
    with pytest.raises(ValueError, match="dataset has no rows with a text"):
        load_table_task(blank, skip_empty=True)


def test_missing_labels_are_counted(tmp_path):
    lines = ["text,label", *(f"text {i},{'ab'[i % 2] if i > 2 else ''}" for i in range(20))]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"3 of 20 rows have no label \(.*line 2, line 3, line 4"):
        load_table_task(tmp_path / "a.csv")


def labelled_dataset(n=20):
    labels = ClassLabel(names=["no", "yes"])
    features = Features(dict(message=Value("string"), topic=labels))
    rows = [dict(message=f"text {i}", topic=i % 2) for i in range(n)]
    return Dataset.from_list(rows, features=features)


def test_datasets_and_their_folders_are_tables(tmp_path, caplog):
    whole = labelled_dataset()
    columns = dict(text="message", label="topic")
    task, held_out = load_table_task(whole, **columns)
    assert task.labels == ("no", "yes") and held_out == ["test", "validation"]
    splits = DatasetDict(train=whole, dev=labelled_dataset(4), extra=whole)
    task, held_out = load_table_task(splits, **columns)
    assert held_out == ["test"] and len(task.splits["validation"]) == 4
    assert task.columns == ("{message}", None, "topic")
    splits.save_to_disk(tmp_path / "saved")
    whole.save_to_disk(tmp_path / "one")
    assert load_table_task(tmp_path / "saved", **columns)[0].splits == task.splits
    assert load_table_task(str(tmp_path / "one"), **columns)[0].name == "one"
    load_table_task(whole, **columns, sep=";")
    assert "sep: no effect for a dataset, which is no file" in caplog.messages
    (tmp_path / "saved/train/state.json").write_text("{")
    for data, options, words in (
        (tmp_path / "saved", {}, "saved cannot be loaded as a saved dataset"),
        (DatasetDict(test=whole), {}, "has no training rows, only test: name a split train"),
        (DatasetDict(train=whole, val=whole, dev=whole), {}, "several tables .* .val, dev.: keep"),
    ):
        with pytest.raises(ValueError, match=words):
            load_table_task(data, **columns, **options)


def test_every_reader_finds_the_same_columns(tmp_path):
    """A file, a dataset, a data frame and a list of rows are one table."""
    rows = [dict(text=f"t {i}", text2=f"u {i}", label="ab"[i % 2], features="x") for i in range(20)]
    rows = [{**row, "split": "y"} for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task, _ = load_table_task(tmp_path / "a.jsonl")
    assert task.pair and task.columns == ("{text}", "{text2}", "label")
    for table in (Dataset.from_list(rows), pd.DataFrame(rows), rows):
        assert load_table_task(table)[0].splits == task.splits
    with pytest.raises(ValueError, match=r"1 of 21 rows has no text .*dataset, row 21"):
        load_table_task([*rows, dict(text=None, text2="u", label="a")])


def test_some_rows_with_a_second_text_are_a_fault(tmp_path):
    rows = [dict(text=f"t {i}", label="ab"[i % 2]) for i in range(20)]
    rows[4]["text2"] = "u"
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="line 5: give each row a second text, or no row"):
        load_table_task(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    "names,options,columns",
    [
        (("text", "label"), {}, ("text", None, "label")),
        (("sentence1", "sentence2", "label"), {}, ("sentence1", "sentence2", "label")),
        (("sentence", "text2", "label"), {}, ("sentence", None, "label")),
        (("text", "text2", "label"), dict(pair=False), ("text", None, "label")),
        (("text", "mine", "y"), dict(trained=("mine", None, "y")), ("mine", None, "y")),
        (("text", "label"), dict(trained=("mine", None, "y")), ("text", None, "label")),
        (("mine", "reply", "y"), dict(trained=("mine", "reply", "y")), ("mine", "reply", "y")),
        ((0, 1, "label"), dict(n_positional=2), (0, 1, "label")),
    ],
)
def test_columns_are_those_of_training_or_have_usual_names(names, options, columns):
    resolved = resolve_columns(names, "a.csv", TextConfig(), with_label=True, **options)
    assert resolved == columns


@pytest.mark.parametrize("names", [("a", "label"), ("a", "b", "c", "label")])
def test_columns_without_usual_names_are_named(names):
    with pytest.raises(ValueError, match="a.csv: no column 'text' among a, .* in text="):
        resolve_columns(names, "a.csv", TextConfig(), n_positional=2 * (len(names) > 2))


def test_a_known_name_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "own-sentiment", None)  # removes the task after the test
    (tmp_path / "sentiment.tsv").write_text(
        "text\tlabel\n" + "".join(f"text {i}\t{'ab'[i % 2]}\n" for i in range(20))
    )
    task, _ = register_table_task(tmp_path / "sentiment.tsv")
    assert (
        task.name == "own-sentiment"
        and TASKS["own-sentiment"] is task
        and not TASKS["sentiment"].splits
    )
    assert (
        register_table_task(tmp_path / "sentiment.tsv")[0].name == "own-sentiment"
    )  # the same table again


@pytest.mark.parametrize("name", ["copy.csv", "blank.csv", "table.tsv", "table.parquet"])
def test_rows_have_texts_and_labels_only_whatever_file_they_come_from(name, tmp_path):
    rows = [dict(text=f"text {i}", label="ab"[i % 2]) for i in range(40)]
    lines = ["text,label", *(f"{r['text']},{r['label']}" for r in rows)]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    (tmp_path / "copy.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "blank.csv").write_text("\n".join([*lines[:9], "", *lines[9:]]))
    (tmp_path / "table.tsv").write_text("\n".join(lines).replace(",", "\t"))
    Dataset.from_list(rows).to_parquet(tmp_path / "table.parquet")
    task, _ = load_table_task(tmp_path / "table.csv")
    assert all(set(row) == {"sentence1", "label"} for row in task.splits["train"])
    assert load_table_task(tmp_path / name)[0].splits == task.splits


def test_missing_splits_are_held_out_in_proportion_to_the_classes(tmp_path):
    lines = [f'"ticket {i}, please",{("billing", "delivery", "refund")[i % 3]}' for i in range(60)]
    (tmp_path / "tickets.csv").write_text("\n".join(["message,topic", *lines]))
    task, held_out = load_table_task(tmp_path / "tickets.csv", text="message", label="topic")
    assert held_out == ["test", "validation"] and task.name == "tickets"
    for split, n in dict(train=16, validation=2, test=2).items():
        assert Counter(row["label"] for row in task.splits[split]) == {0: n, 1: n, 2: n}


def test_a_class_with_one_row_stays_in_the_training_rows():
    labels = ["common"] * 91 + ["rare"] * 8 + ["once"]
    rows = [dict(sentence1=str(i), label=label) for i, label in enumerate(labels)]
    rest, held_out = hold_out_rows(rows, 0.1)
    assert len(rest) == 90 and Counter(row["label"] for row in held_out) == dict(common=9, rare=1)


def test_class_names_that_are_integers_are_sorted_as_numbers():
    assert sort_class_names(["10", "9", "9"]) == ("9", "10")
    assert sort_class_names(["10", "9", "x"]) == ("10", "9", "x")


def test_labels_become_class_names_or_numbers():
    assert [parse_label(value, "f") for value in (" billing", 3, True)] == ["billing", "3", "True"]
    assert parse_label("2.5", "f", regression=True) == 2.5


def test_a_class_that_only_the_test_split_has_is_compared_with_those_of_training(tmp_path):
    rows = [dict(text=f"a text {i}", label=i % 2 == 0) for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.csv").write_text("text,label\none,true\n")
    message = "test rows: label must be .* a class name .False, True. .* got 'true'"
    with pytest.raises(ValueError, match=message):
        load_table_task(tmp_path)


@pytest.mark.parametrize(
    "value,regression,message",
    [
        (["a", "b"], False, "line 2: the label is .* multi_label=True for lists"),
        ({"name": "a"}, False, "line 2: the label is .*, but a class is a text or a whole number"),
        (None, False, "line 2: every row needs a label, got None"),
        (" ", False, "line 2: every row needs a label"),
        (float("nan"), False, "line 2: every row needs a label, got nan"),
        ("high", True, "line 2: the label of a regression must be a number, got 'high'"),
        (True, True, "must be a number, got True"),
        ("inf", True, "must be a number, got 'inf'"),
        ("2,5", True, "must be a number, got '2,5'"),
        ("1_0", True, "must be a number, got '1_0'"),
        ("١٢", True, "must be a number, got '١٢'"),
        (1j, True, "must be a number, got 1j"),
        (2.5, False, "line 2: the label is 2.5, .* pass regression=True"),
        ("a\ud800", False, "line 2: the label contains a lone surrogate"),
        ("a\0", False, "line 2: the label contains a NUL character"),
    ],
)
def test_invalid_labels_are_reported(value, regression, message):
    with pytest.raises(ValueError, match=message):
        parse_label(value, "line 2", regression)


# ---- several labels of a row


@pytest.mark.parametrize(
    "value,names",
    [
        ("late | rude", ["late", "rude"]),
        ("late", ["late"]),
        ("", []),
        ("a|a", ["a"]),
        ('["a|b", "c"]', ["a|b", "c"]),
        (["a", 2], ["a", "2"]),
        ([], []),
        (7, ["7"]),
    ],
)
def test_labels_of_a_row_are_read(value, names):
    assert parse_label(value, "row 1", multi_label=True) == names
    assert parse_label(format_labels(names), "row 1", multi_label=True) == names


@pytest.mark.parametrize(
    "value", [None, float("nan"), {"a": 1}, "[broken", "a||b", [["a"]], [None], [""]]
)
def test_labels_that_cannot_be_read_are_refused(value):
    with pytest.raises(ValueError, match="row 1: the labels are .* leave the cell empty"):
        parse_label(value, "row 1", multi_label=True)


def test_a_table_of_several_labels(tmp_path):
    rows = [f"text {i},{('late', 'late|rude', '', 'rude')[i % 4]}" for i in range(40)]
    (tmp_path / "complaints.csv").write_text("\n".join(["text,label", *rows]))
    task, _ = load_table_task(tmp_path / "complaints.csv", multi_label=True)
    assert task.labels == ("late", "rude") and task.multi_label and task.metric == "micro_f1"
    by_text = {row["sentence1"]: row["label"] for rows in task.splits.values() for row in rows}
    assert [by_text[f"text {i}"] for i in range(4)] == [[1, 0], [1, 1], [0, 0], [0, 1]]
    with pytest.raises(ValueError, match="exclude each other"):
        load_table_task(tmp_path / "complaints.csv", multi_label=True, regression=True)
    (tmp_path / "lists.jsonl").write_text('{"text": "a", "label": ["x", "y"]}')
    with pytest.raises(ValueError, match="multi_label=True for lists"):
        load_table_task(tmp_path / "lists.jsonl")


def test_lists_of_class_labels_are_decoded():
    labels = List(ClassLabel(names=["no", "yes"]))
    features = Features(dict(text=Value("string"), label=labels))
    rows = [dict(text="a", label=[0, 1]), dict(text="b", label=[])]
    dataset = Dataset.from_list(rows, features=features)
    read, _ = _read_source(dataset, TableConfig(multi_label=True))
    assert [row["label"] for row in read] == [["no", "yes"], []]


def test_two_columns_of_one_name_are_refused():
    frame = pd.DataFrame([["1", "2", "a text"]], columns=["id", "id", "text"])
    with pytest.raises(ValueError, match="several columns are named 'id'"):
        list(iterate_records(frame))


def test_whole_numbers_in_a_column_with_a_hole_are_whole_numbers():
    texts = [f"text {i}" for i in range(13)]
    frame = pd.DataFrame(dict(text=texts, label=[1, 2, 10] * 4 + [None]))  # floats
    task, _ = load_table_task(frame, skip_unlabelled=True)
    assert [*task.labels] == ["1", "2", "10"]


def test_a_test_split_may_have_no_column_of_labels_and_other_names(tmp_path):
    rows = [dict(text=f"text {i}", label="ab"[i % 2]) for i in range(12)]
    pd.DataFrame(rows).to_csv(tmp_path / "train.csv", index=False)
    pd.DataFrame(dict(sentence=["one", "two"])).to_csv(tmp_path / "test.csv", index=False)
    with pytest.warns(UserWarning, match="test rows of .* have no labels and are ignored"):
        task, _ = load_table_task(tmp_path)
    assert task.source_columns[0] == "text"


def test_an_at_sign_in_a_path_is_part_of_the_path(tmp_path):
    folder = tmp_path / "me@work"
    folder.mkdir()
    rows = [dict(text=f"text {i}", label="ab"[i % 2]) for i in range(12)]
    pd.DataFrame(rows).to_csv(folder / "tickets.csv", index=False)
    assert load_table_task(folder / "tickets.csv")[0].name == "tickets"

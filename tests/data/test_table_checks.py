"""A messy table: all of its problems in one run, and texts that are in two splits."""

import json
import logging
import random

import pytest

from idp_tutorial.data.file_readers import TableDialect, iterate_rows
from idp_tutorial.data.user_data import hold_out_rows, load_table_task, parse_label

BAD = ("1;unquoted;text;human", "2;one cell too few")


def write_excel_export(file, n=200, seed=0, bad=BAD):
    """Write a table as Excel exports it, with everything that people find in one."""
    rng = random.Random(seed)
    lines = ["sep=;", "Id;Message;Topic"]
    for i in range(n):
        topic = rng.choice(["human", "machine", "Human"]) if i else "once"
        text = f"message {i}: <b>hello</b> 🌧️ {'word ' * (10_000 if i == 7 else 3)}"
        if i % 20 == 3:
            topic = ""
        if i % 50 == 9:
            text = " "
        lines.append(f'{i};"{text}";{topic}')
    lines += bad
    lines += ['901;"said twice";human', '902;"said twice";machine', '903;"the same";human'] * 2
    file.write_text("\ufeff" + "\r\n".join(lines) + "\r\n", encoding="utf-8", newline="")
    return file


def test_all_problems_of_a_table_are_named_at_once(tmp_path, caplog):
    file = write_excel_export(tmp_path / "export.csv")
    with pytest.raises(ValueError) as e:
        load_table_task(file, text="Message", label="Topic")
    message = str(e.value)
    assert "\n" not in message and "export.csv has 3 kinds of problems: (1) " in message
    assert "4 of 208 rows have no text in column 'Message' (" in message
    assert "export.csv, line 12, line 62" in message  # the header is line 2
    assert "10 of 208 rows have no label (" in message and "skip_unlabelled" in message
    assert "2 of 208 rows cannot be read. " in message
    assert "export.csv, line 203: 4 cells, but the header has 3 columns" in message
    assert "export.csv, line 204: 2 cells" in message
    notes = "\n".join(caplog.messages)
    assert "2 classes have names that differ only by case" in notes
    assert "'human' (" in notes and "'Human' (" in notes
    assert "1 class has one row ('once')" in notes
    assert "1 text has several labels in different rows ('said twice' is 'human' and" in notes


def test_a_messy_table_is_read_with_what_is_skipped(tmp_path, caplog):
    file = write_excel_export(tmp_path / "export.csv", bad=())
    options = dict(text="Message", label="Topic", skip_empty=True, skip_unlabelled=True)
    task, _ = load_table_task(file, **options)
    assert sum(map(len, task.splits.values())) == 206 - 4 - 10
    notes = "\n".join(caplog.messages)
    assert "skip_empty left out 4 of 206 rows" in notes
    assert "skip_unlabelled left out 10 of 206 rows" in notes
    assert "4 of 192 rows of " in notes and "repeat the text of another row" in notes


def test_the_dialect_of_a_table_is_told(tmp_path):
    file = write_excel_export(tmp_path / "export.csv")
    dialect = TableDialect()
    rows = [*iterate_rows(file, dialect=dialect, on_fault=lambda error: None)]
    assert dialect == TableDialect(";", "\r\n", True, True, ["Id", "Message", "Topic"])
    assert rows[0][0].endswith("export.csv, line 3") and rows[0][1]["Topic"] == "once"
    (tmp_path / "plain.csv").write_text("text,label\na,b\n")
    plain = TableDialect()
    assert [*iterate_rows(tmp_path / "plain.csv", dialect=plain)]
    assert plain == TableDialect(header=["text", "label"])


@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "SEP=;", "sep=|", "sep=\t"])
def test_the_separator_line_of_excel_is_no_header(line, tmp_path):
    separator = line.strip('"')[4]
    (tmp_path / "a.csv").write_text(f"{line}\ntext{separator}label\na{separator}b\n")
    assert [*iterate_rows(tmp_path / "a.csv")] == [
        (f"{tmp_path}/a.csv, line 3", dict(text="a", label="b"))
    ]


def test_a_fault_of_the_header_is_not_one_of_its_first_row(tmp_path):
    rows = "".join(f"a{i},b\n" for i in range(9))
    (tmp_path / "a.csv").write_text("message,topic\n" + rows)
    with pytest.raises(ValueError, match=r"a\.csv: no column 'text' among message, topic"):
        load_table_task(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": 1}\n{"txt": "a", "label": 2}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: no column 'text' among txt"):
        load_table_task(tmp_path / "a.jsonl")


def test_lines_of_json_that_cannot_be_read_are_counted(tmp_path):
    lines = [json.dumps(dict(text=f"t{i}", label="ab"[i % 2])) for i in range(30)]
    lines[3] = "{"
    lines[5] = json.dumps(dict(text=5, label="a"))
    lines[7] = json.dumps(dict(text="x", label=None))
    lines[9] = json.dumps(dict(text="x", label=2.5))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError) as e:
        load_table_task(tmp_path / "a.jsonl")
    for words in ("line 4 is not valid JSON", "line 6: text must be a text", "1 of 30 rows has no"):
        assert words in str(e.value)
    assert "line 10: the label is 2.5" in str(e.value)


# ---- texts in two splits


def write_split(folder, name, texts, label="ab"):
    rows = [dict(text=text, label=label[i % len(label)]) for i, text in enumerate(texts)]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_texts_that_splits_share_are_counted(tmp_path, caplog):
    write_split(tmp_path, "train", [f"t{i}" for i in range(40)])
    write_split(tmp_path, "test", [f"t{i}" for i in range(30, 50)])
    load_table_task(tmp_path)
    expected = f"10 of 20 test texts of {tmp_path} are training texts too ('t30', 't31')"
    assert any(message.startswith(expected) for message in caplog.messages)


@pytest.mark.parametrize("split,other", [("test", "train"), ("dev", "train"), ("test", "dev")])
def test_one_file_as_two_splits_is_refused(split, other, tmp_path):
    write_split(tmp_path, "train", [f"t{i}" for i in range(40)])
    write_split(tmp_path, other, [f"t{i}" for i in range(40)])
    write_split(tmp_path, split, [f"t{i}" for i in reversed(range(40))])
    with pytest.raises(ValueError, match="rows again: leave"):
        load_table_task(tmp_path)


def test_equal_texts_are_held_out_together(tmp_path, caplog):
    texts = [f"t{i % 100}" for i in range(150)]
    rows = "".join(f"{text},{'ab'[int(text[1:]) % 2]}\n" for text in texts)
    (tmp_path / "a.csv").write_text("text,label\n" + rows)
    for seed in range(5):
        task, _ = load_table_task(tmp_path / "a.csv", seed=seed)
        splits = {s: {r["sentence1"] for r in rows} for s, rows in task.splits.items()}
        assert not splits["train"] & splits["test"] and not splits["train"] & splits["validation"]
        assert 13 <= len(task.splits["test"]) <= 15 and len(task.splits["validation"]) >= 13
    assert "50 of 150 rows" in caplog.text and "equal texts stay in the same split" in caplog.text
    caplog.clear()
    task, _ = load_table_task(tmp_path / "a.csv", group_duplicates=False)
    splits = {s: {r["sentence1"] for r in rows} for s, rows in task.splits.items()}
    assert splits["train"] & splits["test"] and "may be in two splits" in caplog.text


def test_equal_texts_with_two_labels_are_held_out_together():
    rows = [dict(sentence1=f"t{i % 50}", label="ab"[i // 50]) for i in range(100)]
    rest, sampled = hold_out_rows(rows, 0.2)
    assert len(sampled) == 20
    assert not {r["sentence1"] for r in rest} & {r["sentence1"] for r in sampled}


def test_rows_that_are_all_equal_are_held_out_all_the_same():
    rows = [dict(sentence1="ab"[i % 2], label="ab"[i % 2]) for i in range(20)]
    rest, sampled = hold_out_rows(rows, 0.2)
    assert len(rest) == 16 and len(sampled) == 4


def test_a_table_without_problems_is_read_in_silence(tmp_path, caplog):
    rows = "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(40))
    (tmp_path / "a.csv").write_text("text,label\n" + rows)
    with caplog.at_level(logging.INFO):
        load_table_task(tmp_path / "a.csv")
    assert not caplog.messages


def test_a_whole_number_that_no_float_holds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="label of a regression must be a number"):
        parse_label(10**400, "line 2", regression=True)
    lines = [json.dumps(dict(text=f"t{i}", label=i)) for i in range(30)]
    lines[4] = '{"text": "x", "label": 1' + "0" * 400 + "}"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 5: the label of a regression must be"):
        load_table_task(tmp_path / "a.jsonl", regression=True)


NAMES = [("Human", "human"), ("caf\u00e9", "cafe\u0301"), ("ﬁne", "fine"), ("a  b", "a b")]


@pytest.mark.parametrize("one,other", NAMES)
def test_classes_that_look_alike_are_named(one, other, tmp_path, caplog):
    write_split(tmp_path, "train", [f"t{i}" for i in range(40)], [one, other, "else"])
    load_table_task(tmp_path)
    (message,) = caplog.messages
    assert message.startswith("2 classes have names that differ only by case, spaces or Unicode")
    assert repr(one) in message and repr(other) in message

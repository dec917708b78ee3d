"""Tables of the user: the commands of the README, held-out splits, pairs, numbers, YAML files."""

import csv
import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from small import make_topic_texts

from idp_tutorial import PromptClassifier
from idp_tutorial.cli.main import main
from idp_tutorial.data.tasks import TASKS

README = Path(__file__).resolve().parents[2] / "README.md"
QUICK = "--steps 2 --evaluations 1 --batch_size 8 --prompt_length 2 --device cpu"


@pytest.fixture(autouse=True)
def tickets(tmp_path, monkeypatch, small_folder):
    """A folder with a table; the tasks that commands make known are forgotten again."""
    monkeypatch.chdir(tmp_path)
    rows = [
        [f'ticket {i}, "please"', ("billing", "delivery", "login")[i % 3], i / 2, f"answer {i}"]
        for i in range(60)
    ]
    with open("tickets.csv", "w", newline="") as f:
        csv.writer(f).writerows([["message", "topic", "days", "reply"], *rows])
    Path("new.csv").write_text("message,label\nwhere is it ?,mine\n")
    for name, text in {
        "empty.csv": "message,topic\n",
        "twice.yaml": "steps: 3\nevaluations: 1\nsteps: 4\n",
        "same.yaml": "batch-size: 3\nbatch_size: 4\n",
        "weights.yaml": "class_weight: {login: 3, login: 4}\n",
        "dates.yaml": "class_weight: {billing: 2020-01-01}\n",
        "on.yaml": "label: on\ntext: 12:30\n",
    }.items():
        Path(name).write_text(text)
    monkeypatch.setattr("idp_tutorial.data.tasks.TASKS", TASKS)
    before = {*TASKS}
    yield
    for name in TASKS.keys() - before:
        del TASKS[name]


def call(line, monkeypatch):
    """A command as a shell would call it, in this process."""
    _, *argv = shlex.split(line)
    monkeypatch.setattr(sys, "argv", [str(Path(sys.prefix, "bin/idp")), *argv])
    main(argv)


def test_the_commands_of_readme(small_folder, monkeypatch, capsys):
    block = re.search(
        r"## Your own data\n+```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.S
    )[1]
    lines = [line for line in block.strip().splitlines() if line.startswith("idp ")]
    assert [line.split()[1] for line in lines] == ["compare", "train", "predict"]
    for line in lines:
        more = "--device cpu" if "predict" in line else QUICK
        line = line.partition("  #")[0].replace("--backbone minilm", f"--backbone {small_folder}")
        if "compare" in line:
            line += f" --backbone {small_folder} --methods probe,lpt-npg"
        line = line.replace("--method lora", "--method lpt-npg")
        call(f"{line} {more}{' --seeds 1' if 'compare' in line else ''}", monkeypatch)
    captured = capsys.readouterr()
    assert "tickets: 48 train, 6 validation, 6 test rows; held out at random" in captured.err
    assert "3 classes: billing" in captured.err
    assert "lpt-npg on tickets, seed 0: accuracy" in captured.out and "tickets on" in captured.out
    with open("predictions.csv", newline="") as file:
        (answer,) = csv.DictReader(file)
    assert answer["label"] == "mine" and answer["prediction"] in ("billing", "delivery", "login")
    assert 0 < float(answer["probability login"]) < 1
    clf = PromptClassifier.from_pretrained("tickets")  # a folder of the command is an estimator
    assert clf.predict(["where is it ?"]).tolist() == [answer["prediction"]]


def test_a_file_of_options_is_the_flags(small_folder, monkeypatch, capsys):
    flags = (
        f"idp train tickets.csv --text message --label topic {QUICK} --backbone {small_folder} "
        "--lr 1e-3"
    )
    call(f"{flags} --out a", monkeypatch)
    Path("run.yaml").write_text(
        "table: tickets.csv\ntext: message\nlabel: topic\nsteps: 2\nevaluations: 1\n"
        f"batch-size: 8\nprompt-length: 2\ndevice: cpu\nbackbone: {small_folder}\nlr: 1e-3\n"
        "precision: no\nregression: false\nout: b\n"
    )
    call("idp train --config run.yaml", monkeypatch)
    r, s = [json.loads(Path(f, "record.jsonl").read_text()) for f in "ab"]
    for record in (r, s):
        for name in ("provenance", "ms_per_step", "peak_memory_mb", "digest"):
            record.pop(name, None)
    assert r == s and r["lr"] == 1e-3
    capsys.readouterr()


def test_what_a_run_would_cost(small_folder, monkeypatch, capsys):
    call(
        f"idp train tickets.csv --text message --label topic --dry-run {QUICK} "
        f"--backbone {small_folder}",
        monkeypatch,
    )
    out = capsys.readouterr().out
    assert "lpt-npg on tickets: 4," not in out and "trained parameters" in out and "minutes" in out
    assert not Path("runs").exists()


def test_pairs_and_numbers(small_folder, monkeypatch, capsys):
    call(
        f"idp train tickets.csv --text message --text2 reply --label days --regression --test 0 "
        f"{QUICK} --backbone {small_folder} --out days",
        monkeypatch,
    )
    assert (
        "54 train, 6 validation, 6 test rows; " in (captured := capsys.readouterr()).err
        and "regression" in captured.err
    )
    assert "classes" not in captured.err
    assert "the validation rows report the score" in captured.err
    call("idp predict --model days --texts tickets.csv --device cpu", monkeypatch)
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert isinstance(first["prediction"], float) and first["topic"] == "billing"


@pytest.mark.parametrize(
    "options,words",
    [
        ("tickets.csv", "no column 'text' among message, topic"),
        (
            "tickets.csv --text message --label days",
            "check their column, --label days",
        ),
        ("--text message", "no table is given"),
        ("--validation .2", "no table is given"),
        ("--regression", "no table is given"),
        ("--method lora --prompt_length 5", "method 'lora' has no option 'prompt_length'"),
        (
            "tickets.csv --text message --label topic --task mr",
            "--task mr and the table tickets.csv are two tasks",
        ),
        ("nowhere.csv --text a --label b", "no file or folder nowhere.csv"),
        ("nowhere/there --text a", "nowhere/there"),
        (
            "tickets.csv --text message --label topic --validation 1",
            "validation must be below 1, got 1.0 .a fraction .* such as 0.1",
        ),
        (
            "tickets.csv --text message --label topic --validation 0",
            "validation must be a positive number, got 0.0 .a fraction .* such as 0.1",
        ),
        (
            "tickets.csv --text message --label topic --test -1",
            "test must be at least 0, got -1.0 .* or 0 for none",
        ),
        (
            "tickets.csv --text message --label topic --test nan",
            "test must be at least 0, got nan",
        ),
        (
            "tickets.csv --text message --label topic --test .95",
            "--test 0.95 and --validation 0.1 leave no rows .* below 1",
        ),
        ("tickets.csv --text topic --label topic", "text, label must be different columns, got"),
        (
            "tickets.csv --text message --text2 message --label topic",
            "must be different columns, got",
        ),
        ("empty.csv --text message --label topic", "idp train: empty.csv has no rows"),
        ("--config twice.yaml", "--config twice.yaml cannot be read .steps occurs twice"),
        ("--config same.yaml", "same.yaml .*batch_size occurs twice"),
        ("--config weights.yaml", "weights.yaml .*login occurs twice"),
        ("--config dates.yaml", "class_weight .*2020-01-01.*: give balanced, or"),
        (
            "tickets.csv --config on.yaml",
            "(12:30|'on')",
        ),  # not 750, nor yes: columns are called as they are written
        ("--method head-only --layer 3 --dry_run", "method 'head-only' has no option 'layer'"),
        ("--method probe --dry_run", "'probe' is a control and has no prompt to save"),
        ("tickets.csv --text days --label topic --format jsonl", "line 1 is not valid JSON"),
        ("tickets.csv --text message --label topic --regression", "must be a number"),
    ],
)
def test_refused_in_one_sentence(options, words, monkeypatch, capsys):
    with pytest.raises(SystemExit) as e:
        call(f"idp train {options}", monkeypatch)
    err = capsys.readouterr().err
    assert e.value.code == 2 and re.search(words, err) and err.count("\n") == 1


@pytest.mark.long
def test_streams_that_are_closed_or_narrow(monkeypatch):
    from idp_tutorial.data.file_readers import iterate_rows

    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="standard input is closed"):
        [*iterate_rows("-", "lines", False)]
    help = [sys.executable, "-m", "idp_tutorial", "train", "--help"]
    got = subprocess.run(
        help, env=os.environ | dict(PYTHONIOENCODING="ascii"), capture_output=True, text=True
    )
    assert got.returncode == 0 and r"configs/\u2026" in got.stdout, got.stderr


# ---- several labels, reports and metrics


@pytest.fixture
def topics():
    """A table of texts with several labels each, joined by |."""
    texts, labels = make_topic_texts(160)
    with open("topics.csv", "w", newline="") as f:
        rows = [[text, "|".join(names)] for text, names in zip(texts, labels)]
        csv.writer(f).writerows([["text", "topics"], *rows])
    return texts, labels


@pytest.mark.long
def test_several_labels_are_trained_predicted_and_reported(topics, monkeypatch, capsys):
    _, labels = topics
    call(
        "idp train topics.csv --label topics --multi_label --method head-only --steps 60 --lr 3e-2 "
        "--evaluations 2 --metric macro_f1 --device cpu --out run --report",
        monkeypatch,
    )
    captured = capsys.readouterr()
    assert "3 labels, any number in a row: food, money, sport" in captured.err
    assert "head-only on topics, seed 0: macro_f1" in captured.out
    assert "| micro F1 (%) |" in captured.out and "written: run/report/report.md" in captured.out
    record = json.loads(Path("run/record.jsonl").read_text())
    with open("run/report/scores.csv", newline="") as file:
        scores = {row["score"]: float(row["value"]) for row in csv.DictReader(file)}
    assert scores["macro_f1"] == pytest.approx(record["score"], rel=1e-4)
    # to predict every label gets micro F1 57
    assert record["scores"]["micro_f1"] > 70
    call(
        "idp predict --model run --texts topics.csv --proba --out out.csv --device cpu "
        "--report new --label topics",
        monkeypatch,
    )
    assert "written: new/report.md" in capsys.readouterr().out
    clf = PromptClassifier.from_pretrained("run")
    assert clf.label_form_ == "lists" and clf.classes_.tolist() == ["food", "money", "sport"]
    with open("out.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    predicted = clf.predict([row["text"] for row in rows])
    assert [row["prediction"].split("|") if row["prediction"] else [] for row in rows] == predicted
    assert all(
        (float(row["probability food"]) > 0.5) == ("food" in row["prediction"]) for row in rows
    )
    correct = sum({*a} == {*b} for a, b in zip(predicted, labels)) / len(rows)
    with open("new/scores.csv", newline="") as file:
        scores = {row["score"]: float(row["value"]) for row in csv.DictReader(file)}
    assert scores["subset_accuracy"] == pytest.approx(100 * correct, rel=1e-4)


def test_a_report_of_predictions_needs_labels(small_folder, monkeypatch, capsys):
    table = "tickets.csv --text message --label topic"
    call(f"idp train {table} {QUICK} --backbone {small_folder} --out run", monkeypatch)
    predict = "idp predict --model run --text message --device cpu"
    call(f"{predict} --texts tickets.csv --report r --out p.jsonl", monkeypatch)
    with open("r/classes.csv", newline="") as file:
        support = {row["label"]: row["support"] for row in csv.DictReader(file)}
    assert support["billing"] == support["login"] == "20" and support["macro avg"] == "60"
    answers = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    n_wrong = sum(answer["prediction"] != answer["topic"] for answer in answers)
    with open("r/errors.csv", newline="") as file:
        assert len([*csv.DictReader(file)]) == n_wrong
    capsys.readouterr()
    Path("none.csv").write_text("message\nwhere is it\n")
    for line, words in (
        (f"{predict} --texts none.csv --report q", "no column 'label' among message"),
        (f"{predict} --texts new.csv --report q", "label must be an index"),
        (f"{predict} --texts new.csv --label label", "--label label is not used without report"),
    ):
        with pytest.raises(SystemExit) as error:
            call(line, monkeypatch)
        assert error.value.code == 2 and words in capsys.readouterr().err
    assert not Path("q").exists()

    def write_nothing(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "r")

    monkeypatch.setattr("idp_tutorial.runs.report.write_report", write_nothing)
    with pytest.raises(SystemExit) as error:
        call(f"{predict} --texts tickets.csv --report r --out again.jsonl", monkeypatch)
    assert error.value.code == 2 and "No space left" in capsys.readouterr().err
    assert Path("again.jsonl").read_text() == Path("p.jsonl").read_text()


def test_a_report_of_numbers_is_drawn(small_folder, monkeypatch, capsys):
    call(
        f"idp train tickets.csv --text message --label days --regression {QUICK} "
        f"--backbone {small_folder} --out run --report",
        monkeypatch,
    )
    assert "| mean absolute error |" in capsys.readouterr().out
    assert Path("run/report/scatter.png").is_file()


def test_compare_takes_a_metric_and_class_weights(small_folder, monkeypatch, capsys):
    call(
        "idp compare tickets.csv --text message --label topic --methods majority,head-only "
        f"{QUICK.replace('--prompt_length 2', '')} --backbone {small_folder} --metric log_loss "
        "--class_weight balanced --out c",
        monkeypatch,
    )
    assert "neg_log_loss" in capsys.readouterr().out
    records = [json.loads(line) for line in Path("c/compare.jsonl").read_text().splitlines()]
    assert {r["metric"] for r in records} == {"neg_log_loss"}
    assert [r["class_weight"] for r in records] == ["balanced"] * 2
    assert all(r["score"] < 0 for r in records)


def test_a_table_of_excel_is_trained_and_predicted(small_folder, monkeypatch, capsys, caplog):
    lines = ["message;topic", *(f"café {i} – open;{'ab'[i % 2]}" for i in range(40)), " ;a"]
    Path("excel.csv").write_bytes("\r\n".join(lines).encode("cp1252"))
    train = f"idp train excel.csv --text message --label topic {QUICK} --backbone {small_folder}"
    with pytest.raises(SystemExit):
        call(train, monkeypatch)
    assert "pass --encoding utf-16, 'cp1252'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call(f"{train} --encoding cp1252", monkeypatch)
    assert "1 of 41 rows has no text in column 'message'" in capsys.readouterr().err
    caplog.clear()
    call(f"{train} --encoding cp1252 --skip_empty --out m", monkeypatch)
    assert "columns are separated by ';'" in caplog.messages[0] and "1 of 41" in caplog.messages[1]
    err = capsys.readouterr().err  # what is logged is seen, once
    assert err.count("columns are separated by") == err.count("skip_empty left out 1 of 41") == 1
    predict = "idp predict --model m --texts excel.csv --encoding cp1252 --sep ';' --device cpu"
    call(f"{predict} --skip_empty --out out.csv", monkeypatch)
    with open("out.csv", newline="", encoding="cp1252") as file:  # as the table was written
        rows = list(csv.DictReader(file, delimiter=";"))
    assert len(rows) == 40 and rows[3]["message"] == "café 3 – open" and rows[3]["prediction"]


def test_a_saved_dataset_is_given_as_table_or_as_data(small_folder, monkeypatch, capsys):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    features = Features(dict(message=Value("string"), topic=ClassLabel(names=["no", "yes"])))
    rows = [dict(message=f"ticket {i}", topic=i % 2) for i in range(20)]
    DatasetDict(
        train=Dataset.from_list(rows, features=features),
        validation=Dataset.from_list(rows[:4], features=features),
    ).save_to_disk("saved")
    options = f"--text message --label topic {QUICK} --backbone {small_folder} --dry_run"
    for data in ("saved", "--data saved"):
        call(f"idp train {data} {options}", monkeypatch)
        assert "18 train, 4 validation, 2 test rows" in (err := capsys.readouterr().err), err
        assert "2 classes: no, yes" in err

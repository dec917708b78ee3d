"""The output of idp predict."""

import io
import json
import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from small import config, small_task

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.cli import predict as predict_module
from idp_tutorial.cli import progress
from idp_tutorial.cli.predict import (
    RowWriter,
    _open_output,
    _output_format,
    predict_command,
    read_texts,
)
from idp_tutorial.data.config import TextConfig
from idp_tutorial.saving.prompt_files import save_pretrained
from idp_tutorial.training import evaluation
from idp_tutorial.utils import durable_files


def test_nan_becomes_null_and_infinity_is_refused():
    output = io.StringIO()
    RowWriter(output, "jsonl").write(dict(size=math.nan, split_sizes=[1.0, dict(a=math.nan)], n=3))
    assert json.loads(output.getvalue()) == dict(size=None, split_sizes=[1.0, dict(a=None)], n=3)
    with pytest.raises(ValueError, match="cannot be written as jsonl .Out of range float"):
        RowWriter(output, "jsonl").write(dict(size=[math.inf]))


def test_a_prediction_replaces_no_column_of_the_table():
    with pytest.raises(ValueError, match="already has a column 'probability yes'"):
        RowWriter(io.StringIO(), "csv").write(
            {"probability yes": "1", "probabilities": dict(yes=0.5)}
        )


def test_the_extension_decides_the_output_format():
    assert [
        _output_format(out, None) for out in ("-", "a.csv", "a.CSV", "a.jsonl", "a", "a.txt")
    ] == ["jsonl", "csv", "csv"] + ["jsonl"] * 3
    assert _output_format("a.tsv", "csv") == "csv" and _output_format("a.csv", "jsonl") == "jsonl"
    for out in ("a.tsv", "a.Parquet", "a.xlsx", "a.csv.gz", "a.csv.xz"):
        with pytest.raises(
            ValueError,
            match=f"out={out}: use the extension .csv or .jsonl",
        ):
            _output_format(out, None)


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    for out, words in (
        ("nope/a.csv", "nope/a.csv cannot be used (No such file or directory)"),
        (".", "cannot be used (Is a directory)"),
        ("file/a.csv", "file/a.csv cannot be used (Not a directory)"),
    ):
        with pytest.raises(SystemExit):
            predict_command(model="nowhere", out=out)  # before the model is looked for
        err = capsys.readouterr().err
        assert words in err and err.startswith("idp predict: ") and err.count("\n") == 1
    with pytest.raises(SystemExit):
        predict_command(model="nowhere", out="")
    assert capsys.readouterr().err == "idp predict: out is empty: give a value, or leave it out.\n"
    with _open_output("/dev/null") as file:
        file.write("x")
    monkeypatch.setattr(durable_files, "open", Mock(side_effect=PermissionError), raising=False)
    with pytest.raises(PermissionError), _open_output("new"):
        pass


def test_bytes_are_refused():
    with pytest.raises(ValueError, match="cannot be written as jsonl .bytes are not a text"):
        RowWriter(io.StringIO(), "jsonl").write(dict(text="tea", image=b"x"))


@pytest.fixture(scope="module")
def saved_tiny(tmp_path_factory):
    """Return the folder of an untrained model on the bundled backbone."""
    cfg = config(backbone="tiny")
    task = small_task()
    folder = tmp_path_factory.mktemp("saved")
    save_pretrained(build_model(cfg, load_config_backbone(cfg), task), folder, task, cfg)
    return folder


def read_predictions(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_texts(path, n):
    words = ["good", "a bad and dull film", "the actors are wonderful in every scene ."]
    path.write_text("".join(f"{words[i % 3]} {'very ' * (i % 11)}{i}\n" for i in range(n)))


def test_bfloat16_predicts_nearly_what_float32_does(saved_tiny, tmp_path, record_property):
    write_texts(tmp_path / "in", 120)
    predictions = {}
    for dtype in (None, "float32", "bfloat16"):
        out = tmp_path / f"{dtype}.jsonl"
        predict_command(
            model=str(saved_tiny), texts=str(tmp_path / "in"), out=str(out), proba=True, dtype=dtype
        )
        predictions[dtype] = read_predictions(out)
    assert predictions["float32"] == predictions[None]
    exact = torch.tensor([[*p["probabilities"].values()] for p in predictions[None]])
    rounded = torch.tensor([[*p["probabilities"].values()] for p in predictions["bfloat16"]])
    smallest_cosine = torch.cosine_similarity(exact, rounded).min().item()
    same = [a["prediction"] == b["prediction"] for a, b in zip(*[*predictions.values()][1:])]
    agreement = sum(same) / len(same)
    record_property("smallest_cosine", smallest_cosine)
    record_property("agreement", agreement)
    assert 0.999 < smallest_cosine < 1 and agreement > 0.95


def test_windows_change_neither_predictions_nor_the_order_of_rows(
    saved_tiny, tmp_path, monkeypatch
):
    write_texts(tmp_path / "in", 30)
    sizes = []
    predict = evaluation.predict

    def counted(model, task, cfg, rows, batch_size):
        sizes.append(len(rows))
        return predict(model, task, cfg, rows, batch_size)

    monkeypatch.setattr(evaluation, "predict", counted)
    results = []
    for window in (4096, 8):
        monkeypatch.setattr(predict_module, "WINDOW_SIZE", window)
        out = tmp_path / f"{window}.jsonl"
        predict_command(
            model=str(saved_tiny), texts=str(tmp_path / "in"), out=str(out), batch_size=1
        )
        results.append(read_predictions(out))
    assert sizes == [30, 8, 8, 8, 6]
    assert results[0] == results[1]
    assert [r["sentence1"] for r in results[0]] == (tmp_path / "in").read_text().splitlines()


def test_an_empty_text_of_a_table_is_predicted_if_the_task_allows_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": ""}\n')
    file = str(tmp_path / "a.jsonl")
    task = replace(small_task(), allow_empty_text=True)
    texts = [texts for _, texts in read_texts(file, task, TextConfig())]
    assert texts == [dict(sentence1="good"), dict(sentence1="")]
    with pytest.raises(ValueError, match="line 2"):
        [*read_texts(file, small_task(), TextConfig())]


def predict_text(saved, tmp_path, content, name="in.csv", out="out.csv", **options):
    """Write a file, predict it, and return the bytes of the output."""
    (tmp_path / name).write_bytes(content)
    options = dict(model=str(saved), texts=str(tmp_path / name), out=str(tmp_path / out)) | options
    predict_command(device="cpu", **options)
    return (tmp_path / out).read_bytes()


DIALECTS = {  # content of a table without the cells: the first lines of the output
    b"text,id\n%s,1\n": b"text,id,prediction\n%s,1,",
    b"text;id\r\n%s;1\r\n": b"text;id;prediction\r\n%s;1;",
    b"\xef\xbb\xbfsep=;\r\ntext;id\r\n%s;1\r\n": (
        b"\xef\xbb\xbfsep=;\r\ntext;id;prediction\r\n%s;1;"
    ),
}


@pytest.mark.parametrize("table", DIALECTS)
def test_a_table_keeps_its_dialect(saved_tiny, tmp_path, table):
    text = "caf\u00e9 <b>\U0001f327</b>".encode()
    out = predict_text(saved_tiny, tmp_path, table % text)
    assert out.startswith(DIALECTS[table] % text)
    again = predict_text(  # what was written is a table again
        saved_tiny, tmp_path, out.replace(b"prediction", b"earlier"), "again.csv", "twice.csv"
    )
    assert again.count(b"\n") == out.count(b"\n")


def test_a_table_keeps_its_encoding(saved_tiny, tmp_path):
    content = "text;id\ncaf\u00e9;1\n".encode("cp1252")
    out = predict_text(saved_tiny, tmp_path, content, encoding="cp1252")
    assert out.startswith(content[:-1].replace(b"text;id", b"text;id;prediction"))


@pytest.mark.parametrize("proba", [False, True])
@pytest.mark.parametrize("header", [b"text,id\n", b"text;id\r\n", b"text\n"])
def test_a_table_without_rows_gives_one(saved_tiny, tmp_path, header, proba):
    out = predict_text(saved_tiny, tmp_path, header, proba=proba)
    filled = predict_text(
        saved_tiny, tmp_path, header + header.replace(b"text", b"tea"), proba=proba
    )
    assert out and out.splitlines() == filled.splitlines()[:1]
    out = out.replace(b"prediction", b"earlier")
    assert predict_text(saved_tiny, tmp_path, out, "again.csv", "twice.csv")
    assert predict_text(saved_tiny, tmp_path, header, out="out.jsonl") == b""


def test_the_only_column_of_a_table_has_the_texts(saved_tiny, tmp_path):
    out = predict_text(saved_tiny, tmp_path, b"Message\ntea\n")
    assert out.startswith(b"Message,prediction\ntea,")


def test_all_faults_of_a_table_are_named_at_once(saved_tiny, tmp_path, capsys):
    lines = [b"text,id", b"tea,1", b" ,2", b"tea", b"rain,4", b"a\0b,5", b" ,6", b"tea,1,2"]
    lines[5] = b"rain,5"
    with pytest.raises(SystemExit):
        predict_text(saved_tiny, tmp_path, b"\n".join(lines))
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "in.csv has 2 kinds of problems: (1) 2 of 7 rows have no" in err
    assert "2 of 7 rows cannot be read." in err and "line 4: 1 cells" in err
    assert "line 8: 3 cells" in err and not (tmp_path / "out.csv").exists()


def test_a_missing_column_is_a_fault_of_the_header(saved_tiny, tmp_path, capsys):
    for content, words in (
        (b"a,b\nc,d\n", "in.csv: "),
        (b"a,prediction\nc,d\n", "in.csv already has a column 'prediction'"),
    ):
        with pytest.raises(SystemExit):
            predict_text(saved_tiny, tmp_path, content, text="a" if b"pred" in content else "x")
        err = capsys.readouterr().err
        assert words in err and "line 2" not in err


def replaced_files(saved):
    return [
        dict(out="in.csv"),
        dict(out="link.csv"),
        dict(out=str(saved / "prompts.json")),
        dict(out=str(saved / "prompts.safetensors")),
        dict(report="."),
    ]


@pytest.mark.parametrize("n", range(5))
def test_an_output_replaces_nothing_that_is_read(saved_tiny, tmp_path, n, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.csv").write_text("text,label\ntea,positive\n")
    (tmp_path / "link.csv").symlink_to("in.csv")
    before = {p: p.read_bytes() for p in [*saved_tiny.iterdir(), tmp_path / "in.csv"]}
    options = dict(model=str(saved_tiny), texts="in.csv", device="cpu", out="new.csv")
    with pytest.raises(SystemExit):
        predict_command(**options | replaced_files(saved_tiny)[n])
    assert "is read by this command, which would replace it" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in before} == before
    predict_command(**options)
    predict_command(**options)  # an earlier output is replaced


def test_a_line_of_progress_is_printed_now_and_then(saved_tiny, tmp_path, monkeypatch, capsys):
    write_texts(tmp_path / "in", 30)
    monkeypatch.setattr(predict_module, "WINDOW_SIZE", 8)
    options = dict(model=str(saved_tiny), texts=str(tmp_path / "in"), out=str(tmp_path / "out"))
    predict_command(**options, batch_size=1)
    assert "texts are predicted" not in capsys.readouterr().err
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.0)
    predict_command(**options, batch_size=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{n} texts are predicted" for n in (8, 16, 24, 30)]

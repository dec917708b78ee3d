"""The output of idp predict, and the label map of idp transfer."""

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
from idp_tutorial.cli.predict import (
    _open_output,
    _output_format,
    make_row_writer,
    predict_command,
    select_text_columns,
)
from idp_tutorial.saving.prompt_files import save_pretrained
from idp_tutorial.training import evaluation
from idp_tutorial.utils import durable_files


def test_nan_becomes_null_and_infinity_is_refused():
    output = io.StringIO()
    make_row_writer(output, "jsonl")(dict(size=math.nan, split_sizes=[1.0, dict(a=math.nan)], n=3))
    assert json.loads(output.getvalue()) == dict(size=None, split_sizes=[1.0, dict(a=None)], n=3)
    with pytest.raises(ValueError, match="cannot be written as jsonl .Out of range float"):
        make_row_writer(output, "jsonl")(dict(size=[math.inf]))


def test_a_prediction_replaces_no_column_of_the_table():
    with pytest.raises(ValueError, match="already has a column 'probability yes'"):
        make_row_writer(io.StringIO(), "csv")(
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
            match=f"out={out}: predictions are written as uncompressed CSV or JSON lines",
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
        make_row_writer(io.StringIO(), "jsonl")(dict(text="tea", image=b"x"))


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


def test_an_empty_text_of_a_table_is_predicted_if_the_task_allows_it():
    rows = [("line 1", dict(text="good")), ("line 2", dict(text=""))]
    task = replace(small_task(), allow_empty_text=True)
    texts = [texts for _, texts in select_text_columns(rows, task)]
    assert texts == [dict(sentence1="good"), dict(sentence1="")]
    with pytest.raises(ValueError, match="line 2"):
        [*select_text_columns(rows, small_task())]

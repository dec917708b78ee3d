"""The output of idp predict, and the label map of idp transfer."""

import io
import json
import math
import os

import pytest

from idp_tutorial.cli.predict import _output_format, make_row_writer, predict_command
from idp_tutorial.cli.transfer import parse_label_map
from idp_tutorial.utils.checks import check_writable_file


def test_nan_becomes_null_and_infinity_is_refused():
    output = io.StringIO()
    make_row_writer(output, "jsonl")(dict(size=math.nan, split_sizes=[1.0, dict(a=math.nan)], n=3))
    assert json.loads(output.getvalue()) == dict(size=None, split_sizes=[1.0, dict(a=None)], n=3)
    with pytest.raises(ValueError, match="column 'size' contains infinity"):
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
        ("nope/a.csv", "the folder nope does not exist: create it"),
        (".", "is a folder: give a file in it"),
        ("file/a.csv", "the folder file does not exist"),
    ):
        with pytest.raises(SystemExit):
            predict_command(model="nowhere", out=out)  # before the model is looked for
        err = capsys.readouterr().err
        assert words in err and err.startswith(f"idp predict: out={out}") and err.count("\n") == 1
    with pytest.raises(SystemExit):
        predict_command(model="nowhere", out="")
    assert capsys.readouterr().err == "idp predict: out is empty: give a value, or leave it out.\n"
    for out in ("file", "new", "/dev/null"):
        check_writable_file(out)
    monkeypatch.setattr(os, "access", lambda *a: False)
    check_writable_file("/dev/null")
    with pytest.raises(ValueError, match="there is no write permission in ."):
        check_writable_file("new")


def test_a_label_map_is_parsed():
    assert parse_label_map(" a = b,c=b ") == dict(a="b", c="b") and parse_label_map(None) is None
    with pytest.raises(ValueError, match="label 'a' is mapped twice"):
        parse_label_map("a = b,a=c")
    with pytest.raises(ValueError, match="'b' is not a pair"):
        parse_label_map("a=c,b")

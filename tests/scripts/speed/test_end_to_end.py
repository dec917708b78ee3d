"""Whole commands timed in turns, beside scripts of other libraries."""

import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from idp_tutorial.utils.records import read_existing_records
from results.speed import end_to_end
from results.speed.bench import bench_command

SMALL_SIZES = dict(train=48, validation=12, test=12)


def run_in_this_process(command, **kwargs):
    """Run `python -m MODULE ARGUMENTS` in this process, where libraries are imported already."""
    _, flag, module, *arguments = command
    assert flag == "-m" and kwargs["capture_output"] and kwargs["env"]["HF_HUB_OFFLINE"] == "1"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        monkeypatch.delitem(sys.modules, module, raising=False)
        runpy.run_module(module, run_name="__main__")
    return SimpleNamespace(returncode=0, stderr="")


@pytest.mark.slow
def test_whole_commands_are_timed_beside_those_of_others(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    monkeypatch.setattr(end_to_end, "SIZES", SMALL_SIZES)
    monkeypatch.setattr(end_to_end, "N_ANSWERS", 24)
    monkeypatch.setattr(end_to_end, "subprocess", SimpleNamespace(run=run_in_this_process))
    peft_dtypes = []  # of the models that the script for peft loads

    def load_and_note_dtype(*args, **kwargs):
        """Load a model, and note its dtype if the script for peft asks for it."""
        model = load(*args, **kwargs)
        if sys.argv[0].endswith("other_scripts") and "--lr" in " ".join(sys.argv):
            peft_dtypes.append(model.dtype)
        return model

    load = AutoModelForSequenceClassification.from_pretrained
    loader = "transformers.AutoModelForSequenceClassification.from_pretrained"
    monkeypatch.setattr(loader, load_and_note_dtype)
    out = tmp_path / "end.jsonl"
    kwargs = dict(measure="commands", backbone="tiny", methods="lora", device="cpu")
    bench_command(**kwargs, batch_size=32, length=128, repeats=1, threads=1, out=str(out))
    captured = capsys.readouterr()
    rows = read_existing_records(out)
    assert [(r["part"], r["name"], r.get("dtype")) for r in rows] == [
        ("training", "idp train", None),
        ("training", "peft + Trainer", None),
        ("answering", "idp predict", "float32"),
        ("answering", "pipeline", "float32"),
        ("answering", "idp predict", "bfloat16"),
        ("answering", "pipeline", "bfloat16"),
    ]
    assert all(len(r["seconds"]) == 1 and r["processor"] and r["versions"]["peft"] for r in rows)
    assert all((r["batch_size"], r["max_len"], r["task"]) == (32, 128, "questions") for r in rows)
    assert rows[0]["sizes"] == dict(train=48, validation=12, test=12, predict=24)
    assert all(0 < r["score"] <= 100 for r in rows[:2]) and "score" not in rows[2]
    assert rows[0]["ratio"] == pytest.approx(rows[1]["seconds"][0] / rows[0]["seconds"][0], 0.02)
    assert rows[0]["baseline"] == "peft + Trainer" and rows[4]["baseline"] == "pipeline"
    assert [r["ratio"] for r in rows if r["name"] in ("pipeline", "peft + Trainer")] == [None] * 3
    assert rows[3]["over_pipeline"] == 1 and rows[2]["as_float32"] == 100
    assert str(tmp_path) not in out.read_text()  # no path of this machine
    assert peft_dtypes == [torch.float32]  # the bundled checkpoint is in float16
    for words in ("tiny, 32 × 128 tokens", "training", "answering", "as_float32", "seconds_median"):
        assert words in captured.out
    assert "round 1 of 1: peft + Trainer" in captured.err


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(prompt_length=8), "prompt_length=8 is not used for commands"),
        (dict(bottleneck=8), "bottleneck=8 is not used for commands"),
        (dict(head="verbalizer"), "head=verbalizer is not used for commands"),
        (dict(methods="nothing"), "unknown method 'nothing'"),
        (dict(backbone="roberta-base"), "has no weights on this machine"),
        (dict(backbone="roberta-large"), "'roberta-large' has no weights on this machine"),
    ],
    ids=str,
)
def test_whole_commands_refuse_what_they_cannot_use(options, words, capsys, monkeypatch):
    """The refusal comes before anything is measured."""
    pytest.importorskip("peft")
    monkeypatch.setattr(end_to_end, "write_inputs", None)
    with pytest.raises(SystemExit):
        bench_command(**{"measure": "commands", "backbone": "tiny", **options})
    assert words in capsys.readouterr().err


def test_a_busy_machine_is_reported(monkeypatch, messages):
    monkeypatch.setattr(end_to_end.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert end_to_end.measure_load() == 0 and not messages
    monkeypatch.setattr(end_to_end.os, "getloadavg", lambda: (2.0, 0.0, 0.0))
    assert end_to_end.measure_load() == 2 and "this machine is busy" in messages[0]


def test_a_process_is_timed(tmp_path):
    command = end_to_end._Command("x", ["-m", "json.tool"], ["--help"], {}, tmp_path / "out")
    command.run(threads=1)
    assert command.seconds[0] > 0


def test_a_command_that_fails_shows_its_error(tmp_path):
    command = end_to_end._Command("x", ["-m", "json.tool"], ["--unknown"], {}, tmp_path / "out")
    with pytest.raises(RuntimeError, match="unrecognized arguments"):
        command.run(threads=None)


def test_mixed_texts_have_the_same_lengths_in_every_measurement():
    mixed = end_to_end._mix_lengths(["a", "b"], 12)
    assert mixed == end_to_end._mix_lengths(["a", "b"], 12)
    assert sorted(len(text.split()) for text in mixed) == [1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16]

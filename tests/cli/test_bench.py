"""The command that measures times. No test depends on a measured time."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from timings import replace_fit
from transformers import AutoModelForSequenceClassification

from idp_tutorial.backbones import load as pretrained
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.cli import bench
from idp_tutorial.cli.bench import bench_command
from idp_tutorial.reproduction.efficiency import end_to_end, timing
from idp_tutorial.utils.records import read_existing_records


@pytest.fixture
def fits(monkeypatch):
    return replace_fit(monkeypatch)


FAST = dict(
    methods="prompt-tuning,lpt-npg",
    batch_size=2,
    length=24,
    repeats=1,
    device="cpu",
)


def test_the_command(small_folder, capsys, tmp_path):
    out = tmp_path / "new" / "bench.jsonl"
    bench_command(backbone=str(small_folder), **FAST, json=True, out=str(out))
    captured = capsys.readouterr()
    rows = [json.loads(l) for l in captured.out.splitlines()]
    assert read_existing_records(out) == rows and "round 1 of 1" in captured.err
    assert [(r["method"], r["layer"], r["cached"]) for r in rows] == [
        ("fine-tuning", None, False),
        ("prompt-tuning", None, False),
        ("lpt-npg", 0, False),
        ("lpt-npg", 1, False),
        ("lpt-npg", 1, True),
        ("lpt-npg", 2, False),
        ("lpt-npg", 2, True),
    ]
    assert all(
        r["part"] == "methods"
        and r["backbone"] == small_folder.name
        and r["batch_size"] == 2
        and r["length"] == 24
        and r["device"] == "cpu"
        and r["threads"] > 0
        and r["versions"]["torch"]
        and r["ms"] > 0
        for r in rows
    )
    # no path of this machine
    assert str(tmp_path) not in out.read_text() and str(small_folder.parent) not in out.read_text()


def test_the_commands_table(small_folder, capsys):
    bench_command(backbone=str(small_folder), **FAST)
    out = capsys.readouterr().out
    assert (
        all(
            w in out
            for w in (
                "2 × 24 tokens",
                "ratio",
                "ideal",
                "share",
                "saved",
                "tokens_per_ms",
            )
        )
        and "nan" not in out.lower()
        and "versions" not in out
    )
    bench_command(backbone=str(small_folder), **FAST, measure="length", values="16,32")
    out = capsys.readouterr().out
    rows = [l.split() for l in out.splitlines() if "prompt-tuning" in l]
    assert "value" in out and [row[5] for row in rows] == ["16", "32"]


def test_what_is_measured_is_written_at_once(small_folder, tmp_path, monkeypatch, capsys):
    inner = timing.benchmark_methods
    out = tmp_path / "g.jsonl"

    def stops(*a, **kw):
        if out.exists():
            raise KeyboardInterrupt
        return inner(*a, **kw)

    monkeypatch.setattr(timing, "benchmark_methods", stops)
    with pytest.raises(SystemExit):
        bench_command(
            backbone=str(small_folder),
            **{**FAST, "methods": "lora"},
            measure="batch",
            values="1,3",
            out=str(out),
        )
    assert [
        (r["method"], r["batch_size"], r["value"], r["grow"])
        for r in map(json.loads, out.read_text().splitlines())
    ] == [("fine-tuning", 1, 1, "batch"), ("lora", 1, 1, "batch")]


def test_a_method_that_is_refused_is_named_with_the_reason(capsys):
    row = dict(backbone="b", batch_size=4, length=64, device="cpu", threads=1, repeats=7)
    row |= dict(part="methods", method="lora", refused="no linear layers")
    bench._print_tables([{**row, "method": "fine-tuning", "refused": None, "ms": 2.0}, row])
    table, refusal = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert refusal == "lora was not timed: no linear layers" and "lora" not in table


def test_long_texts_get_a_position_table(monkeypatch):
    monkeypatch.setattr(
        pretrained,
        "load_backbone",
        lambda name, weights=None, **kw: load_backbone(name, "meta", **kw),
    )

    def max_tokens(**options):
        options = bench.BenchOptions(backbone="roberta-base", **options)
        return bench._load_backbones(options)[0].max_tokens

    assert max_tokens() == 512 and max_tokens(measure="batch", values="1000") == 512
    assert max_tokens(length=600) >= 600 + 134
    assert max_tokens(measure="methods,length", values="32,2000", prompt_length=50) >= 2050
    assert max_tokens(measure="prompt_length", values="600") >= 664


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(methods="lpt,lpt_npg"), ["unknown method 'lpt_npg'", "did you mean 'lpt-npg'?"]),
        (dict(measure="depth", values="3"), ["layer must be between 0 and 2", "got 3"]),
        (dict(measure="depth", values="one"), ["values='one'", "6,12,18"]),
        (dict(device="gpu"), ["device must be ", "got 'gpu'", "'cuda'"]),
        (dict(device="cuda"), ["no GPU", "--device cpu|cpu"]),
        (
            dict(length=250),
            [
                "250",
                "20 prompt positions",
                "'prompt-tuning'",
                "256",
                "length=236",
                "a smaller prompt_length",
            ],
        ),
        (dict(length=300, methods="lora"), ["length=300", "256", "length=256"]),
        (dict(prompt_length=0), ["prompt_length must be at least 1, got 0"]),
        (dict(repeats=0), ["repeats must be at least 1, got 0"]),
        (dict(measure="width"), ["unknown measurement 'width'", "prompt_length, length, depth"]),
        (dict(values="3"), ["values=3 is not used without one axis"]),
        (dict(measure="depth,batch", values="3"), ["values=3 is not used without one axis"]),
        (dict(measure="peft"), ["methods=prompt-tuning,lpt-npg is not used beside other"]),
        (dict(dtypes="float32,int8"), ["dtypes must be 'float32' or 'bfloat16'", "'int8'"]),
        (dict(data="x"), ["data=x is not used without commands"]),
        (dict(batch_size=0), ["batch_size must be at least 1, got 0"]),
        (dict(head="verbaliser"), ["'verbaliser'", "'verbalizer'"]),
        (dict(backbone="nowhere"), ["no backbone 'nowhere'"]),
        (dict(out="."), ["out=.", "folder"]),
        (dict(out="/dev/null/x/y.jsonl"), ["out=/dev/null/x: /dev/null is a file"]),
    ],
    ids=lambda v: str(v)[:40],
)
def test_the_command_says_why(kw, words, small_folder, capsys, monkeypatch, fits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as e:
        bench_command(**{"backbone": str(small_folder), **FAST, **kw})
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert (
        e.value.code == 2
        and captured.out == ""
        and last.startswith("idp bench: ")
        and all(any(o in last for o in w.split("|")) for w in words)
    ), captured.err


def test_several_measurements_are_one_command(small_folder, tmp_path):
    out = tmp_path / "speed.jsonl"
    bench_command(
        backbone=str(small_folder),
        measure="methods,peft,pipeline,depth",
        methods="lpt-npg,lora",
        dtypes="float32,bfloat16",
        repeats=1,
        length=8,
        batch_size=2,
        prompt_length=2,
        device="cpu",
        out=str(out),
        json=True,
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {r["part"] for r in rows} == {
        "methods",
        "beside peft",
        "answers",
        "growth with depth",
    }
    assert {(r["method"], r["weights_dtype"]) for r in rows if r["part"] == "methods"} == {
        ("fine-tuning", "float32"),
        *((m, d) for m in ("lpt-npg", "lora") for d in ("float32", "bfloat16")),
    }
    assert all(r["ms"] > 0 for r in rows)
    for part in ("answers", "beside peft"):
        plain = [r for r in rows if r["part"] == part]
        assert {r["weights_dtype"] for r in plain} == {"float32", "bfloat16"}
        assert all(r["plain"] and r["device"] == "cpu" for r in plain)
    assert all(r["texts_per_s"] > 0 for r in rows if r["part"] == "answers")
    assert all(r["prompt_length"] == 2 for r in rows if r["part"] == "beside peft")
    assert [r["method"] for r in rows if r["part"] == "beside peft"][:3] == [
        "fine-tuning",
        "forward, Hugging Face",
        "forward",
    ]


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


def test_whole_commands_are_timed_beside_those_of_others(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    monkeypatch.setattr(end_to_end, "SIZES", SMALL_SIZES)
    monkeypatch.setattr(end_to_end, "N_ANSWERS", 24)
    monkeypatch.setattr(end_to_end, "subprocess", SimpleNamespace(run=run_in_this_process))
    peft_dtypes = []  # of the models that the script for peft loads

    def load_and_note_dtype(*args, **kwargs):
        """Load a model, and note its dtype if the script for peft asks for it."""
        model = load(*args, **kwargs)
        if sys.argv[0].endswith("peft_script"):
            peft_dtypes.append(model.dtype)
        return model

    load = AutoModelForSequenceClassification.from_pretrained
    loader = "transformers.AutoModelForSequenceClassification.from_pretrained"
    monkeypatch.setattr(loader, load_and_note_dtype)
    out = tmp_path / "end.jsonl"
    kwargs = dict(measure="commands", backbone="tiny", methods="lora", device="cpu")
    bench_command(**kwargs, batch_size=32, length=128, repeats=2, threads=1, out=str(out))
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
    assert all(len(r["seconds"]) == 2 and r["processor"] and r["versions"]["peft"] for r in rows)
    assert all((r["batch_size"], r["max_len"], r["task"]) == (32, 128, "questions") for r in rows)
    assert rows[0]["sizes"] == dict(train=48, validation=12, test=12, predict=24)
    assert all(0 < r["score"] <= 100 for r in rows[:2]) and "score" not in rows[2]
    ratios = [b / s for b, s in zip(rows[1]["seconds"], rows[0]["seconds"])]
    assert rows[0]["ratio"] == pytest.approx(sum(ratios) / 2, 0.02)
    assert rows[0]["baseline"] == "peft + Trainer" and rows[4]["baseline"] == "pipeline"
    assert [r["ratio"] for r in rows if r["name"] in ("pipeline", "peft + Trainer")] == [None] * 3
    assert rows[3]["over_pipeline"] == 1 and rows[2]["as_float32"] == 100
    assert str(tmp_path) not in out.read_text()  # no path of this machine
    assert peft_dtypes == [torch.float32] * 2  # the bundled checkpoint is in float16
    assert len(Path(end_to_end.__file__).with_name("peft_script.py").read_text().splitlines()) <= 60
    for words in ("tiny, 32 × 128 tokens", "training", "answering", "as_float32", "seconds_median"):
        assert words in captured.out
    assert "round 2 of 2: peft + Trainer" in captured.err


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(prompt_length=8), "prompt_length=8 is not used for commands"),
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
    monkeypatch.setattr(end_to_end, "_write_inputs", None)
    with pytest.raises(SystemExit):
        bench_command(**{"measure": "commands", "backbone": "tiny", **options})
    assert words in capsys.readouterr().err


def test_a_busy_machine_is_reported(monkeypatch, messages):
    monkeypatch.setattr(end_to_end.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert end_to_end.measure_load() == 0 and not messages
    monkeypatch.setattr(end_to_end.os, "getloadavg", lambda: (2.0, 0.0, 0.0))
    assert end_to_end.measure_load() == 2 and "this machine is busy" in messages[0]


def test_a_process_is_timed(tmp_path):
    command = end_to_end._Command("x", "json.tool", ["--help"], {}, tmp_path / "out")
    command.run(threads=1)
    assert command.seconds[0] > 0


def test_a_command_that_fails_shows_its_error(tmp_path):
    command = end_to_end._Command("x", "json.tool", ["--unknown"], {}, tmp_path / "out")
    with pytest.raises(RuntimeError, match="unrecognized arguments"):
        command.run(threads=None)


def test_mixed_texts_have_the_same_lengths_in_every_measurement():
    mixed = end_to_end._mix_lengths(["a", "b"], 12)
    assert mixed == end_to_end._mix_lengths(["a", "b"], 12)
    assert sorted(len(text.split()) for text in mixed) == [1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16]

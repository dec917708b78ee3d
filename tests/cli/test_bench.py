"""The command that measures times. No test depends on a measured time."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small import backbone
from timings import replace_fit, tiny_base
from transformers import AutoModelForSequenceClassification

from idp_tutorial.backbones import load as pretrained
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.cli import bench as bench
from idp_tutorial.cli.bench import bench_command
from idp_tutorial.reproduction.efficiency import end_to_end, speed_tables
from idp_tutorial.reproduction.efficiency import timing as turns
from idp_tutorial.reproduction.efficiency.end_to_end import EndToEndSizes
from idp_tutorial.reproduction.efficiency.speed_tables import time_training_steps
from idp_tutorial.reproduction.efficiency.timing import (
    BenchmarkVariant,
    benchmark_methods,
)
from idp_tutorial.utils.records import read_existing_records


@pytest.fixture
def fits(monkeypatch):
    return replace_fit(monkeypatch)


FAST = dict(
    methods="prompt-tuning,lpt-npg",
    layers="1",
    batch_size=2,
    length=24,
    repeats=1,
    warmup=0,
    device="cpu",
)


def test_the_command(small_folder, capsys, tmp_path):
    out = tmp_path / "new" / "bench.jsonl"
    bench_command(backbone=str(small_folder), **FAST, json=True, out=str(out))
    captured = capsys.readouterr()
    rows = [json.loads(l) for l in captured.out.splitlines()]
    assert read_existing_records(out) == rows and "round 1 of 1" in captured.err
    assert [(r["method"], r["layer"], r["cached"]) for r in rows if "refused" in r] == [
        ("fine-tuning", None, False),
        ("prompt-tuning", None, False),
        ("lpt-npg", 1, False),
        ("lpt-npg", 1, True),
    ]
    assert [r["method"] for r in rows if r.get("plain")] == [
        "fine-tuning",
        "forward, Hugging Face",
        "forward",
    ]
    assert all(
        r["backbone"] == small_folder.name
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
                "forward, Hugging Face",
                "over_ours",
            )
        )
        and "nan" not in out.lower()
        and "versions" not in out
    )
    bench_command(
        backbone=str(small_folder), **{**FAST, "layers": None}, grow="length", values="16,32"
    )
    out = capsys.readouterr().out
    assert "value" in out and [l.split()[-1] for l in out.splitlines() if "prompt-tuning" in l] == [
        "16",
        "32",
    ]


def test_what_is_measured_is_written_at_once(small_folder, tmp_path, monkeypatch, capsys):
    inner = turns.time_scaling
    out = tmp_path / "g.jsonl"

    def stops(*a, **kw):
        if out.exists():
            raise KeyboardInterrupt
        return inner(*a, **kw)

    monkeypatch.setattr(turns, "time_scaling", stops)
    with pytest.raises(SystemExit):
        bench_command(
            backbone=str(small_folder),
            **{**FAST, "methods": "lora", "layers": None},
            grow="batch",
            values="1,3",
            out=str(out),
        )
    assert [
        (r["method"], r["batch_size"], r["value"], r["grow"])
        for r in map(json.loads, out.read_text().splitlines())
    ] == [("fine-tuning", 1, 1, "batch"), ("lora", 1, 1, "batch")]


def test_precision_reaches_both_kinds_of_step(monkeypatch):
    bb = backbone()
    seen = []
    monkeypatch.setattr(
        bb,
        "run_layer",
        lambda *a, f=bb.run_layer, **kw: (
            seen.append(torch.is_autocast_enabled("cpu")),
            f(*a, **kw),
        )[1],
    )
    benchmark_methods(
        bb, [BenchmarkVariant("fine-tuning")], tiny_base(bb, precision="bf16"), repeats=1, warmup=0
    )
    n = len(seen)
    assert True in seen  # `evaluate` does without
    time_training_steps(bb, tiny_base(bb, precision="bf16"), repeats=1, warmup=1)
    assert len(seen) > n and all(seen[n:])
    n = len(seen)
    time_training_steps(bb, tiny_base(bb), repeats=1, warmup=1)
    assert not any(seen[n:])


def test_growing_texts_get_a_position_table(monkeypatch):
    monkeypatch.setattr(
        pretrained,
        "load_backbone",
        lambda name, weights=None, **kw: load_backbone(name, "meta", **kw),
    )
    assert (
        bench._load_benchmark_backbone("roberta-base", "length", 2000, 50).max_tokens >= 2050
        and bench._load_benchmark_backbone("roberta-base", None, 2000, 50).max_tokens == 512
        and bench._load_benchmark_backbone("roberta-base", "batch", 64, 20).max_tokens >= 512
    )


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(methods="lpt,lpt_npg"), ["unknown method 'lpt_npg'", "did you mean 'lpt-npg'?"]),
        (dict(layers="3"), ["layer must be between 0 and 2", "got 3"]),
        (dict(layers="one"), ["layers='one'", "6,12,18"]),
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
        (dict(grow="width"), ["'width'", "prompt_length, length, depth, batch"]),
        (dict(grow="prompt_length", values="a"), ["values='a'"]),
        (dict(values="3"), ["is not used without grow"]),
        (dict(grow="prompt_length", peft=True), ["peft=True is not used with grow"]),
        (dict(batch_size=0), ["batch_size must be at least 1, got 0"]),
        (dict(precision="int8"), ["'int8'", "'bf16'"]),
        (dict(head="verbaliser"), ["'verbaliser'", "'verbalizer'"]),
        (dict(backbone="nowhere"), ["no backbone 'nowhere'"]),
        (dict(out="."), ["out=.", "folder"]),
        (dict(out="/dev/null/x/y.jsonl"), ["out=/dev/null/x: /dev/null is a file"]),
    ],
    ids=lambda v: str(v)[:40],
)
def test_the_command_says_why(kw, words, small_folder, capsys, monkeypatch, fits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fast = {k: v for k, v in FAST.items() if not ("grow" in kw and k == "layers")}
    with pytest.raises(SystemExit) as e:
        bench_command(**{"backbone": str(small_folder), **fast, **kw})
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert (
        e.value.code == 2
        and captured.out == ""
        and last.startswith("idp bench: ")
        and all(any(o in last for o in w.split("|")) for w in words)
    ), captured.err


def test_all_that_the_tables_show_is_one_command(small_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(speed_tables, "SPEED_TABLE_METHODS", ("lpt-npg", "lora"))
    out = tmp_path / "speed.jsonl"
    bench_command(
        backbone=str(small_folder),
        tables=True,
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
        *(f"growth with {w}" for w in ("batch", "length", "depth")),
    }
    assert {(r["method"], r["weights_dtype"]) for r in rows if r["part"] == "methods"} == {
        ("fine-tuning", "float32"),
        *((m, d) for m in ("lpt-npg", "lora") for d in ("float32", "bfloat16")),
    }
    assert all(r["ms"] > 0 for r in rows) and all(
        r["texts_per_s"] > 0 for r in rows if r["part"] == "answers"
    )


def test_only_what_was_measured_under_the_same_conditions_is_left_out(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from idp_tutorial.utils.records import append_record

    options = dict(
        backbone="small",
        batch_size=2,
        length=8,
        repeats=1,
        head="classification",
        precision="no",
        prompt_length=None,
        device="cpu",
        out=tmp_path / "speed.jsonl",
    )
    row = {
        k: options[k]
        for k in ("backbone", "batch_size", "length", "repeats", "head", "precision", "device")
    }
    row |= dict(threads=torch.get_num_threads(), weights_dtype="float32")
    for part in ("methods", "answers", "beside peft"):
        append_record({**row, "part": part}, options["out"])
    append_record({**row, "part": "growth with batch", "device": "H200"}, options["out"])

    def measured_parts(**other):
        return {
            part for part, _ in bench._read_measured_parts(SimpleNamespace(**{**options, **other}))
        }

    assert measured_parts() == {"methods", "answers", "beside peft"} and measured_parts(
        prompt_length=2
    ) == {
        "methods",
        "answers",
    }
    assert not measured_parts(precision="bf16") and not measured_parts(batch_size=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    assert measured_parts(device="auto") == {"growth with batch", "answers"}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert not measured_parts()


SMALL_SIZES = EndToEndSizes(train=48, validation=12, test=12, predict=24)


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
    monkeypatch.setattr(end_to_end, "DEFAULT_SIZES", SMALL_SIZES)
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
    kwargs = dict(end_to_end=True, backbone="tiny", methods="lora", repeats=1, device="cpu")
    bench_command(**kwargs, threads=1, out=str(out))
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
    assert all(len(r["seconds"]) == 1 and r["cpu_seconds"] >= 0 and r["processor"] for r in rows)
    assert rows[0]["sizes"] == dict(train=48, validation=12, test=12, predict=24)
    assert all(0 < r["score"] <= 100 for r in rows[:2]) and "score" not in rows[2]
    assert rows[0]["ratio"] == pytest.approx(rows[1]["seconds"][0] / rows[0]["seconds"][0], 0.01)
    assert [r["ratio"] for r in rows if r["name"] in ("pipeline", "peft + Trainer")] == [None] * 3
    assert rows[3]["over_pipeline"] == 1 and rows[2]["as_float32"] == 100
    assert str(tmp_path) not in out.read_text()  # no path of this machine
    assert peft_dtypes == [torch.float32]  # the bundled checkpoint is in float16
    assert len(Path(end_to_end.__file__).with_name("peft_script.py").read_text().splitlines()) <= 60
    for words in ("tiny, questions", "training", "answering", "as_float32", "seconds_median"):
        assert words in captured.out
    assert "round 1 of 1: peft + Trainer" in captured.err


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(batch_size=8), "batch_size=8 is not used with end_to_end"),
        (dict(grow="depth"), "grow=depth is not used with end_to_end"),
        (dict(methods="nothing"), "unknown method 'nothing'"),
        (dict(backbone="roberta-base"), "has no weights on this machine"),
        (dict(backbone="roberta-large"), "'roberta-large' has no weights on this machine"),
        (dict(end_to_end=False, data="x"), "data=x is not used without end_to_end"),
    ],
    ids=str,
)
def test_whole_commands_refuse_what_they_cannot_use(options, words, capsys, monkeypatch):
    """The refusal comes before anything is measured."""
    pytest.importorskip("peft")
    monkeypatch.setattr(end_to_end, "_write_inputs", None)
    with pytest.raises(SystemExit):
        bench_command(**{"end_to_end": True, "backbone": "tiny", **options})
    assert words in capsys.readouterr().err


def test_a_busy_machine_is_reported(monkeypatch):
    lines = []
    monkeypatch.setattr(end_to_end.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert end_to_end.warn_if_busy(lines.append) == 0 and not lines
    monkeypatch.setattr(end_to_end.os, "getloadavg", lambda: (2.0, 0.0, 0.0))
    assert end_to_end.warn_if_busy(lines.append) == 2 and "this machine is busy" in lines[0]


def test_the_seconds_of_a_process_are_measured():
    code = "x = sum(range(3_000_000))"
    command = end_to_end._Command("x", ["-c", code], None, {})
    end_to_end._run_command(command, 0, 1)
    assert command.seconds[0] > 0 and command.cpu_seconds[0] > 0


def test_a_command_that_fails_shows_its_error():
    command = end_to_end._Command("x", ["-c", "raise SystemExit('no luck')"], None, {})
    with pytest.raises(RuntimeError, match="no luck"):
        end_to_end._run_command(command, 0, None)


def test_mixed_texts_have_the_same_lengths_in_every_measurement():
    mixed = end_to_end._mix_lengths(["a", "b"], 12)
    assert mixed == end_to_end._mix_lengths(["a", "b"], 12)
    assert sorted(len(text.split()) for text in mixed) == [1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 16]

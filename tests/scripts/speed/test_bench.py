"""The command that measures times. No test depends on a measured time."""

import json

import pytest
import torch
from timings import replace_fit

from idp_tutorial.backbones import load as pretrained
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.utils.records import read_existing_records
from results.speed import bench, timing
from results.speed.bench import bench_command


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


def test_the_bottleneck_goes_to_the_methods_that_have_one(small_folder, fits, capsys):
    bench_command(backbone=str(small_folder), **FAST, bottleneck=6, json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["bottleneck"] for row in rows} == {6}
    widths = {cfg.method: cfg.get("bottleneck") for cfg in fits[0]}
    assert widths == {"fine-tuning": None, "prompt-tuning": None, "lpt-npg": 6}


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
        (dict(length=250), ["length=250", "20 for its prompt", "'prompt-tuning'", "has 256"]),
        (dict(length=300, methods="lora"), ["length=300", "has 256", "smaller length"]),
        (dict(prompt_length=0), ["prompt_length must be at least 1, got 0"]),
        (dict(repeats=0), ["repeats must be at least 1, got 0"]),
        (dict(measure="width"), ["unknown measurement 'width'", "prompt_length, length, depth"]),
        (dict(values="3"), ["values=3 is not used without one axis"]),
        (dict(measure="depth,batch", values="3"), ["values=3 is not used without one axis"]),
        (dict(methods="lpt,lora,bitfit", bottleneck=0), ["bottleneck must be at least 1, got 0"]),
        (dict(methods="lpt,bitfit", bottleneck=8), ["bottleneck=8 has no effect on lpt, bitfit"]),
        (dict(measure="peft"), ["methods=prompt-tuning,lpt-npg is not used beside other"]),
        (dict(dtypes="float32,int8"), ["dtypes must be 'float32' or 'bfloat16'", "'int8'"]),
        (dict(data="x"), ["data=x is not used without commands"]),
        (dict(batch_size=0), ["batch_size must be at least 1, got 0"]),
        (dict(head="verbaliser"), ["'verbaliser'", "'verbalizer'"]),
        (dict(backbone="nowhere"), ["no backbone 'nowhere'"]),
        (dict(out="."), ["out=.", "folder"]),
        (dict(out="/dev/null/x/y.jsonl"), ["/dev/null/x cannot be used"]),
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
        and last.startswith("python -m results.speed.bench: ")
        and all(any(o in last for o in w.split("|")) for w in words)
    ), captured.err


@pytest.mark.long
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

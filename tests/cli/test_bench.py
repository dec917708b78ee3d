"""Timing through `fit` and beside peft. No test depends on a measured time."""

import json
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from small import backbone

from idp_tutorial.backbones import load as pretrained
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.cli import bench as bench
from idp_tutorial.cli.bench import idp_bench
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.reproduction.efficiency import method_times as turns
from idp_tutorial.reproduction.efficiency import speed_tables
from idp_tutorial.reproduction.efficiency.cost_model import (
    KEY_VALUE_SHARE,
    compare_published_speeds,
    ideal_speed_up,
)
from idp_tutorial.reproduction.efficiency.method_times import (
    BENCHMARK_PROMPT_LENGTHS,
    SCALING_VALUES,
    BenchmarkVariant,
    benchmark_methods,
    list_benchmark_variants,
    make_benchmark_config,
    make_timing_task,
    plot_scaling,
    time_scaling,
)
from idp_tutorial.reproduction.efficiency.speed_tables import PEFT_CONFIGS, time_training_steps
from idp_tutorial.utils.records import read_existing_records

FAMILY = ("roberta", "bert", "gpt2", "deberta")
ROW = {
    "method",
    "layer",
    "cached",
    "prompt_length",
    "refused",
    "ms",
    "spread",
    "ratio",
    "tokens_per_ms",
    "ideal",
    "share",
    "mb",
    "saved",
    "paper",
    "paper_saved",
    "weights_dtype",
}


def tiny_base(bb, **kw):
    return make_benchmark_config(bb, **{**dict(batch_size=2, length=24, bottleneck=8), **kw})


def state(bb):
    return {n: p.detach().clone() for n, p in bb.model.state_dict().items()}


def as_it_was(bb, before):
    """Return whether the tensors are the same, nothing is trained, and eval mode is on.

    Fine-tuning at a learning rate of 1e-8 changes no tensor.
    """
    after = bb.model.state_dict()
    return (
        after.keys() == before.keys()
        and all(torch.allclose(after[n], before[n], atol=1e-5) for n in after)
        and bb.active_edit is None
        and not any(p.requires_grad or p.grad is not None for p in bb.model.parameters())
        and not any(m.training for m in bb.model.modules())
    )


# --- texts and variants


@pytest.mark.parametrize("template", [None, "code"])
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_texts_have_the_wanted_length(family, template):
    bb = backbone(family)
    task = make_timing_task(5, 30)
    assert {s: len(r) for s, r in task.splits.items()} == dict(train=5, validation=1, test=1)
    texts = task.encode(task.splits["train"], bb.tokenizer, 30, template)
    assert (
        {len(e["input_ids"]) for e in texts} == {30}
        and len({tuple(e["input_ids"]) for e in texts}) == 5
        and {e["label"] for e in texts} == {0, 1}
    )
    assert make_timing_task(5, 30).splits == task.splits


def test_variants():
    v = list_benchmark_variants(
        [
            "lpt-npg",
            "head-only",
            "adapterdrop",
            "prompt-tuning",
            "lpt-npg",
            "m-idpg-phm",
            "m-idpg-phm-glove",
        ],
        24,
        [6, 18],
    )
    assert [o[:3] for o in v] == [
        ("fine-tuning", None, False),
        ("lpt-npg", 6, False),
        ("lpt-npg", 6, True),
        ("lpt-npg", 18, False),
        ("lpt-npg", 18, True),
        ("head-only", None, False),
        ("head-only", None, True),
        ("adapterdrop", 12, False),
        ("adapterdrop", 12, True),
        ("prompt-tuning", None, False),
        ("m-idpg-phm", None, False),
        ("m-idpg-phm", None, True),
        ("m-idpg-phm-glove", None, False),
    ]
    assert [o.layer for o in list_benchmark_variants(["lpt"], 24, cached=False)[1:]] == [
        6,
        12,
        18,
    ] and list_benchmark_variants([], 3) == [BenchmarkVariant("fine-tuning")]
    assert [(o.layer, o.cached) for o in list_benchmark_variants(["id-spam"], 3, [0])[1:]] == [
        (0, False)
    ]  # nothing lies below
    assert [o.layer for o in list_benchmark_variants(["lpt"], 1, cached=False)[1:]] == [0]


def test_lengths_are_the_papers():
    assert (
        BENCHMARK_PROMPT_LENGTHS["prompt-tuning"],
        BENCHMARK_PROMPT_LENGTHS["p-tuning-v2"],
        BENCHMARK_PROMPT_LENGTHS["s-idpg-phm"],
        BENCHMARK_PROMPT_LENGTHS["lpt-npg"],
        BENCHMARK_PROMPT_LENGTHS["lpt-appg"],
    ) == (20, 20, 5, 5, 10) and BENCHMARK_PROMPT_LENGTHS.keys() <= METHODS.keys()


# --- through fit, with `fit` replaced: who comes when, and what is made of it


@pytest.fixture
def fits(monkeypatch):
    """Records the config of each `fit`; `times[method]` are its times, one a call."""
    seen = []
    times = {}

    def fit(model, task, cfg):
        seen.append(cfg)
        return dict(
            ms_per_step=times.get(cfg.method, [10.0] * 99)[
                sum(
                    c.method == cfg.method and c.layer == cfg.layer and c.cache == cfg.cache
                    for c in seen
                )
                - 1
            ],
            peak_memory_mb={"fine-tuning": 800.0}.get(cfg.method, 200.0),
        )

    monkeypatch.setattr(turns, "fit", fit)
    monkeypatch.setattr(turns.gc, "collect", lambda: 0)
    return seen, times


def test_turns_ratios_and_warm_up(fits):
    seen, times = fits
    times.update(
        {
            "fine-tuning": [999.0, 30, 60, 90],
            "lora": [999.0, 10, 30, 20],
            "head-only": [999.0, 1, 2, 3],
        }
    )
    messages = []
    rows = benchmark_methods(
        backbone(),
        list_benchmark_variants(["lora", "head-only"], 3, cached=False),
        make_benchmark_config(backbone(), 2, 24),
        repeats=3,
        report=messages.append,
    )
    assert [c.method for c in seen] == ["fine-tuning", "lora", "head-only"] * 4 and messages == [
        "warmed up",
        "round 1 of 3",
        "round 2 of 3",
        "round 3 of 3",
    ]
    # of 30/10, 60/30, 90/20 the middle one
    assert [r["ms"] for r in rows] == [60, 20, 2] and [r["ratio"] for r in rows] == [1, 3, 30]
    assert [r["saved"] for r in rows] == [0, 0.75, 0.75] and rows[1]["tokens_per_ms"] == 2 * 24 / 20
    assert (
        all((c.steps, c.max_len, c.pooling) == (3, 24, "cls") for c in seen)
        and len({c.cache_dir for c in seen}) == 1
    )


def test_rows_beside_model_and_paper(fits, monkeypatch):
    monkeypatch.setattr(turns, "build_model", lambda cfg, bb, task: None)
    bb = load_backbone("roberta-large", weights="meta")
    rows = benchmark_methods(
        bb,
        list_benchmark_variants(
            ["prompt-tuning", "lpt-npg", "adapterdrop", "head-only", "m-idpg-phm"], 24, [6, 12, 13]
        ),
        make_benchmark_config(bb, 4, 64),
        repeats=1,
        warmup=0,
    )
    by_variant = {(r["method"], r["layer"], r["cached"]): r for r in rows}
    assert (
        set(rows[0]) == ROW
        and by_variant["fine-tuning", None, False]["paper"] == 1
        and by_variant["fine-tuning", None, False]["prompt_length"] is None
    )
    p = compare_published_speeds().set_index(["backbone", "method"])
    assert np.isclose(
        by_variant["prompt-tuning", None, False]["paper"], 16.9 / 11.6
    ) and np.isclose(by_variant["prompt-tuning", None, False]["paper_saved"], 1 - 17.8 / 23.5)
    assert (
        np.isclose(by_variant["lpt-npg", 12, False]["paper"], 2)
        and np.isclose(by_variant["lpt-npg", 6, False]["paper"], 18.5 / 11.6)
        and np.isclose(by_variant["adapterdrop", 12, False]["paper"], 21.6 / 11.6)
    )
    assert (
        all(
            by_variant[k]["paper"] is None
            for k in (("lpt-npg", 12, True), ("lpt-npg", 13, False), ("m-idpg-phm", None, False))
        )
        and len(p) == 28
    )
    r = by_variant["lpt-npg", 12, True]
    last = KEY_VALUE_SHARE if bb.supports_single_position else 1.0
    assert (
        np.isclose(
            r["ideal"],
            ideal_speed_up(
                "lpt-npg", 24, 12, True, prompt_length=5, T=64, d=1024, last_layer_share=last
            ),
        )
        and np.isclose(r["share"], r["ratio"] / r["ideal"])
        and r["prompt_length"] == 5
    )
    # nothing is left to do
    assert (
        by_variant["head-only", None, True]["ideal"] is None
        and by_variant["head-only", None, True]["share"] is None
    )


def test_a_family_that_cannot_take_a_method(fits, monkeypatch):
    def no(bb, cfg):
        raise ValueError("not on this one")

    monkeypatch.setitem(METHODS, "lora", replace(METHODS["lora"], build_plan=no))
    bb = backbone()
    rows = benchmark_methods(
        bb,
        list_benchmark_variants(["lora", "bitfit"], 3),
        make_benchmark_config(bb, 2, 24),
        repeats=2,
    )
    assert (
        [r["refused"] for r in rows] == [None, "not on this one", None]
        and "ms" not in rows[1]
        and rows[2]["ms"] == 10
    )
    monkeypatch.setitem(METHODS, "fine-tuning", replace(METHODS["fine-tuning"], build_plan=no))
    with pytest.raises(ValueError, match="not on this one"):
        benchmark_methods(
            bb, list_benchmark_variants(["bitfit"], 3), make_benchmark_config(bb, 2, 24), repeats=1
        )  # no yardstick


@pytest.mark.parametrize("method", ["fine-tuning", "lora", "adapter", "bitfit"])
def test_an_interrupted_turn_gives_the_backbone_back(method, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    bb = backbone()
    before = state(bb)
    monkeypatch.setattr(turns, "fit", stop)
    with pytest.raises(KeyboardInterrupt):
        benchmark_methods(
            bb, [BenchmarkVariant(method)], make_benchmark_config(bb, 2, 24), repeats=1
        )
    assert as_it_was(bb, before)


# --- the real thing, on small models

SOME = ["prompt-tuning", "p-tuning-v2", "s-idpg-phm", "lpt-npg", "id-spam", "lora", "adapterdrop"]


@pytest.mark.parametrize("family", FAMILY)
def test_every_method_is_timed(family):
    bb = backbone(family, max_position_embeddings=258) if family != "bert" else backbone(family)
    before = state(bb)
    plan = list_benchmark_variants(METHODS if family == "roberta" else SOME, 3, [1])
    rows = benchmark_methods(bb, plan, tiny_base(bb), repeats=1, warmup=0)
    assert [(r["method"], r["layer"], r["cached"], r["weights_dtype"]) for r in rows] == plan
    assert all(r["refused"] is None and r["ms"] > 0 and r["ratio"] > 0 for r in rows)
    assert as_it_was(bb, before) and json.loads(json.dumps(rows)) == rows
    mb = {r["method"]: r["mb"] for r in rows}
    weights = sum(p.numel() for p in bb.model.parameters()) * 4e-6
    assert (
        all(v > weights for v in mb.values())
        and mb["fine-tuning"] == max(mb[m] for m in [*SOME, "fine-tuning"])
        and rows[0]["saved"] == 0
        and rows[0]["ratio"] == 1
    )


@pytest.mark.parametrize("cached", [False, True])
def test_cached_variants_really_go_on_from_states(cached, monkeypatch):
    bb = backbone()
    started = set()
    inner = turns.fit

    def fit(model, task, cfg):
        context = model.compute_context

        def watched(batch):
            if model.training:
                started.add((cfg.method, "hidden_states" in batch, "sentence" in batch))
            return context(batch)

        model.compute_context = watched
        return inner(model, task, cfg)

    monkeypatch.setattr(turns, "fit", fit)
    benchmark_methods(
        bb,
        [
            BenchmarkVariant("fine-tuning"),
            BenchmarkVariant("lpt-npg", 2, cached),
            BenchmarkVariant("s-idpg-phm", None, cached),
        ],
        tiny_base(bb),
        repeats=1,
        warmup=0,
    )
    assert started == {
        ("fine-tuning", False, False),
        ("lpt-npg", cached, False),
        ("s-idpg-phm", False, cached),
    }


def test_a_verbalizer_head():
    bb = backbone()
    rows = benchmark_methods(
        bb,
        list_benchmark_variants(["prompt-tuning", "lpt-npg"], 3, [1]),
        tiny_base(bb, head="verbalizer"),
        repeats=1,
        warmup=0,
    )
    assert len(rows) == 4 and all(r["ms"] > 0 for r in rows)


# --- plain steps, Hugging Face and peft


@pytest.mark.parametrize(
    "family,peft",
    [
        ("roberta", PEFT_CONFIGS),
        ("gpt2", PEFT_CONFIGS),
        ("bert", ()),
        ("deberta", ("prompt-tuning", "p-tuning")),
    ],
)
def test_beside_peft(family, peft):
    bb = backbone(family, max_position_embeddings=258) if family != "bert" else backbone(family)
    before = state(bb)
    messages = []
    rows = time_training_steps(
        bb, tiny_base(bb), True, prompt_length=4, repeats=1, warmup=1, report=messages.append
    )
    names = [r["name"] for r in rows]
    both = (
        (*peft, "lora") if family != "bert" else ()
    )  # Hugging Face's classifier needs a pooler, which this BERT has not
    assert names == ["fine-tuning", "forward, Hugging Face", "forward"] + [
        n for m in both for n in (m, f"peft {m}")
    ], (names, messages)
    assert len(messages) == len(PEFT_CONFIGS) + 1 - len(both) and all(
        f"is not compared with peft on {family}" in s for s in messages
    )
    ms = {r["name"]: r["ms"] for r in rows}
    assert all(
        (r["over_ours"] is not None) == (r["name"].startswith("peft") or "Hugging" in r["name"])
        for r in rows
    )
    assert np.isclose(rows[1]["over_ours"], ms["forward, Hugging Face"] / ms["forward"]) and (
        not both or np.isclose(rows[-1]["over_ours"], ms["peft lora"] / ms["lora"])
    )
    assert as_it_was(bb, before)


def test_both_sides_have_the_same_weights(monkeypatch):
    bb = backbone(max_position_embeddings=258)
    training_models = []
    inner = speed_tables._make_training_step
    monkeypatch.setattr(
        speed_tables,
        "_make_training_step",
        lambda model, *a: training_models.append(model) or inner(model, *a),
    )
    time_training_steps(bb, tiny_base(bb), True, prompt_length=4, repeats=1, warmup=1)
    whole, *pairs = training_models
    backbone_pointers = {p.data_ptr() for p in bb.base.parameters()}
    for ours, peft_model in zip(pairs[::2], pairs[1::2]):
        frozen, trained = [
            {
                p.data_ptr()
                for n, p in peft_model.named_parameters()
                if p.requires_grad == flag and "classifier" not in n
            }
            for flag in (False, True)
        ]
        if any("lora" in n for n, _ in peft_model.named_parameters()):
            mine = {
                p.data_ptr()
                for n, p in ours.named_parameters()
                if p.requires_grad and not n.startswith("head")
            }
            assert trained == mine and len(mine) == 3 * 2 * 2 and not mine & backbone_pointers
        else:
            assert (
                backbone_pointers <= frozen
                and trained
                and backbone_pointers <= {p.data_ptr() for p in ours.parameters()}
            )
    assert backbone_pointers <= {p.data_ptr() for p in whole.parameters()}


def test_the_plain_step_trains_what_it_should():
    bb = backbone()
    before = state(bb)
    rows = []

    class Watch(torch.optim.AdamW):
        def step(self):
            rows.append(sum(p.grad is not None for g in self.param_groups for p in g["params"]))
            super().step()

    with pytest.MonkeyPatch.context() as m:
        m.setattr(torch.optim, "AdamW", Watch)
        time_training_steps(bb, tiny_base(bb), repeats=1, warmup=1)
    # every tensor of the encoder, and the head's two
    assert rows == [len(list(bb.base.parameters())) + 2] * 2 and as_it_was(bb, before)


# --- growth


@pytest.mark.parametrize(
    "axis,values,check",
    [
        ("prompt_length", [2, 9], lambda c, v: c.prompt_length == v),
        ("length", [16, 40], lambda c, v: c.max_len == v),
        ("batch", [1, 3], lambda c, v: c.batch_size == v),
        ("depth", [0, 2], lambda c, v: c.layer == v),
    ],
)
def test_one_thing_grows(axis, values, check, fits):
    bb = backbone()
    rows = time_scaling(
        axis,
        bb,
        make_benchmark_config(bb, 2, 24),
        ["lpt-npg", "prompt-tuning"],
        values,
        repeats=1,
        warmup=0,
    )
    seen, _ = fits
    assert all(check(c, r["value"]) for c, r in zip(seen, rows) if c.method == "lpt-npg") and {
        r["grow"] for r in rows
    } == {axis}
    late = [(r["value"], r["cached"]) for r in rows if r["method"] == "lpt-npg"]
    assert late == (
        [(0, False), (2, False), (2, True)]
        if axis == "depth"
        else [(v, c) for v in values for c in (False, True)]
    )
    assert {r["method"] for r in rows} == {
        "fine-tuning",
        "lpt-npg",
        *(() if axis == "depth" else ("prompt-tuning",)),
    }
    assert {c.max_len for c in seen} == (set(values) if axis == "length" else {24}) and {
        c.batch_size for c in seen
    } == (set(values) if axis == "batch" else {2})


def test_depth_goes_through_the_whole_model(fits):
    bb = backbone()
    rows = time_scaling("depth", bb, make_benchmark_config(bb, 2, 24), repeats=1, warmup=0)
    assert [r["value"] for r in rows if not r["cached"] and r["method"] == "lpt-npg"] == [0, 1, 2]


def test_plot_of_growth(capsys):
    assert plot_scaling([]) is None and capsys.readouterr().out
    plot_scaling([dict(method="lora", ms=1.0)])
    out = capsys.readouterr().out  # rows of another kind are no growth
    assert all(
        f"idp_bench --backbone roberta-large --grow {w} --out results/" in out
        for w in SCALING_VALUES
    )

    def row(w, m, v):
        return dict(grow=w, value=v, method=m, cached=False, ms=1.0, ratio=v / 10, ideal=v / 20)

    fig = plot_scaling(
        [
            row(w, m, v)
            for w in ("prompt_length", "batch")
            for m in ("fine-tuning", "lpt-npg")
            for v in (8, 2, 4)
        ]
    )
    assert [ax.get_xlabel() for ax in fig.axes] == ["prompt length $t$", "batch size"]
    dots, line = fig.axes[0].lines
    assert (
        dots.get_marker() == "o"
        and [*dots.get_xdata()] == [2, 4, 8]
        and np.allclose(dots.get_ydata(), (0.2, 0.4, 0.8))
        and np.allclose(line.get_ydata(), (0.1, 0.2, 0.4))
        and len(fig.axes[0].lines) == 2
    )
    plt.close(fig)


# --- the command

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
    idp_bench(str(small_folder), **FAST, json=True, out=str(out))
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
    idp_bench(str(small_folder), **FAST)
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
    idp_bench(str(small_folder), **{**FAST, "layers": None}, grow="length", values="16,32")
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
        idp_bench(
            str(small_folder),
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
        (dict(layers="one"), ["--layers 'one'", "6,12,18"]),
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
        (dict(grow="prompt_length", values="a"), ["--values 'a'"]),
        (dict(values="3"), ["is not used without --grow"]),
        (dict(grow="prompt_length", peft=True), ["--peft True is not used with --grow"]),
        (dict(batch_size=0), ["batch_size must be at least 1, got 0"]),
        (dict(precision="int8"), ["'int8'", "'bf16'"]),
        (dict(head="verbaliser"), ["'verbaliser'", "'verbalizer'"]),
        (dict(backbone="nowhere"), ["no backbone 'nowhere'"]),
        (dict(out="."), ["--out .", "folder"]),
        (dict(out="/dev/null/x/y.jsonl"), ["--out /dev/null/x: /dev/null is a file"]),
    ],
    ids=lambda v: str(v)[:40],
)
def test_the_command_says_why(kw, words, small_folder, capsys, monkeypatch, fits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fast = {k: v for k, v in FAST.items() if not ("grow" in kw and k == "layers")}
    with pytest.raises(SystemExit) as e:
        idp_bench(**{"backbone": str(small_folder), **fast, **kw})
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert (
        e.value.code == 2
        and captured.out == ""
        and last.startswith("idp_bench: ")
        and all(any(o in last for o in w.split("|")) for w in words)
    ), captured.err


def test_all_that_the_tables_show_is_one_command(small_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(speed_tables, "SPEED_TABLE_METHODS", ("lpt-npg", "lora"))
    out = tmp_path / "speed.jsonl"
    idp_bench(
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

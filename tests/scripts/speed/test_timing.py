"""Timing in turns with a simulated clock, and times of methods through `fit`.

No test depends on a measured time.
"""

import json

import numpy as np
import pytest
from small import backbone
from timings import as_it_was, replace_fit, state, tiny_base

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.reproduction.efficiency.cost_model import (
    KEY_VALUE_SHARE,
    LPT_PUBLISHED_SPEEDS,
    ideal_speed_up,
)
from results.speed import timing
from results.speed.timing import (
    BENCHMARK_PROMPT_LENGTHS,
    BenchmarkVariant,
    benchmark_methods,
    list_benchmark_variants,
    make_benchmark_config,
    make_timing_task,
    time_functions,
    time_scaling,
)


def test_turns_medians_and_drift(monkeypatch):
    """Time passes only in calls."""
    seconds = [0.0]
    called = []
    monkeypatch.setattr(timing, "timer", lambda: seconds[0])

    def fn(name, duration):
        def f():
            n = called.count(name)
            called.append(name)
            # slow at first, slower in every round, and one round is disturbed
            seconds[0] += (
                duration * (100 if n < 2 else 1 + 0.1 * n) * (50 if (name, n) == ("b", 4) else 1)
            )

        return f

    rows = time_functions({"a": fn("a", 3), "b": fn("b", 1), "c": fn("c", 2)}, warmup=2, repeats=5)
    assert called == ["a", "b", "c"] * 7
    assert [r["name"] for r in rows] == ["a", "b", "c"]
    assert np.allclose(
        [r["ratio"] for r in rows], (1, 3, 1.5)
    )  # though every round is slower than the one before
    # rounds 1.2 … 1.6; the disturbed one moves the median by one place
    assert np.allclose([rows[i]["ms"] for i in (0, 2)], (3000 * 1.4, 2000 * 1.4)) and np.isclose(
        rows[1]["ms"], 1500
    )
    assert np.isclose(rows[0]["spread"], 100 * 0.1 / 1.4)


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


def test_every_published_speed_is_found_by_its_key():
    keys = {(r.backbone, r.method, r.layer) for r in LPT_PUBLISHED_SPEEDS}
    assert len(keys) == len(LPT_PUBLISHED_SPEEDS) == 28


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
    assert [o.layer for o in list_benchmark_variants(["lpt"], 24)[1::2]] == [6, 12, 18]
    assert list_benchmark_variants([], 3) == [BenchmarkVariant("fine-tuning")]
    assert [o[3] for o in list_benchmark_variants(["lora"], 3, dtypes=("bfloat16", "int8"))] == [
        "bfloat16",
        "bfloat16",
        "int8",
    ]
    assert [(o.layer, o.cached) for o in list_benchmark_variants(["id-spam"], 3, [0])[1:]] == [
        (0, False)
    ]  # nothing lies below
    assert [o.layer for o in list_benchmark_variants(["lpt"], 1)[1:]] == [0]


def test_lengths_are_the_papers():
    assert (
        BENCHMARK_PROMPT_LENGTHS["prompt-tuning"],
        BENCHMARK_PROMPT_LENGTHS["p-tuning-v2"],
        BENCHMARK_PROMPT_LENGTHS["s-idpg-phm"],
        BENCHMARK_PROMPT_LENGTHS["lpt-npg"],
        BENCHMARK_PROMPT_LENGTHS["lpt-appg"],
    ) == (20, 20, 5, 5, 10) and BENCHMARK_PROMPT_LENGTHS.keys() <= METHODS.keys()


@pytest.fixture
def fits(monkeypatch):
    return replace_fit(monkeypatch)


def test_turns_ratios_and_warm_up(fits, messages):
    seen, times = fits
    times.update(
        {
            "fine-tuning": [999.0, 30, 60, 90],
            "lora": [999.0, 10, 30, 20],
            "head-only": [999.0, 1, 2, 3],
        }
    )
    rows = benchmark_methods(
        backbone(),
        [v for v in list_benchmark_variants(["lora", "head-only"], 3) if not v.cached],
        make_benchmark_config(backbone(), 2, 24),
        repeats=3,
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
    monkeypatch.setattr(timing, "build_model", lambda cfg, bb, task: None)
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
    assert np.isclose(
        by_variant["prompt-tuning", None, False]["paper"], 16.9 / 11.6
    ) and np.isclose(by_variant["prompt-tuning", None, False]["paper_saved"], 1 - 17.8 / 23.5)
    assert (
        np.isclose(by_variant["lpt-npg", 12, False]["paper"], 2)
        and np.isclose(by_variant["lpt-npg", 6, False]["paper"], 18.5 / 11.6)
        and np.isclose(by_variant["adapterdrop", 12, False]["paper"], 21.6 / 11.6)
    )
    assert all(
        by_variant[k]["paper"] is None
        for k in (("lpt-npg", 12, True), ("lpt-npg", 13, False), ("m-idpg-phm", None, False))
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
    def refuse(options, bb, cfg):
        raise ValueError("not on this one")

    monkeypatch.setattr(METHODS["lora"].config_class, "plan", refuse)
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
    monkeypatch.setattr(METHODS["fine-tuning"].config_class, "plan", refuse)
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
    monkeypatch.setattr(timing, "fit", stop)
    with pytest.raises(KeyboardInterrupt):
        benchmark_methods(
            bb, [BenchmarkVariant(method)], make_benchmark_config(bb, 2, 24), repeats=1
        )
    assert as_it_was(bb, before)


SOME = ["prompt-tuning", "p-tuning-v2", "s-idpg-phm", "lpt-npg", "id-spam", "lora", "adapterdrop"]


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_every_kind_of_method_is_timed(family):
    bb = backbone(family, max_position_embeddings=258)
    before = state(bb)
    plan = list_benchmark_variants(SOME, 3, [1])
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
    inner = timing.fit

    def fit(model, task, cfg):
        context = model.compute_context

        def watched(batch):
            if model.training:
                started.add((cfg.method, "hidden_states" in batch, "sentence" in batch))
            return context(batch)

        model.compute_context = watched
        return inner(model, task, cfg)

    monkeypatch.setattr(timing, "fit", fit)
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


@pytest.mark.parametrize(
    "axis,values,check",
    [
        ("prompt_length", [2, 9], lambda c, v: c.get("prompt_length") == v),
        ("length", [16, 40], lambda c, v: c.max_len == v),
        ("batch", [1, 3], lambda c, v: c.batch_size == v),
        ("depth", [0, 2], lambda c, v: c.get("layer") == v),
    ],
)
def test_one_thing_grows(axis, values, check, fits):
    bb = backbone()
    rows = list(
        time_scaling(
            axis,
            bb,
            make_benchmark_config(bb, 2, 24),
            ["lpt-npg", "prompt-tuning"],
            values,
            repeats=1,
            warmup=0,
        )
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
    if axis in ("length", "batch"):
        name = "length" if axis == "length" else "batch_size"
        assert all(r[name] == r["value"] for r in rows)
    assert {c.max_len for c in seen} == (set(values) if axis == "length" else {24}) and {
        c.batch_size for c in seen
    } == (set(values) if axis == "batch" else {2})


def test_depth_goes_through_the_whole_model(fits):
    bb = backbone()
    rows = list(time_scaling("depth", bb, make_benchmark_config(bb, 2, 24), repeats=1, warmup=0))
    assert [r["value"] for r in rows if not r["cached"] and r["method"] == "lpt-npg"] == [0, 1, 2]

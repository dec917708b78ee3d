"""Summaries of a sweep: its profile over layers, score and cost, and the regret of a choice."""

import math
from pathlib import Path

import pytest
from sweeps import HUMP, SETTINGS, fake

from idp_tutorial.reproduction.analysis.layer_choice import choice_matches_sweep
from idp_tutorial.reproduction.analysis.layer_sweep import (
    check_single_sweep,
    plot_convergence,
    plot_sweep,
    sweep_table,
)
from idp_tutorial.reproduction.analysis.sweep_summaries import (
    depth_profile_table,
    layer_choice_regret,
    tradeoff_table,
)
from idp_tutorial.utils.records import read_records


@pytest.mark.parametrize(
    "read",
    [
        check_single_sweep,
        sweep_table,
        depth_profile_table,
        plot_sweep,
        tradeoff_table,
        lambda r: plot_convergence(r, "lpt"),
        lambda r: layer_choice_regret(r, dict(layer=1, seconds=1.0)),
    ],
    ids=["check_single_sweep", "table", "profile", "plot", "tradeoff", "convergence", "regret"],
)
def test_different_experiments_are_not_averaged(read):
    for change in [
        *SETTINGS,
        dict(task="b"),
        dict(backbone="b"),
        dict(data="b"),
        dict(split_sizes=dict(train=5)),
        dict(compile=True),
        dict(lr_selection="given"),
    ]:
        with pytest.raises(ValueError, match="several sweeps.*one sweep at a time"):
            read(
                HUMP
                + [
                    {
                        **r,
                        "seed": r["seed"] + 3,
                        **({"lr_selection": "given"} if "lr" in change else change),
                    }
                    for r in HUMP
                ]
            )
    with pytest.raises(ValueError, match="'lpt' at layer 0 with seed 0 has 2 records"):
        read([*HUMP, {**HUMP[0], "lr": 0.7}])
    read(HUMP + [{**r, "seed": r["seed"] + 3, "lr": 0.3, "device": "cpu"} for r in HUMP])


STORED = sorted((Path(__file__).parents[3] / "results/depth").glob("sweep-*.jsonl"))


@pytest.mark.parametrize("path", STORED, ids=lambda p: p.stem)
def test_stored_sweeps_are_read(path):
    r = read_records(path)
    choice = path.with_name(path.name.replace("sweep", "choice"))
    assert (
        check_single_sweep(r) == r
        and len(depth_profile_table(r)) > 0
        and len(tradeoff_table(r)) > 0
    )
    if choice.exists():
        c = read_records(choice)[-1]
        assert choice_matches_sweep(c, r[0]) and (layer_choice_regret(r, c).regret >= 0).all()


@pytest.mark.parametrize(
    "scores,noise,is_one",
    [
        ([60, 63, 66, 66, 63, 60], 0.5, True),
        ([60, 62, 63, 64, 66, 67], 0.5, False),
        ([67, 66, 64, 63, 62, 60], 0.5, False),
        ([60, 63, 66, 66, 63, 60], 9, False),
        ([66, 60, 60, 60, 60, 66], 0.5, False),
        ([60, 60.2, 60.4, 60.4, 60.2, 60], 0.5, False),
    ],
    ids=["hump", "rising", "falling", "noise", "valley", "too small"],
)
def test_middle_maximum(scores, noise, is_one):
    (s,) = depth_profile_table(fake(scores, noise)).to_dict("records")
    assert s["middle_maximum"] is is_one or bool(s["middle_maximum"]) == is_one
    assert (s["first"], s["last"], s["best"]) == (scores[0], scores[-1], max(scores)) and s[
        "middle"
    ] == sum(scores[2:4]) / 2
    assert s["error"] == pytest.approx(noise * (1.5 / 3) ** 0.5)


def test_no_maximum_without_seeds_or_ends():
    assert not depth_profile_table(fake([60, 63, 66, 66, 63, 60], seeds=1)).middle_maximum[
        0
    ]  # one seed has no error
    assert not depth_profile_table([r for r in HUMP if r["layer"] not in (0,)]).middle_maximum[0]


def test_error_is_that_of_the_layer_with_the_fewest_seeds():
    (s,) = depth_profile_table([r for r in HUMP if (r["layer"], r["seed"]) != (2, 2)]).to_dict(
        "records"
    )
    assert s["error"] == pytest.approx(((5 * 0.25 + 0.125) / 6 * 1.5 / 2) ** 0.5)


def test_tradeoff_is_table_10():
    full = fake(
        [80],
        method="fine-tuning",
        layer=None,
        n_layers=24,
        ms_per_step=72.0,
        peak_memory_mb=200.0,
    )
    t = tradeoff_table(fake(list(range(24)), ms_per_step=None) + full)
    assert t.layer.tolist() == [6, 12, 18]
    assert t.ideal.round(2).tolist() == [1.71, 2.0, 2.4] and t.ideal_cached.tolist() == [
        2.0,
        3.0,
        6.0,
    ]
    t = tradeoff_table(fake(list(range(24))) + full)
    assert t.speed_up.tolist() == [72 / (48 - k) for k in (6, 12, 18)]
    assert t.memory_saved.tolist() == [1 - (100 - 5 * k) / 200 for k in (6, 12, 18)]
    # nothing to compare with
    assert tradeoff_table(HUMP).speed_up.isna().all() and tradeoff_table(HUMP).measured.isna().all()


def test_tradeoff_with_measured_times():
    """Times are interpolated linearly at the same fraction of the layers, and not extrapolated."""

    def row(layer, ratio, cached=False):
        return dict(
            method="lpt-npg", backbone="big", n_layers=24, layer=layer, cached=cached, ratio=ratio
        )

    times = [row(6, 2.0), row(12, 4.0), row(12, 5.0, True), row(18, 10.0, True)]
    t = tradeoff_table(fake(list(range(8))), timing_records=times)
    assert (
        t.layer.tolist() == [2, 4, 6]
        and t.measured.tolist()[:2] == [2.0, 4.0]
        and t.measured_cached.tolist()[1:] == [5.0, 10.0]
    )
    assert math.isnan(t.measured[2]) and math.isnan(t.measured_cached[0])
    (third,) = tradeoff_table(
        fake(list(range(6))), depth_fractions=[1 / 3], timing_records=times
    ).measured
    assert third == pytest.approx(1 / (1 / 2 - (1 / 2 - 1 / 4) / 3))
    for mixed in ([*times, row(12, 3.0) | {"method": "lpt"}], [row(12, 3.0) | {"method": "lora"}]):
        with pytest.raises(ValueError, match="one late method on one backbone"):
            tradeoff_table(HUMP, timing_records=mixed)


def test_regret():
    (r,) = layer_choice_regret(HUMP, dict(layer=4, seconds=3.0)).to_dict("records")
    assert (r["best"], r["chosen"], r["regret"], r["middle"], r["random"]) == (2, 4, 3, 0, 3)
    assert r["share_of_sweep"] == 3 / 270 and r["noise"] == pytest.approx(0.5 / 3**0.5)
    both = layer_choice_regret(
        HUMP + fake([1, 2, 3, 4, 5, 6], method="lpt-npg"), dict(layer=5, seconds=3.0)
    )
    assert both.method.tolist() == ["lpt", "lpt-npg"] and both.regret.tolist() == [6, 0]


@pytest.mark.parametrize(
    "make,words",
    [
        (
            lambda: depth_profile_table(fake([1], method="fine-tuning")),
            ["none of the 3 records has a late method", "lpt-npg"],
        ),
        (lambda: depth_profile_table(HUMP + fake([1, 2, 3], task="b")), ["one sweep at a time"]),
        (
            lambda: tradeoff_table(fake([1], method="fine-tuning")),
            ["none of the 3 records has a late method"],
        ),
        (
            lambda: layer_choice_regret(HUMP, dict(layer=7, seconds=1.0)),
            ["not 7", "sweep every layer first"],
        ),
        (
            lambda: layer_choice_regret(HUMP, dict(layer=4, seconds=1.0, prompt_length=20)),
            ["made with prompt_length=20", "Choose again"],
        ),
        (
            lambda: layer_choice_regret(HUMP, dict(layer=4, seconds=1.0, backbone="minilm")),
            ["made with backbone='minilm'"],
        ),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError) as e:
        make()
    assert all(w in str(e.value) for w in words), str(e.value)

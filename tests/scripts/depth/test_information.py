"""Mutual information where it is known, and hidden states of a model with a prompt."""

import math

import pytest
import torch
from small import FAMILY, batch_of, refused, same, setting, small_task

from idp_tutorial.core.context import INPUT
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.steps import Insert, KeyValue, Replace
from idp_tutorial.methods.lpt import lpt_plan
from idp_tutorial.methods.npg import NaivePromptGenerator
from idp_tutorial.methods.soft_prompt import SoftPrompt
from results.depth import information
from results.depth.information import (
    StateProbe,
    mutual_information,
    probe_layers,
    states_by_layer,
)
from results.depth.probe_config import ProbeConfig


def channel(n, eps, seed, d=8):
    """Make hidden states that encode a label after a noisy channel in one of their positions."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    x = (y + (torch.rand(n, generator=g) < eps) * torch.randint(1, 4, (n,), generator=g)) % 4
    states = [
        torch.randn(int(k), d, generator=g).mul(0.3) for k in torch.randint(1, 5, (n,), generator=g)
    ]
    for h, c in zip(states, x):
        h[torch.randint(len(h), (1,), generator=g), c] += 4.0
    return states, y


def both_of(make, sizes=(1200, 300, 1200)):
    s = {
        name: make(n, i) for i, (name, n) in enumerate(zip(("train", "validation", "test"), sizes))
    }
    return {k: v[0] for k, v in s.items()}, {k: v[1] for k, v in s.items()}


@pytest.mark.grid
@pytest.mark.parametrize("eps", [0, 0.25, 0.75])
def test_information_is_found_where_it_is_known(eps):
    known = (
        2
        - (-(eps * math.log2(eps) + (1 - eps) * math.log2(1 - eps)) if eps else 0)
        - eps * math.log2(3)
    )
    r = mutual_information(
        *both_of(lambda n, i: channel(n, eps, i)), depth=1, width=16, steps=120, lr=1e-2
    )
    assert abs(r["bits"] - known) < 0.12 and abs(r["entropy"] - 2) < 0.02
    assert abs(r["accuracy"] - 100 * max(1 - eps, 0.25)) < 5


def parity(n, seed):
    """Make hidden states labelled by whether two positions agree; neither one alone tells."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randint(2, (2, n), generator=g)
    h = torch.zeros(n, 3, 6)
    h[:, 0, 0] = 2.0 * a - 1
    h[:, 1, 1] = 2.0 * b - 1
    h[:, 2] = 0.3 * torch.randn(n, 6, generator=g)
    h[:, 0, 2] = h[:, 1, 3] = 1.0
    return list(h), (a != b).long()


def test_size_of_the_probe_matters():
    data = both_of(parity, (600, 200, 400))
    assert mutual_information(*data, depth=0, steps=150, lr=1e-2)["bits"] < 0.05
    assert mutual_information(*data, depth=1, width=16, steps=150, lr=1e-2)["bits"] > 0.8


def test_probe_ignores_padding():
    torch.manual_seed(0)
    probe = StateProbe(6, 3, ProbeConfig(depth=2, width=16)).eval()
    h = torch.randn(2, 7, 6)
    keep = torch.ones(2, 7)
    keep[1, 4:] = 0
    with torch.no_grad():
        same(probe(h, keep)[1:], probe(h[1:, :4], keep[1:, :4]))


def test_same_seed_same_bits_and_the_callers_random_numbers():
    data = both_of(parity, (80, 40, 40))
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    a, b, c = [mutual_information(*data, steps=20, seed=s)["bits"] for s in (0, 0, 1)]
    assert a == b != c and torch.equal(torch.rand(1), want)


@pytest.mark.parametrize("steps", [dict(lr=1e30), dict(lr=1e30, depth=0)])
def test_a_probe_that_diverges_raises(steps):
    with pytest.raises(FloatingPointError, match="diverged at lr=1e[+]30. A lower lr"):
        mutual_information(*both_of(parity, (40, 20, 20)), width=4, **{**steps, "steps": 3})


def test_probe_is_chosen_on_validation():
    h = [torch.tensor([[2.0 * (i % 2) - 1]]) for i in range(40)]
    y = [i % 2 for i in range(40)]

    def bits(n):
        return mutual_information(
            dict.fromkeys(("train", "validation", "test"), h),
            dict(train=y, validation=[1 - v for v in y], test=y),
            depth=0,
            steps=n,
            evaluations=n,
            lr=0.1,
        )["bits"]

    assert bits(20) == bits(
        1
    )  # every step makes the reversed validation labels worse and the test labels better


def test_of_equal_validation_losses_the_first_counts(monkeypatch):
    evaluations = iter(
        [(1.0, 0.5), (9.0, 0.1), (1.0, 0.5), (2.0, 0.9)]
    )  # validation and test, two times: the test examples decide nothing
    monkeypatch.setattr(information, "_evaluate_probe", lambda *a: next(evaluations))
    result = mutual_information(*both_of(parity, (40, 20, 20)), width=4, steps=2, evaluations=2)
    assert result["bits"] == result["entropy"] - 9


def test_entropy_is_of_the_test_labels():
    r = mutual_information(
        dict.fromkeys(("train", "validation", "test"), [torch.zeros(1, 1)] * 40),
        dict(train=[0, 1] * 20, validation=[0, 1] * 20, test=[0, 0, 0, 1] * 10),
        depth=0,
        steps=1,
    )
    assert abs(r["entropy"] - 0.8113) < 1e-3


PLANS = {
    "late": lambda bb: lpt_plan(bb, NaivePromptGenerator(bb.d, 4, 8), 1),
    "deep": lambda bb: {
        0: Insert(SoftPrompt(4, bb.d, std=1.0)),
        2: Replace(SoftPrompt(4, bb.d, std=1.0)),
    },
    "among the words": lambda bb: {INPUT: Insert(SoftPrompt(4, bb.d, std=1.0), position=1)},
    "keys": lambda bb: {1: KeyValue(SoftPrompt(4, 2 * bb.d, std=1.0))},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILY)
def test_states_under_a_prompt(family, plan):
    """They equal those of a loop that stops there; every layer runs once for each batch."""
    if (family, plan) == ("deberta", "keys"):
        pytest.skip("DeBERTa's attention has no prefix keys")
    bb, task, examples, head = setting(family, 5)
    torch.manual_seed(0)
    model = PlannedModel(bb, head, PLANS[plan](bb))
    plain = PlannedModel(bb, head)
    with pytest.MonkeyPatch.context() as m:
        applied = []
        inner = bb.run_layer
        m.setattr(bb, "run_layer", lambda k, *a, **kw: (applied.append(k), inner(k, *a, **kw))[1])
        text = list(states_by_layer(model, examples, batch_size=2))
    assert sorted(applied) == sorted([0, 1, 2] * 3)  # three layers, three batches
    first = dict(late=1, deep=0, keys=1).get(plan, -1)
    for k, bare in zip((0, 1, 2, 3), states_by_layer(plain, examples)):
        assert [len(h) for h in text[k]] == [len(e["input_ids"]) for e in examples]
        with torch.no_grad():
            ctx = run_layers(bb, batch_of(bb, task, 5), model.plan, stop=k)
        same(torch.cat(text[k]), ctx.h[ctx.word_mask == 1], 1e-4)
        moved = max((a - b).abs().max() for a, b in zip(text[k], bare))
        # its embeddings have no positions to move
        unchanged = k <= first or (family, plan, k) == ("deberta", "among the words", 0)
        assert moved < 1e-4 if unchanged else moved > 1e-3


def test_probe_layers_is_one_probe_a_layer():
    bb, task, _, head = setting()
    model = PlannedModel(bb, head)
    got = probe_layers(model, task, max_examples=24, depth=0, steps=5)
    assert [r["layer"] for r in got] == [1, 2, 3] and len({r["bits"] for r in got}) == 3
    encoded = {s: task.encode(r[:24], bb.tokenizer, 128) for s, r in task.splits.items()}
    again = mutual_information(
        {s: list(states_by_layer(model, e))[2] for s, e in encoded.items()},
        {s: [r["label"] for r in t[:24]] for s, t in task.splits.items()},
        depth=0,
        steps=5,
    )
    assert (
        got[1] == {"layer": 2, **again}
        and probe_layers(model, task, [2, 0], max_examples=24, depth=0, steps=5)[0] == got[1]
    )


def test_each_layer_is_computed_once(monkeypatch):
    bb, task, _, head = setting()
    applied = []
    inner = bb.run_layer
    monkeypatch.setattr(
        bb, "run_layer", lambda k, *a, **kw: (applied.append(k), inner(k, *a, **kw))[1]
    )
    probe_layers(PlannedModel(bb, head), task, max_examples=24, depth=0, steps=1)
    assert applied == [0] * 3 + [1] * 3 + [2] * 3  # of three splits, a batch each
    applied.clear()
    probe_layers(PlannedModel(bb, head), task, [1], max_examples=24, depth=0, steps=1)
    assert applied == [0] * 3


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: ProbeConfig(width=10, heads=4), ["width=10", "heads=4"]),
        (
            lambda: ProbeConfig(depth=-1),
            ["depth must be at least 0, got -1", "0 is a linear probe"],
        ),
        (lambda: ProbeConfig(lr=0.0), ["lr must be a positive number, got 0.0"]),
        *[
            (
                lambda name=name: mutual_information({}, {}, **{name: 0}),
                [f"{name} must be at least 1, got 0"],
            )
            for name in ("steps", "evaluations", "batch_size", "width", "heads")
        ],
        (
            lambda: probe_layers(PlannedModel(setting()[0], None), small_task("similarity")),
            ["regression", "needs one class for each row"],
        ),
        (
            lambda: probe_layers(PlannedModel(setting()[0], None), small_task("in-short")),
            ["texts", "needs one class for each row"],
        ),
        (
            lambda: probe_layers(PlannedModel(setting()[0], None), small_task(), [1, 4]),
            ["got 4", "between 0 and 3"],
        ),
    ],
)
def test_what_is_refused(make, words):
    refused(make, *words)

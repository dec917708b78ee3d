"""Gradients at a prompt, and the choice of a layer: its reasons and its data."""

from dataclasses import replace

import pytest
import torch
from small import FAMILY, backbone, batch_of, one, refused, same, setting, small_task

from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.steps import Insert
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.lpt import lpt_plan
from idp_tutorial.methods.soft_prompt import SoftPrompt
from idp_tutorial.reproduction.analysis.layer_choice import (
    choose_prompt_layer,
    prompt_gradient_statistics,
    prompt_gradients,
)
from idp_tutorial.reproduction.analysis.probes import layer_features


@pytest.mark.grid
@pytest.mark.parametrize(
    "family,head",
    [*((family, "classification") for family in FAMILY), ("roberta", "verbalizer")],
)
def test_choice_and_its_reasons(family, head):
    bb, task, _, _ = setting(family)
    c = choose_prompt_layer(bb, task, head, max_examples=32, prompt_length=3, max_len=60)
    again = choose_prompt_layer(bb, task, head, max_examples=32, prompt_length=3, max_len=60)
    assert (
        c["layer"] in range(3)
        and [r["layer"] for r in c["rows"]] == [0, 1, 2]
        and c["rows"] == again["rows"]
    )
    assert c["seconds"] > 0
    best = max(r["score"] for r in c["rows"])
    assert c["layer"] == (
        max(r["layer"] for r in c["rows"] if r["score"] >= best - 0.1) if c["informed"] else 1
    )
    assert all(
        0 <= r["score"] <= 2 + 1e-6 and r["cost"] == (6 - r["layer"]) / 9 and r["signal"] > 0
        for r in c["rows"]
    )
    assert all(p.grad is None for p in bb.model.parameters())


def test_choice_only_sees_training_texts():
    bb, task, _, _ = setting()
    blind = replace(task, splits=dict(train=task.splits["train"]))
    assert (
        choose_prompt_layer(bb, blind, max_examples=16)["rows"]
        == choose_prompt_layer(bb, task, max_examples=16)["rows"]
    )


def test_choice_balances_bits_and_signal(monkeypatch):
    """Given bits and signals must lead to the expected layer."""
    bb, task, _, _ = setting()

    def chosen(bits, signal, **kw):
        values = iter([(b, 10.0) for b in (*bits, 0.0)])
        monkeypatch.setattr(
            "idp_tutorial.reproduction.analysis.layer_choice.linear_probe_bits",
            lambda *a: next(values),
        )
        monkeypatch.setattr(
            "idp_tutorial.reproduction.analysis.layer_choice.prompt_gradient_statistics",
            lambda *a, **k: [dict(layer=i, signal=s) for i, s in enumerate(signal)],
        )
        c = choose_prompt_layer(bb, task, max_examples=16, **kw)
        assert c["informed"] == (max(bits) >= 0.05)
        return c["layer"]

    assert chosen([0.1, 0.5, 0.6], [9.0, 8.0, 1.0]) == 1  # a middle one
    assert chosen([0.3, 0.3, 0.3], [9.0, 1.0, 0.1]) == 0  # all know the same: the signal decides
    assert (
        chosen([0.1, 0.2, 0.9], [1.0, 1.0, 1.0]) == 2
    )  # all can do the same: what is known decides
    assert chosen([0.300, 0.301, 0.303], [1.0, 1.02, 0.99]) == 2  # noise: the cheapest
    assert chosen([0.1, 0.5, 0.6], [9.0, 8.0, 1.0], tolerance=1.5) == 2  # as good, and the cheapest
    assert chosen([-0.2, 0.01, 0.0], [9.0, 1.0, 0.1]) == 1  # nothing is known: the middle


def test_choice_records_its_settings():
    bb, task, _, _ = setting()
    c = choose_prompt_layer(bb, task, max_examples=16, prompt_length=3, max_len=60, seed=2)
    assert (c["prompt_length"], c["max_len"], c["seed"], c["n"], c["template"]) == (
        3,
        60,
        2,
        16,
        None,
    )
    assert choose_prompt_layer(bb, task, "verbalizer", max_examples=16)["template"] == "code"


def test_gradients_are_of_texts_the_head_has_not_seen(monkeypatch):
    bb, task, _, _ = setting()
    seen = {}
    target = "idp_tutorial.reproduction.analysis.layer_choice."
    monkeypatch.setattr(target + "linear_probe_bits", lambda *a: (0.1, 10.0))
    monkeypatch.setattr(
        target + "fit_softmax_regression",
        lambda x, y, *a: seen.update(x=x) or (torch.zeros(2, bb.d), torch.zeros(2)),
    )
    monkeypatch.setattr(
        target + "prompt_gradient_statistics",
        lambda bb, head, ex, X, prompt_length=10: (
            seen.update(ex=ex, t=prompt_length) or [dict(layer=k, signal=1.0) for k in range(3)]
        ),
    )
    choose_prompt_layer(bb, task, max_examples=16, prompt_length=3)
    assert (
        len(seen["x"]) == 12
        and seen["t"] == 3
        and torch.cdist(layer_features(bb, seen["ex"])[-1], seen["x"]).min() > 1e-3
    )


@pytest.mark.parametrize(
    "make,words",
    [
        (
            lambda: choose_prompt_layer(setting()[0], small_task("similarity")),
            ["regression", "needs one class for each row"],
        ),
        (
            lambda: choose_prompt_layer(backbone("gpt2"), load_task("in-short")),
            ["texts", "needs one class for each row"],
        ),
        (
            lambda: choose_prompt_layer(setting()[0], small_task(), "verbaliser"),
            ["head must be ", "got 'verbaliser'", "'verbalizer'"],
        ),
        (
            lambda: choose_prompt_layer(setting()[0], small_task(train=1)),
            ["at least 8 examples", "got 1 examples"],
        ),
    ],
)
def test_what_is_refused(make, words):
    refused(make, *words)


@pytest.mark.parametrize("head", ["classification", "verbalizer"])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("family", FAMILY)
def test_gradients_of_each_text(family, layer, head):
    """They average to a static prompt's gradient, do not depend on the batch or on given states."""
    bb, task, _examples, reader = setting(family, 6, head)
    batch = batch_of(bb, task, 6, "code" if head == "verbalizer" else None)
    torch.manual_seed(1)
    source = SoftPrompt(4, bb.d, std=1.0)
    model = PlannedModel(bb, reader, lpt_plan(bb, source, layer)).eval()
    model.loss(batch).backward()
    G = prompt_gradients(bb, reader, batch, layer, source.p)
    assert G.shape == (6, 4, 32) and G[0].abs().max() > 1e-6 and (G[0] - G[1]).abs().max() > 1e-6
    same(G.mean(0), source.p.grad, 1e-6, 1e-3)
    same(
        torch.cat([prompt_gradients(bb, reader, one(batch, i), layer, source.p) for i in range(6)]),
        G,
        1e-5,
        1e-3,
    )
    same(
        prompt_gradients(
            bb,
            reader,
            batch,
            layer,
            source.p.expand(6, -1, -1),
            run_layers(bb, batch, stop=layer).h,
        ),
        G,
        1e-6,
        1e-4,
    )


def test_gradient_norms_by_hand():
    bb, _task, examples, head = setting(n=35)  # two batches
    X = layer_features(bb, examples)
    got = prompt_gradient_statistics(bb, head, examples, X, prompt_length=3)
    assert [r["layer"] for r in got] == list(range(bb.n_layers))
    for r in got:
        k = r["layer"]
        G = []
        length = []
        for e in examples:
            b = dict(
                input_ids=torch.tensor([e["input_ids"]]),
                attention_mask=torch.ones(1, len(e["input_ids"])).long(),
                token_type_ids=torch.zeros(1, len(e["input_ids"])).long(),
                label=torch.tensor([e["label"]]),
            )
            p = X[k].mean(0).repeat(1, 3, 1).requires_grad_()
            head.loss(run_layers(bb, b, {k: Insert(lambda ctx, p=p: p)}), b["label"]).backward()
            G.append(p.grad.flatten())
            length += run_layers(bb, b, stop=k).h[0].norm(dim=-1).tolist()
        G = torch.stack(G)
        norm = G.norm(dim=1).mean().item()
        assert r["norm"] == pytest.approx(norm, rel=1e-3)
        assert r["agreement"] == pytest.approx(G.mean(0).norm().item() / norm, rel=1e-3)
        assert r["signal"] == pytest.approx(
            norm * 3**0.5 * sorted(length)[(len(length) - 1) // 2], rel=1e-3
        )

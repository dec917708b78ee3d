"""Gradients at a prompt, and the choice of a layer: its reasons, its data, and its file."""

import json
import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from small import FAMILY, backbone, batch_of, one, refused, same, setting, small_task
from sweeps import BASE, HUMP, TASK

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.steps import Insert
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.lpt import lpt_plan
from idp_tutorial.methods.soft_prompt import SoftPrompt
from idp_tutorial.reproduction.analysis import layer_choice as module
from idp_tutorial.reproduction.analysis.layer_choice import (
    choice_matches_sweep,
    choose_prompt_layer,
    load_or_choose_layer,
    plot_gradients,
    prompt_gradient_statistics,
    prompt_gradients,
    try_choose_layer,
)
from idp_tutorial.reproduction.analysis.probes import layer_features
from idp_tutorial.utils.records import read_records


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


def test_choice_matches_only_its_prompt_length():
    assert choice_matches_sweep(dict(layer=4, prompt_length=10), HUMP[0]) and choice_matches_sweep(
        dict(layer=4), HUMP[0]
    )
    assert not choice_matches_sweep(dict(layer=4, prompt_length=20), HUMP[0])


def test_a_choice_is_for_its_settings(monkeypatch, tmp_path):
    """A stored choice with digests is used for the same length, head and data only."""
    chosen = []
    out = tmp_path / "choice.jsonl"

    def choose(bb, task, head, prompt_length, max_len, template):
        chosen.append((head, prompt_length, max_len))
        return dict(
            layer=len(chosen),
            head=head,
            prompt_length=prompt_length,
            max_len=max_len,
            template=template,
            seconds=1.0,
        )

    monkeypatch.setattr(module, "choose_prompt_layer", choose)

    def layer(task=TASK, **kw):
        return load_or_choose_layer(replace(BASE, **kw), task, out)["layer"]

    got = [
        layer(),
        layer(),
        layer(prompt_length=3),
        layer(prompt_length=3, max_len=64),
        layer(prompt_length=3, head="verbalizer"),
        layer(small_task(train=32)),
        layer(prompt_length=3),
        layer(lr=0.5),
        layer(prompt_length=3, head="verbalizer", template="paper"),
    ]
    assert got == [1, 1, 2, 3, 4, 5, 2, 1, 6]
    assert len(chosen) == 6
    assert [
        (r["prompt_length"], r["max_len"], r["split_sizes"]["train"]) for r in read_records(out)
    ] == [(10, 128, 64), (3, 128, 64), (3, 64, 64), (3, 128, 64), (10, 128, 32), (3, 128, 64)]
    assert all(
        r["provenance"]["command"] and r["provenance"]["started_at"] for r in read_records(out)
    )
    old = dict(task="sentiment", head="classification", layer=17, seconds=1.0)
    out.write_text(json.dumps(old) + "\n")
    assert [layer(), layer(prompt_length=3), layer()] == [7, 8, 7]
    assert choice_matches_sweep(
        read_records(out)[0], HUMP[0] | dict(task="sentiment")
    )  # a page may show it
    out.write_text('{"task": \n')  # damaged: an error, and no sweep without a choice
    with pytest.raises(ValueError, match="line 1 is not a record"):
        try_choose_layer(["lpt"], BASE, TASK, out)


def test_a_choice_of_other_weights_or_rows_is_another(small_folder, monkeypatch, tmp_path):
    """The contents of weights and data decide, not the names of folders."""
    chosen = []
    out = tmp_path / "choice.jsonl"

    def choose(bb, task, *a, **kw):
        chosen.append(1)
        return dict(layer=len(chosen), seconds=1.0)

    monkeypatch.setattr(module, "choose_prompt_layer", choose)
    for folder in "abc":
        shutil.copytree(
            small_folder, tmp_path / folder / "bb", ignore=shutil.ignore_patterns("SHA256SUMS")
        )
    weights = safetensors.torch.load_file(tmp_path / "c" / "bb" / "model.safetensors")
    name = next(k for k in weights if "word_embeddings" in k)
    changed = {**weights, name: weights[name] + 1}
    safetensors.torch.save_file(
        changed, tmp_path / "c" / "bb" / "model.safetensors", {"format": "pt"}
    )
    turned = replace(
        TASK,
        splits={
            s: [{**r, "label": 1 - r["label"]} for r in rows] for s, rows in TASK.splits.items()
        },
    )

    def layer(folder, task=TASK):
        return load_or_choose_layer(
            replace(BASE, backbone=str(tmp_path / folder / "bb")), task, out
        )["layer"]

    assert [layer("a"), layer("b"), layer("c"), layer("a", turned), layer("b"), layer("c")] == [
        1,
        1,
        2,
        3,
        1,
        2,
    ]
    r = read_records(out)[0]
    assert r["digests"] == dict(
        weights=backbone_id(load_backbone(str(small_folder))), data=TASK.digest()
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


def test_plot_of_gradients():
    ax = plot_gradients(
        dict(
            layer=1,
            rows=[
                dict(layer=k, norm=n, signal=s)
                for k, (n, s) in enumerate([(4.0, 1.0), (2.0, 5.0), (1.0, 2.0)])
            ],
        )
    )
    assert [list(l.get_ydata()) for l in ax.lines] == [[1.0, 0.5, 0.25], [0.2, 1.0, 0.4], [0, 1]]
    assert list(ax.lines[2].get_xdata()) == [1, 1]

"""Gradients at a prompt, example by example, and their norms at every layer."""

import pytest
import torch
from small import FAMILY, batch_of, one, same, setting

from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.core.steps import Insert
from idp_tutorial.methods.lpt import lpt_plan
from idp_tutorial.methods.prompt_tuning import SoftPrompt
from idp_tutorial.reproduction.analysis.gradients import (
    plot_gradients,
    prompt_gradient_statistics,
    prompt_gradients,
)
from idp_tutorial.reproduction.analysis.probes import layer_features


@pytest.mark.parametrize("head", ["classification", "verbalizer"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILY)
def test_gradients_of_each_text(family, layer, head):
    """They average to a static prompt's gradient, do not depend on the batch or on given states."""
    bb, task, _examples, reader = setting(family, 6, head)
    batch = batch_of(bb, task, 6, "code" if head == "verbalizer" else None)
    torch.manual_seed(1)
    source = SoftPrompt(4, bb.d, std=1.0)
    model = PromptedModel(bb, reader, lpt_plan(bb, source, layer)).eval()
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
    bb, _task, examples, head = setting(n=5)
    X = layer_features(bb, examples)
    got = prompt_gradient_statistics(bb, head, examples, X, prompt_length=3, batch_size=2)
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

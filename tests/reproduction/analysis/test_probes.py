"""Linear probes: features of a layer, logistic regression, bits."""

import math

import pytest
import torch
import torch.nn.functional as F
from small import FAMILY, refused, same, setting

from idp_tutorial.reproduction.analysis.probes import (
    compute_label_entropy,
    fit_softmax_regression,
    layer_features,
    linear_probe_bits,
)


@pytest.mark.parametrize("family", FAMILY)
def test_layer_features_are_hugging_faces(family):
    bb, _task, examples, _ = setting(family, 7)
    got = layer_features(bb, examples, batch_size=3)
    assert got.shape == (4, 7, 32) and not got.requires_grad
    for i, e in enumerate(examples):
        x = dict(
            input_ids=torch.tensor([e["input_ids"]]),
            attention_mask=torch.ones(1, len(e["input_ids"])).long(),
        )
        with torch.no_grad():
            hidden = bb.model(
                **x, output_hidden_states=True
            ).hidden_states  # Hugging Face applies the final layer norm to the last of GPT-2
        same(got[:, i], torch.stack([h[0].mean(0) for h in hidden]), 1e-4)


def test_logistic_is_the_minimum():
    torch.manual_seed(0)
    x = torch.randn(60, 5) * torch.tensor([1.0, 10, 0.1, 3, 1]) + 4
    y = torch.randint(3, (60,))
    W, b = fit_softmax_regression(x, y, 3, l2=6.0)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    V = (W * x.std(0, correction=0)).requires_grad_()
    c = (b + W @ x.mean(0)).detach().requires_grad_()
    (F.cross_entropy(z @ V.T + c, y) + 6 * V.pow(2).sum() / 120).backward()
    assert V.grad.abs().max() < 2e-3 and c.grad.abs().max() < 2e-3
    assert V.norm() > 1e-2 and fit_softmax_regression(x, y, 4)[0].shape == (
        4,
        5,
    )  # a class that does not occur


def test_bits_of_a_linear_probe():
    torch.manual_seed(0)
    y = (torch.arange(200) % 2)[torch.randperm(200)]
    assert (
        abs(linear_probe_bits(F.one_hot(y).float() + 0.01 * torch.randn(200, 2), y, 2)[0] - 1) < 0.1
    )
    bits, l2 = linear_probe_bits(torch.randn(200, 100), y, 2)
    assert math.isfinite(
        linear_probe_bits(torch.randn(8, 3), torch.tensor([0, 0, 0, 0, 0, 0, 0, 1]), 2)[0]
    )
    assert (
        -0.1 < bits < 0.05
        and l2 == 1000
        and compute_label_entropy(y) == 1
        and abs(compute_label_entropy(torch.tensor([0, 0, 0, 1])) - 0.8113) < 1e-3
    )


@pytest.mark.parametrize(
    "make,words",
    [
        (
            lambda: linear_probe_bits(torch.randn(7, 2), torch.arange(7) % 2, 2),
            ["got 7 examples", "at least 8"],
        ),
        (
            lambda: linear_probe_bits(torch.randn(9, 2), torch.zeros(9).long(), 2),
            ["two labels, got ", " and 1."],
        ),
    ],
)
def test_what_is_refused(make, words):
    refused(make, *words)

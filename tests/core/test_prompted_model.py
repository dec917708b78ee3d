"""A prompted model becomes one graph with `torch.export`, for any batch size and length."""

import pytest
import torch
from small import batch_of, config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone

FIELDS = ("input_ids", "attention_mask", "token_type_ids")


@pytest.fixture(scope="module")
def tiny():
    return load_backbone("tiny")


@pytest.mark.long
@pytest.mark.parametrize(
    "method,pooling",
    [
        ("prompt-tuning", "mean"),
        pytest.param("lpt-npg", "cls", marks=pytest.mark.slow),
        pytest.param("id-spam", "mean", marks=pytest.mark.slow),
        ("s-idpg-phm", "cls"),
        ("p-tuning-v2", "mean"),
    ],
)
def test_an_exported_model_computes_the_same_logits(tiny, method, pooling):
    task = small_task()
    model = build_model(config(method=method, pooling=pooling), tiny, task).eval()
    batch = {name: x for name, x in batch_of(tiny, task, n=5).items() if name in FIELDS}
    B, T = torch.export.Dim("B", min=2), torch.export.Dim("T", min=4, max=200)
    shapes = {name: {0: B, 1: T} for name in FIELDS}
    with torch.no_grad():
        exported = torch.export.export(model, (batch,), dynamic_shapes=(shapes,)).module()
        for n in (5, 3):
            other = {name: x for name, x in batch_of(tiny, task, n=n).items() if name in FIELDS}
            other = {name: torch.cat([x, 0 * x[:, :n]], 1) for name, x in other.items()}
            torch.testing.assert_close(exported(other), model(other), atol=1e-6, rtol=0)

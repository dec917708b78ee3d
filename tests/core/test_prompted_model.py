"""A prompted model becomes one graph with `torch.export`, for any batch size and length."""

import pytest
import torch
from small import batch_of, config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.methods.all_methods import METHODS

FIELDS = ("input_ids", "attention_mask", "token_type_ids")


DAILY = [
    ("prompt-tuning", dict(position=4)),  # a position for each example
    ("lpt-appg", {}),
    ("lpt-npg", dict(standardise=True)),
    ("s-idpg-phm", dict(pooling="cls")),
    ("p-tuning-v2", {}),
]
# no graph: word vectors of GloVe are looked up, and EFL scores pairs; the others need fewer tokens
WITHOUT_GRAPH = ("m-idpg-phm-glove", "efl", "prompt-tuning-134", "dept")
WEEKLY = [
    *((method, {}) for method in METHODS if method not in WITHOUT_GRAPH),
    *(("prompt-tuning", dict(position=p)) for p in (0, 1)),
    *(("m-idpg-phm", dict(insertion=i)) for i in ("insert", "replace", "kv")),
    ("s-idpg-phm", dict(standardise=True, position=4)),
    ("smop", dict(top_k=2)),
    ("lpt-mppg", dict(pooling="last")),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "method,options",
    [*DAILY, *(pytest.param(*case, marks=pytest.mark.slow) for case in WEEKLY)],
    ids=str,
)
def test_an_exported_model_computes_the_same_logits(method, options):
    task = small_task()
    tiny = load_backbone("tiny")
    model = build_model(config(method=method, **options), tiny, task).eval()
    if options.get("standardise"):  # with statistics of two batches
        model.train()(batch_of(tiny, task, n=5))
        model.train()(batch_of(tiny, task, n=3))
        model.eval()
    batch = {name: x for name, x in batch_of(tiny, task, n=5).items() if name in FIELDS}
    B, T = torch.export.Dim("B", min=2), torch.export.Dim("T", min=4, max=200)
    shapes = {name: {0: B, 1: T} for name in FIELDS}
    with torch.no_grad():
        exported = torch.export.export(model, (batch,), dynamic_shapes=(shapes,)).module()
        for n in (5, 3):
            other = {name: x for name, x in batch_of(tiny, task, n=n).items() if name in FIELDS}
            other = {name: torch.cat([x, 0 * x[:, :n]], 1) for name, x in other.items()}
            torch.testing.assert_close(exported(other), model(other), atol=1e-6, rtol=0)

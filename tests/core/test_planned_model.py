"""A prompted model becomes one graph with `torch.export`, for any batch size and length."""

import pytest
import torch
from small import config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.encoding import collate
from idp_tutorial.methods.all_methods import METHODS

# GloVe's vectors are looked up outside of the graph
TOKENS = ("input_ids", "attention_mask", "token_type_ids")
FIELDS = (*TOKENS, "glove")


DAILY = [
    ("prompt-tuning", dict(position=4)),  # a position for each example
    ("lpt-appg", {}),
    ("lpt-npg", dict(standardise=True)),
    ("s-idpg-phm", dict(pooling="cls")),
    ("p-tuning-v2", {}),
]
WEEKLY = [
    # EFL's graph has another sequence length, about which torch cannot reason
    *((method, {}) for method in METHODS if method != "efl"),
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
    examples = task.encode(task.splits["train"][:5], tiny.tokenizer, 60)
    for source in model.prompt_sources():
        examples = source.prepare(examples)

    def fields_of(n):
        batch = collate(examples[:n], tiny.pad_id)
        return {name: batch[name] for name in FIELDS if name in batch}

    if options.get("standardise"):  # with statistics of two batches
        model.train()(fields_of(5))
        model.train()(fields_of(3))
        model.eval()
    batch = fields_of(5)
    # with a prompt of 134 vectors, `tiny` has positions for 122 tokens
    B, T = torch.export.Dim("B", min=2), torch.export.Dim("T", min=4, max=100)
    shapes = {name: {0: B} | ({} if name == "glove" else {1: T}) for name in batch}
    with torch.no_grad():
        exported = torch.export.export(model, (batch,), dynamic_shapes=(shapes,)).module()
        for n in (5, 3):
            other = fields_of(n)
            other |= {name: torch.cat([other[name], 0 * other[name][:, :n]], 1) for name in TOKENS}
            torch.testing.assert_close(exported(other), model(other), atol=1e-6, rtol=0)

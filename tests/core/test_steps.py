"""The steps of a plan: which plans and prompts are refused.

What the library asks of prompt sources, and what it assumes of one that defines nothing.
"""

import pytest
import torch
from small import backbone as small_backbone
from small import batch_of
from small_layers import backbone, d, make_batch, refused, static, t
from torch import nn

from idp_tutorial.core.context import INPUT
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.core.steps import Add, Insert, KeyValue, PromptSource, Replace, check_plan
from idp_tutorial.training.cache import required_sentence_vectors
from idp_tutorial.training.examples import precompute_source_inputs


def test_invalid_plans():
    bb = backbone("roberta")
    deberta = backbone("deberta")
    p = static()
    batch = make_batch(bb)
    for run in (
        lambda plan: check_plan(plan, bb),
        lambda plan: run_layers(bb, batch, plan),
    ):  # never silently left out
        refused(
            lambda: run({3: Insert(p)}),
            "between 0 and 2 for backbone 'roberta', got 3",
            "0 is the embedding output",
        )
        refused(lambda: run({-2: Insert(p)}), "between 0 and 2", "got -2")
        refused(
            lambda: run({"word": Insert(p)}),
            "got 'word'",
            "must be INPUT or",
        )
        refused(lambda: run({1: p}), "a function at layer 1 instead of a step", "Insert(source)")
        for step_class in (Add, Replace):
            refused(
                lambda: run({1: step_class(p), 2: Insert(p)}),
                f"'{step_class.name}' at layer 1",
                "Begin the plan with an `Insert`",
            )
            refused(lambda: run({INPUT: step_class(p)}), "Begin the plan with an `Insert`")
            refused(
                lambda: run({0: KeyValue(static(2 * d)), 1: step_class(p)}),
                "Begin the plan with an `Insert`",
            )
        refused(lambda: run({INPUT: KeyValue(p)}), "'kv' at INPUT", "enter at a layer")
    refused(
        lambda: check_plan({1: KeyValue(static(2 * d))}, deberta),
        "'kv' at layer 1",
        "a deberta backbone",
        "Use `Insert` and `Replace`",
    )
    check_plan({2: Add(p), INPUT: Insert(p), 1: KeyValue(p)}, bb)


@pytest.mark.parametrize(
    "plan,words",
    [
        (
            {1: Insert(static(t=4, width=8))},
            ("'insert' at layer 1", "(3, 4, 8)", "(3, t, 32)"),
        ),
        (
            {INPUT: Insert(lambda ctx: torch.zeros(1, t, d))},
            ("'insert' at INPUT", "(1, 4, 32)", "needs `.expand"),
        ),
        ({0: Insert(lambda ctx: torch.zeros(t, d))}, ("(4, 32)", "batch, length, width")),
        (
            {0: KeyValue(static())},
            ("'kv' at layer 0", "(3, 4, 32)", "(3, t, 64)"),
        ),
        (
            {0: Insert(static()), 2: Add(static(t=3))},
            ("'add' at layer 2", "has 4 vectors but the source gives 3", "one prompt length"),
        ),
        (
            {0: Insert(static()), 2: Replace(lambda ctx: torch.zeros(1, t, d))},
            ("'replace' at layer 2", "(1, 4, 32)"),
        ),
        (
            {0: Insert(static(), 3)},
            ("inserted at positions [3, 3, 3]", "have [9, 5, 2] tokens", "not inside the padding"),
        ),
        ({0: Insert(static(), -1)}, ("inserted at positions [-1, -1, -1]",)),
        (
            {0: Insert(static(), lambda ctx: ctx.tracked_positions["last"] + 2)},
            ("inserted at positions [10, 6, 3]", "each example"),
        ),
        (
            {0: Insert(lambda ctx: ctx.state_at("eos")[:, None])},
            ("no 'eos' position", "cls, last, mask", "template"),
        ),
    ],
)
def test_wrong_prompts(plan, words):
    bb = backbone("roberta")
    refused(lambda: run_layers(bb, make_batch(bb), plan), *words)


class Inner(PromptSource):
    needs = ("sentence",)

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 32))
        self.lr_scale = {"w": 0.5}

    def prepare(self, examples):
        return [dict(e, n=len(e["input_ids"])) for e in examples]

    def state_digest(self):
        return "d"


class Outer(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.v = nn.Parameter(torch.zeros(3, 32))

    def forward(self, ctx):
        return self.v.expand(len(ctx.h), -1, -1)


def model_with(source):
    bb = small_backbone()
    return PromptedModel(bb, ClassificationHead(bb.d, 2), {0: Insert(source)})


def test_the_parts_of_a_source_are_asked_too():
    model = model_with(Outer(Inner()))
    assert [type(s) for s in model.prompt_sources()] == [Inner]
    assert required_sentence_vectors(model) == ["sentence"]
    assert precompute_source_inputs(model, [dict(input_ids=[1, 2])]) == [
        dict(input_ids=[1, 2], n=2)
    ]
    rates = {g["lr"]: len(g["params"]) for g in model.parameter_groups(1.0)}
    assert rates == {1.0: 3, 0.5: 1}  # v and the head's two, w


def test_the_defaults_need_and_change_nothing():
    model = model_with(Outer(PromptSource()))
    examples = [dict(input_ids=[1, 2])]
    (source,) = model.prompt_sources()
    assert source.state_digest() is None and not source.lr_scale
    assert required_sentence_vectors(model) == []
    assert precompute_source_inputs(model, examples) is examples
    assert len(model.parameter_groups(1.0)) == 1
    assert model(batch_of(model.backbone)).shape[1] == 2

"""The steps of a plan: which plans and prompts are refused.

What the library asks of prompt sources, and what it assumes of one that defines nothing.
"""

import torch
from small import backbone as small_backbone
from small import batch_of
from torch import nn

from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.steps import Insert, PromptSource
from idp_tutorial.training.cache import required_sentence_vectors
from idp_tutorial.training.examples import precompute_source_inputs


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
    return PlannedModel(bb, ClassificationHead(bb.d, 2), {0: Insert(source)})


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

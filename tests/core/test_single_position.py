"""A pass for one position equals a full pass, also from cached states."""

import pytest
from small import refused
from small_layers import backbone, d, make_batch, resume, same, static

from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.single_position import run_for_position
from idp_tutorial.core.steps import Insert, KeyValue


@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2", "deberta"])
@pytest.mark.parametrize("start", range(4))
def test_a_pass_for_one_position_equals_a_full_pass(family, start):
    bb = backbone(family)
    batch = make_batch(bb)
    batch = resume(batch, start, run_layers(bb, batch, stop=start).h)
    step = Insert(static(), 1) if family == "deberta" else KeyValue(static(2 * d))
    for plan in ({}, {2: step} if start < 3 else {}):
        ctx = run_for_position(bb, batch, plan, "last")
        full = run_layers(bb, batch, plan)
        same(ctx.state_at("last"), full.state_at("last"))
        assert ctx.layer == full.layer == 3


def test_the_last_layer_computes_one_position():
    bb = backbone("roberta")
    assert run_for_position(bb, make_batch(bb), position="mask").h.shape == (3, 1, d)
    assert run_for_position(bb, make_batch(bb)).h.shape == (3, 9, d)


def test_an_unknown_position_is_refused():
    bb = backbone("roberta")
    batch = make_batch(bb)
    del batch["mask_position"]
    refused(lambda: run_for_position(bb, batch, position="mask"), "no 'mask' position", "template")

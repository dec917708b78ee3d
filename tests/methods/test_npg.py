"""Tests of NPG, the generator that reads one hidden state; tests/methods/test_lpt.py has more."""

import pytest
import torch
from small import FAMILY, backbone, batch_of

from idp_tutorial.core.loop import run_layers
from idp_tutorial.methods.npg import NaivePromptGenerator


@pytest.mark.parametrize("family", FAMILY)
def test_the_prompt_depends_on_one_hidden_state_only(family):
    bb = backbone(family)
    ctx = run_layers(bb, batch_of(bb, n=2), stop=1)
    generator = NaivePromptGenerator(bb.d, t=3, m=4).eval()
    before = generator(ctx)
    read = ctx.tracked_positions[ctx.summary_position]
    others = torch.ones(ctx.h.shape[:2], dtype=torch.bool)
    others[torch.arange(2), read] = False
    ctx.h = torch.where(others[..., None], ctx.h + 1, ctx.h)
    assert before.shape == (2, 3, bb.d)
    torch.testing.assert_close(generator(ctx), before)
    ctx.h = ctx.h + 1
    assert not torch.allclose(generator(ctx), before)


def test_a_standardised_generator_ignores_the_mean_and_scale_of_the_states():
    bb = backbone()
    ctx = run_layers(bb, batch_of(bb, n=6), stop=1)
    prompts = []
    for scale in (1, 3):
        torch.manual_seed(0)
        generator = NaivePromptGenerator(bb.d, dropout=0.0, standardise=True)
        ctx.h = scale * ctx.h + scale
        prompts.append(generator(ctx))  # in training mode it counts the states first
    torch.testing.assert_close(*prompts, atol=1e-3, rtol=1e-3)

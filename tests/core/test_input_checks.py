"""Plans, prompts and batches that are refused, with messages that say why."""

import pytest
import torch
from small import refused
from small_layers import (
    backbone,
    d,
    make_batch,
    resume,
    static,
    t,
)

from idp_tutorial.core.context import INPUT
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.steps import Add, Insert, KeyValue, Replace


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
        ({0: Insert(lambda ctx: torch.zeros(t, d))}, ("(4, 32)", "(3, t, 32)")),
        (
            {0: KeyValue(static())},
            ("'kv' at layer 0", "(3, 4, 32)", "(3, t, 64)"),
        ),
        (
            {0: Insert(static()), 2: Add(static(t=3))},
            ("'add' at layer 2", "(3, 4, 32)", "(3, 3, 32)"),
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


@pytest.mark.parametrize("mask", [[0, 1, 1], [1, 0, 1], [0, 0, 0]], ids=str)
def test_padding_that_is_not_on_the_right_is_refused(mask):
    bb = backbone("gpt2")
    batch = {name: value[:, :3] for name, value in make_batch(bb).items() if value.dim() == 2}
    batch["attention_mask"] = torch.tensor([[1, 1, 1], mask, [1, 0, 0]])
    for given in (batch, {**batch, "attention_mask": batch["attention_mask"].bool()}):
        refused(lambda given=given: run_layers(bb, given), "pad on the right")


def test_a_resumed_run_refuses_prompts_below_its_start():
    bb = backbone("roberta")
    batch = make_batch(bb)
    h = run_layers(bb, batch, stop=2).h
    step = Insert(static())
    resumed = resume(batch, 2, h)
    refused(
        lambda: run_layers(bb, resumed, {1: step}),
        "'insert' at layer 1",
        "have passed 2 layers",
        "states of a lower layer",
    )
    refused(lambda: run_layers(bb, resume(batch, 0, h), {INPUT: step}), "'insert' at INPUT")
    refused(
        lambda: run_layers(bb, resume(batch, 2, h[:, :5])),
        "hidden_states must have shape (3, 9, 32)",
        "got (3, 5, 32)",
        "no prompts",
    )
    refused(lambda: run_layers(bb, batch, stop=4), "between 0", "got 4")
    refused(lambda: run_layers(bb, resumed, stop=1), "between 2", "got 1")
    refused(lambda: run_layers(bb, resume(batch, 4, h)), "start_layer", "and 4")

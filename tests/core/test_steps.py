"""The steps of a plan: which plans and prompts are refused."""

import pytest
import torch
from small_layers import backbone, d, make_batch, refused, static, t

from idp_tutorial.core.context import INPUT
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.steps import Add, Insert, KeyValue, Replace, check_plan


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

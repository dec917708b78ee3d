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
from idp_tutorial.core.plan_checks import check_plan
from idp_tutorial.core.steps import Add, Insert, KeyValue, Replace


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
            ("'add' at layer 2", "(3, 4, 32)", "(3, 3, 32)", "need one length"),
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
        refused(lambda given=given: run_layers(bb, given), "padding on the right")


def test_a_resumed_run_refuses_prompts_below_its_start():
    bb = backbone("roberta")
    batch = make_batch(bb)
    h = run_layers(bb, batch, stop=2).h
    step = Insert(static())
    resumed = resume(batch, 2, h)
    refused(
        lambda: run_layers(bb, resumed, {1: step}),
        "a prompt at layer 1",
        "have passed 2 layers",
        "states of a lower layer",
    )
    refused(lambda: run_layers(bb, resume(batch, 0, h), {INPUT: step}), "a prompt at layer INPUT")
    refused(
        lambda: run_layers(bb, resume(batch, 2, h[:, :5])),
        "hidden_states must have shape (3, 9, 32)",
        "got (3, 5, 32)",
        "without prompts",
    )
    refused(lambda: run_layers(bb, batch, stop=4), "between 0", "got 4")
    refused(lambda: run_layers(bb, resumed, stop=1), "between 2", "got 1")
    refused(lambda: run_layers(bb, resume(batch, 4, h)), "start_layer", "and 4")


@pytest.mark.parametrize(
    "family,max_tokens", [("roberta", 38), ("bert", 40), ("gpt2", 40)]
)  # RoBERTa counts from its padding id
def test_a_prompt_among_the_words_needs_positions(family, max_tokens):
    bb = backbone(family)
    p = static()
    assert (
        run_layers(bb, make_batch(bb, (max_tokens,))).h.shape[1] == max_tokens
        and run_layers(bb, make_batch(bb, (max_tokens,)), {0: Insert(p)}).h.shape[1]
        == max_tokens + t
    )
    assert (
        run_layers(bb, make_batch(bb, (max_tokens - t,)), {INPUT: Insert(p)}).h.shape[1]
        == max_tokens
    )
    refused(
        lambda: run_layers(bb, make_batch(bb, (max_tokens + 1,))),
        f"has {max_tokens + 1} tokens, but",
        f"{family!r} has only {max_tokens} positions",
        f"max_len={max_tokens} or less",
    )
    refused(
        lambda: run_layers(bb, make_batch(bb, (max_tokens - t + 1,)), {INPUT: Insert(p)}),
        f"has {max_tokens - t + 1} tokens, and the prompt 4 vectors",
        f"max_len={max_tokens - t} or less",
        "insert it at layer 0",
    )

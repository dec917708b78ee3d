"""Plans that are refused, with messages that say why."""

import pytest
import torch
from small import refused
from small_layers import (
    backbone,
    d,
    make_batch,
    static,
    t,
)
from torch import nn

from idp_tutorial.core.context import INPUT
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.plan_checks import check_plan
from idp_tutorial.core.steps import Add, Insert, KeyValue, Replace


def test_invalid_plans_are_refused():
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
    refused(
        lambda: check_plan({1: Insert(p, update=nn.Linear(d, d))}, bb),
        "'insert' at layer 1: its update is a module",
        "a method of the source",
    )
    check_plan({2: Add(p), INPUT: Insert(p), 1: KeyValue(p)}, bb)


def test_an_update_changes_the_states_that_the_prompt_enters():
    bb = backbone("roberta")
    p = static()
    batch = make_batch(bb)
    doubled = 2 * run_layers(bb, batch, stop=1).h
    start_layer = torch.ones(len(doubled), dtype=torch.long)
    expected = run_layers(
        bb, dict(batch, hidden_states=doubled, start_layer=start_layer), {1: Insert(p)}
    )
    actual = run_layers(bb, batch, {1: Insert(p, update=lambda ctx: 2 * ctx.h)})
    torch.testing.assert_close(actual.h, expected.h)


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

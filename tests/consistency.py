"""Comparisons of two ways to compute the same: they differ by rounding only.

The logits of some tokens only, the last layer at one position, an example alone or in a batch, and
prompts of several lengths in one batch.
"""

import torch
from parity import max_abs_difference
from small_models import (
    EQUAL_LENGTHS,
    RAGGED_LENGTHS,
    random_batch,
    random_prompt,
)

from idp_tutorial.core.context import INPUT
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.prompt_key_values import PromptKeyValues
from idp_tutorial.core.single_position import run_for_position
from idp_tutorial.core.steps import Add, Insert, KeyValue, Replace


def iterate_step_kinds(bb):
    """Yield class and layer of each step that a plan of this backbone can have.

    `Add` and `Replace` need an `Insert` at layer 0; see `single_step_plan`.
    """
    yield Insert, INPUT
    for layer in range(bb.n_layers):
        yield Insert, layer
        if bb.supports_kv_prompt:
            yield KeyValue, layer
        if layer > 0:
            yield Add, layer
            yield Replace, layer


def single_step_plan(bb, step_class, layer, source):
    """Return a plan with one step, after an `Insert` at layer 0 for `Add` and `Replace`."""
    if step_class in (Insert, KeyValue):
        return {layer: step_class(source)}

    def constant_prompt(ctx):
        """Return the same three vectors for every example."""
        return torch.full((len(ctx.h), 3, bb.d), 0.3)

    return {0: Insert(constant_prompt), layer: step_class(source)}


def _compare_label_logits(bb):
    if not bb.has_lm_head:
        return None
    h = run_layers(bb, random_batch()).state_at("mask")
    ids = torch.tensor([7, 50, 9])
    return max_abs_difference(bb.lm_logits_for_tokens(h, ids), bb.lm_logits(h)[:, ids])


def _iterate_plans(bb):
    """Yield an empty plan, and a plan with each kind of step."""
    yield {}
    for step_class, layer in iterate_step_kinds(bb):
        p = random_prompt(bb, step_class, layer).detach()
        yield single_step_plan(bb, step_class, layer, lambda ctx, p=p: p)


@torch.no_grad()
def _compare_single_position(bb):
    if not bb.supports_single_position:
        return None
    largest = 0.0
    for lengths in (RAGGED_LENGTHS, EQUAL_LENGTHS):
        for plan in _iterate_plans(bb):
            for position in ("cls", "mask", "last"):
                b = random_batch(lengths)
                state = run_for_position(bb, b, plan, position).state_at(position)
                expected = run_layers(bb, b, plan).state_at(position)
                largest = max(largest, max_abs_difference(state, expected))
    return largest


def _last_states(bb, step_class, layer, examples, n_tokens):
    """Return the final states at 'last' of some examples of the random batch, with a prompt."""
    b = {
        name: x[examples, :n_tokens] if x.dim() == 2 else x[examples]
        for name, x in random_batch().items()
    }
    p = random_prompt(bb, step_class, layer)[examples]
    plan = single_step_plan(bb, step_class, layer, lambda ctx, p=p: p)
    return run_layers(bb, b, plan).state_at("last")


@torch.no_grad()
def _compare_unbatched(bb):
    largest = 0.0
    for step_class, layer in [(Insert, 0), *iterate_step_kinds(bb)]:
        for i, n_tokens in enumerate(RAGGED_LENGTHS):
            alone = _last_states(bb, step_class, layer, [i], n_tokens)
            batched = _last_states(bb, step_class, layer, [2, i, 0], max(RAGGED_LENGTHS))[1:2]
            largest = max(largest, max_abs_difference(alone, batched))
    return largest


@torch.no_grad()
def _compare_mixed_prompt_lengths(bb):
    if not bb.supports_kv_prompt:
        return None
    b = random_batch()
    mask = b["attention_mask"]
    prompt_lengths = (3, 0, 1)
    prefix_mask = (torch.arange(3) < torch.tensor(prompt_lengths)[:, None]).long()
    p = random_prompt(bb, KeyValue, 0)
    h = run_layers(bb, b, stop=0).h
    kv = PromptKeyValues.from_prompt(p * prefix_mask[..., None], bb.n_kv_heads)
    batched = bb.run_layer(0, h, bb.layer_kwargs_by_type(mask, h, prefix_mask), kv)
    largest = 0.0
    for i, t in enumerate(prompt_lengths):
        example = slice(i, i + 1)
        example_kv = PromptKeyValues.from_prompt(p[example, :t], bb.n_kv_heads) if t else None
        layer_kwargs = bb.layer_kwargs_by_type(mask[example], h[example], t)
        alone = bb.run_layer(0, h[example], layer_kwargs, example_kv)
        largest = max(largest, max_abs_difference(batched[example], alone, mask[example]))
    return largest


CONSISTENCY_COMPARISONS = dict(
    labels=_compare_label_logits,
    one_row=_compare_single_position,
    alone=_compare_unbatched,
    mixed=_compare_mixed_prompt_lengths,
)


def measure_consistency(bb):
    """Return the largest difference in each comparison; None where it is not supported."""
    return {name: compare(bb) for name, compare in CONSISTENCY_COMPARISONS.items()}

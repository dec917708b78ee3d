"""Eleven comparisons that measure how exactly the layer loop computes what the library computes.

`measure_parity(backbone)` returns the largest absolute difference in each. The first seven compare
with the library and should be 0: a batch with padding, one without, one of single tokens; training
mode with the same random numbers; the logits; a prompt among the words, compared with the library's
`inputs_embeds`; for decoders, keys and values, compared with its `past_key_values`. The last four
compare two ways to compute the same in this package, which differ by rounding: the logits of some
tokens only, the last layer at one position, an example alone or in a batch, and prompts of several
lengths in one batch.

The library runs without its cache, which stores copies of the keys with another memory layout, so
that products are rounded differently.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import INPUT, Context
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.prompt_key_values import PromptKeyValues
from idp_tutorial.core.single_position import run_for_position
from idp_tutorial.core.steps import Insert, KeyValue, Step
from idp_tutorial.testing.small_models import (
    EQUAL_LENGTHS,
    RAGGED_LENGTHS,
    SINGLE_TOKEN_LENGTHS,
    iterate_step_kinds,
    random_batch,
    random_prompt,
    single_step_plan,
)
from idp_tutorial.utils.checks import UserError

__all__ = [
    "LIBRARY_COMPARISONS",
    "CONSISTENCY_COMPARISONS",
    "max_abs_difference",
    "library_hidden_states",
    "measure_parity",
]


def max_abs_difference(
    a: Tensor,
    b: Tensor,
    attention_mask: Tensor | None = None,  # compare only where it is 1 `[B,T]`; None: everywhere
) -> float:
    """Return the largest absolute difference of two tensors.

    Raises: UserError if the shapes differ or `a` contains NaN or infinity.
    """
    if attention_mask is not None:
        a = a[attention_mask == 1]
        b = b[attention_mask == 1]
    if a.shape != b.shape or not a.isfinite().all():
        raise UserError(
            f"two finite tensors of the same shape are needed, got shapes {tuple(a.shape)} and "
            f"{tuple(b.shape)}, or values that are not finite."
        )
    return (a - b).abs().max().item()


def library_hidden_states(
    bb: Backbone,
    batch: dict[str, Tensor],
    **inputs: Any,  # arguments of the library's model that replace `input_ids`
) -> Tensor:  # `[B,T,d]`
    """Return the final hidden states of the library's own forward pass."""
    cache = dict(use_cache=False) if bb.causal else {}
    inputs = inputs or dict(input_ids=batch["input_ids"])
    output = bb.base(attention_mask=batch["attention_mask"], **inputs, **cache)
    return output.last_hidden_state


def _constant_source(p: Tensor) -> Callable[[Context], Tensor]:
    """Return a source that always gives the same prompt."""
    return lambda ctx: p


def _compare_hidden_states(bb: Backbone, lengths: tuple[int, ...]) -> float:
    b = random_batch(lengths)
    expected = library_hidden_states(bb, b)
    return max_abs_difference(run_layers(bb, b).h, expected, b["attention_mask"])


def _compare_dropout(bb: Backbone) -> float:
    """Compare in training mode, with the same random numbers."""
    b = random_batch()
    bb.model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        h = run_layers(bb, b).h
        torch.manual_seed(2)
        expected = library_hidden_states(bb, b)
    bb.model.eval()
    if not max_abs_difference(h, run_layers(bb, b).h, b["attention_mask"]):
        raise UserError(
            f"backbone {bb.name!r} has no dropout in training mode. Give its config dropout "
            "probabilities above 0."
        )
    return max_abs_difference(h, expected, b["attention_mask"])


def _compare_logits(bb: Backbone) -> float | None:
    if not bb.has_lm_head:
        return None
    b = random_batch()
    cache = dict(use_cache=False) if bb.causal else {}
    expected = bb.model(
        input_ids=b["input_ids"], attention_mask=b["attention_mask"], **cache
    ).logits
    return max_abs_difference(bb.lm_logits(run_layers(bb, b).h), expected, b["attention_mask"])


def _compare_embedding_prompt(bb: Backbone) -> float:
    """Compare a prompt in front of the words with the library's `inputs_embeds`."""
    b = random_batch(EQUAL_LENGTHS)
    p = random_prompt(bb, Insert, INPUT)
    e = torch.cat([p, bb.word_embeddings(b["input_ids"])], 1)
    longer = dict(attention_mask=torch.ones(e.shape[:2], dtype=torch.long))
    expected = library_hidden_states(bb, longer, inputs_embeds=e)
    h = run_layers(bb, b, {INPUT: Insert(_constant_source(p))}).h
    return max_abs_difference(h, expected)


def _compare_kv_cache(bb: Backbone) -> float | None:
    """Compare keys and values at every layer with a decoder's `past_key_values`."""
    if not bb.causal:
        return None
    import transformers

    b = random_batch()
    cache = transformers.DynamicCache()
    plan: dict[int, Step] = {}
    for layer in range(bb.n_layers):
        p = random_prompt(bb, KeyValue, layer).detach() * (layer + 1)
        kv = PromptKeyValues.from_prompt(p, bb.n_kv_heads)
        cache.update(kv.k, kv.v, layer)
        plan[layer] = KeyValue(_constant_source(p))
    mask = F.pad(b["attention_mask"], (3, 0), value=1)
    output = bb.base(input_ids=b["input_ids"], attention_mask=mask, past_key_values=cache)
    # the library gives the words the positions after the cache
    padded_words = F.pad(bb.word_embeddings(b["input_ids"]), (0, 0, 3, 0))
    h = bb.embed(padded_words, mask, 0 * mask)[:, 3:]
    resumed = dict(b, hidden_states=h, start_layer=torch.zeros(len(h)))
    return max_abs_difference(
        run_layers(bb, resumed, plan).h, output.last_hidden_state, b["attention_mask"]
    )


def _compare_label_logits(bb: Backbone) -> float | None:
    if not bb.has_lm_head:
        return None
    h = run_layers(bb, random_batch()).state_at("mask")
    ids = torch.tensor([7, 50, 9])
    return max_abs_difference(bb.lm_logits_for_tokens(h, ids), bb.lm_logits(h)[:, ids])


def _iterate_plans(bb: Backbone) -> Iterator[dict[int, Step]]:
    """Yield an empty plan, and a plan with each kind of step."""
    yield {}
    for step_class, layer in iterate_step_kinds(bb):
        p = random_prompt(bb, step_class, layer).detach()
        yield single_step_plan(bb, step_class, layer, _constant_source(p))


@torch.no_grad()
def _compare_single_position(bb: Backbone) -> float | None:
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


def _last_states(
    bb: Backbone, step_class: type[Step], layer: int, examples: list[int], n_tokens: int
) -> Tensor:
    """Return the final states at 'last' of some examples of the random batch, with a prompt."""
    b = {
        name: x[examples, :n_tokens] if x.dim() == 2 else x[examples]
        for name, x in random_batch().items()
    }
    p = random_prompt(bb, step_class, layer)[examples]
    plan = single_step_plan(bb, step_class, layer, _constant_source(p))
    return run_layers(bb, b, plan).state_at("last")


@torch.no_grad()
def _compare_unbatched(bb: Backbone) -> float:
    largest = 0.0
    for step_class, layer in [(Insert, 0), *iterate_step_kinds(bb)]:
        for i, n_tokens in enumerate(RAGGED_LENGTHS):
            alone = _last_states(bb, step_class, layer, [i], n_tokens)
            batched = _last_states(bb, step_class, layer, [2, i, 0], max(RAGGED_LENGTHS))[1:2]
            largest = max(largest, max_abs_difference(alone, batched))
    return largest


@torch.no_grad()
def _compare_mixed_prompt_lengths(bb: Backbone) -> float | None:
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


_Comparison = Callable[[Backbone], float | None]
LIBRARY_COMPARISONS: dict[str, _Comparison] = dict(
    padded=partial(_compare_hidden_states, lengths=RAGGED_LENGTHS),
    full=partial(_compare_hidden_states, lengths=EQUAL_LENGTHS),
    one=partial(_compare_hidden_states, lengths=SINGLE_TOKEN_LENGTHS),
    dropout=_compare_dropout,
    logits=_compare_logits,
    words=_compare_embedding_prompt,
    cache=_compare_kv_cache,
)
CONSISTENCY_COMPARISONS: dict[str, _Comparison] = dict(
    labels=_compare_label_logits,
    one_row=_compare_single_position,
    alone=_compare_unbatched,
    mixed=_compare_mixed_prompt_lengths,
)


def measure_parity(
    bb: Backbone,  # a small model with random weights, as `small_backbone` returns
) -> dict[str, float | None]:
    """Return the largest difference in each comparison; None where the family does not support it.

    The comparisons of `LIBRARY_COMPARISONS` are with the library's forward pass, those of
    `CONSISTENCY_COMPARISONS` between two computations of this package.
    """
    comparisons = {**LIBRARY_COMPARISONS, **CONSISTENCY_COMPARISONS}
    return {name: compare(bb) for name, compare in comparisons.items()}

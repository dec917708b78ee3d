"""Seven comparisons that measure how exactly the layer loop computes what the library computes.

After `register_family`, three lines measure a new family on a small model with random weights, here
of ERNIE (CONTRIBUTING.md has its class):

    config = ErnieConfig(vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    backbone = wrap_hf_model(build_hf_model(config))
    measure_parity(backbone)

The result is the largest absolute difference in each comparison, which should be 0: a batch with
padding, one without, one of single tokens; training mode with the same random numbers; the logits;
a prompt among the words, compared with the library's `inputs_embeds`; for decoders, keys and
values, compared with its `past_key_values`.

The library runs without its cache, which stores copies of the keys with another memory layout, so
that products are rounded differently.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from small_models import (
    EQUAL_LENGTHS,
    RAGGED_LENGTHS,
    SINGLE_TOKEN_LENGTHS,
    random_batch,
    random_prompt,
)
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import INPUT, Context
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.prompt_key_values import PromptKeyValues
from idp_tutorial.core.steps import Insert, KeyValue, Step
from idp_tutorial.utils.checks import UserError

__all__ = [
    "LIBRARY_COMPARISONS",
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


LIBRARY_COMPARISONS: dict[str, Callable[[Backbone], float | None]] = dict(
    padded=partial(_compare_hidden_states, lengths=RAGGED_LENGTHS),
    full=partial(_compare_hidden_states, lengths=EQUAL_LENGTHS),
    one=partial(_compare_hidden_states, lengths=SINGLE_TOKEN_LENGTHS),
    dropout=_compare_dropout,
    logits=_compare_logits,
    words=_compare_embedding_prompt,
    cache=_compare_kv_cache,
)


def measure_parity(
    bb: Backbone,  # a small model with random weights, as `small_backbone` returns
) -> dict[str, float | None]:
    """Return the largest difference in each comparison; None where the family does not support it.

    The comparisons are with the library's forward pass.
    """
    return {name: compare(bb) for name, compare in LIBRARY_COMPARISONS.items()}

"""Keys and values of a prompt equal those of a cache of the library."""

import pytest
import torch
from small_layers import (
    WITH_KV,
    B,
    T,
    backbone,
    d,
    make_batch,
    same,
    static,
    t,
)
from transformers import DynamicCache

from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.steps import KeyValue


@pytest.mark.parametrize("lens", [(9, 9, 9), (9, 5, 2)], ids=["full", "ragged"])
@pytest.mark.parametrize("family,attn", WITH_KV)
def test_keys_and_values_are_a_cache(family, attn, lens):
    bb = backbone(family, attn)
    batch = make_batch(bb, lens)
    plan = {k: KeyValue(static(2 * d, seed=k)) for k in range(3)}
    got = run_layers(bb, batch, plan)
    cache = DynamicCache()
    for k in range(3):
        key, value = [
            x.view(B, t, 4, 8).transpose(1, 2) for x in static(2 * d, seed=k)(got).split(d, -1)
        ]  # 4 heads of 8
        cache.update(key, value, k)
    keep = torch.cat([torch.ones(B, t, dtype=torch.long), batch["attention_mask"]], 1)
    want = bb.base(
        input_ids=batch["input_ids"],
        attention_mask=keep,
        position_ids=bb.position_ids(batch["attention_mask"]),
        past_key_values=cache,
    ).last_hidden_state
    real = batch["attention_mask"] == 1
    same(got.h[real], want[real])
    assert got.h.shape == (B, T, d)  # no row of their own
    assert (got.h - run_layers(bb, batch).h)[real].abs().max() > 0.1


def test_keys_and_values_of_one_layer():
    bb = backbone("gpt2")
    batch = make_batch(bb)
    got = run_layers(bb, batch, {1: KeyValue(static(2 * d))})
    without = run_layers(bb, batch, stop=1).h
    same(run_layers(bb, batch, {1: KeyValue(static(2 * d))}, stop=1).h, without)
    assert (got.h - run_layers(bb, batch).h)[batch["attention_mask"] == 1].abs().max() > 0.1

"""Every family equals the library's forward pass, and training changes the prompt only."""

import pytest
import torch
from consistency import iterate_step_kinds, measure_consistency, single_step_plan
from parity import (
    library_hidden_states,
    max_abs_difference,
    measure_parity,
)
from small_models import (
    RAGGED_LENGTHS,
    SMALL_CONFIGS,
    attention_implementations,
    random_batch,
    random_prompt,
    small_backbone,
)
from torch import nn

from idp_tutorial.core.context import INPUT
from idp_tutorial.core.dtypes import cast_weights
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.single_position import run_for_position
from idp_tutorial.core.steps import KeyValue
from idp_tutorial.families.family import FAMILIES
from idp_tutorial.methods.adapters import add_adapters, add_lora

ALL = [(name, attn) for name in SMALL_CONFIGS for attn in attention_implementations(name)]
ONE = [(name, attention_implementations(name)[0]) for name in SMALL_CONFIGS]
each = pytest.mark.parametrize("name,attn", ALL)
each_once = pytest.mark.parametrize("name,attn", ONE)


def test_every_family_has_a_small_model():
    assert {n.partition(",")[0] for n in SMALL_CONFIGS} == set(FAMILIES) and len(FAMILIES) == 19


@pytest.mark.parametrize(
    "name,attn",
    [pair if pair in ONE else pytest.param(*pair, marks=pytest.mark.slow) for pair in ALL],
)
def test_it_computes_what_the_library_computes(name, attn):
    bb = small_backbone(name, attn)
    assert bb.config._attn_implementation == attn
    got = measure_parity(bb)
    assert all((difference or 0.0) <= 2e-6 for difference in got.values()), got
    consistency = measure_consistency(bb)
    assert all((difference or 0.0) <= 1e-5 for difference in consistency.values()), consistency
    got |= consistency
    assert [k for k in got if got[k] is None] == [
        *(["logits"] if not bb.has_lm_head else []),
        *(["cache"] if not bb.causal else []),
        *(["labels"] if not bb.has_lm_head else []),
        *(["one_row"] if not bb.supports_single_position else []),
        *(["mixed"] if not bb.supports_kv_prompt else []),
    ]


@each
def test_a_prompt_of_every_kind_learns_and_nothing_frozen_does(name, attn):
    bb = small_backbone(name, attn)
    seen = 0
    plain = run_layers(bb, random_batch())
    w = torch.randn(bb.d)

    def words(ctx):  # all: with sliding-window attention, the last may be too far from the prompt
        return ctx.h[ctx.word_mask == 1]

    for step_class, layer in iterate_step_kinds(bb):
        p = random_prompt(bb, step_class, layer)
        ctx = run_layers(bb, random_batch(), single_step_plan(bb, step_class, layer, lambda ctx: p))
        (words(ctx) * w).sum().backward()
        assert (p.grad.abs().sum((1, 2)) > 0).all(), (step_class, layer)
        assert max_abs_difference(words(ctx), words(plain)) > 1e-6, (step_class, layer)
        assert all(q.grad is None for q in bb.model.parameters())
        seen += 1
    assert seen == (11 if bb.supports_kv_prompt else 8)


@each_once
def test_lora_and_adapters_go_into_its_layers(name, attn):
    bb = small_backbone(name, attn)
    b = random_batch()
    plain = run_layers(bb, b).h
    for where, n in (("qv", len(bb.lora_target_modules) * bb.n_layers), ("all", None)):
        with add_lora(bb, 2, target_modules=where):
            trained = [p for p in bb.model.parameters() if p.requires_grad]
            assert (
                trained
                and (n is None or len(trained) == 2 * n)
                and max_abs_difference(run_layers(bb, b).h, plain, b["attention_mask"]) < 1e-6
            )
            for p in trained:
                p.data += 0.1 * torch.randn_like(p)
            changed = run_layers(bb, b)
            assert (
                max_abs_difference(changed.h, library_hidden_states(bb, b), b["attention_mask"])
                < 1e-5
                and max_abs_difference(changed.h, plain, b["attention_mask"]) > 1e-4
            )
            one = run_for_position(bb, b, position="last")
            assert max_abs_difference(one.state_at("last"), changed.state_at("last")) < 1e-5
            (one.state_at("last") * torch.randn(bb.d)).sum().backward()
            assert all(p.grad is not None for p in trained)
    with add_adapters(bb, 4, std=0.1):
        trained = [p for p in bb.model.parameters() if p.requires_grad]
        changed = run_layers(bb, b)
        assert (
            len(trained) == 8 * bb.n_layers
            and max_abs_difference(changed.h, library_hidden_states(bb, b), b["attention_mask"])
            < 1e-5
        )
        assert (
            max_abs_difference(
                run_for_position(bb, b, position="last").state_at("last"), changed.state_at("last")
            )
            < 1e-5
        )
        (changed.h[b["attention_mask"] == 1] * torch.randn(bb.d)).sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    assert torch.equal(run_layers(bb, b).h, plain)  # as it was


@each_once
def test_weights_in_bfloat16(name, attn):
    """Prompts, their gradients and pooled representations stay float32."""
    bb = small_backbone(name, attn)
    b = random_batch()
    want = run_layers(bb, random_batch()).h
    cast_weights(bb.model, torch.bfloat16)
    assert all(x.dtype == torch.float32 for n, x in bb.model.named_buffers() if "inv_freq" in n)
    seen = []

    def source(ctx, p):
        seen.append(ctx.float32_states.dtype)
        return p

    for step_class, layer in iterate_step_kinds(bb):
        p = random_prompt(bb, step_class, layer)
        plan = single_step_plan(bb, step_class, layer, lambda ctx: source(ctx, p))
        ctx = run_for_position(bb, b, plan, "last")
        assert (
            ctx.h.dtype == torch.bfloat16
            and ctx.state_at("last").dtype == ctx.mean_state().dtype == torch.float32
        ), (step_class, layer)
        (ctx.state_at("last") * torch.randn(bb.d)).sum().backward()
        assert p.grad.dtype == torch.float32 and p.grad.isfinite().all()
    assert set(seen) == {torch.float32}
    ctx = run_layers(bb, b)
    if bb.has_lm_head:
        row = ctx.state_at("mask")
        assert (
            bb.lm_logits_for_tokens(row, torch.tensor([7, 50])).dtype
            == bb.lm_logits(row).dtype
            == torch.float32
        )
    off = (ctx.float32_states - want)[b["attention_mask"] == 1].abs().mean() / want.std()
    assert off < 0.05


def test_prompts_of_keys_can_have_different_lengths_in_a_batch():
    """With prompts of 3, 0 and 1 keys, each text begins behind its own keys."""
    bb = small_backbone("llama")
    prefix = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0]])
    rows, distance, real = bb.positions_and_distances(
        random_batch(RAGGED_LENGTHS)["attention_mask"], prefix
    )
    assert rows[:, 0].tolist() == [3, 0, 1] and real.shape == (3, 14)
    assert distance[0, 0, :4].tolist() == [3, 2, 1, 0] and distance[1, 0, 3].item() == 0


def test_the_modules_named_for_lora_and_adapters_exist_in_every_layer():
    for name in SMALL_CONFIGS:
        bb = small_backbone(name, attention_implementations(name)[0])
        for layer in bb.layers:
            assert {n.rpartition(".")[2] for n, _ in layer.named_modules()} >= set(
                bb.lora_target_modules
            )
            for name in bb.sublayer_output_modules:
                assert isinstance(layer.get_submodule(name), nn.Module)
        assert hasattr(bb.config, bb.attention_dropout_field)


def test_a_family_that_ignores_prompt_keys_raises_an_error():
    """A user-defined class that declares a wrong capability does not ignore a prompt silently."""
    bb = small_backbone("roberta")

    class Deaf(type(bb)):
        def run_layer(self, layer, h, layer_kwargs_by_type, kv=None):
            return super().run_layer(layer, h, layer_kwargs_by_type)

    class Honest(Deaf):
        supports_kv_prompt = False

    plan = single_step_plan(bb, KeyValue, 1, lambda ctx: torch.randn(len(ctx.h), 3, bb.d_kv_prompt))
    deaf = Deaf(bb.model, bb.tokenizer, "deaf")
    # without padding there is no mask, so nothing else would notice
    whole = {
        k: v[:1, :4]
        for k, v in random_batch().items()
        if k in ("input_ids", "attention_mask", "token_type_ids")
    }
    with pytest.raises(
        ValueError,
        match="layer 1 of a roberta backbone ignored .* pass `kv` on in `Deaf.run_layer`",
    ):
        run_layers(deaf, whole, plan)
    with pytest.raises(
        ValueError,
        match="'kv' at layer 1: the attention of a roberta backbone takes no prompt keys",
    ):
        run_layers(Honest(bb.model, bb.tokenizer, "honest"), random_batch(), plan)
    with pytest.raises(ValueError, match="'kv' at INPUT: keys and values enter at a layer"):
        run_layers(bb, random_batch(), single_step_plan(bb, KeyValue, INPUT, plan[1].source))
    run_layers(deaf, random_batch())
    run_layers(bb, random_batch(), plan)

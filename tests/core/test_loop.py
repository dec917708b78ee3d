"""The layer loop: steps compared with the library, tracked positions, gradients, errors."""

import pytest
import torch
from small_layers import (
    KINDS,
    MODELS,
    B,
    backbone,
    d,
    dynamic,
    make_batch,
    resume,
    same,
    single_example,
    static,
    t,
)
from torch import nn

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.context import INPUT
from idp_tutorial.core.loop import run_layers, walk_layers
from idp_tutorial.core.steps import Add, Insert, KeyValue, Replace
from idp_tutorial.methods.sentence_vectors import sentence_vector


def library_states(bb, h, keep):  # from word embeddings
    return bb.base(
        inputs_embeds=h, attention_mask=keep, position_ids=bb.position_ids(keep)
    ).last_hidden_state


# --- rows


@pytest.mark.parametrize("position", [0, 1, "each"])
@pytest.mark.parametrize("family,attn", KINDS)
def test_among_the_words_is_inputs_embeds(family, attn, position):
    bb = backbone(family, attn)
    batch = make_batch(bb)
    p = static()
    rows = torch.tensor([9, 2, 0]) if position == "each" else torch.full((B,), position)
    got = run_layers(
        bb,
        batch,
        {INPUT: Insert(p, (lambda ctx: rows) if position == "each" else position)},
    )
    words = torch.stack(
        [
            torch.cat([w[:a], q, w[a:]])
            for w, q, a in zip(bb.word_embeddings(batch["input_ids"]), p(got), rows)
        ]
    )
    keep = torch.stack(
        [
            torch.cat([k[:a], torch.ones(t, dtype=torch.long), k[a:]])
            for k, a in zip(batch["attention_mask"], rows)
        ]
    )
    assert torch.equal(got.attention_mask, keep)
    same(got.h[keep == 1], library_states(bb, words, keep)[keep == 1])


def insert_into_library_states(bb, batch, k, p, position):
    # the library's states after k layers, with the prompt, through the library's other layers
    seen = bb.base(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        output_hidden_states=True,
    ).hidden_states[k]
    h = torch.cat([seen[:, :position], p, seen[:, position:]], 1)
    keep = torch.cat(
        [
            batch["attention_mask"][:, :position],
            torch.ones(len(p), p.shape[1], dtype=torch.long),
            batch["attention_mask"][:, position:],
        ],
        1,
    )
    n = h.shape[1]
    see = keep[:, None, None].bool().expand(-1, 1, n, -1)
    if bb.causal:
        see = see & (torch.arange(n)[:, None] >= torch.arange(n))  # to the left, prompts too
    add = torch.zeros(see.shape).masked_fill(~see, -1e30)
    for l in range(k, bb.n_layers):
        if bb.family == "deberta":
            e = bb.base.encoder
            out = e.layer[l](
                h,
                e.get_attention_mask(keep),
                relative_pos=e.get_rel_pos(h),
                rel_embeddings=e.get_rel_embedding(),
            )
        else:
            out = bb.layers[l](h, attention_mask=add)
        h = out[0] if isinstance(out, tuple) else out
    return bb.norm(h), keep


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize("family,attn", KINDS)
def test_at_a_layer_is_the_model_cut_there(family, attn, k, position):
    bb = backbone(family, attn)
    batch = make_batch(bb)
    p = static()
    got = run_layers(bb, batch, {k: Insert(p, position)})
    want, keep = insert_into_library_states(bb, batch, k, p(got), position)
    assert torch.equal(got.attention_mask, keep)
    same(got.h[keep == 1], want[keep == 1], 2e-6)


@pytest.mark.parametrize("step_class", [Add, Replace])
@pytest.mark.parametrize("family", MODELS)
def test_add_and_replace_by_index(family, step_class):
    bb = backbone(family)
    batch = make_batch(bb)
    first = static()
    second = static(seed=2)
    position = torch.tensor([1, 5, 0])

    def rows(ctx):
        return position

    below = run_layers(bb, batch, {1: Insert(first, rows)}, stop=2)
    h = below.h.clone()
    for i, a in enumerate(position):
        h[i, a : a + t] = second(below)[i] + (h[i, a : a + t] if step_class is Add else 0)
    want = bb.norm(bb.run_layer(2, h, bb.layer_kwargs_by_type(below.attention_mask, h)))
    got = run_layers(bb, batch, {1: Insert(first, rows), 2: step_class(second)})
    same(got.h[got.attention_mask == 1], want[got.attention_mask == 1])
    assert got.prompt_span[0].tolist() == position.tolist() and got.prompt_span[1] == t


# --- what is tracked, and what padding must not change

PLANS = {
    **{
        f"insert {k}": {k: Insert(static() if k == INPUT else dynamic, 1)} for k in (INPUT, 0, 1, 2)
    },
    "insert, add": {0: Insert(dynamic), 1: Add(dynamic), 2: Add(static())},
    "insert, replace": {
        INPUT: Insert(static(), 1),
        1: Replace(dynamic),
        2: Replace(dynamic),
    },
    "at the end": {
        0: Insert(dynamic, lambda ctx: ctx.attention_mask.sum(1)),
        1: Replace(dynamic),
    },
    "in the middle, twice": {
        0: Insert(dynamic, lambda ctx: ctx.tracked_positions["mask"]),
        2: Insert(dynamic, lambda ctx: ctx.tracked_positions["mask"] + 1),
    },
    "sentence": {0: Insert(lambda ctx: sentence_vector(ctx)[:, None].expand(-1, t, -1))},
    "kv": {k: KeyValue(lambda ctx: torch.cat([dynamic(ctx)] * 2, -1)) for k in range(3)},
}


@pytest.mark.parametrize(
    "family,attn,plan", [(f, a, p) for f, a in KINDS for p in PLANS if (f, p) != ("deberta", "kv")]
)
def test_an_example_alone_equals_the_example_in_a_batch(family, attn, plan):
    bb = backbone(family, attn)
    batch = make_batch(bb, T=14)
    together = run_layers(bb, batch, PLANS[plan])
    for i in range(B):
        alone = run_layers(bb, single_example(batch, i), PLANS[plan])
        for row in ("cls", "mask", "last"):
            same(alone.state_at(row)[0], together.state_at(row)[i], 1e-5)
        same(alone.mean_state()[0], together.mean_state()[i], 1e-5)
        # values as large as 10; products of other shapes are rounded otherwise on some CPUs
        same(alone.h[0], together.h[i][together.attention_mask[i] == 1], 3e-5)


# --- the walk


@pytest.mark.parametrize("family", MODELS)
def test_a_walk_stops_before_every_layer_and_at_the_end(family):
    bb = backbone(family)
    batch = make_batch(bb)
    plan = {0: Insert(dynamic, 1), 2: Replace(dynamic)}
    for layer, ctx in enumerate(walk_layers(bb, batch, plan)):
        assert ctx.layer == layer
        want = run_layers(bb, batch, plan, stop=layer)
        assert torch.equal(ctx.h, want.h) and torch.equal(
            ctx.attention_mask, want.attention_mask
        )  # the step of this layer is still to come
    assert layer == bb.n_layers
    assert torch.equal(
        bb.norm(ctx.h), run_layers(bb, batch, plan).h
    )  # the final norm is not the walk's


def test_a_change_of_the_context_during_a_walk_reaches_the_layer():
    bb = backbone("roberta")
    batch = make_batch(bb)
    for ctx in walk_layers(bb, batch):
        if ctx.layer == 1:
            ctx.h = 2 * ctx.h
    same(ctx.h, run_layers(bb, resume(batch, 1, 2 * run_layers(bb, batch, stop=1).h)).h)


def test_a_walk_that_is_left_runs_no_further_layer():
    bb = backbone("roberta")
    ran = []
    layer = bb.run_layer
    bb.run_layer = lambda l, *a: ran.append(l) or layer(l, *a)
    for ctx in walk_layers(bb, make_batch(bb)):
        if ctx.layer == 1:
            break
    assert ran == [0]


# --- the graph


@pytest.mark.parametrize("k", [INPUT, 0, 1, 2])
@pytest.mark.parametrize("family,attn", KINDS)
def test_nothing_below_the_prompt_is_in_the_graph(family, attn, k):
    bb = backbone(family, attn)
    bb.model.train()
    batch = make_batch(bb)
    p = nn.Parameter(torch.randn(t, d))
    first = max(k, 0)
    grad = []
    saved = []
    layer = bb.run_layer

    def watched(l, h, *a):
        before = len(saved)
        out = layer(l, h, *a)
        grad.append((h.requires_grad, len(saved) > before))
        return out

    bb.run_layer = watched
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(1) or x, lambda x: x):
        ctx = run_layers(bb, batch, {k: Insert(lambda ctx: p.expand(B, -1, -1))})
    assert grad == [(l >= first,) * 2 for l in range(3)]
    (ctx.state_at("cls" if family != "gpt2" else "last") @ torch.randn(d)).sum().backward()
    assert (p.grad.abs().sum(1) > 0).all() and all(w.grad is None for w in bb.model.parameters())


@pytest.mark.parametrize("family", MODELS)
def test_every_step_gets_a_gradient(family):
    bb = backbone(family)
    batch = make_batch(bb)
    steps = [Insert, Add, Insert if family == "deberta" else KeyValue]
    params = [nn.Parameter(torch.randn(t, d * (1 + (step is KeyValue)))) for step in steps]
    plan = {
        k: step(lambda ctx, p=p: p.expand(B, -1, -1))
        for k, (step, p) in enumerate(zip(steps, params))
    }
    (run_layers(bb, batch, plan).state_at(bb.default_pooling) @ torch.randn(d)).sum().backward()
    assert all((p.grad.abs().sum(1) > 0).all() for p in params) and all(
        w.grad is None for w in bb.model.parameters()
    )


# --- in two goes


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("family,attn", KINDS)
def test_a_resumed_run_equals_a_single_run(family, attn, k):
    bb = backbone(family, attn)
    batch = make_batch(bb)
    h = run_layers(bb, batch, stop=k).h
    same(run_layers(bb, resume(batch, k, h)).h, run_layers(bb, batch).h)
    for plan in (
        {l: Insert(dynamic) if l == k else Add(dynamic) for l in range(k, 3)},
        {2: Insert(dynamic, 1)} if k <= 2 else {},
    ):
        assert torch.equal(
            run_layers(bb, batch, plan, stop=k).h, h
        )  # steps at `stop` or above wait
        one = run_layers(bb, batch, plan)
        two = run_layers(bb, resume(batch, k, h), plan)
        same(two.h, one.h)
        assert all(
            torch.equal(two.tracked_positions[r], one.tracked_positions[r])
            for r in one.tracked_positions
        )


# --- what is refused


def test_half_precision_backbones_take_full_precision_prompts():
    bb = load_backbone(
        "roberta-base",
        weights="random",
        dtype=torch.bfloat16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=60,
    )
    p = nn.Parameter(torch.randn(t, d))
    batch = make_batch(bb)
    for plan in (
        {
            0: Insert(lambda ctx: p.expand(B, -1, -1)),
            1: Add(lambda ctx: p.expand(B, -1, -1)),
        },
        {1: KeyValue(lambda ctx: torch.cat([p, p], -1).expand(B, -1, -1))},
    ):
        ctx = run_layers(bb, batch, plan)
        assert ctx.h.dtype == torch.bfloat16
        p.grad = None
        (ctx.state_at("cls") @ torch.randn(d)).sum().backward()  # what is read is float32
        assert p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0

"""The layer loop: operations compared with the library, tracked positions, gradients, errors."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DebertaConfig,
    DebertaForMaskedLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.loop import insert_prompt, run_layers, splice, walk_layers
from idp_tutorial.core.plan import Step, check_plan
from idp_tutorial.families.family import wrap_hf_model
from idp_tutorial.methods import sentence_vectors
from idp_tutorial.methods.sentence_vectors import sentence_vector

SMALL = dict(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=40,
)
MODELS = dict(
    roberta=lambda a: RobertaForMaskedLM._from_config(
        RobertaConfig(**SMALL, intermediate_size=64, pad_token_id=1), attn_implementation=a
    ),
    bert=lambda a: BertForMaskedLM._from_config(
        BertConfig(**SMALL, intermediate_size=64), attn_implementation=a
    ),
    gpt2=lambda a: GPT2LMHeadModel._from_config(GPT2Config(**SMALL), attn_implementation=a),
    deberta=lambda a: DebertaForMaskedLM._from_config(
        DebertaConfig(
            **SMALL,
            intermediate_size=64,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_biased_input=False,
        ),
        attn_implementation="eager",
    ),
)
KINDS = [(f, a) for f in MODELS for a in ("eager", "sdpa") if (f, a) != ("deberta", "sdpa")]
WITH_KV = [(f, a) for f, a in KINDS if f != "deberta"]
B = 3
T = 9
t = 4
d = 32


def backbone(family, attn="sdpa"):
    m = MODELS[family](attn)
    for p in m.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.2)
    return wrap_hf_model(m, None, family)


def make_batch(bb, lens=(9, 5, 2), T=None):
    T = T or max(lens)
    keep = (torch.arange(T)[None] < torch.tensor(lens)[:, None]).long()
    pad = bb.config.pad_token_id or 0
    return dict(
        input_ids=torch.randint(5, 50, keep.shape).masked_fill(keep == 0, pad),
        attention_mask=keep,
        token_type_ids=torch.zeros_like(keep),
        mask_position=torch.tensor(lens) // 2,
    )


def single_example(batch, i):  # without its padding
    n = int(batch["attention_mask"][i].sum())
    return {k: v[i : i + 1, :n] if v.dim() == 2 else v[i : i + 1] for k, v in batch.items()}


def static(width=d, t=t, seed=1):
    p = torch.randn(t, width, generator=torch.Generator().manual_seed(seed))
    return lambda ctx: p.expand(len(ctx.h), -1, -1)


def dynamic(ctx):
    return (
        ctx.mean_state()[:, None] * torch.arange(1.0, t + 1)[:, None] + ctx.state_at("cls")[:, None]
    )  # differs from text to text


def same(a, b, atol=2e-6):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


def library_states(bb, h, keep):  # from word embeddings
    return bb.base(
        inputs_embeds=h, attention_mask=keep, position_ids=bb.position_ids(keep)
    ).last_hidden_state


def refused(f, *words):
    with pytest.raises(ValueError) as e:
        f()
    assert all(w in str(e.value) for w in words), str(e.value)


# --- rows


@pytest.mark.parametrize("position", [[0, 0, 0], [1, 1, 1], [9, 9, 9], [0, 5, 9], [3, 1, 2]])
def test_splice_row_by_row(position):
    x = torch.randn(B, T, d)
    new = torch.randn(B, t, d)
    want = torch.stack([torch.cat([x[i, :a], new[i], x[i, a:]]) for i, a in enumerate(position)])
    assert torch.equal(splice(x, new, torch.tensor(position)), want)
    if len({*position}) == 1:
        assert torch.equal(splice(x, new, position[0]), want)
    ids = torch.randint(0, 9, (B, T))
    assert splice(ids, ids[:, :t], torch.tensor(position)).dtype == ids.dtype


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
        {"words": Step("insert", p, (lambda ctx: rows) if position == "each" else position)},
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
    got = run_layers(bb, batch, {k: Step("insert", p, position)})
    want, keep = insert_into_library_states(bb, batch, k, p(got), position)
    assert torch.equal(got.attention_mask, keep)
    same(got.h[keep == 1], want[keep == 1], 2e-6)


@pytest.mark.parametrize("op", ["add", "replace"])
@pytest.mark.parametrize("family", MODELS)
def test_add_and_replace_by_index(family, op):
    bb = backbone(family)
    batch = make_batch(bb)
    first = static()
    second = static(seed=2)
    position = torch.tensor([1, 5, 0])

    def rows(ctx):
        return position

    below = run_layers(bb, batch, {1: Step("insert", first, rows)}, stop=2)
    h = below.h.clone()
    for i, a in enumerate(position):
        h[i, a : a + t] = second(below)[i] + (h[i, a : a + t] if op == "add" else 0)
    want = bb.norm(bb.run_layer(2, h, bb.layer_kwargs_by_type(below.attention_mask, h)))
    got = run_layers(bb, batch, {1: Step("insert", first, rows), 2: Step(op, second)})
    same(got.h[got.attention_mask == 1], want[got.attention_mask == 1])
    assert got.prompt_span[0].tolist() == position.tolist() and got.prompt_span[1] == t


def test_separators_are_not_changed():
    bb = backbone("roberta")
    batch = make_batch(bb)
    inner = static(t=t - 2, seed=2)
    below = run_layers(bb, batch, {0: Step("insert", static(), 1, n_separator_vectors=1)}, stop=1)
    h = below.h.clone()
    h[:, 2 : 2 + t - 2] = inner(below)  # rows 1 and t are the margin
    got = run_layers(
        bb,
        batch,
        {0: Step("insert", static(), 1, n_separator_vectors=1), 1: Step("replace", inner)},
        stop=2,
    )
    same(
        got.h[got.attention_mask == 1],
        bb.run_layer(1, h, bb.layer_kwargs_by_type(below.attention_mask, h))[
            got.attention_mask == 1
        ],
    )


@pytest.mark.parametrize("lens", [(9, 9, 9), (9, 5, 2)], ids=["full", "ragged"])
@pytest.mark.parametrize("family,attn", WITH_KV)
def test_keys_and_values_are_a_cache(family, attn, lens):
    bb = backbone(family, attn)
    batch = make_batch(bb, lens)
    plan = {k: Step("kv", static(2 * d, seed=k)) for k in range(3)}
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
    got = run_layers(bb, batch, {1: Step("kv", static(2 * d))})
    without = run_layers(bb, batch, stop=1).h
    same(run_layers(bb, batch, {1: Step("kv", static(2 * d))}, stop=1).h, without)
    assert (got.h - run_layers(bb, batch).h)[batch["attention_mask"] == 1].abs().max() > 0.1


# --- what is tracked, and what padding must not change

PLANS = {
    **{
        f"insert {k}": {k: Step("insert", dynamic if k != "words" else static(), 1)}
        for k in ("words", 0, 1, 2)
    },
    "insert, add": {0: Step("insert", dynamic), 1: Step("add", dynamic), 2: Step("add", static())},
    "insert, replace": {
        "words": Step("insert", static(), 1),
        1: Step("replace", dynamic),
        2: Step("replace", dynamic),
    },
    "at the end": {
        0: Step("insert", dynamic, lambda ctx: ctx.attention_mask.sum(1)),
        1: Step("replace", dynamic),
    },
    "in the middle, twice": {
        0: Step("insert", dynamic, lambda ctx: ctx.tracked_positions["mask"]),
        2: Step("insert", dynamic, lambda ctx: ctx.tracked_positions["mask"] + 1),
    },
    "sentence": {0: Step("insert", lambda ctx: sentence_vector(ctx)[:, None].expand(-1, t, -1))},
    "kv": {k: Step("kv", lambda ctx: torch.cat([dynamic(ctx)] * 2, -1)) for k in range(3)},
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


def test_tracked_rows_after_several_inserts():
    bb = backbone("roberta")
    batch = make_batch(bb)
    plan = {
        "words": Step("insert", static(), 1),
        0: Step("insert", static(t=2)),
        1: Step("insert", static(t=3), lambda ctx: ctx.tracked_positions["last"]),
        2: Step("insert", static(t=1), lambda ctx: ctx.tracked_positions["mask"] + 1),
    }

    def follow(ctx):
        return {
            k: ctx.token_type_ids.gather(1, r[:, None])[:, 0].tolist()
            for k, r in ctx.tracked_positions.items()
        }

    batch["token_type_ids"] = (
        torch.arange(9).expand(B, -1).contiguous() * batch["attention_mask"]
    )  # a name for each row, carried along
    bb.base.embeddings.token_type_embeddings = nn.Embedding(9, d)
    ctx = run_layers(bb, batch, plan)
    assert follow(ctx) == dict(cls=[0] * B, last=[8, 4, 1], mask=[4, 2, 1])
    assert (
        ctx.h.shape[1] == 9 + 4 + 2 + 3 + 1
        and ctx.word_mask.sum(1).tolist() == [9, 5, 2]
        and ctx.attention_mask.sum(1).tolist() == [19, 15, 12]
    )
    assert ctx.tracked_positions["cls"].tolist() == [2] * B  # two rows of layer 0 are before it


def test_the_mean_state_excludes_prompts_and_padding():
    bb = backbone("bert")
    batch = make_batch(bb)
    seen = []

    def source(ctx):
        seen.append((ctx.mean_state(), ctx.h))
        return torch.full((B, t, d), 1e6)

    run_layers(bb, batch, {0: Step("insert", source, 1), 1: Step("replace", source)})
    mean, h = seen[1]  # rows 1 to 4 are the prompt
    same(
        mean,
        torch.stack(
            [torch.cat([h[i, :1], h[i, 5 : n + 4]]).mean(0) for i, n in enumerate((9, 5, 2))]
        ),
        1e-5,
    )
    assert mean.abs().max() < 1e3


@pytest.mark.parametrize("family", MODELS)
def test_sentence_is_the_models_own_in_eval_mode_once(family, monkeypatch):
    bb = backbone(family)
    batch = make_batch(bb)
    want = bb.base(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).last_hidden_state
    want = (
        want[torch.arange(B), batch["attention_mask"].sum(1) - 1]
        if family == "gpt2"
        else want[:, 0]
    )
    passes = []
    monkeypatch.setattr(
        sentence_vectors, "run_layers", lambda *a, **kw: passes.append(1) or run_layers(*a, **kw)
    )
    bb.model.train()
    p = nn.Parameter(torch.ones(()))

    def source(ctx):
        return p * sentence_vector(ctx)[:, None].expand(-1, t, -1)

    ctx = run_layers(
        bb, batch, {0: Step("insert", source), 1: Step("add", source), 2: Step("replace", source)}
    )
    same(ctx.memo["sentence"], want)
    assert len(passes) == 1 and not ctx.memo["sentence"].requires_grad
    assert all(m.training for m in bb.model.modules())  # every layer keeps its mode
    assert "sentence" not in batch  # a pass leaves the caller's batch as it was
    run_layers(bb, batch, {0: Step("insert", source)})
    assert len(passes) == 2  # so another pass computes it again
    cached = dict(batch, sentence=torch.zeros(B, d))
    assert sentence_vector(run_layers(bb, cached)) is cached["sentence"] and len(passes) == 2


@pytest.mark.parametrize(
    "encoder", ["sentence_vector", "mean_sentence_vector", "noisy_sentence_vector"]
)
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_the_gradient_of_m_of_x_reaches_a_backbone_that_is_trained_and_no_other(family, encoder):
    bb = backbone(family)
    saved = []
    w = torch.linspace(-1, 1, d).double()
    bb.model.double()
    batch = make_batch(bb)

    def weights():
        return [p for layer in bb.layers for p in layer.parameters()]

    def m_of_x():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            return getattr(sentence_vectors, encoder)(run_layers(bb, batch, stop=0))

    assert not m_of_x().requires_grad and not saved  # frozen: nothing is recorded
    bb.base.requires_grad_(True)
    z = m_of_x()
    (z @ w).sum().backward()
    assert (
        saved
        and all(p.grad is not None for p in (*weights(), bb.word_embeddings.weight))
        and bb.word_embeddings.weight.grad.any()
    )
    if encoder != "noisy_sentence_vector":  # M(x) goes where its gradient says
        p = weights()[0]
        with torch.no_grad():
            p -= 1e-6 * p.grad
            torch.testing.assert_close(
                ((z - m_of_x()) @ w).sum(), 1e-6 * p.grad.square().sum(), rtol=1e-3, atol=0
            )


# --- the walk


@pytest.mark.parametrize("family", MODELS)
def test_a_walk_stops_before_every_layer_and_at_the_end(family):
    bb = backbone(family)
    batch = make_batch(bb)
    plan = {0: Step("insert", dynamic, 1), 2: Step("replace", dynamic)}
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
    same(ctx.h, run_layers(bb, batch, start=1, h=2 * run_layers(bb, batch, stop=1).h).h)


def test_a_walk_that_is_left_runs_no_further_layer():
    bb = backbone("roberta")
    ran = []
    layer = bb.run_layer
    bb.run_layer = lambda l, *a: ran.append(l) or layer(l, *a)
    for ctx in walk_layers(bb, make_batch(bb)):
        if ctx.layer == 1:
            break
    assert ran == [0]


def test_a_layer_runner_replaces_the_layers():
    bb = backbone("roberta")
    batch = make_batch(bb)

    def run_two_times(ctx, kv):
        for _ in range(2):
            ctx.h = bb.run_layer(
                ctx.layer, ctx.h, bb.layer_kwargs_by_type(ctx.attention_mask, ctx.h), kv
            )

    *_, ctx = walk_layers(bb, batch, stop=1, layer_runner=run_two_times)
    h = run_layers(bb, batch, stop=1).h
    same(ctx.h, bb.run_layer(0, h, bb.layer_kwargs_by_type(ctx.attention_mask, h)))


# --- the graph


@pytest.mark.parametrize("k", ["words", 0, 1, 2])
@pytest.mark.parametrize("family,attn", KINDS)
def test_nothing_below_the_prompt_is_in_the_graph(family, attn, k):
    bb = backbone(family, attn)
    bb.model.train()
    batch = make_batch(bb)
    p = nn.Parameter(torch.randn(t, d))
    first = 0 if k == "words" else k
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
        ctx = run_layers(bb, batch, {k: Step("insert", lambda ctx: p.expand(B, -1, -1))})
    assert grad == [(l >= first,) * 2 for l in range(3)]
    (ctx.state_at("cls" if family != "gpt2" else "last") @ torch.randn(d)).sum().backward()
    assert (p.grad.abs().sum(1) > 0).all() and all(w.grad is None for w in bb.model.parameters())


@pytest.mark.parametrize("family", MODELS)
def test_every_step_gets_a_gradient(family):
    bb = backbone(family)
    batch = make_batch(bb)
    ops = ["insert", "add", "insert"] if family == "deberta" else ["insert", "add", "kv"]
    params = [nn.Parameter(torch.randn(t, d * (1 + (op == "kv")))) for op in ops]
    plan = {
        k: Step(op, lambda ctx, p=p: p.expand(B, -1, -1))
        for k, (op, p) in enumerate(zip(ops, params))
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
    same(run_layers(bb, batch, start=k, h=h).h, run_layers(bb, batch).h)
    for plan in (
        {l: Step("insert", dynamic) if l == k else Step("add", dynamic) for l in range(k, 3)},
        {2: Step("insert", dynamic, 1)} if k <= 2 else {},
    ):
        assert torch.equal(
            run_layers(bb, batch, plan, stop=k).h, h
        )  # steps at `stop` or above wait
        one = run_layers(bb, batch, plan)
        two = run_layers(bb, batch, plan, start=k, h=h)
        same(two.h, one.h)
        assert all(
            torch.equal(two.tracked_positions[r], one.tracked_positions[r])
            for r in one.tracked_positions
        )


def test_a_resumed_run_refuses_prompts_below_its_start():
    bb = backbone("roberta")
    batch = make_batch(bb)
    h = run_layers(bb, batch, stop=2).h
    step = Step("insert", static())
    refused(
        lambda: run_layers(bb, batch, {1: step}, start=2, h=h),
        "a prompt at layer 1",
        "resumes from layer 2",
        "Start at layer 1 or below",
    )
    refused(lambda: run_layers(bb, batch, {"words": step}, start=0, h=h), "a prompt at layer words")
    refused(lambda: run_layers(bb, batch, start=2), "start=2 needs `h`", "stop=2")
    refused(
        lambda: run_layers(bb, batch, start=2, h=h[:, :5]),
        "h must have shape (3, 9, 32)",
        "got (3, 5, 32)",
        "without prompts",
    )
    refused(lambda: run_layers(bb, batch, stop=4), "stop=4", "which has 3 layers")
    refused(lambda: run_layers(bb, batch, start=2, stop=1, h=h), "start <= stop")


# --- what is refused


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
            lambda: run({3: Step("insert", p)}),
            "between 0 and 2 for backbone 'roberta', got 3",
            "0 is the embedding output",
        )
        refused(lambda: run({-1: Step("insert", p)}), "between 0 and 2", "got -1")
        refused(
            lambda: run({"word": Step("insert", p)}),
            "got 'word'",
            "must be 'words' or",
        )
        refused(
            lambda: run({1: Step("prepend", p)}),
            "operation must be 'insert', 'add', 'replace' or 'kv'",
            "got 'prepend' (at layer 1)",
        )
        for op in ("add", "replace"):
            refused(
                lambda: run({1: Step(op, p), 2: Step("insert", p)}),
                f"'{op}' at layer 1",
                "Begin the plan with an 'insert'",
            )
            refused(lambda: run({"words": Step(op, p)}), "Begin the plan with an 'insert'")
            refused(
                lambda: run({0: Step("kv", static(2 * d)), 1: Step(op, p)}),
                "Begin the plan with an 'insert'",
            )
        refused(lambda: run({"words": Step("kv", p)}), "'kv' at 'words'", "enter at a layer")
    refused(
        lambda: check_plan({1: Step("kv", static(2 * d))}, deberta),
        "'kv' at layer 1",
        "a deberta backbone",
        "Use 'insert' and 'replace'",
    )
    for plan in PLANS.values():
        check_plan(plan, bb)


@pytest.mark.parametrize(
    "plan,words",
    [
        (
            {1: Step("insert", static(t=4, width=8))},
            ("'insert' at layer 1", "(3, 4, 8)", "(3, t, 32)"),
        ),
        (
            {"words": Step("insert", lambda ctx: torch.zeros(1, t, d))},
            ("'insert' at layer words", "(1, 4, 32)", "needs `.expand"),
        ),
        ({0: Step("insert", lambda ctx: torch.zeros(t, d))}, ("(4, 32)", "batch, length, width")),
        (
            {0: Step("kv", static())},
            ("'kv' at layer 0", "(3, 4, 32)", "(3, t, 64)", "keys and values"),
        ),
        (
            {0: Step("insert", static()), 2: Step("add", static(t=3))},
            ("'add' at layer 2", "has 4 vectors but the source gives 3", "one prompt length"),
        ),
        (
            {0: Step("insert", static()), 2: Step("replace", lambda ctx: torch.zeros(1, t, d))},
            ("'replace' at layer 2", "(1, 4, 32)"),
        ),
        (
            {0: Step("insert", static(), 3)},
            ("inserted at positions [3, 3, 3]", "have [9, 5, 2] tokens", "not inside the padding"),
        ),
        ({0: Step("insert", static(), -1)}, ("inserted at positions [-1, -1, -1]",)),
        (
            {0: Step("insert", static(), lambda ctx: ctx.tracked_positions["last"] + 2)},
            ("inserted at positions [10, 6, 3]", "each example"),
        ),
        (
            {0: Step("insert", lambda ctx: ctx.state_at("eos")[:, None])},
            ("no 'eos' position", "cls, last, mask", "template"),
        ),
    ],
)
def test_wrong_prompts(plan, words):
    bb = backbone("roberta")
    refused(lambda: run_layers(bb, make_batch(bb), plan), *words)


def test_insert_alone_says_which_dimensions_disagree():
    refused(
        lambda: insert_prompt(torch.zeros(4, 9, 32), torch.ones(4, 9), torch.zeros(1, 5, 32)),
        "(1, 5, 32)",
        "(4, 9, 32)",
        "batch size (dim 0) and width (dim 2)",
        ".expand",
    )


@pytest.mark.parametrize(
    "family,max_tokens", [("roberta", 38), ("bert", 40), ("gpt2", 40)]
)  # RoBERTa counts from its padding id
def test_a_prompt_among_the_words_needs_positions(family, max_tokens):
    bb = backbone(family)
    p = static()
    assert (
        run_layers(bb, make_batch(bb, (max_tokens,))).h.shape[1] == max_tokens
        and run_layers(bb, make_batch(bb, (max_tokens,)), {0: Step("insert", p)}).h.shape[1]
        == max_tokens + t
    )
    assert (
        run_layers(bb, make_batch(bb, (max_tokens - t,)), {"words": Step("insert", p)}).h.shape[1]
        == max_tokens
    )
    refused(
        lambda: run_layers(bb, make_batch(bb, (max_tokens + 1,))),
        f"has {max_tokens + 1} tokens, but",
        f"{family!r} has only {max_tokens} positions",
        f"max_len={max_tokens} or less",
    )
    refused(
        lambda: run_layers(bb, make_batch(bb, (max_tokens - t + 1,)), {"words": Step("insert", p)}),
        f"has {max_tokens - t + 1} tokens and the prompt 4 vectors",
        f"max_len={max_tokens - t} or less",
        "insert it at layer 0",
    )


def test_padding_on_the_left_is_refused():
    bb = backbone("gpt2")
    batch = make_batch(bb)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    refused(lambda: run_layers(bb, batch), "an example begins with padding", "padding on the right")


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
            0: Step("insert", lambda ctx: p.expand(B, -1, -1)),
            1: Step("add", lambda ctx: p.expand(B, -1, -1)),
        },
        {1: Step("kv", lambda ctx: torch.cat([p, p], -1).expand(B, -1, -1))},
    ):
        ctx = run_layers(bb, batch, plan)
        assert ctx.h.dtype == torch.bfloat16
        p.grad = None
        (ctx.state_at("cls") @ torch.randn(d)).sum().backward()  # what is read is float32
        assert p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0

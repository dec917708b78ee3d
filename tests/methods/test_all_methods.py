"""Every method of the registry on every family.

Padding, order, gradients, what depends on the text, parameter counts, and references written out in
plain torch.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small import FAMILY, backbone, batch_of, config, model_of, one, same, small_task, text_of

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.planned_model import count_parameters
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.all_methods import METHODS

HEADS = ("classification", "verbalizer")
STATIC = {m for m, row in METHODS.items() if row.kind == "static"}
DYNAMIC = {m for m, row in METHODS.items() if row.kind in ("generated", "second pass")}


def make_model_and_batch(method, family, head="classification", **kw):
    """Model and batch; skipped where the method says that it does not go with the family."""
    bb = backbone(family)
    try:
        model = model_of(method, bb, head=head, **kw)
    except ValueError as e:
        if family != "roberta" and family in str(e).lower().replace("-", ""):
            pytest.skip(str(e))
        raise
    return model, batch_of(bb, template="code" if head == "verbalizer" else None)


def _quick(i, f, h):
    # each method on RoBERTa and on one more pair, which changes from method to method
    return (f == "roberta" and h == "classification") or (
        FAMILY.index(f) + 2 * HEADS.index(h) + i
    ) % 8 == 3


def on_all(f):
    """Parametrise a test with all methods, families and heads.

    The full product is slow (`-m ''` runs it), so CI takes two pairs of each method.
    """
    # EFL has a head of its own
    cases = [
        pytest.param(
            m, fam, h, marks=[] if _quick(i, fam, h) else [pytest.mark.slow], id=f"{m}-{fam}-{h}"
        )
        for i, m in enumerate(METHODS)
        for fam in FAMILY
        for h in HEADS
        if (m, h) != ("efl", "verbalizer")
    ]
    return pytest.mark.parametrize("method,family,head", cases)(f)


def test_every_method_has_learning_rates():
    for m in METHODS.values():
        assert (
            len(m.learning_rates) == 3
            and sorted(m.learning_rates) == [*m.learning_rates]
            and m.default_learning_rate == m.learning_rates[1]
        )


@on_all
def test_padding_and_order_change_nothing(method, family, head):
    model, batch = make_model_and_batch(method, family, head)
    with torch.no_grad():
        together = model(batch)
        order = torch.randperm(len(together))
        alone = torch.cat([model(one(batch, i)) for i in range(len(together))])
        shuffled = model({k: v[order] for k, v in batch.items()})
    lengths = batch["attention_mask"].sum(1)
    assert lengths.min() < lengths.max() and (together[0] - together[1]).abs().max() > 1e-3
    same(alone, together)
    same(shuffled, together[order])


@on_all
def test_gradients_reach_what_is_trained_and_nothing_else(method, family, head):
    model, batch = make_model_and_batch(method, family, head)
    model.train()
    trained = model.trained_parameters()
    if not trained:
        assert (method, head) == ("head-only", "verbalizer")
        return
    model.loss(batch).backward()
    without = [n for n, p in trained.items() if p.grad is None or not p.grad.any()]
    assert not without, without
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    if head == "verbalizer":
        assert not any(n.startswith("head.") for n in trained)


def record_sources(model, batch):
    """Return the output of each source of a plan.

    The context's hidden states and mode when it was asked.
    """
    seen = []
    plan = model.plan

    def listen(k, source):
        def f(ctx):
            h = ctx.h
            p = source(ctx)
            seen.append((k, p.detach(), h))
            return p

        return f

    model.plan = {k: replace(s, source=listen(k, s.source)) for k, s in plan.items()}
    try:
        ctx = model.compute_context(batch)
    finally:
        model.plan = plan
    return seen, ctx


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("method", METHODS)
def test_which_prompts_depend_on_the_text(method, family):
    model, batch = make_model_and_batch(method, family)
    seen, _ = record_sources(model, batch)
    differs = any((p[0] - p[1]).abs().max() > 1e-3 for _, p, _ in seen)
    if method in STATIC:
        assert seen and not differs
    elif method in DYNAMIC:
        assert seen and differs


@pytest.mark.parametrize("family", FAMILY)
def test_head_only_builds_no_graph_below_the_head(family):
    model, batch = make_model_and_batch("head-only", family)
    model.train()
    _, ctx = record_sources(model, batch)
    assert not ctx.h.requires_grad and model(batch).requires_grad


@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_the_last_layer_at_the_row_that_is_read_is_the_whole_layer(method, family):
    head = dict(pooling="cls") if len(method) % 2 or method == "efl" else dict(head="verbalizer")
    model, batch = make_model_and_batch(method, family, **head)
    if not model.trained_parameters():
        pytest.skip("nothing to train")  # head-only
    rows = {}
    out = []  # of the pass that the head reads, which is the last one
    layer = model.backbone.layers[-1]
    (layer.mlp if family == "gpt2" else layer.output).register_forward_hook(
        lambda m, i, o: rows.update({model.backbone.supports_single_position: o.shape[1]})
    )
    for short in (True, False):
        model.backbone.supports_single_position = short
        model.zero_grad()
        loss = model.loss(text_of(batch))
        loss.backward()
        out.append([loss.detach(), *(p.grad.clone() for p in model.trained_parameters().values())])
    same(*out, atol=1e-5)
    assert rows[True] == 1 < batch["input_ids"].shape[1] <= rows[False]


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("method", [m for m in METHODS if m == "lpt" or m.startswith("lpt-")])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_below_a_late_prompt_there_is_no_graph_and_no_dropout(method, layer, family):
    model, batch = make_model_and_batch(method, family, layer=layer)
    model.train()

    def below():
        return record_sources(model, batch)[0]

    torch.manual_seed(1)
    ((k, _, h),) = below()
    torch.manual_seed(2)
    _, _, g = below()[0]
    assert k == layer and not h.requires_grad and torch.equal(h, g)
    assert [m.training for m in model.backbone.layers] == [i >= layer for i in range(3)]
    torch.manual_seed(1)
    a = model(batch)
    torch.manual_seed(2)
    assert (a - model(batch)).abs().max() > 1e-4  # above it there is
    model.eval()
    same(model(batch), model(batch), 0)


@pytest.mark.parametrize("family", FAMILY)
def test_lower_dropout_is_a_switch(family):
    model, batch = make_model_and_batch("lpt", family, layer=2, dropout_below_prompt=True)
    model.train()
    h, g = [record_sources(model, batch)[0][0][2] for _ in range(2)]
    assert (h - g).abs().max() > 1e-3 and all(m.training for m in model.backbone.layers)


def test_prompt_dropout_is_on_generated_prompts():
    model, batch = make_model_and_batch("lpt-npg", "roberta", prompt_dropout=0.5)
    model.train()
    p = record_sources(model, batch)[0][0][1]
    assert 0.3 < (p == 0).float().mean() < 0.7
    assert (record_sources(model.eval(), batch)[0][0][1] != 0).all()


# --- references


def npg_by_hand(bb, gen, batch, q, t):
    """The definition of NPG, Hugging Face's own layers, one text at a time.

    P = W2 ReLU(W1 h + b1) + b2, in front of the states after q layers.
    """
    hidden = bb.model(input_ids=batch["input_ids"], output_hidden_states=True).hidden_states[q]
    z = hidden[:, 0] if bb.family != "gpt2" else hidden[:, -1]
    p = F.linear(
        F.relu(F.linear(z, gen.down.weight, gen.down.bias)), gen.up.weight, gen.up.bias
    ).reshape(1, t, bb.d)
    h = torch.cat([p, hidden], 1)
    T = h.shape[1]
    mask = torch.full((T, T), float("-inf")).triu(1)[None, None] if bb.family == "gpt2" else None
    for layer in (bb.base.h if bb.family == "gpt2" else bb.base.encoder.layer)[q:]:
        h = layer(h, attention_mask=mask)
        h = h[0] if isinstance(h, tuple) else h
    return (bb.base.ln_f(h) if bb.family == "gpt2" else h)[:, t:], p


@pytest.mark.parametrize("q", [0, 1, 2])
@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2"])
def test_npg_is_the_papers(family, q):
    bb = backbone(family)
    task = small_task()
    model = model_of("lpt-npg", bb, task, "verbalizer", layer=q)
    batch = batch_of(bb, task, 4, "code")
    words = task.word_ids(bb.tokenizer)
    with torch.no_grad():
        got = model(batch)
        seen = record_sources(model, batch)[0][0][1]
        for i in range(4):
            h, p = npg_by_hand(bb, model.sources[0], one(batch, i), q, 4)
            row = h[0, batch["mask_position"][i]]
            head = bb.model.lm_head if hasattr(bb.model, "lm_head") else bb.model.cls
            same(seen[i : i + 1], p)
            same(got[i], head(row)[words], 1e-4)


def test_npg_reads_its_row_at_unit_spread():
    bb = backbone()
    plain, scaled = [model_of("lpt-npg", bb, standardise=on).train() for on in (False, True)]
    scaled.sources[0].load_state_dict(plain.sources[0].state_dict(), strict=False)
    batch = batch_of(bb)
    rows = []
    scaled.sources[0].down.register_forward_pre_hook(lambda _, x: rows.append(x[0].detach()))
    with torch.no_grad():
        different = (plain(batch) - scaled(batch)).abs().max()
    assert different > 1e-3
    torch.testing.assert_close(rows[0].mean(0), torch.zeros(bb.d), atol=1e-3, rtol=0)
    torch.testing.assert_close(rows[0].std(0, unbiased=False), torch.ones(bb.d), atol=1e-2, rtol=0)


def test_prompt_tuning_is_more_word_vectors():
    bb = backbone()
    model = model_of("prompt-tuning", bb)
    batch = batch_of(bb)
    p = model.sources[0].p
    with torch.no_grad():
        for i in range(3):
            x = one(batch, i)
            e = bb.word_embeddings(x["input_ids"])
            e = torch.cat([e[:, :1], p[None], e[:, 1:]], 1)
            h = bb.base(
                inputs_embeds=e, attention_mask=torch.ones_like(e[..., 0]).long()
            ).last_hidden_state
            want = model.head.net(
                torch.cat([h[:, :1], h[:, 5:]], 1).mean(1)
            )  # mean over the text, not over the prompt
            same(model(x), want)


# --- sizes

COUNTS = [
    ("lpt", dict(prompt_length=20), "roberta-large", 20_480),
    ("lpt", dict(prompt_length=20), "gpt2-large", 25_600),
    ("lpt-npg", dict(prompt_length=5, bottleneck=128), "roberta-large", 791_680),
    ("lpt-npg", dict(prompt_length=5, bottleneck=128), "gpt2-large", 989_568),
    ("prompt-tuning", dict(prompt_length=5), "roberta-large", 5_120),
    ("prompt-tuning", dict(prompt_length=256), "roberta-large", 262_144),
    ("head-only", {}, "roberta-large", 0),
]


@pytest.mark.parametrize(
    "method,kw,name,published", COUNTS, ids=[f"{m} {n} {p}" for m, _, n, p in COUNTS]
)
def test_published_sizes(method, kw, name, published):
    bb = load_backbone(name, weights="meta")
    task = TASKS["sentiment"]
    assert count_parameters(build_model(config(method=method, **kw), bb, task)) == dict(
        prompt=published, head=2 * bb.d + 2, backbone=0
    )
    assert count_parameters(
        build_model(config(method=method, head="verbalizer", **kw), bb, task)
    ) == dict(prompt=published, head=0, backbone=0)


def test_fine_tuning_counts_what_it_changes():
    bb = load_backbone("roberta-large", weights="meta")
    n = count_parameters(
        build_model(config(method="fine-tuning", head="verbalizer"), bb, TASKS["sentiment"])
    )
    assert n == dict(prompt=0, head=0, backbone=355_412_057)
    n = count_parameters(
        build_model(
            config(method="fine-tuning"),
            load_backbone("roberta-large", weights="meta"),
            TASKS["sentiment"],
        )
    )
    # the language-model head is not used
    assert n == dict(prompt=0, head=2050, backbone=sum(p.numel() for p in bb.base.parameters()))


# --- refused

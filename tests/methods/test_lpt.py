"""Tests of late prompt tuning.

Pooling and generators are compared with slow references on ragged batches. The layers below the
prompt, decoders, parameter counts, initialisation, and invalid arguments.
"""

import math
from functools import cache

import pytest
import small
import torch
import torch.nn.functional as F
from small import FAMILY, batch_of, one, refused, same, small_task
from torch import nn

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.methods.lpt import (
    PoolingPromptGenerator,
    adaptive_pool,
    lpt_plan,
)
from idp_tutorial.methods.npg import NaivePromptGenerator
from idp_tutorial.methods.soft_prompt import SoftPrompt

backbone = cache(small.backbone)  # built once a family

SOURCES = {
    "lpt": lambda d, t=4, **kw: SoftPrompt(t, d, std=1.0),
    "lpt-npg": lambda d, t=4, **kw: NaivePromptGenerator(d, t, 8, **kw),
    "lpt-appg": lambda d, t=4, **kw: PoolingPromptGenerator(d, t, 8, "mean", **kw),
    "lpt-mppg": lambda d, t=4, **kw: PoolingPromptGenerator(d, t, 8, "max", **kw),
}


def model_of(method, bb, layer=1, head="verbalizer", dropout_below_prompt=False, **kw):
    """Build a model with seed 0, without the registry."""
    torch.manual_seed(0)
    source = SOURCES[method](bb.d, **kw)
    reader = (
        VerbalizerHead(bb, small_task().word_ids(bb.tokenizer))
        if head == "verbalizer"
        else ClassificationHead(bb.d, 2, "mean")
    )
    return PlannedModel(bb, reader, lpt_plan(bb, source, layer), dropout_below_prompt).eval()


def prompt_of(model, batch):
    """Return the output of the source and the hidden states that it read."""
    ((layer, step),) = model.plan.items()
    ctx = run_layers(model.backbone, batch, stop=layer)
    return step.source(ctx), ctx.h


# --- pooling


@pytest.mark.parametrize(
    "kind,layer", [("mean", nn.AdaptiveAvgPool1d), ("max", nn.AdaptiveMaxPool1d)]
)
@pytest.mark.parametrize("t", [1, 2, 3, 5, 10, 20])
def test_pooling_matches_pytorch_on_each_text(kind, layer, t):
    torch.manual_seed(t)
    lengths = [1, 2, 3, 4, 5, 7, 9, 10, 11, 13]
    T = 13
    x = torch.randn(len(lengths), T, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    w = torch.randn(len(lengths), t, 6)
    keep = (torch.arange(T) < torch.tensor(lengths)[:, None]).long()
    got = adaptive_pool(x, keep, t, kind)
    want = torch.stack([layer(t)(r[:n].T[None])[0].T for r, n in zip(y, lengths)])
    same(got, want, 1e-6)
    (got * w).sum().backward()
    (want * w).sum().backward()
    same(x.grad, y.grad, 1e-5)
    assert not x.grad[keep == 0].any() and x.grad[keep == 1].any()


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_pooled_positions_need_not_be_contiguous(kind):
    torch.manual_seed(0)
    x = torch.randn(3, 9, 4)
    keep = torch.tensor(
        [[1, 0, 0, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 1]]
    )
    want = torch.cat(
        [
            adaptive_pool(r[k == 1][None], torch.ones(1, int(k.sum())).long(), 5, kind)
            for r, k in zip(x, keep)
        ]
    )
    same(adaptive_pool(x, keep, 5, kind), want)
    # the other positions have no effect
    same(adaptive_pool(x.masked_fill(keep[..., None] == 0, float("nan")), keep, 5, kind), want)


def test_pooling_is_one_call_for_the_batch(monkeypatch):
    """The number of operators does not grow with the batch size."""

    def n_ops(B):
        with torch.profiler.profile() as prof:
            adaptive_pool(torch.randn(B, 12, 4), torch.ones(B, 12).long(), 5)
        return len([e for e in prof.events() if e.name.startswith("aten::")])

    assert n_ops(2) == n_ops(16)


# --- generators, compared with the paper's formulas: one text at a time, without padding


def states_by_hand(bb, x, q):
    # `[n,d]`
    return bb.model(
        input_ids=x["input_ids"], attention_mask=x["attention_mask"], output_hidden_states=True
    ).hidden_states[q][0]


def bins(n, t):
    return [(math.floor(i * n / t), math.ceil((i + 1) * n / t)) for i in range(t)]


def by_hand(method, gen, h, t, last=None, off_by_one=False):
    """Compute the prompt of one text from its states `[n,d]`.

    `last` is the position of a decoder's last context word.
    """

    def down(r):
        return F.linear(r, gen.down.weight, gen.down.bias)

    def up(r):
        return F.linear(r, gen.up.weight, gen.up.bias)

    if method == "lpt-npg":
        return up(F.relu(down(h[0] if last is None else h[last]))).reshape(t, -1)
    u = [down(r) for r in (h if last is None else h[:last] if off_by_one else h[: last + 1])]
    pool = {
        "lpt-appg": lambda rows: sum(rows) / len(rows),
        "lpt-mppg": lambda rows: torch.stack(rows).max(0).values,
    }[method]
    return torch.stack([up(F.relu(pool(u[a:b]))) for a, b in bins(len(u), t)])


@pytest.mark.parametrize("t", [4, 40], ids=["shorter than the texts", "longer"])
@pytest.mark.parametrize("q", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("method", ["lpt-npg", "lpt-appg", "lpt-mppg"])
def test_generators_match_the_papers_formulas(method, family, q, t):
    bb = backbone(family)
    model = model_of(method, bb, q, t=t)
    batch = batch_of(bb, template="code")
    lengths = batch["attention_mask"].sum(1)
    assert lengths.min() < lengths.max() and (t < lengths.min() or t > lengths.max())
    with torch.no_grad():
        got, _ = prompt_of(model, batch)
        for i in range(len(got)):
            x = one(batch, i)
            last = int(x["mask_position"]) if family == "gpt2" else None
            same(got[i], by_hand(method, model.sources[0], states_by_hand(bb, x, q), t, last), 2e-5)


@pytest.mark.parametrize("q", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("method", ["lpt-appg", "lpt-mppg"])
def test_logits_match_a_computation_by_hand(method, family, q):
    """The prompt is in front of the hidden states after q layers.

    The frozen language-model head reads the mask position, for two label words.
    """
    bb = backbone(family)
    task = small_task()
    t = 4
    model = model_of(method, bb, q)
    batch = batch_of(bb, template="code")
    words = task.word_ids(bb.tokenizer)
    with torch.no_grad():
        got = model(batch)
        for i in range(len(got)):
            x = one(batch, i)
            h = states_by_hand(bb, x, q)
            h = torch.cat(
                [
                    by_hand(
                        method,
                        model.sources[0],
                        h,
                        t,
                        int(x["mask_position"]) if family == "gpt2" else None,
                    ),
                    h,
                ]
            )[None]
            mask = None
            if family == "gpt2":
                mask = torch.full((h.shape[1],) * 2, float("-inf")).triu(1)[None, None]
            more = {}
            if family == "deberta":
                enc = bb.base.encoder
                mask = torch.ones(1, 1, *(h.shape[1],) * 2).long()
                more = dict(relative_pos=enc.get_rel_pos(h), rel_embeddings=enc.get_rel_embedding())
            for layer in (bb.base.h if family == "gpt2" else bb.base.encoder.layer)[q:]:
                h = layer(h, attention_mask=mask, **more)
                h = h[0] if isinstance(h, tuple) else h
            if family == "gpt2":
                h = bb.base.ln_f(h)
            head = next(
                getattr(bb.model, n)
                for n in ("lm_head", "cls", "lm_predictions")
                if hasattr(bb.model, n)
            )
            row = h[0, t + x["mask_position"][0]]
            same(
                got[i],
                (
                    head(row, bb.word_embeddings)
                    if hasattr(bb.model, "lm_predictions")
                    else head(row)
                )[words],
                1e-4,
            )


@pytest.mark.parametrize("head", ["verbalizer", "classification"])
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("method", SOURCES)
def test_padding_and_neighbours_change_nothing(method, family, head):
    bb = backbone(family)
    model = model_of(method, bb, head=head)
    batch = batch_of(bb, template="code" if head == "verbalizer" else None)
    with torch.no_grad():
        together = model(batch)
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        same(torch.cat([model(one(batch, i)) for i in range(len(together))]), together)
        same(model({k: v[order] for k, v in batch.items()}), together[order])
        far = {k: F.pad(v, (0, 7)) if v.dim() == 2 else v for k, v in batch.items()}
        same(model(far), together)
    assert (together[0] - together[1]).abs().max() > 1e-3


# --- below the prompt


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("method", SOURCES)
def test_below_the_prompt_nothing_is_saved(method, family, layer, monkeypatch):
    bb = backbone(family)
    model = model_of(method, bb, layer, "classification").train()
    batch = batch_of(bb)
    saved = {}
    inner = bb.run_layer

    def watched(k, h, mask, kv=None):
        saved[k] = 0

        def pack(x):
            saved[k] += 1
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = inner(k, h, mask, kv)
        assert out.requires_grad == (k >= layer)
        return out

    monkeypatch.setattr(bb, "run_layer", watched)
    model.loss(batch).backward()
    assert all(saved[k] == 0 for k in range(layer)) and all(saved[k] > 0 for k in range(layer, 3))
    assert all(p.grad is not None and p.grad.any() for p in model.sources.parameters())
    assert all(p.grad is None for p in bb.model.parameters())


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("method", SOURCES)
def test_dropout_below_the_prompt_is_off_by_default(method, family):
    bb = backbone(family)
    batch = batch_of(bb)
    (_, a), (_, b) = [
        prompt_of(model_of(method, bb, 2, "classification").train(), batch) for _ in range(2)
    ]
    assert torch.equal(a, b)
    (_, a), (_, b) = [
        prompt_of(
            model_of(method, bb, 2, "classification", dropout_below_prompt=True).train(), batch
        )
        for _ in range(2)
    ]
    torch.manual_seed(1)
    c = run_layers(bb, batch, stop=2).h
    assert (a - c).abs().max() > 1e-3
    bb.model.eval()


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("method", ["lpt-npg", "lpt-appg", "lpt-mppg"])
def test_dropout_on_generated_prompts(method, rate):
    bb = backbone()
    model = model_of(method, bb, t=40, dropout=rate)
    batch = batch_of(bb)
    model.train()
    torch.manual_seed(3)
    p, _ = prompt_of(model, batch)
    q, _ = prompt_of(model.eval(), batch)
    assert abs((p == 0).float().mean() - rate) < 0.03 and (q != 0).all()
    same(p[p != 0], (q / (1 - rate))[p != 0])  # dropout scales the other values up


def test_static_prompts_have_no_dropout():
    bb = backbone()
    model = model_of("lpt", bb).train()
    p, _ = prompt_of(model, batch_of(bb))
    assert (p != 0).all()


# --- decoders


@pytest.mark.parametrize("template", ["code", None])
@pytest.mark.parametrize("method", ["lpt-npg", "lpt-appg", "lpt-mppg"])
def test_generators_use_the_last_context_word_of_a_decoder(method, template):
    """NPG reads it, and pooling includes it.

    With `exclude_last_token` pooling leaves out exactly that position, as the released code does.
    """
    bb = backbone("gpt2")
    batch = batch_of(bb, template=template)
    q = 2
    kw = {} if method == "lpt-npg" else dict(exclude_last_token=True)
    model = model_of(method, bb, q, **kw)
    with torch.no_grad():
        got, _ = prompt_of(model, batch)
        for i in range(len(got)):
            x = one(batch, i)
            last = int(batch["attention_mask"][i].sum()) - 1
            if template:
                assert last == int(
                    batch["mask_position"][i]
                )  # the template ends where the answer begins
            same(
                got[i],
                by_hand(
                    method, model.sources[0], states_by_hand(bb, x, q), 4, last, off_by_one=True
                ),
                2e-5,
            )
        if kw:
            assert (got - prompt_of(model_of(method, bb, q), batch)[0]).abs().max() > 1e-3


def test_exclude_last_token_has_no_effect_on_encoders():
    bb = backbone()
    batch = batch_of(bb, template="code")
    model = model_of("lpt-appg", bb)
    with torch.no_grad():
        want = prompt_of(model, batch)[0]
        model.sources[0].exclude_last_token = True
        assert torch.equal(prompt_of(model, batch)[0], want)


@pytest.mark.parametrize("method", SOURCES)
def test_a_decoders_prompt_is_inserted_in_front(method):
    bb = backbone("gpt2")
    model = model_of(method, bb, 1)
    batch = batch_of(bb, template="code")
    with torch.no_grad():
        p, _ = prompt_of(model, batch)
        ctx = run_layers(bb, batch, model.plan)
        assert (
            ctx.h.shape[1] == batch["input_ids"].shape[1] + 4
            and torch.equal(ctx.tracked_positions["mask"], batch["mask_position"] + 4)
            and not ctx.word_mask[:, :4].any()
        )
        # upper layers are causal: the prompt depends on the words only through the generator
        prompt_only = p
        for k in (1, 2):
            prompt_only = bb.run_layer(
                k, prompt_only, bb.layer_kwargs_by_type(torch.ones(p.shape[:2]).long(), p)
            )
        same(ctx.h[:, :4], bb.norm(prompt_only), 1e-4)


# --- parameter counts and initialisation

SIZES = [
    ("lpt", 20, "roberta-large", 20_480),
    ("lpt-npg", 5, "roberta-large", 791_680),
    ("lpt-appg", 10, "roberta-large", 263_296),
    ("lpt-mppg", 20, "roberta-large", 263_296),
    ("lpt", 20, "gpt2-large", 25_600),
    ("lpt-npg", 5, "gpt2-large", 989_568),
    ("lpt-appg", 20, "gpt2-large", 329_088),
    ("lpt-mppg", 15, "gpt2-large", 329_088),
    ("lpt-npg", 5, "deberta-large", 791_680),
    ("lpt-appg", 10, "deberta-large", 263_296),
    ("lpt-npg", 5, "roberta-base", 593_792),
    ("lpt-appg", 10, "roberta-base", 197_504),
]


@pytest.mark.parametrize("method,t,name,published", SIZES)
def test_published_sizes(method, t, name, published):
    bb = load_backbone(name, weights="meta")
    with torch.device("meta"):
        source = dict(
            zip(
                SOURCES,
                (
                    SoftPrompt(t, bb.d),
                    NaivePromptGenerator(bb.d, t),
                    PoolingPromptGenerator(bb.d, t),
                    PoolingPromptGenerator(bb.d, t, pool="max"),
                ),
            )
        )[method]
    model = PlannedModel(bb, VerbalizerHead(bb, [0, 1]), lpt_plan(bb, source))
    assert count_parameters(model) == dict(
        prompt=published, head=0, backbone=0
    )  # the language-model head stays frozen
    # LPT's 13th and 19th layer
    assert (
        model.first_trained_layer
        == {"roberta-large": 12, "gpt2-large": 18, "deberta-large": 12, "roberta-base": 6}[name]
    )


@pytest.mark.parametrize(
    "make",
    [lambda: NaivePromptGenerator(512, 5, 128), lambda: PoolingPromptGenerator(512, 5, 128)],
    ids=["NPG", "PPG"],
)
def test_generators_have_pytorchs_initialisation(make):
    torch.manual_seed(0)
    g = make()
    for layer in (g.down, g.up):
        for p in (layer.weight, layer.bias):
            edge = layer.in_features**-0.5
            assert (
                0.9 * edge < p.abs().max() <= edge
                and p.std().sub(edge / 3**0.5).abs() < 0.08 * edge
            )
    assert (
        0.2 < g.up(g.down(torch.randn(500, 512)).relu()).std() < 0.28
    )  # SPEC 4.2: about 0.24 at m=128


def test_static_prompt_has_the_given_std():
    torch.manual_seed(0)
    assert abs(SoftPrompt(20, 1024, std=1.0).p.std() - 1) < 0.02


# --- invalid arguments


@pytest.mark.parametrize(
    "make,words",
    [
        (
            lambda: PoolingPromptGenerator(8, pool="avg"),
            ["pooling must be ", "got 'avg'", "'mean' (APPG)", "'max' (MPPG)"],
        ),
        (
            lambda: adaptive_pool(torch.zeros(1, 2, 3), torch.ones(1, 2).long(), 2, "sum"),
            ["'sum'", "'max'"],
        ),
        (
            lambda: adaptive_pool(torch.zeros(2, 2, 3), torch.tensor([[1, 1], [0, 0]]), 2),
            ["no token to pool", "at least one token"],
        ),
        (
            lambda: run_layers(
                backbone(), batch_of(backbone()), lpt_plan(backbone(), SoftPrompt(2, 32), 3)
            ),
            ["between 0 and 2", "got 3"],
        ),
    ],
)
def test_invalid_arguments_are_refused(make, words):
    refused(make, *words)


def test_pooling_accepts_a_boolean_mask():
    x = torch.randn(2, 5, 3)
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert torch.equal(adaptive_pool(x, keep.bool(), 2), adaptive_pool(x, keep, 2))

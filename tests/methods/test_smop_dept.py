"""SMoP and DePT on every family.

The router against loops, DePT against Hugging Face's own forward, padding, noise, the traps of the
released code, two learning rates.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from small import FAMILY, backbone, batch_of, config, one, refused, same, small_task

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.methods.prompt_tuning import prompt_plan
from idp_tutorial.methods.smop_dept import (
    DecomposedPrompt,
    DePTConfig,
    RoutedPrompt,
    SMoPConfig,
    dept_plan,
)
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.training.fit import fit

T = 4


def smop(seed=1, **kw):
    torch.manual_seed(seed)
    s = RoutedPrompt(32, T, **kw).eval()
    with torch.no_grad():
        s.router.weight.mul_(8)
    return s


def dept(B=0.3, seed=1, **kw):
    torch.manual_seed(seed)
    s = DecomposedPrompt(32, T, **{**dict(max_len=60, r=6), **kw}).eval()
    torch.nn.init.normal_(s.B, std=B)
    return s


def make_model(bb, method, head="classification", position=0):
    source = smop() if method == "smop" else dept()
    plan = (
        prompt_plan(bb, source, position) if method == "smop" else dept_plan(bb, source, position)
    )
    h = (
        ClassificationHead(bb.d, 2, bb.default_pooling)
        if head == "classification"
        else VerbalizerHead(bb, small_task().word_ids(bb.tokenizer))
    )
    return PlannedModel(bb, h, plan).eval()


def ctx_of(bb, batch):
    return run_layers(bb, batch, stop=0)


# --- both: what must not matter


@pytest.mark.parametrize("head", ["classification", "verbalizer"])
@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("method", ["smop", "dept"])
def test_padding_and_company_change_nothing(bbs, method, family, head):
    bb = bbs(family)
    model = make_model(bb, method, head)
    batch = batch_of(bb, template="code" if head == "verbalizer" else None)
    with torch.no_grad():
        together = model(batch)
        order = torch.randperm(6)
        same(torch.cat([model(one(batch, i)) for i in range(6)]), together)
        same(model({k: v[order] for k, v in batch.items()}), together[order])
        longer = {k: F.pad(v, (0, 9)) if v.dim() == 2 else v for k, v in batch.items()}
        longer["input_ids"][:, -9:] = 77
        same(model(longer), together)
    assert (
        batch["attention_mask"].sum(1).unique().numel() > 1
        and (together[0] - together[1]).abs().max() > 1e-3
    )


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("method", ["smop", "dept"])
def test_every_position(bbs, method, position):
    bb = bbs("bert")
    batch = batch_of(bb, small_task("entailment"))
    model = make_model(bb, method, position=position)
    with torch.no_grad():
        same(torch.cat([model(one(batch, i)) for i in range(6)]), model(batch))
    assert len(list(model.sources.parameters())) == (2 if method == "smop" else 3)


@pytest.mark.parametrize("position", range(5))
def test_without_an_update_dept_is_prompt_tuning_at_every_position(bbs, position):
    bb = bbs("bert")
    batch = batch_of(bb, small_task("entailment"))
    source = dept(B=0.0)
    with torch.no_grad():
        updated = run_layers(bb, batch, dept_plan(bb, source, position))
        expected = run_layers(bb, batch, prompt_plan(bb, source, position))
    assert torch.equal(updated.attention_mask, expected.attention_mask)
    same(updated.h, expected.h)


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("method", ["smop", "dept"])
def test_gradients_reach_the_source_and_nothing_else(bbs, method, family):
    bb = bbs(family)
    model = make_model(bb, method).train()
    model.loss(batch_of(bb)).backward()
    assert not [
        n for n, p in model.trained_parameters().items() if p.grad is None or not p.grad.any()
    ] and all(p.grad is None for p in bb.model.parameters())
    model.eval()


# --- SMoP


def route_by_hand(source, words, top=1):
    """One text, numbers only.

    The mean word, a score for each prompt, softmax, the best prompts times their probabilities.
    """
    mean = [sum(w[i] for w in words) / len(words) for i in range(32)]
    s = [
        math.exp(sum(a * b for a, b in zip(row, mean)))
        for row in source.router.weight.double().tolist()
    ]
    prob = [x / sum(s) for x in s]
    best = sorted(range(len(s)), key=lambda i: -prob[i])[:top]
    p = source.p.double().tolist()
    return torch.tensor(
        [[sum(prob[i] * p[i][j][l] for i in best) for l in range(32)] for j in range(T)]
    ), prob


@pytest.mark.parametrize(
    "kw",
    [dict(), dict(n_prompts=3, top_k=2), dict(n_prompts=2, top_k=2), dict(n_prompts=1)],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILY)
def test_router_is_the_definition(bbs, family, kw):
    bb = bbs(family)
    batch = batch_of(bb)
    source = smop(**kw)
    ctx = ctx_of(bb, batch)
    taken = set()
    with torch.no_grad():
        got = source(ctx)
        prob = source.routing_probabilities(ctx)
        for i in range(6):
            p, want = route_by_hand(
                source,
                bb.word_embeddings(one(batch, i)["input_ids"])[0].double().tolist(),
                kw.get("top_k", 1),
            )
            taken.add(max(range(len(want)), key=want.__getitem__))
            same(got[i], p.float())
            same(prob[i], torch.tensor(want))
    assert len(taken) > 1 or kw.get("n_prompts") == 1


@pytest.mark.parametrize("n", [1, T, 5])
def test_no_batch_size_is_special(bbs, n):
    """The released code transposes the prompt where the batch is as large as the prompt is long.

    Drops a dimension for one text.
    """
    bb = bbs("roberta")
    batch = batch_of(bb, n=6)
    source = smop()
    want = source(ctx_of(bb, batch))[:n]
    same(source(ctx_of(bb, {k: v[:n] for k, v in batch.items()})), want)


def test_noise_in_training_only(bbs, monkeypatch):
    bb = bbs("roberta")
    ctx = ctx_of(bb, batch_of(bb))
    source = smop()
    quiet = source.routing_probabilities(ctx)
    assert torch.equal(quiet, source.routing_probabilities(ctx))
    source.train()
    assert (
        source.routing_probabilities(ctx) - source.routing_probabilities(ctx)
    ).abs().max() > 1e-2
    still = smop(noise=0.0).train()
    same(still.routing_probabilities(ctx), quiet)
    assert (
        smop(noise=0.0, dropout=0.5).train().routing_probabilities(ctx) - quiet
    ).abs().max() > 1e-2
    eps = torch.randn(6, 4)
    monkeypatch.setattr(torch, "randn_like", lambda s: eps.clone())
    s = source.pool(bb.word_embeddings(ctx.input_ids), ctx.attention_mask) @ source.router.weight.T
    same(source.routing_probabilities(ctx), (s * (1 + eps)).softmax(-1), 1e-4)


def test_the_scale_of_the_noise_is_no_path_for_gradients(bbs, monkeypatch):
    """D s(1+eps) / d s is 1 where the scale is detached, as in the code."""
    bb = bbs("roberta")
    ctx = ctx_of(bb, batch_of(bb))
    source = smop().train()
    eps = torch.randn(6, 4)
    monkeypatch.setattr(torch, "randn_like", lambda s: eps.clone())
    x = source.pool(bb.word_embeddings(ctx.input_ids), ctx.attention_mask)
    s = (x @ source.router.weight.T).detach().requires_grad_()
    c = torch.randn(6, 4)
    (got,) = torch.autograd.grad(
        (source.routing_probabilities(ctx) * c).sum(), source.router.weight
    )
    noisy = (s.detach() * (1 + eps)).requires_grad_()
    (g,) = torch.autograd.grad((noisy.softmax(-1) * c).sum(), noisy)
    same(got, g.T @ x)


def test_only_what_is_taken_learns_and_the_router_by_the_probability(bbs):
    bb = bbs("bert")
    ctx = ctx_of(bb, batch_of(bb))
    source = smop(n_prompts=6)
    taken = source.routing_probabilities(ctx).argmax(1)
    source(ctx).square().mean().backward()
    assert (
        [bool(g.any()) for g in source.p.grad] == [i in taken for i in range(6)]
        and 1 < len(taken.unique()) < 6
        and source.router.weight.grad.any()
    )


@pytest.mark.parametrize("top_k", [1, 2])
def test_load(bbs, top_k):
    bb = bbs("gpt2")
    ctx = ctx_of(bb, batch_of(bb))
    source = smop(top_k=top_k)
    i = source.routing_probabilities(ctx).topk(top_k).indices.flatten()
    same(source.routing_load(ctx), torch.bincount(i, minlength=4) / (6 * top_k))


def test_smops_start_and_size():
    source = RoutedPrompt(64, 5, 4, std=0.5)
    w = source.router.weight
    same(w @ w.T, torch.eye(4))
    assert 0.4 < source.p.std() < 0.6 and source.router.bias is None
    bb = load_backbone("roberta-base", weights="meta")
    assert count_parameters(
        PlannedModel(bb, ClassificationHead(768, 2), prompt_plan(bb, RoutedPrompt(768, 5, 4)))
    ) == dict(prompt=4 * 5 * 768 + 4 * 768, head=2 * 769, backbone=0)


# --- DePT


@pytest.mark.parametrize("family", FAMILY)
def test_dept_is_the_definition(bbs, family):
    """Row j of every text moves by (alpha/sqrt(r)) A[j]B; then the prompt.

    Then Hugging Face's own forward.
    """
    bb = bbs(family)
    batch = batch_of(bb)
    source = dept(alpha=3.0)
    ctx = run_layers(bb, batch, dept_plan(bb, source))
    first_row = 0 if family == "gpt2" else 1
    with torch.no_grad():
        for i in range(3):
            x = one(batch, i)
            E = bb.word_embeddings(x["input_ids"])[0].clone()
            for j in range(len(E)):
                E[j] += 3 / math.sqrt(6) * sum(source.A[j, q] * source.B[q] for q in range(6))
            E = torch.cat([E[:first_row], source.p, E[first_row:]])[None]
            want = bb.base(
                inputs_embeds=E, attention_mask=torch.ones_like(E[..., 0]).long()
            ).last_hidden_state
            same(ctx.h[i : i + 1, : E.shape[1]], want, 1e-4)


@pytest.mark.parametrize("family", FAMILY)
def test_dept_starts_as_prompt_tuning_and_does_not_stay_it(bbs, family):
    """The released code, asked for a classifier, leaves the update out."""
    bb = bbs(family)
    batch = batch_of(bb)
    head = ClassificationHead(bb.d, 2, bb.default_pooling)

    def out(source, plan):
        return PlannedModel(bb, head, plan(bb, source)).eval()(batch)

    same(out(dept(0.0), dept_plan), out(dept(0.0), prompt_plan))
    assert (out(dept(), dept_plan) - out(dept(), prompt_plan)).abs().max() > 1e-2
    torch.manual_seed(0)
    fresh = DecomposedPrompt(32, T, max_len=60, r=6)
    assert (
        not fresh.B.any()
        and fresh.A.abs().max() <= 6**-0.5
        and fresh.A.abs().max() > 0.9 * 6**-0.5
        and fresh.scale == 8 / 6**0.5
    )


def test_padding_to_the_table_as_the_authors_do(bbs):
    bb = bbs("bert")
    batch = batch_of(bb)
    plan = dept_plan(bb, dept())
    full = {k: F.pad(v, (0, 60 - v.shape[1])) if v.dim() == 2 else v for k, v in batch.items()}
    same(run_layers(bb, full, plan).mean_state(), run_layers(bb, batch, plan).mean_state())


def test_dept_sizes():
    """100·768 for T5-base, as the paper has it; and on backbones of ours."""
    assert sum(p.numel() for p in DecomposedPrompt(768, 40, 256, 45).parameters()) == 76_800
    bb = load_backbone("roberta-large", weights="meta")
    model = PlannedModel(
        bb, ClassificationHead(1024, 2), dept_plan(bb, DecomposedPrompt(1024, 10, 128, 45))
    )
    assert count_parameters(model) == dict(
        prompt=10 * 1024 + 45 * (128 + 1024), head=2050, backbone=0
    )


def dept_model(bb, lr_scale=0.02, n=2):
    return PlannedModel(bb, ClassificationHead(bb.d, n), dept_plan(bb, dept(lr_scale=lr_scale)))


@pytest.mark.parametrize("position", [0, 4])
def test_two_learning_rates(bbs, position):
    """Adam's first step is as long as its learning rate."""
    bb = bbs("bert")
    model = PlannedModel(
        bb, ClassificationHead(32, 2), dept_plan(bb, source := dept(lr_scale=0.02), position)
    )
    before = {n: p.detach().clone() for n, p in model.trained_parameters().items()}
    groups = model.parameter_groups(0.1)
    assert (
        sorted(g["lr"] for g in groups) == pytest.approx([0.002, 0.1])
        and sum(len(g["params"]) for g in groups) == 5
    )
    opt = torch.optim.AdamW(groups, weight_decay=0.0)
    model.loss(batch_of(bb)).backward()
    opt.step()
    for n, p in model.trained_parameters().items():
        assert (p - before[n]).abs().max().item() == pytest.approx(
            0.002 if n[-2:] in (".A", ".B") else 0.1, rel=1e-2
        ), n
    assert {n[-2:] for n in before} >= {".A", ".B", ".p"} and source.B.grad.any()


def test_fit_uses_both(monkeypatch):
    seen = []

    class Recorder(torch.optim.AdamW):
        def __init__(self, *args, **kw):
            super().__init__(*args, **kw)
            seen.extend((g["lr"], len(g["params"])) for g in self.param_groups)

    monkeypatch.setattr(torch.optim, "AdamW", Recorder)
    model = dept_model(backbone(), 0.5)
    fit(model, small_task(), config(method="dept", lr=1e-2, steps=2))
    assert sorted(seen) == [(5e-3, 2), (1e-2, 3)]


# --- refused


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: RoutedPrompt(32, n_prompts=0), ["n_prompts=0", "top_k must be between 1 and"]),
        (
            lambda: RoutedPrompt(32, n_prompts=2, top_k=3),
            ["top_k must be between 1 and n_prompts=2", "got 3"],
        ),
        (lambda: dept_plan(backbone(), dept(), None), ["among them", "from 0 to 4"]),
        (lambda: dept_plan(backbone(), dept(), 7), ["between 0 and 4", "got 7"]),
    ],
)
def test_what_cannot_be_built(make, words):
    refused(make, *words)


def test_texts_longer_than_the_table(bbs):
    bb = bbs("roberta")
    batch = batch_of(bb)
    n = batch["input_ids"].shape[1]
    run_layers(bb, batch, dept_plan(bb, dept(max_len=n)))
    with pytest.raises(
        ValueError, match=f"{n} tokens exceed the {n - 1} positions.*max_len={n - 1}"
    ):
        run_layers(bb, batch, dept_plan(bb, dept(max_len=n - 1)))


def test_depts_start():
    assert DecomposedPrompt(64, 100, std=0.1).p.std().item() == pytest.approx(0.1, rel=0.1)


def test_options_reach_the_sources():
    bb = backbone("roberta")
    options = dict(prompt_length=3, n_prompts=6, top_k=2, routing_noise=0.5)
    (step,) = SMoPConfig(**options).plan(bb, TrainingConfig()).values()
    assert step.source.p.shape == (6, 3, bb.d)
    assert (step.source.top_k, step.source.noise) == (2, 0.5)
    options = dict(prompt_length=3, update_rank=4, update_scale=2.0, update_lr_scale=0.5)
    (step,) = DePTConfig(**options).plan(bb, TrainingConfig()).values()
    assert step.source.B.shape == (4, bb.d)
    assert (step.source.scale, step.source.lr_scale["A"]) == (1.0, 0.5)
    with pytest.raises(ValueError, match="top_k must be between 1 and n_prompts=4"):
        SMoPConfig(top_k=5).plan(bb, TrainingConfig())

"""M(x), the sentence vector of a second pass: its gradient, its dropout and its standardisation."""

import pytest
import torch
from small import FAMILY, backbone, batch_of, count_passes, one, same
from small_layers import MODELS, B, make_batch, t
from small_layers import backbone as layer_backbone
from torch import nn

from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.single_position import compute_sentence_vector
from idp_tutorial.core.steps import Add, Insert, Replace
from idp_tutorial.methods import sentence_vectors
from idp_tutorial.methods.sentence_vectors import (
    RunningStandardiser,
    SentenceVector,
    mean_sentence_vector,
    noisy_sentence_vector,
    sentence_vector,
)

d = 32


@pytest.mark.parametrize("family", MODELS)
def test_sentence_is_the_models_own_in_eval_mode_once(family, monkeypatch):
    bb = layer_backbone(family)
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
        sentence_vectors,
        "compute_sentence_vector",
        lambda *a: passes.append(1) or compute_sentence_vector(*a),
    )
    bb.model.train()
    p = nn.Parameter(torch.ones(()))

    def source(ctx):
        return p * sentence_vector(ctx)[:, None].expand(-1, t, -1)

    ctx = run_layers(bb, batch, {0: Insert(source), 1: Add(source), 2: Replace(source)})
    same(ctx.memo[sentence_vector], want, 2e-6, 0)
    assert len(passes) == 1 and not ctx.memo[sentence_vector].requires_grad
    assert all(m.training for m in bb.model.modules())  # every layer keeps its mode
    assert "sentence" not in batch  # a pass leaves the caller's batch as it was
    run_layers(bb, batch, {0: Insert(source)})
    assert len(passes) == 2  # so another pass computes it again
    cached = dict(batch, sentence=torch.zeros(B, d))
    assert sentence_vector(run_layers(bb, cached)) is cached["sentence"] and len(passes) == 2


@pytest.mark.parametrize(
    "encoder", ["sentence_vector", "mean_sentence_vector", "noisy_sentence_vector"]
)
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_the_gradient_of_m_of_x_reaches_a_backbone_that_is_trained_and_no_other(family, encoder):
    bb = layer_backbone(family)
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


def test_dropout_on_the_sentence_vector_is_sampled_once_per_pass():
    bb = backbone()
    batch = batch_of(bb)
    read = SentenceVector(dropout=0.5).train()
    a, b = [run_layers(bb, batch, stop=0) for _ in range(2)]
    assert torch.equal(read(a), read(a)) and not torch.equal(read(a), read(b))
    zero = read(a) == 0
    assert 0.3 < zero.float().mean() < 0.7
    same(read(a)[~zero], 2 * sentence_vector(a)[~zero])
    assert torch.equal(read.eval()(run_layers(bb, batch, stop=0)), sentence_vector(a))


@pytest.mark.parametrize("family", FAMILY)
def test_mean_and_noisy_sentence_vectors(family):
    bb = backbone(family)
    batch = batch_of(bb)
    bb.model.train()

    def ctx():
        return run_layers(bb, batch, stop=0)

    a, b = [noisy_sentence_vector(ctx()) for _ in range(2)]
    assert (a - b).abs().max() > 1e-3 and not a.requires_grad
    m = mean_sentence_vector(ctx())
    assert all(x.training for x in bb.model.modules()) and not m.requires_grad
    again = ctx()
    assert (
        torch.equal(mean_sentence_vector(again), m)
        and count_passes(bb, lambda: mean_sentence_vector(again)) == 0
    )
    bb.model.eval()
    same(noisy_sentence_vector(ctx()), sentence_vector(ctx()))
    for i in (0, 1, 4):
        x = one(batch, i)
        same(
            m[i],
            bb.base(input_ids=x["input_ids"], attention_mask=x["attention_mask"])
            .last_hidden_state[0]
            .mean(0),
        )


def test_standardiser_updates_its_statistics_in_training_mode_only():
    s = RunningStandardiser(d)
    z = 2 + 0.2 * torch.randn(400, d) * torch.linspace(1, 5, d)
    assert not list(s.parameters())  # nothing to train, nothing to count
    same(s.eval()(z), z)  # no statistics yet: unchanged
    s.train()
    [s(part) for part in z.split(80)]
    s.eval()
    want = (z - z.mean(0)) / z.std(0, unbiased=False)
    same(s(z), want, 1e-3)
    same(s(z[:1]), want[:1], 1e-3)  # a single example
    s(z + 100)
    same(s(z), want, 1e-3)  # evaluation mode does not change the statistics
    other = RunningStandardiser(d).eval()
    other.load_state_dict(s.state_dict())
    same(other(z), want, 1e-3)  # and is saved with the prompt


def test_standardiser_is_finite_for_a_constant_dimension():
    s = RunningStandardiser(2)
    z = torch.stack([torch.randn(50), torch.full((50,), 3.0)], 1)
    assert s(z).isfinite().all() and s.eval()(z)[:, 1].abs().max() < 1e-2


def test_statistics_are_computed_before_dropout():
    bb = backbone("roberta")
    ctx = run_layers(bb, batch_of(bb), stop=0)
    read = SentenceVector(dropout=0.5, standardise_width=d).train()
    z = read(ctx)
    same(read.scale.total, sentence_vector(ctx).sum(0))
    assert 0.3 < (z == 0).float().mean() < 0.7


@pytest.mark.parametrize("mean", [0.0, 100.0, 3000.0, 1e5])
def test_standardised_values_stay_small_with_a_large_mean(mean):
    """Float32 cannot represent a standard deviation of 1 with a mean of 3000."""
    g = torch.Generator().manual_seed(0)
    s = RunningStandardiser(8)
    batches = [mean + torch.randn(32, 8, generator=g) for _ in range(20)]
    for z in batches:
        s(z)
    out = torch.cat([s.eval()(z) for z in batches])
    assert out.abs().max() < 20 and (mean > 100 or abs(out.std() - 1) < 0.1)

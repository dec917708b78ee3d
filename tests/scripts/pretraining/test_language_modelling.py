"""The losses of language modelling."""

import numpy as np
import pytest
import torch

from results.pretraining.corpus import draw_windows, gather_windows
from results.pretraining.language_modelling import (
    create_language_model,
    evaluate_held_out,
    lm_loss,
    mask_tokens,
    sample_next_tokens,
)


def test_masks_follow_the_80_10_10_rule():
    V = 700
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, V, (400, 500)))
    original_ids = ids.clone()
    masked, positions, targets = mask_tokens(ids, 4, V, rng)
    assert torch.equal(ids, original_ids) and torch.equal(targets, ids.flatten()[positions])
    assert targets.min() >= 5  # special tokens are never predicted
    x = masked.flatten()[positions]
    changed = (masked != ids).flatten()
    changed[positions] = False
    assert not changed.any()
    n = (ids >= 5).sum().item()
    assert len(positions) / n == pytest.approx(0.15, abs=0.005)
    masked_fraction = (x == 4).float().mean().item()
    unchanged_fraction = (x == targets).float().mean().item()
    assert (
        masked_fraction == pytest.approx(0.8, abs=0.01)
        and unchanged_fraction == pytest.approx(0.1, abs=0.01)
        and x[x != 4].min() >= 5
    )
    assert len(mask_tokens(ids[:2], 4, V, rng, p=0.0)[1]) == 0


def test_next_tokens_are_of_the_same_window():
    ids = torch.arange(60).view(3, 20)
    inputs, positions, targets = sample_next_tokens(ids, np.random.default_rng(0), p=0.5)
    assert (
        torch.equal(inputs, ids)
        and torch.equal(targets, positions + 1)
        and (positions % 20 != 19).all()
        and 15 < len(positions) < 45
    )


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_the_loss_equals_that_of_transformers(family, stream, tok):
    torch.manual_seed(0)
    model = create_language_model(len(tok), 32, 2, family=family).eval()
    rng = np.random.default_rng(0)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)
    ids = gather_windows(stream, draw_windows(len(stream), 1024, rng))
    inputs, positions, targets = (
        mask_tokens(ids, 4, len(tok), rng)
        if family == "roberta"
        else sample_next_tokens(ids, rng, 1.0)
    )
    labels = torch.full_like(ids.flatten(), -100)
    labels[positions] = targets
    outputs = model(input_ids=inputs, labels=labels.view_as(ids) if family == "roberta" else ids)
    loss, acc = lm_loss(model, model.base_model(inputs).last_hidden_state, positions, targets)
    torch.testing.assert_close(loss, outputs.loss)
    predictions = outputs.logits.flatten(0, 1)[positions].argmax(-1)
    assert acc == (predictions == targets).float().mean()


def test_held_out_evaluations_are_repeatable_and_change_nothing(stream, tok):
    model = create_language_model(len(tok), 32, 1).train()
    before = evaluate_held_out(model, stream, tok, 2000, max_batches=2)
    state = torch.get_rng_state()
    assert evaluate_held_out(model, stream, tok, 2000, max_batches=2) == before and model.training
    assert torch.equal(state, torch.get_rng_state())
    # the model is not trained yet
    assert before["lm"] == pytest.approx(np.log(len(tok)), abs=0.1) and before.keys() == {
        "lm",
        "top1",
    }


def test_a_batch_has_at_least_one_prediction():
    ids = torch.full((1, 4), 300)
    for _, positions, targets in (
        mask_tokens(ids, 4, 400, np.random.default_rng(0), 1e-9),
        sample_next_tokens(ids, np.random.default_rng(0), 1e-9),
    ):
        assert len(positions) == 1 and targets.tolist() == [300]
    drawn = {int(sample_next_tokens(ids, np.random.default_rng(i), 1e-9)[1]) for i in range(40)}
    assert drawn == {0, 1, 2}  # all positions but the last

"""Tests of the keys and values of one layer."""

from types import SimpleNamespace

import torch

from idp_tutorial.methods.key_value_prompt import KeyValuePrompt


def test_every_example_gets_the_keys_and_then_the_values():
    initial = torch.arange(16.0).view(2, 8)
    prompt = KeyValuePrompt(2, 4, initial=initial).eval()
    p = prompt(SimpleNamespace(h=torch.zeros(3, 5, 4)))
    assert p.shape == (3, 2, 8) and torch.equal(p[1].detach(), initial)


def test_dropout_acts_in_training_mode_only():
    context = SimpleNamespace(h=torch.zeros(1, 5, 50))
    prompt = KeyValuePrompt(20, 50, dropout=0.5)
    torch.manual_seed(0)
    assert 0.4 < (prompt(context) == 0).float().mean() < 0.6
    assert (prompt.eval()(context) != 0).all()

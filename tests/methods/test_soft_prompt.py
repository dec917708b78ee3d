"""Tests of the static prompt."""

from types import SimpleNamespace

import pytest
import torch

from idp_tutorial.methods.soft_prompt import SoftPrompt


def context(n):
    return SimpleNamespace(h=torch.zeros(n, 3, 4))


def test_every_example_gets_the_same_trainable_vectors():
    prompt = SoftPrompt(2, 4)
    p = prompt(context(3))
    assert p.shape == (3, 2, 4) and (p == p[0]).all()
    p.sum().backward()
    assert torch.equal(prompt.p.grad, torch.full((2, 4), 3.0))


def test_initial_values_are_taken_as_they_are():
    initial = torch.arange(8.0).view(2, 4)
    assert torch.equal(SoftPrompt(2, 4, initial=initial).p, initial)


@pytest.mark.parametrize("std", [0.02, 1.0])
def test_random_values_have_the_standard_deviation_that_was_asked_for(std):
    torch.manual_seed(0)
    assert SoftPrompt(100, 100, std).p.std().item() == pytest.approx(std, rel=0.05)

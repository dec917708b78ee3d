"""The generator of chapter 06: its formula, its output biases, and its place in the library."""

import torch
import torch.nn.functional as F
from torch import nn

from idp_tutorial.methods.bottleneck_generator import BottleneckGenerator
from idp_tutorial.methods.idpg import PromptGenerator
from idp_tutorial.methods.phm import PHMLinear

d, t, m = 32, 3, 8


def test_it_matches_its_formula_with_each_output_bias():
    b2 = torch.randn(2, t * d)
    generator = BottleneckGenerator(nn.Linear(d, m), nn.Linear(m, t * d, bias=False), b2, t).eval()
    z = torch.randn(5, d)
    hidden = F.gelu(z @ generator.down.weight.T + generator.down.bias)
    for layer in range(2):
        expected = (hidden @ generator.up.weight.T + b2[layer]).view(5, t, d)
        torch.testing.assert_close(generator(z, layer), expected)


def test_dropout_acts_in_training_only():
    layers = nn.Linear(d, m), nn.Linear(m, t * d, bias=False)
    generator = BottleneckGenerator(*layers, torch.zeros(1, t * d), t, dropout=0.5)
    z = torch.randn(5, d)
    assert not torch.equal(generator(z), generator(z))
    generator.eval()
    assert torch.equal(generator(z), generator(z))


def test_one_output_bias_serves_every_layer():
    layers = nn.Linear(d, m), nn.Linear(m, t * d, bias=False)
    generator = BottleneckGenerator(*layers, torch.randn(1, t * d), t).eval()
    z = torch.randn(5, d)
    assert torch.equal(generator(z, 0), generator(z, 7))


def test_the_generator_of_the_library_has_its_parameters_and_random_numbers():
    torch.manual_seed(0)
    layers = PHMLinear(d, m, 4), PHMLinear(m, t * d, 4, bias=False)
    taught = BottleneckGenerator(*layers, 0.02 * torch.randn(1, t * d), t).eval()
    torch.manual_seed(0)
    library = PromptGenerator(d, d, t, m, n=4).eval()
    assert [*taught.state_dict()] == [*library.state_dict()]
    z = torch.randn(5, d)
    assert torch.equal(taught(z), library(z))

"""The PHM layer of chapter 05: its definition, a shared rule, and its equality with `PHMLinear`."""

import pytest
import torch

from idp_tutorial.methods.phm import PHMLinear
from idp_tutorial.methods.phm_layer import PHMLayer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("d_in,d_out,n", [(8, 12, 4), (12, 8, 4), (6, 9, 3), (5, 7, 1)])
def test_it_multiplies_by_a_sum_of_kronecker_products(d_in, d_out, n, bias):
    layer = PHMLayer(d_in, d_out, n, bias=bias).double()
    x = torch.randn(2, 5, d_in).double()
    W = sum(torch.kron(a, b) for a, b in zip(layer.A, layer.B))
    torch.testing.assert_close(layer.weight, W)
    torch.testing.assert_close(layer(x), x @ W + (layer.bias if bias else 0))


def test_a_rule_can_be_shared():
    down = PHMLayer(8, 4, 4)
    up = PHMLayer(4, 12, 4, A=down.A)
    assert up.A is down.A
    up(down(torch.randn(3, 8)).detach()).square().sum().backward()
    assert down.A.grad.any() and down.B.grad is None


@pytest.mark.parametrize("bias", [True, False])
def test_the_linear_layer_of_the_library_has_its_parameters_and_random_numbers(bias):
    layers = []
    for layer_class in (PHMLayer, PHMLinear):
        torch.manual_seed(0)
        layers.append(layer_class(24, 36, 4, bias=bias))
    taught, library = (layer.state_dict() for layer in layers)
    assert [*taught] == [*library] == ["A", "B", *["bias"] * bias]
    assert all(torch.equal(taught[name], library[name]) for name in taught)
    x = torch.randn(5, 24)
    torch.testing.assert_close(layers[0](x), layers[1](x))

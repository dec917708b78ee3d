"""PHM layers: the definition, both paths, gradients, sharing, rank, counts and refusals."""

import copy

import pytest
import torch
from torch import nn

from idp_tutorial.methods.adapters import LowRankPHMLinear
from idp_tutorial.methods.phm import PHMLinear, count_phm_parameters

SHAPES = [(8, 12, 4), (12, 8, 4), (8, 8, 8), (6, 9, 3), (5, 7, 1), (4, 4, 4)]


def factors(l):
    return l.s @ l.t if isinstance(l, LowRankPHMLinear) else l.B


def slow_weight(l):
    """W entry by entry: row (i,k), column (j,m) of Σ_q A_q ⊗ B_q."""
    B = factors(l)
    n, p, r = B.shape
    W = torch.zeros(n * p, n * r, dtype=B.dtype)
    for q in range(n):
        for i in range(n):
            for j in range(n):
                for k in range(p):
                    for m in range(r):
                        W[i * p + k, j * r + m] += (l.A[q, i, j] * B[q, k, m]).item()
    return W


def run(l, x, path):
    """Output and the gradient of every parameter and of the input."""
    l.algorithm = path
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = l(x)
    return [
        y,
        *torch.autograd.grad(
            (y * torch.randn_like(y)).sum() + y.square().sum(), [x, *l.parameters()]
        ),
    ]


classes = pytest.mark.parametrize("layer_class", [PHMLinear, LowRankPHMLinear])


@pytest.mark.parametrize("bias", [True, False])
@classes
@pytest.mark.parametrize("d_in,d_out,n", SHAPES)
def test_both_paths_are_the_definition(d_in, d_out, n, layer_class, bias):
    l = layer_class(d_in, d_out, n, bias=bias).double()
    x = torch.randn(2, 5, d_in).double()
    W = slow_weight(l)
    torch.testing.assert_close(l.weight, W)
    torch.testing.assert_close(l.weight, sum(torch.kron(a, b) for a, b in zip(l.A, factors(l))))
    factored, built, auto = [run(l, x, p) for p in ("factored", "materialised", "auto")]
    torch.testing.assert_close(factored[0], x @ W + (l.bias if bias else 0))
    for a, b, c in zip(factored, built, auto):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(c, b)
        assert a.abs().max() > 1e-8
    assert len(factored) == 2 + (2 if layer_class is PHMLinear else 3) + bias


@pytest.mark.parametrize("path", ["factored", "materialised"])
@classes
def test_gradients_are_right(path, layer_class):
    l = layer_class(4, 6, 2, algorithm=path).double()
    x = torch.randn(3, 4).double().requires_grad_()
    params = list(l.parameters())
    assert torch.autograd.gradcheck(
        lambda x, *ps: torch.func.functional_call(
            l, dict(zip([n for n, _ in l.named_parameters()], ps)), (x,)
        ),
        (x, *params),
    )


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 3, 8), (1, 8)])
@pytest.mark.parametrize("path", ["factored", "materialised", "auto"])
def test_any_leading_shape(shape, path):
    l = PHMLinear(8, 12, 4, algorithm=path)
    x = torch.randn(shape)
    assert l(x).shape == (*shape[:-1], 12)
    torch.testing.assert_close(l(x), x @ l.weight + l.bias)
    wide = torch.randn(3, 7, 8)
    torch.testing.assert_close(l(wide[:, 2]), l(wide[:, 2].contiguous()))  # rows of a longer tensor
    t = torch.randn(8, 5)
    torch.testing.assert_close(l(t.T), l(t.T.contiguous()))


def test_the_cheaper_path_is_taken(monkeypatch):
    l = PHMLinear(16, 64, 4)
    taken = []
    for name in ("_factored", "weight"):
        assert hasattr(PHMLinear, name)
    original = PHMLinear._factored
    monkeypatch.setattr(
        PHMLinear, "_factored", lambda self, x: taken.append(len(x)) or original(self, x)
    )
    for rows in (1, 15, 16, 17, 100):
        l(torch.randn(rows, 16))
    assert taken == [1, 15, 16]  # break-even at 64/4 rows; there either will do
    l(torch.randn(4, 4, 16))
    assert taken == [1, 15, 16, 16]  # rows, not batches
    l(torch.randn(5, 4, 16))
    assert taken == [1, 15, 16, 16]


def multiplications(l, rows):
    """Counted by torch in the matrix products of one pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as f, torch.no_grad():
        l(torch.randn(rows, l.d_in))
    return f.get_total_flops() // 2


@classes
@pytest.mark.parametrize("d_in,d_out,n", [(64, 128, 8), (128, 64, 8), (96, 96, 4), (32, 320, 2)])
@pytest.mark.parametrize("rows", [1, 7])
def test_costs_are_what_is_multiplied(d_in, d_out, n, layer_class, rows):
    for path, cost in layer_class(d_in, d_out, n).count_multiplications(rows).items():
        assert multiplications(layer_class(d_in, d_out, n, algorithm=path), rows) == cost, path


def test_a_rule_is_shared():
    down = PHMLinear(8, 4, 4)
    up = PHMLinear(4, 12, 4, A=down.A)
    both = nn.ModuleList([down, up])
    assert up.A is down.A and sum(p.numel() for p in both.parameters()) == count_phm_parameters(
        8, 4, 4
    ) + count_phm_parameters(4, 12, 4, shared_A=True)
    up(down(torch.randn(3, 8))).square().sum().backward()
    together = down.A.grad.clone()
    both.zero_grad()
    up(down(torch.randn(3, 8)).detach()).square().sum().backward()
    assert not torch.allclose(together, down.A.grad)
    other = copy.deepcopy(both)
    assert other[0].A is other[1].A and other[0].A is not down.A
    before = down.A.detach().clone()
    PHMLinear(4, 4, 4, A=down.A)
    assert torch.equal(before, down.A)  # not started again


@pytest.mark.parametrize("bias", [True, False])
def test_counts(bias):
    n_parameters = sum(p.numel() for p in PHMLinear(24, 36, 4, bias=bias).parameters())
    assert n_parameters == count_phm_parameters(24, 36, 4, bias=bias) == 64 + 216 + 36 * bias
    low = LowRankPHMLinear(24, 36, 4, bias=bias)
    assert sum(p.numel() for p in low.parameters()) == 64 + 60 + 36 * bias


def generator_count(d, m, n, shared=False, second_bias=True):
    return count_phm_parameters(d, m, n) + count_phm_parameters(
        m, 5120, n, shared_A=shared, bias=second_bias
    )


@pytest.mark.parametrize(
    "got,published",
    [
        (generator_count(1024, 256, 16, True), 107_776),
        (generator_count(1024, 256, 16), 111_872),
        (generator_count(1024, 16, 16, second_bias=False) + 24 * 5120, 137_232),
        (generator_count(300, 16, 4, second_bias=False) + 24 * 5120, 144_704),
    ],
)
def test_published_sizes(got, published):
    assert got == published


def test_idpgs_start():
    l = PHMLinear(512, 512, 16)
    for p in (l.A, l.B, l.bias):
        assert abs(p.std() - 0.05) < 0.005 and abs(p.mean()) < 0.005
    assert abs(l.weight.std() - 0.01) < 0.001
    low = LowRankPHMLinear(512, 512, 4)
    assert all(abs(p.std() - 0.05) < 0.005 for p in (low.s, low.t))


def test_saved_and_loaded():
    a = LowRankPHMLinear(8, 12, 4)
    b = LowRankPHMLinear(8, 12, 4)
    x = torch.randn(3, 8)
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x)) and set(a.state_dict()) == {"A", "s", "t", "bias"}


@pytest.mark.parametrize("n", [5, 8, 0])
def test_what_is_refused(n):
    with pytest.raises(ValueError, match=f"n must divide both widths, got n={n} for d_in=24"):
        PHMLinear(24, 36, n)

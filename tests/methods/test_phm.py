"""PHM layers: the definition, both paths, gradients, sharing, rank, counts and refusals."""

import copy

import pytest
import torch
from small import refused
from torch import nn

from idp_tutorial.methods.phm import PHMLinear, count_phm_multiplications, count_phm_parameters

SHAPES = [(8, 12, 4), (12, 8, 4), (8, 8, 8), (6, 9, 3), (5, 7, 1), (4, 4, 4)]


def slow_weight(l):
    """W entry by entry: row (i,k), column (j,m) of Σ_q A_q ⊗ B_q."""
    B = l.B if l.rank is None else torch.stack([s @ t for s, t in zip(l.s, l.t)])
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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [None, 1, 3])
@pytest.mark.parametrize("d_in,d_out,n", SHAPES)
def test_both_paths_are_the_definition(d_in, d_out, n, rank, bias):
    l = PHMLinear(d_in, d_out, n, rank=rank, bias=bias).double()
    x = torch.randn(2, 5, d_in).double()
    W = slow_weight(l)
    torch.testing.assert_close(l.weight, W)
    torch.testing.assert_close(
        l.weight, sum(torch.kron(a, b) for a, b in zip(l.A, l.B if rank is None else l.s @ l.t))
    )
    factored, built, auto = [run(l, x, p) for p in ("factored", "materialised", "auto")]
    torch.testing.assert_close(factored[0], x @ W + (l.bias if bias else 0))
    for a, b, c in zip(factored, built, auto):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(c, b)
        assert a.abs().max() > 1e-8
    assert len(factored) == 2 + (2 if rank is None else 3) + bias


@pytest.mark.parametrize("path", ["factored", "materialised"])
@pytest.mark.parametrize("rank", [None, 2])
def test_gradients_are_right(path, rank):
    l = PHMLinear(4, 6, 2, rank=rank, algorithm=path).double()
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


@pytest.mark.parametrize("rank", [None, 1, 2])
@pytest.mark.parametrize("d_in,d_out,n", [(64, 128, 8), (128, 64, 8), (96, 96, 4), (32, 320, 2)])
@pytest.mark.parametrize("rows", [1, 7])
def test_costs_are_what_is_multiplied(d_in, d_out, n, rank, rows):
    for path, cost in count_phm_multiplications(d_in, d_out, n, rows, rank).items():
        assert (
            multiplications(PHMLinear(d_in, d_out, n, rank=rank, algorithm=path), rows) == cost
        ), path


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
    PHMLinear(4, 4, 4, A=down.A, init="compacter")
    assert torch.equal(before, down.A)  # not started again


@pytest.mark.parametrize("rank", [None, 1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_counts(rank, bias):
    l = PHMLinear(24, 36, 4, rank=rank, bias=bias)
    assert (
        sum(p.numel() for p in l.parameters())
        == count_phm_parameters(24, 36, 4, rank, bias=bias)
        == {None: 64 + 216, 1: 64 + 60, 2: 64 + 120}[rank] + 36 * bias
    )


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
        (
            48
            * (
                count_phm_parameters(1024, 16, 4, rank=1)
                + count_phm_parameters(16, 1024, 4, rank=1, shared_A=True)
            ),
            152_832,
        ),
    ],
)
def test_published_sizes(got, published):
    assert got == published


def test_idpgs_start():
    l = PHMLinear(512, 512, 16)
    for p in (l.A, l.B, l.bias):
        assert abs(p.std() - 0.05) < 0.005 and abs(p.mean()) < 0.005
    assert abs(l.weight.std() - 0.01) < 0.001
    low = PHMLinear(512, 512, 4, rank=8)
    assert all(abs(p.std() - 0.05) < 0.005 for p in (low.s, low.t))
    low = PHMLinear(512, 512, 4, rank=1, std=0.05**0.5)
    assert (
        all(abs(p.std() - 0.2236) < 0.02 for p in (low.s, low.t))
        and abs((low.s @ low.t).std() - 0.05) < 0.005
        and abs(low.A.std() - 0.05) < 0.02
    )


def test_compacters_start():
    l = PHMLinear(512, 256, 4, rank=1, init="compacter")
    assert 0.7e-4 < l.A.std() < 1.3e-4 and not l.bias.any()
    for p, fan in (
        (l.s, 129),
        (l.t, 65),
    ):  # Glorot-uniform, gain √2: ±√2·√(6/(fan_in+fan_out)) for each factor
        assert (
            0.97 * (12 / fan) ** 0.5 < p.abs().max() <= (12 / fan) ** 0.5
            and abs(p.std() - (4 / fan) ** 0.5) < 0.1 * (4 / fan) ** 0.5
        )
    full = PHMLinear(64, 32, 4, init="compacter")
    assert 0.95 < full.B.abs().max() / (12 / 24) ** 0.5 <= 1


def test_saved_and_loaded():
    a = PHMLinear(8, 12, 4, rank=1)
    b = PHMLinear(8, 12, 4, rank=1)
    x = torch.randn(3, 8)
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x)) and set(a.state_dict()) == {"A", "s", "t", "bias"}


@pytest.mark.parametrize(
    "kw,words",
    [
        (
            dict(n=5),
            ["n must divide both", "n=5 for d_in=24 and d_out=36", "are 1, 2, 3, 4, 6, 12."],
        ),
        (dict(n=8), ["n=8", "are 1, 2, 3, 4, 6, 12."]),
        (dict(n=0), ["n=0", "1, 2"]),
        (dict(n=4, rank=0), ["rank must be at least 1, got 0"]),
        (dict(n=4, algorithm="fast"), ["algorithm must be ", "got 'fast'", "'materialised'"]),
        (dict(n=4, init="normal"), ["init must be ", "got 'normal'", "'compacter'"]),
        (
            dict(n=4, A=nn.Parameter(torch.zeros(2, 2, 2))),
            ["got (2, 2, 2)", "shape (4, 4, 4) for n=4", "the same n"],
        ),
    ],
)
def test_what_is_refused(kw, words):
    refused(lambda: PHMLinear(24, 36, **kw), *words)


def test_wrong_width():
    with pytest.raises(ValueError, match=r"input.*d_in=8, got \(2, 6\)"):
        PHMLinear(8, 12, 4)(torch.zeros(2, 6))

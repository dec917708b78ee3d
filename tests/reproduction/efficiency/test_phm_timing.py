"""Times and memory of the implementations of PHM layers. No test depends on a measured time."""

import torch

from idp_tutorial.methods.phm import PHMLinear
from idp_tutorial.reproduction.efficiency import phm_timing
from idp_tutorial.reproduction.efficiency.phm_timing import PHM_IMPLEMENTATIONS, measure_phm


def test_all_implementations_are_the_same_function():
    layer = PHMLinear(8, 12, 4).double()
    x = torch.randn(3, 8).double()
    expected = x @ layer.weight + layer.bias  # test_phm.py checks it entry by entry
    for way in ("auto", "factored", "materialised", "idpg", "compacter"):
        torch.testing.assert_close(PHM_IMPLEMENTATIONS[way](layer, x), expected)


def test_memory_is_the_peak_of_live_tensors():
    w = torch.ones(100, 50, requires_grad=True)

    def call():
        a = w.T[:3] * 2
        b = a.t()  # views are free, and what was there before
        del a, b
        w[:1] * 2

    assert 1e6 * phm_timing._peak_mb(call) < 1.1 * 3 * 100 * 4
    assert 1e6 * phm_timing._peak_mb(lambda: (w.exp() + 1).sum().backward()) >= 2 * w.nbytes


def test_each_implementation_is_measured():
    records = measure_phm(
        d=256, t=2, bottlenecks=(32,), kronecker_terms=(4, 3), batch_sizes=(1, 4), min_seconds=0.001
    )
    assert [(r["n"], r["batch"], r["way"]) for r in records] == [
        (4, R, w) for R in (1, 4) for w in PHM_IMPLEMENTATIONS
    ]  # 3 does not divide
    assert all(r["forward_ms"] > 0 for r in records)
    mb = {r["way"]: r["peak_mb"] for r in records if r["batch"] == 1}
    # IDPG's code stores n matrices (both layers), the materialised path one, the factored path none
    W = (256 * 32 + 32 * 512) * 4 / 1e6
    assert mb["factored"] < W < mb["materialised"] < 3 * W and mb["idpg"] > 4 * W
    assert mb["compacter"] > 4 * 32 * 512 * 4 / 1e6

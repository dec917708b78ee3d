"""Times and memory of the implementations of PHM layers."""

import json

import torch

from idp_tutorial.methods.phm import PHMLinear
from idp_tutorial.reproduction.efficiency.component_times import (
    PHM_IMPLEMENTATIONS,
    _LiveTensorMemory,
    measure_phm,
)


def test_all_implementations_are_the_same_function():
    layer = PHMLinear(8, 12, 4).double()
    x = torch.randn(3, 8).double()
    expected = x @ layer.weight + layer.bias  # test_phm.py checks it entry by entry
    for way in ("auto", "factored", "materialised", "idpg", "compacter"):
        torch.testing.assert_close(PHM_IMPLEMENTATIONS[way](layer, x), expected)


def test_memory_is_that_of_live_tensors():
    w = torch.ones(100, 50, requires_grad=True)
    with _LiveTensorMemory() as memory:
        a = w.T[:3] * 2
        b = a.t()
        del a, b
    assert (memory.live_bytes, memory.peak_bytes) == (
        0,
        3 * 100 * 4,
    )  # views are free, what was there before too
    with _LiveTensorMemory() as memory:
        (w.exp() + 1).sum().backward()
    assert memory.live_bytes == w.grad.nbytes + 0 and memory.peak_bytes >= 2 * w.nbytes


def test_each_implementation_is_measured_and_written(tmp_path):
    file = tmp_path / "phm.jsonl"
    records = measure_phm(
        file, d=256, t=2, bottlenecks=(32,), kronecker_terms=(4, 3), batch_sizes=(1, 4), repeats=3
    )
    assert records == [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["n"], r["batch"], r["way"]) for r in records] == [
        (4, R, w) for R in (1, 4) for w in PHM_IMPLEMENTATIONS
    ]  # 3 does not divide
    r = {x["way"]: x for x in records if x["batch"] == 1}
    assert all(
        x["forward_ms"] > 0
        and x["backward_ms"] > 0
        and x["turns"] == 3
        and x["peak_mb"] >= x["kept_mb"] >= 0
        for x in records
    )
    # IDPG's code stores n matrices (both layers), the materialised path one, the factored path none
    W = (256 * 32 + 32 * 512) * 4 / 1e6
    assert (
        r["factored"]["kept_mb"] < 0.5 * W < W <= r["materialised"]["kept_mb"] < 1.5 * W
        and 4 * W <= r["idpg"]["kept_mb"] < 4.5 * W
    )
    assert r["compacter"]["peak_mb"] > 4 * 32 * 512 * 4 / 1e6

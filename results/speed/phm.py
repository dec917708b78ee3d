"""Measure times and peak memory of six implementations of a PHM layer.

    python results/speed/phm.py

The times of one core are written to `results/speed/phm.jsonl`.

A PHM layer is a sum of n Kronecker products. The released code of IDPG multiplies the input by
each of them in turn, so both passes cost as much as n full matrices. Compacter's builds all n
products at once and adds them up, with n times the memory of W. In this implementation
`materialised` builds the matrix with one multiplication `[n²,n]×[n,·]`, `factored` builds no
matrix, and `auto` is the one with fewer multiplications.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from idp_tutorial.methods.phm import PHMLinear


def _apply_layer(layer: nn.Module, x: Tensor) -> Tensor:
    """Call the layer."""
    return layer(x)


def _apply_idpg(layer: Any, x: Tensor) -> Tensor:
    """Apply a PHM layer as IDPG's released code does: one multiplication for each term."""
    return sum(x @ torch.kron(a, b) for a, b in zip(layer.A, layer.B)) + layer.bias


def _apply_compacter(layer: Any, x: Tensor) -> Tensor:
    """Apply a PHM layer as Compacter's released code does: build all terms, then their sum."""
    products = layer.A[:, :, None, :, None] * layer.B[:, None, :, None, :]
    weight = products.reshape(layer.n, layer.d_in, layer.d_out).sum(0)
    return x @ weight + layer.bias


def _apply_with_algorithm(algorithm: str) -> Callable[[Any, Tensor], Tensor]:
    """Return a function that applies a PHM layer with one of its algorithms."""

    def apply(layer: PHMLinear, x: Tensor) -> Tensor:
        """Set the algorithm and call the layer."""
        layer.algorithm = algorithm
        return layer(x)

    return apply


# name → function of a layer and its input; 'linear' is applied to `nn.Linear` layers
PHM_IMPLEMENTATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": _apply_layer,
    "auto": _apply_with_algorithm("auto"),
    "factored": _apply_with_algorithm("factored"),
    "materialised": _apply_with_algorithm("materialised"),
    "idpg": _apply_idpg,
    "compacter": _apply_compacter,
}


def _median_ms(function: Callable[[], object], min_seconds: float) -> float:
    """Return the median time of a function."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return 1000 * timer.blocked_autorange(min_run_time=min_seconds).median


def _peak_mb(function: Callable[[], object]) -> float:
    """Return the peak of the memory that PyTorch allocates in a call on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    return max(accumulate((e["args"]["Bytes"] for e in events), initial=0)) / 1e6


def _measure_implementation(
    apply: Callable[[Any, Tensor], Tensor], layers: nn.ModuleList, x: Tensor, min_seconds: float
) -> dict:
    """Return the times of both passes of a generator, and the peak memory, gradients included."""

    def forward() -> Tensor:
        """Run the forward pass."""
        return apply(layers[1], F.gelu(apply(layers[0], x)))

    def forward_and_backward() -> object:
        """Run both passes."""
        y = forward()
        return torch.autograd.grad(y, [x, *layers.parameters()], torch.ones_like(y))

    forward_ms = _median_ms(forward, min_seconds)
    both_ms = _median_ms(forward_and_backward, min_seconds)
    return dict(
        forward_ms=round(forward_ms, 3),
        backward_ms=round(both_ms - forward_ms, 3),
        peak_mb=round(_peak_mb(forward_and_backward), 3),
    )


def measure_phm(
    d: int = 1024,  # width
    t: int = 5,  # prompt length
    bottlenecks: Sequence[int] = (16, 256),  # values of m
    kronecker_terms: Sequence[int] = (2, 4, 8, 16, 32),  # values of n that divide m and d
    batch_sizes: Sequence[int] = (1, 4, 16, 64, 256),  # inputs in a batch
    min_seconds: float = 0.2,  # time in which a pass is repeated
) -> list[dict]:  # ms of each pass and peak MB of each implementation
    """Time a prompt generator `d → m → t·d` with GELU in the `PHM_IMPLEMENTATIONS`, on the CPU.

    The gradient with respect to the input is computed too, as M-IDPG needs it.
    """
    records = []
    for m, n, batch_size in product(bottlenecks, kronecker_terms, batch_sizes):
        if m % n or d % n:
            continue
        torch.manual_seed(0)
        phm = nn.ModuleList([PHMLinear(d, m, n), PHMLinear(m, t * d, n)])
        linear = nn.ModuleList([nn.Linear(d, m), nn.Linear(m, t * d)])
        x = torch.randn(batch_size, d, requires_grad=True)
        sizes = dict(d=d, m=m, t=t, n=n, batch=batch_size)
        machine = dict(threads=torch.get_num_threads(), torch=torch.__version__)
        for name, apply in PHM_IMPLEMENTATIONS.items():
            layers = linear if name == "linear" else phm
            measured = _measure_implementation(apply, layers, x, min_seconds)
            records.append({**sizes, "way": name, **measured, **machine})
    return records


if __name__ == "__main__":
    torch.set_num_threads(1)
    lines = [json.dumps(record) + "\n" for record in measure_phm()]
    Path(__file__).with_name("phm.jsonl").write_text("".join(lines))

"""Time functions in turns with warm-up rounds, and report medians, ratios and peak memory.

A stopwatch always gives a number. Whether that number is about the code, and not about other
work of the machine in that second, depends on how the measurement was designed.
`time_functions` implements one such design.

A GPU works asynchronously: a call returns before the work is done. So its own events measure
the time.
"""

import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from idp_tutorial.utils.checks import UserError, check_choice

__all__ = [
    "require_gpu",
    "summarize_times",
    "time_functions",
    "tokens_per_ms",
]


def require_gpu() -> None:
    """Check that PyTorch finds a GPU.

    Raises: `UserError` if not.
    """
    if not torch.cuda.is_available():
        raise UserError(
            "device='cuda' needs a GPU, and PyTorch sees no GPU. Use 'cpu', or install a build of "
            "PyTorch with CUDA on a machine with a GPU."
        )


def _time_call(function: Callable[[], object], cuda: bool) -> float:
    """Call a function once and return the time in milliseconds."""
    if not cuda:
        start_time = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - start_time)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _peak_resident_bytes() -> int:
    """Return the largest resident set in bytes since `_reset_peak_resident`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def _reset_peak_resident() -> None:
    """Set the high-water mark of the resident set to its present size."""
    with contextlib.suppress(OSError, AttributeError):
        # memory that the allocator keeps would hide that a call takes it again
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure_peak_memory(
    function: Callable[[], object],
    device: str = "cpu",  # 'cpu' or 'cuda'
) -> float | None:  # MB; None: the system does not report it
    """Call a function once and return the peak of the additional memory that it allocates."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated_before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - allocated_before) / 1e6
    try:
        _reset_peak_resident()
        resident_before = _peak_resident_bytes()
    except (OSError, StopIteration):
        function()
        return None
    function()
    return (_peak_resident_bytes() - resident_before) / 1e6


def summarize_times(
    ms: Sequence[float] | np.ndarray,  # times of one function in ms, one for each round
    baseline_ms: Sequence[float] | np.ndarray,  # times of the baseline in the same rounds
) -> dict:  # `ms`, `spread` (half the interquartile range, in percent of the median), `ratio`
    """Return the median time, its variation, and the median speed-up over the baseline."""
    times = np.asarray(ms)
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75))
    spread = float(50 * (high - low) / median) if median else 0.0
    ratio = float(np.median(np.asarray(baseline_ms) / times))
    return dict(ms=float(median), spread=spread, ratio=ratio)


def time_functions(
    functions: Mapping,  # name → function without arguments; the first one is the baseline
    warmup: int = 2,  # rounds that are not counted; the last one measures memory
    repeats: int = 7,  # rounds that are counted
    device: str = "cpu",  # 'cpu' or 'cuda'
) -> list[dict]:  # `name`, `mb` and the fields of `summarize_times`
    """Time functions in turns, one call of each in every round."""
    if not functions or warmup < 1 or repeats < 1:
        raise UserError(
            f"there must be at least one function, warmup and repeats must be at least 1, got "
            f"{len(functions)} functions, warmup={warmup} and repeats={repeats}."
        )
    check_choice(device, ("cpu", "cuda"), "device")
    if device == "cuda":
        require_gpu()
    for _ in range(warmup - 1):
        for function in functions.values():
            function()
    peak_memory = [measure_peak_memory(function, device) for function in functions.values()]
    rounds = []
    for _ in range(repeats):
        rounds.append([_time_call(function, device == "cuda") for function in functions.values()])
    ms = np.array(rounds)  # `[repeats,functions]`
    return [
        dict(name=name, mb=mb, **summarize_times(times, ms[:, 0]))
        for name, mb, times in zip(functions, peak_memory, ms.T)
    ]


def tokens_per_ms(
    batch_size: int,  # examples in a step
    length: int,  # tokens of an example
    ms: float,  # time of a step
) -> float:
    """Return LPT's measure of speed: words per millisecond, without prompt positions."""
    return batch_size * length / ms

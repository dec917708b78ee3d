"""Timing in turns with a simulated clock, memory, and a simulated GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from idp_tutorial.reproduction.efficiency import timing
from idp_tutorial.reproduction.efficiency.timing import (
    measure_peak_memory,
    summarize_times,
    time_functions,
    tokens_per_ms,
)


def test_tokens_per_ms():
    assert tokens_per_ms(4, 256, 512) == 2


class Clock:
    """Clock whose time passes only in calls."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        return self.seconds


def test_turns_medians_and_drift(monkeypatch):
    clock = Clock()
    called = []
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing, "measure_peak_memory", lambda fn, device: fn() or 0.0)

    def fn(name, seconds):
        def f():
            n = called.count(name)
            called.append(name)
            # slow at first, slower in every round, and one round is disturbed
            clock.seconds += (
                seconds * (100 if n < 2 else 1 + 0.1 * n) * (50 if (name, n) == ("b", 4) else 1)
            )

        return f

    rows = time_functions({"a": fn("a", 3), "b": fn("b", 1), "c": fn("c", 2)}, warmup=2, repeats=5)
    assert called == ["a", "b", "c"] * 7
    assert [r["name"] for r in rows] == ["a", "b", "c"]
    assert np.allclose(
        [r["ratio"] for r in rows], (1, 3, 1.5)
    )  # though every round is slower than the one before
    # rounds 1.2 … 1.6; the disturbed one moves the median by one place
    assert np.allclose([rows[i]["ms"] for i in (0, 2)], (3000 * 1.4, 2000 * 1.4)) and np.isclose(
        rows[1]["ms"], 1500
    )
    assert np.isclose(rows[0]["spread"], 100 * 0.1 / 1.4)


def test_summarize_times():
    s = summarize_times(np.array([1.0, 2, 4]), np.array([2.0, 2, 2]))
    assert s["ms"] == 2 and s["ratio"] == 1 and np.isclose(s["spread"], 100 * 0.75 / 2)


def test_memory_of_a_known_call():
    calls = []

    def f():
        calls.append(0)
        return torch.ones(20_000_000)  # 80 MB

    mb = measure_peak_memory(f)
    assert len(calls) == 1
    if mb is None:
        pytest.skip("this system does not report memory")
    assert 75 < mb < 110 and measure_peak_memory(lambda: torch.ones(10)) < 20

    def many():
        return [torch.ones(25_000) for _ in range(800)]

    many()
    assert (
        measure_peak_memory(many) > 60 and measure_peak_memory(many) > 60
    )  # the second time too, though the allocator has the memory by then
    existing = torch.ones(20_000_000)
    assert measure_peak_memory(lambda: existing.sum()) < 20  # memory from before does not count


def test_memory_is_none_where_the_system_does_not_report_it(monkeypatch):
    calls = []

    def refuse():
        raise PermissionError

    monkeypatch.setattr(timing, "_reset_peak_resident", refuse)
    assert measure_peak_memory(lambda: calls.append(0)) is None and calls == [0]


def test_a_gpu_is_timed_with_its_events_and_allocator(monkeypatch):
    """The GPU is simulated: events measure the time, and the allocator the memory."""
    gpu = SimpleNamespace(ms=0.0, allocated=100, peak=100)
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.t = gpu.ms
            log.append("event")

        def elapsed_time(self, other):
            assert log[-1] == "wait"
            return other.t - self.t

    for k, v in dict(
        is_available=lambda: True,
        Event=Event,
        synchronize=lambda: log.append("wait"),
        memory_allocated=lambda: gpu.allocated * 1_000_000,
        reset_peak_memory_stats=lambda: setattr(gpu, "peak", gpu.allocated),
        max_memory_allocated=lambda: gpu.peak * 1_000_000,
    ).items():
        monkeypatch.setattr(torch.cuda, k, v)

    def fn(ms, mb):
        def f():
            gpu.ms += ms
            gpu.peak = max(gpu.peak, gpu.allocated + mb)

        return f

    a, b = time_functions({"a": fn(6, 30), "b": fn(2, 50)}, 1, 3, "cuda")
    assert (a["ms"], b["ms"], b["ratio"], a["mb"], b["mb"]) == (6, 2, 3, 30, 50)


@pytest.mark.parametrize(
    "fns,kw,words",
    [
        ({}, {}, ["0 functions", "at least 1"]),
        ({"a": int}, dict(warmup=0), ["warmup=0"]),
        ({"a": int}, dict(repeats=0), ["repeats=0"]),
        ({"a": int}, dict(device="gpu"), ["'gpu'", "'cuda'"]),
    ],
)
def test_what_is_refused(fns, kw, words):
    with pytest.raises(ValueError) as e:
        time_functions(fns, **kw)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="sees no GPU.*cpu"):
        time_functions({"a": int}, device="cuda")

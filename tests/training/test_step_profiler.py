"""Time and memory of training steps on a GPU, whose clock and allocator are simulated."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from idp_tutorial.training.distributed import StepProfiler


class SimulatedGPU:
    """A queue that runs as far as it is let, and an allocator that remembers its peak."""

    def __init__(self):
        self.clock = 0.0  # ms of work that was queued
        self.finished = 0.0  # ms of work that is done
        self.waits = 0
        self.allocated = self.peak = 100

    def work(self, ms, extra_bytes):
        """Queue some work, which needs more memory while it runs."""
        self.clock += ms
        self.peak = max(self.peak, self.allocated + extra_bytes)

    def reset_peak(self):
        self.peak = self.allocated

    def wait(self):
        self.waits += 1
        self.finished = self.clock

    def event(self, enable_timing):
        gpu = self
        assert enable_timing

        class Event:
            def record(self):
                self.time = gpu.clock

            def query(self):
                return self.time <= gpu.finished

            def synchronize(self):
                if not self.query():
                    gpu.wait()

            def elapsed_time(self, end):
                assert end.query()
                return end.time - self.time

        return Event()


@pytest.fixture
def gpu(monkeypatch):
    gpu = SimulatedGPU()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", gpu.reset_peak)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: gpu.peak)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: gpu.allocated)
    return gpu


def profiler_on_gpu():
    return StepProfiler(nn.Linear(2, 2), SimpleNamespace(device=torch.device("cuda")))


def take_step(profiler, gpu, ms, extra_bytes):
    profiler.start()
    gpu.work(ms, extra_bytes)
    profiler.stop()


def test_peak_memory_is_that_of_training_and_not_of_evaluation(gpu):
    profiler = profiler_on_gpu()
    assert profiler.peak_memory_mb() == 100 / 1e6  # nothing is trained: the weights
    take_step(profiler, gpu, 5, 40)
    gpu.work(50, 900)  # an evaluation
    take_step(profiler, gpu, 5, 60)
    gpu.work(50, 900)
    assert profiler.peak_memory_mb() == 160 / 1e6


def test_peak_memory_is_kept_across_a_resume(gpu):
    profiler = profiler_on_gpu()
    take_step(profiler, gpu, 5, 60)
    resumed = profiler_on_gpu()
    resumed.load_state_dict(profiler.state_dict())
    take_step(resumed, gpu, 7, 20)
    assert resumed.peak_memory_mb() == 160 / 1e6 and resumed.times_ms() == [5, 7]


def test_a_step_on_a_gpu_waits_for_nothing(gpu):
    profiler = profiler_on_gpu()
    for ms in (5, 6, 7):
        take_step(profiler, gpu, ms, 0)
    gpu.work(100, 0)  # an evaluation, which is not in the time of a step
    assert gpu.waits == 0
    gpu.finished = 11
    take_step(profiler, gpu, 8, 0)
    assert profiler.step_times_ms == [5, 6] and gpu.waits == 0  # those that are known by now
    assert profiler.times_ms() == [5, 6, 7, 8] and gpu.waits == 1

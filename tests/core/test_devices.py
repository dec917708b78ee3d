"""A GPU is one for all parts of a run: MPS is tried, with a generator of the CPU in its place."""

import random
from types import SimpleNamespace

import pytest
import torch

from idp_tutorial.core import devices
from idp_tutorial.core.random_numbers import forked_random_numbers, preserved_random_numbers
from idp_tutorial.training.checkpoint import get_random_state, set_random_state


@pytest.fixture
def mps(monkeypatch):
    """A machine with Apple's GPU, whose random numbers come from `mps.generator`."""
    generator = torch.Generator()
    calls = []
    module = SimpleNamespace(
        generator=generator,
        calls=calls,
        device_count=lambda: 1,
        get_rng_state=lambda device="mps": generator.get_state(),
        set_rng_state=lambda state, device="mps": generator.set_state(state),
        synchronize=lambda: calls.append("synchronize"),
        manual_seed=generator.manual_seed,
        _is_in_bad_fork=lambda: False,
        draw=lambda: torch.rand(3, generator=generator).tolist(),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "mps", module)
    return module


def test_the_gpu_is_found(mps, monkeypatch):
    assert devices.gpu_type() == "mps" and devices.find_device() == torch.device("mps")
    assert devices.find_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert devices.gpu_type() is None and devices.find_device() == torch.device("cpu")
    assert devices.gpu_random_states() == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.find_device() == torch.device("cuda")


def test_the_random_state_of_the_gpu_is_restored_after_a_block(mps):
    before = mps.generator.get_state()
    for block in (preserved_random_numbers(), forked_random_numbers(3)):
        with block:
            mps.draw()
        assert torch.equal(mps.generator.get_state(), before)


def test_a_checkpoint_has_the_random_state_of_the_gpu(mps, monkeypatch):
    state = get_random_state()
    drawn = (mps.draw(), torch.rand(2).tolist(), random.random())
    set_random_state(state)
    assert (mps.draw(), torch.rand(2).tolist(), random.random()) == drawn
    set_random_state({**state, "mps": None})  # of another machine: the GPU's state is kept
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    set_random_state(state)  # on another machine
    assert "mps" not in get_random_state()


def test_a_clock_waits_for_the_gpu_and_not_for_the_cpu(mps):
    devices.synchronize(torch.device("cpu"))
    assert mps.calls == []
    devices.synchronize(torch.device("mps"))
    assert mps.calls == ["synchronize"]

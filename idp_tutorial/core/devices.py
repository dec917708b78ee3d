"""The GPU of this machine, whichever library drives it: CUDA, Apple's MPS or Intel's XPU.

Training, random numbers, checkpoints and times ask here, so that what one of them takes for a GPU
is a GPU for the others too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

GPU_TYPES = ("cuda", "mps", "xpu")  # in the order in which they are looked for


def gpu_type() -> str | None:
    """Return the type of this machine's GPU, or None if PyTorch can use none."""
    for name in GPU_TYPES:
        # torch.mps has no `is_available` in older versions
        module = torch.backends.mps if name == "mps" else getattr(torch, name, None)
        if module is not None and module.is_available():
            return name
    return None


def find_device(
    choice: str = "auto",  # 'auto': the GPU if there is one; or the name of a device
) -> torch.device:
    """Return the device on which a model is run."""
    return torch.device((gpu_type() or "cpu") if choice == "auto" else choice)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work, so that a clock may be read; a CPU never waits."""
    if device.type in GPU_TYPES:
        getattr(torch, device.type).synchronize()


def gpu_random_states() -> dict[str, Tensor]:  # type of the GPU: state
    """Return the random state of the current GPU; empty without a GPU."""
    name = gpu_type()
    return {name: getattr(torch, name).get_rng_state()} if name else {}


def set_gpu_random_states(
    states: dict[str, Tensor | None],  # from `gpu_random_states`, perhaps of another machine
) -> None:
    """Restore the random state of this machine's GPU, if there is one for its type."""
    name = gpu_type()
    state = states.get(name) if name else None
    if state is not None:
        getattr(torch, str(name)).set_rng_state(state)


@contextmanager
def forked_generators(
    devices: list[int] | None = None,  # GPUs whose state is restored; None: all
) -> Iterator[None]:
    """Restore PyTorch's random states, of the CPU and of GPUs, after a `with` block."""
    name = gpu_type()
    if devices is None:
        devices = [*range(getattr(torch, name).device_count())] if name else []
    with torch.random.fork_rng(devices, device_type=name or "cuda"):
        yield

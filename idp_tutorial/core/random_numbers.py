"""Random numbers of runs in several threads, which must not disturb each other.

PyTorch draws initial values and dropout masks from one generator of the process. In the main
thread the package uses this generator. In every other thread, `thread_random_numbers` makes PyTorch
draw from a generator of the thread instead, so that each run gets what it would get alone. The
numbers are the same, since equal generators with equal seeds give equal numbers.

`build_model`, `fit` and the other functions that draw numbers are decorated with
`thread_random_numbers`. In a thread they do not see `torch.manual_seed`: the seed of the config, or
`seed_random_numbers`, sets the thread's generator. A GPU has one generator for all threads, so only
one thread at a time can train on it.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from idp_tutorial.utils.checks import UserError

__all__ = [
    "current_generator",
    "seed_random_numbers",
    "thread_random_numbers",
    "forked_random_numbers",
    "preserved_random_numbers",
    "exclusive_gpu_random_numbers",
    "run_with_recomputation",
]

_thread = threading.local()  # `generator` of this thread, and whether its mode `is_active`
_gpu_is_in_use = threading.Lock()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def current_generator() -> torch.Generator:
    """Return the CPU generator that this thread draws from: in the main thread, PyTorch's own."""
    if _is_main_thread():
        return torch.default_generator
    if not hasattr(_thread, "generator"):
        _thread.generator = torch.Generator()
        _thread.generator.set_state(torch.default_generator.get_state())
    return _thread.generator


def seed_random_numbers(seed: int) -> None:
    """Seed all random number generators that this thread draws from."""
    if _is_main_thread():
        from accelerate.utils import set_seed

        set_seed(seed)
        return
    current_generator().manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


class _DrawFrom(TorchDispatchMode):
    """Mode of a thread in which PyTorch's operations on the CPU draw from a given generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _is_on_cpu(args, kwargs):
            variant = _variant_with_generator(func)
            if variant is not None:
                return variant(*args, **{**kwargs, "generator": self.generator})
        return func(*args, **kwargs)


def _is_on_cpu(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a random operation draws on the CPU, without a generator of its own."""
    if kwargs.get("generator") is not None:
        return False
    device = kwargs.get("device")
    if device is None and args and isinstance(args[0], Tensor):
        device = args[0].device
    return torch.device(device or "cpu").type == "cpu"


def _variant_with_generator(func: Any) -> Any:
    """Return the variant of an operation that takes a generator, or None without one.

    Fused attention on a CPU has none; it is used without dropout only, and draws nothing.
    """
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    overload = func._overloadname
    name = "generator" if overload == "default" else f"{overload}_generator"
    variants = func.overloadpacket
    return getattr(variants, name) if name in variants.overloads() else None


@contextmanager
def thread_random_numbers() -> Iterator[None]:
    """Draw from the thread's own generator, in a `with` block or as a decorator.

    In the main thread nothing changes. In another thread, small models become slower, since each
    operation passes through Python.
    """
    if _is_main_thread() or getattr(_thread, "is_active", False):
        yield
        return
    _thread.is_active = True
    try:
        with _DrawFrom(current_generator()):
            yield
    finally:
        _thread.is_active = False


@contextmanager
def forked_random_numbers(
    seed: int,
    devices: list[int] | None = None,  # GPUs whose state is restored; None: all
) -> Iterator[None]:
    """Draw with a seed in a `with` block; afterwards the random state is as before."""
    if _is_main_thread():
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield
        return
    generator = current_generator()
    with thread_random_numbers(), _restored(generator, _get_states(generator)):
        seed_random_numbers(seed)
        yield


@contextmanager
def preserved_random_numbers() -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch after a `with` block.

    In a thread other than the main thread, only the state of the thread's generator.
    """
    if not _is_main_thread():
        generator = current_generator()
        state = generator.get_state()
        try:
            yield
        finally:
            generator.set_state(state)
        return
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _get_states(generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """Return the state of a thread's generator, and those of all GPUs."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return generator.get_state(), on_gpus


@contextmanager
def _restored(
    generator: torch.Generator,  # of the thread
    states: tuple[Tensor, list[Tensor]],  # from `_get_states`
) -> Iterator[None]:
    """Begin a `with` block with other states, and restore the present ones afterwards."""
    previous = _get_states(generator)
    _set_states(generator, states)
    try:
        yield
    finally:
        _set_states(generator, previous)


def _set_states(generator: torch.Generator, states: tuple[Tensor, list[Tensor]]) -> None:
    on_cpu, on_gpus = states
    generator.set_state(on_cpu)
    if on_gpus:
        torch.cuda.set_rng_state_all(on_gpus)


@contextmanager
def exclusive_gpu_random_numbers(device: torch.device) -> Iterator[None]:
    """Let this thread alone train on a GPU in a `with` block; on a CPU nothing happens.

    Raises: UserError if another thread of the process trains on a GPU.
    """
    if device.type == "cpu":
        yield
        return
    if not _gpu_is_in_use.acquire(blocking=False):
        raise UserError(
            "another thread of this process is training on a GPU, and all threads share the random "
            "numbers of a GPU. Train one model after the other, or in processes of their own."
        )
    try:
        yield
    finally:
        _gpu_is_in_use.release()


def run_with_recomputation(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return `function(*args)`; the backward pass computes what is inside a second time.

    Nothing but the arguments is kept between the two passes, which draw the same random numbers.
    """
    if _is_main_thread():
        return checkpoint(function, *args, use_reentrant=False)
    # `checkpoint` would set the generator of the whole process, which another thread may use
    generator = current_generator()
    states = _get_states(generator)
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), _restored(generator, states)),
    )

"""Seed, fork and restore random number generators, one thread at a time.

All threads of a process share the random numbers of PyTorch, Python and NumPy. So that a run gives
what it would give alone, one thread at a time may build and train models, or set and restore the
random state (`exclusive_random_numbers`); to train several models at once, use processes.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from idp_tutorial.core.devices import forked_generators
from idp_tutorial.utils.checks import UserError

_in_use = threading.RLock()


def seed_random_numbers(seed: int) -> None:
    """Seed the random number generators of PyTorch, Python and NumPy."""
    from accelerate.utils import set_seed

    set_seed(seed)


@contextmanager
def forked_random_numbers(
    seed: int,
    devices: list[int] | None = None,  # GPUs whose state is restored; None: all
) -> Iterator[None]:
    """Seed PyTorch in a `with` block, and restore its random state afterwards.

    Raises: UserError if another thread has reserved the random numbers.
    """
    with exclusive_random_numbers(), forked_generators(devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def preserved_random_numbers() -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch after a `with` block.

    Raises: UserError if another thread has reserved them.
    """
    with exclusive_random_numbers():
        python_state = random.getstate()
        numpy_state = np.random.get_state()
        try:
            with forked_generators():
                yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def exclusive_random_numbers() -> Iterator[None]:
    """Reserve the random numbers of the process for this thread, in a block or a function.

    Raises: UserError if another thread has reserved them.
    """
    if not _in_use.acquire(blocking=False):
        raise UserError(
            "another thread of this process builds, trains or samples from a model, with the same "
            "random numbers: run one after the other, or in separate processes."
        )
    try:
        yield
    finally:
        _in_use.release()

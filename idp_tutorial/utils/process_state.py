"""Accelerate's state of the process, which threads must not create at the same time."""

import threading
from typing import Any

__all__ = ["accelerate_lock", "process_state"]

accelerate_lock = threading.Lock()  # held while objects of accelerate are created


def process_state() -> Any:
    """Return accelerate's `PartialState`: the rank of this process and the number of processes."""
    from accelerate import PartialState

    with accelerate_lock:
        state = PartialState()
        state.__dict__ = dict(state.__dict__)  # another thread may reset the shared ones
        return state

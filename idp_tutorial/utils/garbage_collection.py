"""A pause of the garbage collector while large libraries are imported.

An import creates hundreds of thousands of objects that stay, and the collector looks at them again
and again. Without it, importing PyTorch and Transformers takes a sixth less time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pause_garbage_collection"]


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Switch the garbage collector off for a `with` block, or a function, if it is on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

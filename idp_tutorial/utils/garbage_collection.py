"""A pause of the garbage collector while large libraries are imported.

An import creates hundreds of thousands of objects that stay, and the collector looks at them again
and again. Pausing it saves processor time in the imports of PyTorch and Transformers; no gain was
seen in the time of a whole command.
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

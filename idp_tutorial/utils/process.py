"""State of the process: its rank, and the handler of progress messages.

Threads must not create accelerate's state of the process at the same time.

Progress messages are records of the logger `idp_tutorial`, which the commands print. Each module
logs to the logger of its name, such as `idp_tutorial.runs.compare`, at level INFO. In Python
nothing is shown, as of any library, until logging is set up:

    logging.basicConfig(level=logging.INFO, format="%(message)s")
"""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STATE_LOCK = threading.Lock()  # held while `PartialState` is created


def process_state() -> Any:
    """Return accelerate's `PartialState`: the rank of this process and the number of processes."""
    from accelerate import PartialState

    with _STATE_LOCK:
        state = PartialState()
        state.__dict__ = dict(state.__dict__)  # another thread may reset the shared ones
        return state


class MessageHandler(logging.StreamHandler):
    """Handler that writes the messages to a stream, and raises the errors of the stream."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Raise the error that is being handled, such as that of a closed pipe."""
        raise


class _WarningHandler(MessageHandler):
    """Handler that writes warnings to stderr, unless another handler writes all messages."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setLevel(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning."""
        handlers = logging.getLogger("idp_tutorial").handlers
        if not any(isinstance(h, MessageHandler) and h is not self for h in handlers):
            super().emit(record)


@contextmanager
def show_warnings() -> Iterator[None]:
    """Write the warnings of the package to stderr while the block runs, as a command does."""
    handler = _WarningHandler()
    logger = logging.getLogger("idp_tutorial")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def handle_messages(
    # its level may be below INFO; None: the messages are printed to stdout
    handler: logging.Handler | None = None,
) -> Iterator[None]:
    """Pass the progress messages of the package to a handler while the block runs."""
    handler = handler or MessageHandler(sys.stdout)
    logger = logging.getLogger("idp_tutorial")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(handler.level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)

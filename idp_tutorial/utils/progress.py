"""Progress messages: records of the logger `idp_tutorial`, which the commands print.

Each module logs to the logger of its name, such as `idp_tutorial.runs.compare`, at level INFO. In
Python nothing is shown, as of any library, until logging is set up:

    logging.basicConfig(level=logging.INFO, format="%(message)s")
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MessageHandler", "handle_messages"]


class MessageHandler(logging.StreamHandler):
    """Handler that writes the messages to a stream, and raises the errors of the stream."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Raise the error that is being handled, such as that of a closed pipe."""
        raise


@contextmanager
def handle_messages(
    handler: logging.Handler,  # such as `MessageHandler(sys.stdout)`
) -> Iterator[None]:
    """Pass the progress messages of the package to a handler while the block runs."""
    logger = logging.getLogger("idp_tutorial")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)

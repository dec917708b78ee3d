"""The handler of progress messages."""

import logging
import os
import subprocess
import sys

import pytest

from idp_tutorial.utils.process import MessageHandler, handle_messages

logger = logging.getLogger("idp_tutorial.runs.compare")


def test_messages_are_shown_only_inside_the_block(capsys):
    logger.info("before")
    with handle_messages(MessageHandler(sys.stdout)):
        logger.info("a run of %s", "lpt")
        logger.debug("a detail")
    logger.info("after")
    assert capsys.readouterr() == ("a run of lpt\n", "")
    assert logging.getLogger("idp_tutorial").level == logging.NOTSET


def test_a_closed_stream_raises_its_error():
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    with (
        pytest.raises(BrokenPipeError),
        os.fdopen(writing_end, "w", buffering=1) as stream,
        handle_messages(MessageHandler(stream)),
    ):
        logger.info("nobody reads this")


def test_logging_of_the_standard_library_shows_the_messages():
    program = (
        "import logging; logging.basicConfig(level=logging.INFO, format='%(name)s: %(message)s'); "
        "import idp_tutorial; logging.getLogger('idp_tutorial.runs').info('a message')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("", "idp_tutorial.runs: a message\n")

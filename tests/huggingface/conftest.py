"""Fixtures of the tests of prompts for a Hugging Face model object."""

import pytest

from idp_tutorial.backbones.load import find_local_backbone


@pytest.fixture(scope="session")
def tiny():
    """Return the folder of the bundled encoder."""
    return find_local_backbone("tiny")

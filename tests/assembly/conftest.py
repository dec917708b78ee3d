"""Fixtures of the tests of configs, models and controls."""

import pytest
from small import config


@pytest.fixture(scope="module")
def cfg(small_folder):
    """Return a function that makes the config of a run of three steps."""
    return lambda **kw: config(**{**dict(backbone=str(small_folder), steps=3), **kw})

"""The pause of the garbage collector."""

import gc

import pytest

from idp_tutorial.utils.garbage_collection import pause_garbage_collection


@pytest.fixture(autouse=True)
def enabled():
    """Start with the collector on, and leave it on."""
    gc.enable()
    yield
    gc.enable()


def test_the_collector_is_off_in_the_block_and_on_after_it():
    with pause_garbage_collection():
        assert not gc.isenabled()
        with pause_garbage_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_switches_the_collector_on_again():
    @pause_garbage_collection()
    def fail():
        raise ValueError(str(gc.isenabled()))

    for _ in range(2):  # a decorated function can be called again
        with pytest.raises(ValueError, match="False"):
            fail()
        assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    with pause_garbage_collection():
        pass
    assert not gc.isenabled()

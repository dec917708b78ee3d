"""A fast selection of what `make faults` does at length: kills, full disks, spoilt files, two processes in one folder.
What is promised stands in docs/promises.md."""
import pytest
import works
from campaigns import damaged, finished_again, kills, pairs


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    works.pretend(monkeypatch)


@pytest.mark.parametrize('name', ['recording','snapshots','caching','comparing','sweeping'])
def test_a_kill_or_a_full_disk_leaves_what_the_next_start_needs(name):
    seen,bad = kills([name], every=7)
    assert not bad and sum(seen.values())>=6


@pytest.mark.parametrize('name', ['recording','snapshots','caching','saving'])
def test_a_spoilt_file_is_made_anew_or_refused(name):
    seen,bad = damaged([name], 5)
    assert not bad and sum(seen.values())>=5


@pytest.mark.parametrize('name', ['recording','snapshots','caching','comparing'])
def test_two_at_once_leave_what_one_leaves(name):
    seen,bad = pairs([name], 2)
    assert not bad and sum(seen.values())==2


def test_what_is_finished_is_not_trained_again():
    assert finished_again(['comparing','sweeping'])==dict(comparing=0, sweeping=0)


@pytest.mark.slow
@pytest.mark.parametrize('name', works.WORKS)
def test_every_operation_of_every_work(name):
    assert not kills([name])[1]


@pytest.mark.slow
@pytest.mark.parametrize('name', works.WORKS)
def test_every_file_spoilt_in_many_ways(name):
    assert not damaged([name], 60)[1]


@pytest.mark.slow
@pytest.mark.parametrize('name', works.WORKS)
def test_many_pairs(name):
    assert not pairs([name], 8)[1]

"""A fast selection of `make faults`: kills, full disks, damaged files, two processes in one folder.

The promises are in docs/promises.md.
"""

import pytest
import works
from campaigns import damaged, finished_again, kills, pairs, place
from counts import read_counts

from idp_tutorial.utils.records import read_records


@pytest.fixture(autouse=True)
def pretended(monkeypatch):
    works.pretend(monkeypatch)


@pytest.mark.grid
@pytest.mark.parametrize(
    "name", ["recording", "logits", "snapshots", "caching", "comparing", "answering"]
)
def test_a_work_continues_after_a_kill_or_a_full_disk(name):
    seen, bad = kills(name, every=13, first=4)
    assert not bad and sum(seen.values()) >= 4


@pytest.mark.grid
@pytest.mark.parametrize(
    "name", ["recording", "logits", "snapshots", "caching", "saving", "bundling"]
)
def test_a_damaged_file_is_written_again_or_refused(name):
    seen, bad = damaged(name, 3)
    assert not bad and sum(seen.values()) >= 3


@pytest.mark.grid
@pytest.mark.parametrize("name", ["recording", "caching", "comparing", "reproducing"])
def test_two_processes_leave_the_result_of_one(name):
    seen, bad = pairs(name, 2)
    assert not bad and sum(seen.values()) == 2


@pytest.mark.parametrize(
    "name", ["training", "comparing", "sweeping", "transferring", "reproducing"]
)
def test_finished_runs_are_not_trained_again(name):
    assert finished_again(name) == 0


def test_another_comparison_in_the_folder_loses_nothing():
    with place() as (folder, trained):
        runs = []
        for lr in (None, 0.1, None):
            works.compared(folder, lr)
            runs.append(trained())
        assert runs[0] < runs[1] == runs[2]
        assert (
            len(read_records(folder / "earlier.jsonl"))
            == len(read_records(folder / "compare.jsonl"))
            == 4
        )


def test_no_case_of_the_last_campaigns_broke_a_promise():
    assert not sum(line["bad"] for line in read_counts())


@pytest.mark.slow
@pytest.mark.parametrize("name", works.WORKS)
def test_every_operation_of_every_work(name):
    assert not kills(name)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", works.WORKS)
def test_every_file_damaged_in_many_ways(name):
    assert not damaged(name, 60)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", works.WORKS)
def test_many_pairs(name):
    assert not pairs(name, 8)[1]

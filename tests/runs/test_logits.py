"""Logits: one file for all runs of a comparison, a digest for each, and nothing lost by a kill."""

import errno
import gc
import os
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small import config, small_task

from idp_tutorial.runs import logits
from idp_tutorial.runs.logits import (
    has_logits,
    load_logits,
    logits_name,
    majority_vote_score,
    save_logits,
    write_run_arrays,
)
from idp_tutorial.utils.checks import MissingFileError, UserError


def arrays(seed):
    values = np.random.default_rng(seed).normal(size=(5, 2)).astype(np.float16)
    return dict(test=values, test_label=np.arange(5) % 2)


@pytest.fixture
def records(tmp_path):
    """Records of three runs, whose logits are in one file."""
    return [write_run_arrays(tmp_path / "logits/c.npz", f"run{i}", arrays(i)) for i in range(3)]


def test_the_runs_of_a_comparison_are_in_one_file(records, tmp_path):
    assert [r["logits"] for r in records] == [f"logits/c.npz/run{i}" for i in range(3)]
    assert [p.name for p in (tmp_path / "logits").glob("[!.]*")] == ["c.npz"]
    for i, record in enumerate(records):
        for name, values in load_logits(record, tmp_path).items():
            assert values.dtype == arrays(i)[name].dtype and (values == arrays(i)[name]).all()


def test_a_run_that_is_written_again_replaces_its_arrays_only(records, tmp_path):
    new = write_run_arrays(tmp_path / "logits/c.npz", "run1", arrays(9))
    assert new["logits"] == records[1]["logits"]
    assert (load_logits(new, tmp_path)["test"] == arrays(9)["test"]).all()
    assert (load_logits(records[2], tmp_path)["test"] == arrays(2)["test"]).all()
    with pytest.raises(UserError, match="c.npz is damaged: the logits of run1 differ"):
        load_logits(records[1], tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=str)
def test_a_kill_or_a_full_disk_loses_the_run_in_progress_only(
    error, records, tmp_path, monkeypatch
):
    def fail(source, target):
        raise error

    with monkeypatch.context() as m:
        m.setattr(os, "replace", fail)
        with pytest.raises(type(error)):
            write_run_arrays(tmp_path / "logits/c.npz", "run3", arrays(3))
    for record in records:
        load_logits(record, tmp_path)
    fields = write_run_arrays(tmp_path / "logits/c.npz", "run3", arrays(3))
    assert (load_logits(fields, tmp_path)["test"] == arrays(3)["test"]).all()


def test_every_kind_of_damage_is_an_error_that_names_the_file(records, tmp_path):
    file = tmp_path / "logits/c.npz"
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    n_refused = 0
    for i in range(200):
        position = int(rng.integers(len(whole)))
        flipped = bytes([whole[position] ^ 1 << int(rng.integers(8))])
        changed = whole[:position] + flipped + whole[position + 1 :]
        file.write_bytes(whole[:position] if i % 4 == 0 else changed)
        for j, record in enumerate(records):
            try:
                read = load_logits(record, tmp_path)
            except UserError as e:
                assert f"{file} is damaged" in str(e)
                n_refused += 1
            else:  # a byte of the archive that does not matter, such as a time
                assert all((read[name] == v).all() for name, v in arrays(j).items())
    assert n_refused > 300


def test_a_run_that_the_file_lacks_is_refused(records, tmp_path):
    with pytest.raises(UserError, match="c.npz is damaged: the logits of other differ"):
        load_logits({**records[0], "logits": "logits/c.npz/other"}, tmp_path)


def test_a_record_without_logits_is_refused(tmp_path):
    with pytest.raises(UserError, match="the record names no logits"):
        load_logits({}, tmp_path)


def test_logits_whose_file_is_missing_are_refused(records, tmp_path):
    assert has_logits(records[0], tmp_path) and not has_logits({}, tmp_path)
    (tmp_path / "logits/c.npz").unlink()
    with pytest.raises(MissingFileError, match=r"c\.npz is missing: .* Copy the folder 'logits'"):
        has_logits(records[0], tmp_path)
    with pytest.raises(MissingFileError, match="c.npz is missing"):
        majority_vote_score([{**records[0], "metric": "accuracy", "folder": tmp_path}])


def test_saved_test_logits_are_float32_and_have_labels(tmp_path):
    task = small_task()
    n = len(task.splits["test"])
    logits = torch.arange(2.0 * n).view(n, 2) / 3
    outputs = {"test": (logits, []), "validation": (logits, [])}
    name = logits_name(config(), task, "digest")
    assert name != logits_name(config(seed=1), task, "digest")
    assert name != logits_name(config(), task, "other") != logits_name(config(), task, "other", 1)
    fields = save_logits(tmp_path / "runs.jsonl", name, outputs, task)
    assert fields["logits"] == f"logits/runs.npz/{name}"
    read = load_logits(fields, tmp_path)
    assert (read["test"] == logits.numpy()).all()
    assert read["validation"].dtype == np.float16
    assert read["test_label"].tolist() == [row["label"] for row in task.splits["test"]]
    answers = ["a", "bc"] * (n // 2)
    texts = save_logits(tmp_path / "runs.jsonl", "texts", {"test": (answers, [])}, task)
    assert load_logits(texts, tmp_path)["test"].tolist() == answers


def test_runs_vote_only_if_all_have_logits_with_labels(tmp_path):
    right = np.array([0, 1, 0, 1])
    runs = []
    for seed in range(3):  # each is wrong on another example
        answers = np.eye(2)[np.where(np.arange(4) == seed, 1 - right, right)]
        fields = write_run_arrays(
            tmp_path / "logits/runs.npz", str(seed), dict(test=answers, test_label=right)
        )
        runs.append(dict(fields, task="t", metric="accuracy", folder=tmp_path))
    assert majority_vote_score(runs) == 100.0
    assert majority_vote_score([*runs[:2], dict(task="t", metric="accuracy")]) is None
    assert majority_vote_score([]) is None


def test_the_versions_that_are_written_do_not_stay_in_memory(records, tmp_path, monkeypatch):
    """Each run that is written replaces the file."""
    read = []
    monkeypatch.setattr(logits, "_read_version", lambda *args: read.append(args))
    write_run_arrays(tmp_path / "logits/c.npz", "run3", arrays(3))
    assert not read


def test_replaced_versions_of_a_file_are_not_kept_in_memory(records, tmp_path):
    """Each run that is written replaces the file."""
    old = weakref.ref(load_logits(records[0], tmp_path)["test"])
    write_run_arrays(tmp_path / "logits/c.npz", "run3", arrays(3))
    load_logits(records[0], tmp_path)
    gc.collect()
    assert old() is None


def test_the_number_of_files_in_memory_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(logits, "_MAX_FILES", 2)
    for i in range(4):
        record = write_run_arrays(tmp_path / f"logits/{i}.npz", "run", arrays(i))
        load_logits(record, tmp_path)
    assert len(logits._VERSIONS) == 2
    assert (load_logits(record, tmp_path)["test"] == arrays(3)["test"]).all()


def test_of_several_processes_only_the_main_one_writes(tmp_path, monkeypatch):
    task = small_task(test=4)
    outputs = dict(test=(torch.rand(4, 2), None))
    with monkeypatch.context() as m:
        m.setattr(logits, "process_state", lambda: SimpleNamespace(is_main_process=False))
        fields = save_logits(tmp_path / "a.jsonl", "run", outputs, task)
    assert not [*tmp_path.iterdir()]
    assert save_logits(tmp_path / "a.jsonl", "run", outputs, task) == fields

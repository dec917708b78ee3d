"""The store of states: parts appear whole, damage is found, the limit of the cache holds."""

import errno
import os
import shutil
import time

import numpy as np
import pytest

from idp_tutorial.training.state_store import StateStore, cache_size_bytes, example_key

KEYS = [bytes([i]) * 16 for i in range(4)]


def random_states(lengths=(3, 1, 4, 2), d=5):
    return [np.random.default_rng(n).normal(size=(n, d)).astype(np.float32) for n in lengths]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_store_returns_its_states_and_has_the_predicted_size(dtype, tmp_path):
    texts = random_states()
    store = StateStore(tmp_path / "s", 5, dtype)
    store.add(KEYS, [3, 1, 4, 2], [np.concatenate(texts[:2]), np.concatenate(texts[2:])])
    for s in (store, StateStore(tmp_path / "s", 5, dtype)):
        assert len(s) == 4 and KEYS[0] in s and b"x" * 16 not in s
        for k, t in zip(KEYS, texts):
            np.testing.assert_array_equal(s[k], t.astype(dtype))
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert (
        sum(f.stat().st_size for f in files)
        == cache_size_bytes([3, 1, 4, 2], 5, dtype)
        == 10 * 5 * np.dtype(dtype).itemsize + 4 * 32 + 24
    )
    assert (
        not store[KEYS[0]].flags.owndata and not store[KEYS[0]].flags.writeable
    )  # a view of the file, not a copy


def test_parts_are_combined_and_the_same_part_of_two_processes_is_one_file(tmp_path):
    texts = random_states()
    a = StateStore(tmp_path, 5)
    b = StateStore(tmp_path, 5)
    a.add(KEYS[:2], [3, 1], [np.concatenate(texts[:2])])
    b.add(KEYS[2:], [4, 2], [np.concatenate(texts[2:])])
    assert len(b) == 4 and len(a) == 2
    a.add(KEYS[2:], [4, 2], [np.concatenate(texts[2:])])
    assert len(a) == 4 and len([*tmp_path.iterdir()]) == 2
    for store in (a, b):
        np.testing.assert_array_equal(store[KEYS[3]], texts[3])


def failing_blocks(error):
    yield np.ones((3, 5), np.float32)
    raise error


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        RuntimeError("out of memory"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
    ids=["interrupted", "failed", "disk full"],
)
def test_a_failed_part_leaves_no_files(error, tmp_path):
    store = StateStore(tmp_path, 5)
    with pytest.raises(type(error)):
        store.add(KEYS, [3, 1, 4, 2], failing_blocks(error))
    assert not any(tmp_path.iterdir()) and len(store) == 0
    store.add(KEYS[:1], [3], random_states()[:1])
    assert len(store) == 1


def test_files_of_a_killed_process_are_ignored_and_removed_later(tmp_path):
    abandoned = tmp_path / ".abandoned.states.123-0123abcd.part"
    recent = tmp_path / ".recent.states.124-0123abcd.part"
    for f in (abandoned, recent):
        f.write_bytes(b"half")
    os.utime(abandoned, (time.time() - 7_200,) * 2)
    store = StateStore(tmp_path, 5)
    assert len(store) == 0
    store.add(KEYS[:1], [3], random_states()[:1])
    assert not abandoned.exists() and recent.exists() and len(store) == 1


def test_a_part_of_another_store_is_refused(tmp_path):
    for name in "ab":
        StateStore(tmp_path / name, 5).add(
            KEYS[:2], [3, 1], [random_states()[i] + (name == "b") for i in range(2)]
        )
    (part,) = (tmp_path / "a").iterdir()
    part.unlink()
    shutil.copy(tmp_path / "b" / part.name, part)
    with pytest.warns(UserWarning, match="is damaged"):
        assert len(StateStore(tmp_path / "a", 5)) == 0


def test_the_least_recently_used_parts_are_deleted_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("IDP_CACHE_LIMIT", str(2.5 * cache_size_bytes([3], 5) / 1e9))
    for i in range(3):
        store = StateStore(tmp_path / f"model{i}" / "layer", 5)
        store.add(KEYS[:1], [3], random_states()[:1])
        os.utime(next(store.folder.iterdir()), (i, i))
    assert [len([*(tmp_path / f"model{i}/layer").iterdir()]) for i in range(3)] == [
        0,
        1,
        1,
    ]  # the oldest part is deleted
    with pytest.raises(
        ValueError, match=r"may have 0.0 MB \(IDP_CACHE_LIMIT, or the free space\); nothing is"
    ):
        StateStore(tmp_path / "x/y", 5).add(KEYS, [9, 9, 9, 9], [])
    monkeypatch.setenv("IDP_CACHE_LIMIT", "much")
    with pytest.raises(ValueError, match="IDP_CACHE_LIMIT must be a positive number, got 'much'"):
        StateStore(tmp_path / "x/y", 5).add(KEYS[:1], [3], random_states()[:1])


def test_a_key_depends_on_ids_and_types():
    e = dict(input_ids=[1, 2, 3], token_type_ids=[0, 0, 0])
    key = example_key(e)
    assert len(key) == 16 and key == example_key({**e, "label": 1, "mask_position": 2})
    assert (
        len(
            {
                key,
                example_key(dict(input_ids=[1, 2, 4], token_type_ids=[0, 0, 0])),
                example_key(dict(input_ids=[1, 2, 3], token_type_ids=[0, 0, 1])),
                example_key(dict(input_ids=[1, 2], token_type_ids=[0, 0])),
                example_key(dict(input_ids=[1, 2, 3, 0], token_type_ids=[0, 0])),
            }
        )
        == 5
    )

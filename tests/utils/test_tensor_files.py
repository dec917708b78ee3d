"""Tensors with a description, and snapshots: every changed byte is found, and no code is run."""

import random
import warnings

import pytest
import torch

from idp_tutorial.utils.checks import UserError
from idp_tutorial.utils.tensor_files import (
    deserialise_tensors,
    list_snapshots,
    read_last_snapshot,
    remove_snapshots,
    save_tensors,
    serialise_tensors,
    write_snapshot,
)

TENSORS = {"a": torch.arange(6).view(2, 3).bfloat16(), "b": torch.tensor(3.0)}


def test_tensors_and_their_description_are_read_as_they_were_written(tmp_path):
    save_tensors(tmp_path / "f.safetensors", TENSORS, {"lr": 0.1, "name": "ä"})
    description, tensors = deserialise_tensors((tmp_path / "f.safetensors").read_bytes())
    assert description == {"lr": 0.1, "name": "ä"}
    for name, tensor in TENSORS.items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype


def test_every_changed_byte_and_every_lost_end_is_refused():
    data = serialise_tensors(TENSORS, {"lr": 0.1})
    for i in range(len(data)):
        changed = data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]
        for damaged in (changed, data[:i]):
            with pytest.raises(UserError, match="is damaged, or was not written by idp_tutorial"):
                deserialise_tensors(damaged, "f")


def test_a_tree_keeps_tuples_integer_keys_and_the_state_of_a_generator(tmp_path):
    tree = {1: (2, [None, True, "x"]), "random": random.getstate(), "t": torch.ones(2)}
    write_snapshot(tmp_path, 1, tree)
    read = read_last_snapshot(tmp_path)
    assert torch.equal(read.pop("t"), tree.pop("t")) and read == tree
    with pytest.raises(TypeError, match="set is neither a tensor nor a value"):
        write_snapshot(tmp_path, 2, {1, 2})


def test_two_snapshots_are_kept_and_the_last_intact_one_is_read(tmp_path):
    assert read_last_snapshot(tmp_path) is None
    for step in (2, 4, 10):
        write_snapshot(tmp_path, step, {"step": step})
    assert [step for step, _ in list_snapshots(tmp_path)] == [10, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_last_snapshot(tmp_path, ["step"]) == {"step": 10}
    newest, older = (file for _, file in list_snapshots(tmp_path))
    newest.write_bytes(older.read_bytes())
    with pytest.warns(UserWarning, match="its name and its content disagree; the run con"):
        assert read_last_snapshot(tmp_path) == {"step": 4}
    older.write_bytes(b"")
    with pytest.raises(UserError, match="10.* is damaged.*4.* is damaged.*Delete them to start"):
        read_last_snapshot(tmp_path)
    remove_snapshots(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_snapshot_of_another_kind_of_run_is_refused(tmp_path):
    write_snapshot(tmp_path, 1, {"a": 1})
    with pytest.raises(UserError, match="checkpoint-1.safetensors is a checkpoint of another kind"):
        read_last_snapshot(tmp_path, ["a", "b"])

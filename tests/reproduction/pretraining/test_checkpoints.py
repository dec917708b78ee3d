"""Checkpoints of pretraining: the same state after reading, and refusals of other runs."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_model

from idp_tutorial.reproduction.pretraining.checkpoints import (
    find_weights_file,
    load_initial_weights,
    load_master_weights,
    load_pretraining_checkpoint,
    write_pretraining_checkpoint,
)
from idp_tutorial.reproduction.pretraining.language_modelling import create_language_model
from idp_tutorial.reproduction.pretraining.master_weights import MasterWeightOptimizer
from idp_tutorial.reproduction.pretraining.pretrain import PretrainConfig
from idp_tutorial.utils.durable import write_manifest
from idp_tutorial.utils.records import read_records

CFG = PretrainConfig(d=32, n_layers=1, steps=4, dtype="float32")
LOG = [dict(step=2, lm=3.5)]


def masters(seed, width=3):
    torch.manual_seed(seed)
    optimizer = MasterWeightOptimizer([torch.nn.Linear(width, width)], CFG)
    optimizer.model_parameters[0].sum().backward()
    optimizer.step()
    return optimizer


def test_a_checkpoint_restores_weights_moments_schedule_and_log(tmp_path):
    saved = masters(0)
    assert load_pretraining_checkpoint(tmp_path, CFG, masters(1)) == (0, [])
    write_pretraining_checkpoint(tmp_path, CFG, saved, 2, LOG)
    (tmp_path / "log.jsonl").unlink()  # the run was killed before it wrote this file
    loaded = masters(1)
    assert load_pretraining_checkpoint(tmp_path, CFG, loaded) == (2, LOG)
    assert str(loaded.state_dict()) == str(saved.state_dict())
    assert torch.equal(loaded.model_parameters[0], saved.master_parameters[0])
    assert read_records(tmp_path / "log.jsonl")[0]["lm"] == 3.5
    with pytest.raises(ValueError, match="holds another run .lr was .* and is now 0.5.*"):
        load_pretraining_checkpoint(tmp_path, replace(CFG, lr=0.5), loaded)


def test_another_run_starts_from_the_weights_only(tmp_path):
    saved = masters(0)
    cfg = replace(CFG, init_from=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in init_from="):
        load_master_weights(masters(1), cfg)
    write_pretraining_checkpoint(tmp_path, CFG, saved, 2, LOG)
    other = masters(1)
    moments = str(other.state_dict()["optimizer"])
    load_master_weights(other, cfg)
    assert torch.equal(other.master_parameters[0], saved.master_parameters[0])
    assert str(other.state_dict()["optimizer"]) == moments
    with pytest.raises(ValueError, match="is a run of another shape"):
        load_master_weights(masters(1, width=4), cfg)


def test_weights_of_a_backbone_are_used_if_intact_and_of_the_same_shape(tmp_path):
    cfg = replace(CFG, init_from=str(tmp_path))
    model = create_language_model(20, 32, 1)
    assert find_weights_file(str(tmp_path)) is None
    save_model(model, tmp_path / "model.safetensors")
    file = find_weights_file(str(tmp_path))
    other = create_language_model(20, 32, 1)
    load_initial_weights(other, file, cfg)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    with pytest.raises(ValueError, match="is a model of another shape"):
        load_initial_weights(create_language_model(20, 32, 2), file, cfg)
    write_manifest(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="model.safetensors is damaged or missing: .* Download or"):
        load_initial_weights(other, file, cfg)
    (tmp_path / "SHA256SUMS").unlink()
    with pytest.raises(ValueError, match="model.safetensors is damaged .*Download or save"):
        load_initial_weights(other, file, cfg)
    write_pretraining_checkpoint(tmp_path, CFG, masters(0), 2, LOG)
    assert find_weights_file(str(tmp_path)) is None  # the folder of a pretraining run

"""Random numbers of a fork, of a preserved block and of threads."""

import random

import numpy as np
import torch
from small import in_threads

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.core.random_numbers import (
    exclusive_random_numbers,
    forked_random_numbers,
    preserved_random_numbers,
)
from idp_tutorial.utils.checks import UserError


def random_state():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def test_a_block_restores_the_random_state():
    before = random_state()
    with forked_random_numbers(3, []):
        drawn = torch.rand(3)
    with forked_random_numbers(3, []):
        assert torch.equal(torch.rand(3), drawn)
    assert random_state() == before
    with preserved_random_numbers():
        torch.rand(3)
        random.random()
        np.random.rand()
        assert random_state() != before
    assert random_state() == before


def test_only_one_thread_trains_at_a_time():
    with exclusive_random_numbers(), exclusive_random_numbers():
        (error,) = in_threads(try_to_draw, [0])
    assert "another thread of this process builds, trains or" in str(error)
    assert in_threads(try_to_draw, [0]) == [None]


def test_a_thread_that_is_refused_changes_no_random_state():
    """Otherwise the run that is training would draw the same numbers again."""
    with exclusive_random_numbers():
        before = random_state()
        torch.rand(1)
        during = random_state()
        blocks = [preserved_random_numbers, lambda: forked_random_numbers(0, [])]
        errors = in_threads(try_to_enter, blocks)
        assert random_state() == during != before
    assert [type(error) for error in errors] == [UserError] * 2


def try_to_enter(block):
    try:
        with block():
            return None
    except UserError as e:
        return e


def try_to_draw(_):
    try:
        with exclusive_random_numbers():
            return None
    except UserError as e:
        return e


def test_backbones_loaded_at_once_leave_transformers_as_it_was():
    from transformers import PreTrainedModel

    replaced = PreTrainedModel.tie_weights, torch.nn.init.normal_, torch.linspace
    expected = backbone_id(load_backbone("tiny"))
    loaded = in_threads(load_backbone, ["tiny"] * 4)
    assert [backbone_id(bb) for bb in loaded] == [expected] * 4
    assert (PreTrainedModel.tie_weights, torch.nn.init.normal_, torch.linspace) == replaced

"""Random numbers of a thread, of a fork and of a GPU."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small import in_threads

from idp_tutorial.core import random_numbers
from idp_tutorial.core.random_numbers import (
    current_generator,
    exclusive_gpu_random_numbers,
    forked_random_numbers,
    preserved_random_numbers,
    seed_random_numbers,
    thread_random_numbers,
)
from idp_tutorial.utils.checks import UserError


def draw_everything():
    """Return what PyTorch draws in many ways, also in a backward pass."""
    x = torch.ones(9, 10)
    q = torch.ones(2, 4, 8, 8, requires_grad=True)
    attended = F.scaled_dot_product_attention(q, q, q, None, 0.3)
    attended.sum().backward()
    return [
        torch.rand(3),
        torch.randn(3, 4),
        torch.randn_like(x),
        torch.randint(0, 99, (5,)),
        torch.randperm(9),
        torch.bernoulli(torch.full((9,), 0.5)),
        torch.multinomial(torch.ones(9), 3),
        torch.normal(0.0, 1.0, (3,)),
        torch.nn.Linear(4, 5).weight.detach(),
        torch.nn.init.trunc_normal_(torch.empty(7)),
        F.dropout(x, 0.1),
        attended.detach(),
        q.grad,
    ]


def test_a_thread_draws_the_same_numbers_as_the_main_thread():
    seed_random_numbers(7)
    expected = draw_everything()
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())

    def draw(seed):
        seed_random_numbers(seed)
        with thread_random_numbers(), thread_random_numbers():
            return draw_everything()

    for drawn in in_threads(draw, [7, 7, 7]):
        assert [*map(torch.equal, drawn, expected)] == [True] * len(expected)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_block_restores_the_state_of_its_thread():
    with forked_random_numbers(3, []):
        expected = torch.rand(3)

    def draw(_):
        state = current_generator().get_state()
        with forked_random_numbers(3, []):
            drawn = torch.rand(3)
        with preserved_random_numbers(), thread_random_numbers():
            assert not torch.equal(torch.rand(3), drawn)
        return torch.equal(drawn, expected) and torch.equal(state, current_generator().get_state())

    assert in_threads(draw, [0, 1]) == [True, True]


def test_only_one_thread_trains_on_a_gpu():
    gpu = torch.device("cuda")
    with (
        exclusive_gpu_random_numbers(gpu),
        pytest.raises(UserError, match="another thread of this process is training on a GPU"),
        exclusive_gpu_random_numbers(gpu),
    ):
        pass
    with exclusive_gpu_random_numbers(gpu), exclusive_gpu_random_numbers(torch.device("cpu")):
        assert random_numbers._gpu_is_in_use.locked()
    assert not random_numbers._gpu_is_in_use.locked()

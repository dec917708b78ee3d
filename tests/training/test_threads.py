"""Runs in threads of one process do not disturb each other's random numbers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from small import backbone, config, in_threads, numbers, small_task
from transformers import PreTrainedModel

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.controls import fit_control
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.generation import generate_ids
from idp_tutorial.core.prompted_model import copy_state, trained_state
from idp_tutorial.data.tasks import load_task
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.training.fit import fit


def train(cfg):
    """Return the log and the trained tensors of a run."""
    task = small_task()
    model = build_model(cfg, backbone(), task)
    if cfg.method == "side-network":
        log = fit_control(cfg.method_config, model, task, cfg)
        return numbers(log), copy_state(model.head.state_dict())
    return numbers(fit(model, task, cfg)), copy_state(trained_state(model))


def assert_same_results(results, expected):
    for (log, tensors), (expected_log, expected_tensors) in zip(results, expected, strict=True):
        assert log == expected_log
        for name, tensor in expected_tensors.items():
            assert torch.equal(tensors[name], tensor), name


SIZES = dict(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
CONFIGS = [  # dropout in layers, attention, prompts and adapters; noise; sampled descriptions
    config(method="m-idpg-phm", seed=1, steps=6),
    config(method="smop", seed=2, steps=6, accumulate=2),
    config(method="lora", seed=3, steps=6, dropout_below_prompt=True),
    config(method="efl", seed=4, steps=6, lr=1e-4),
    config(method="lpt-npg", seed=5, steps=6, gradient_checkpointing=True),
    config(method="side-network", seed=6),
]


@pytest.mark.parametrize("configs", [CONFIGS[:3], CONFIGS[3:]], ids=lambda c: c[0].method)
def test_runs_at_once_equal_runs_one_after_the_other(configs):
    expected = [train(cfg) for cfg in configs]
    before = torch.get_rng_state()
    assert_same_results(in_threads(train, configs), expected)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_in_the_main_thread_is_not_disturbed_by_threads():
    cfg = CONFIGS[0]
    expected = train(cfg)
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(lambda: [train(c) for c in CONFIGS[1:3]])
        result = train(cfg)
        others.result()
    assert_same_results([result], [expected])


def test_experiments_and_generation_in_threads():
    bb = load_backbone("tiny-gpt2")
    model = build_model(
        config(method="head-only", task="in-short"), bb, replace(load_task("in-short"), splits={})
    )
    kwargs = dict(max_new_tokens=4, do_sample=True, seed=3)
    texts = [[7, 8, 9], [10, 11]]
    jobs = [
        lambda: generate_ids(model, texts, **kwargs),
        lambda: load_backbone("roberta-base", weights="random", **SIZES).initial_fingerprint(),
        lambda: Experiment(config(method="lpt-npg", steps=3), small_task()).train()[1].score,
    ]
    expected = [job() for job in jobs]
    before = torch.get_rng_state()
    assert in_threads(lambda job: job(), jobs) == expected
    assert torch.equal(torch.get_rng_state(), before)


def test_backbones_loaded_at_once_leave_transformers_as_it_was():
    replaced = PreTrainedModel.tie_weights, torch.nn.init.normal_, torch.linspace
    expected = load_backbone("tiny").initial_fingerprint()
    loaded = in_threads(load_backbone, ["tiny"] * 4)
    assert [bb.initial_fingerprint() for bb in loaded] == [expected] * 4
    assert (PreTrainedModel.tie_weights, torch.nn.init.normal_, torch.linspace) == replaced

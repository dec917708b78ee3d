"""Gradient checkpointing: equal gradients with every method, and layers that run twice."""

from collections import Counter

import pytest
import torch
from small import backbone, batch_of, config, model_of, numbers, small_task
from small_models import (
    SMALL_CONFIGS,
    attention_implementations,
    random_batch,
    small_backbone,
)

from idp_tutorial.assembly.build import build_model
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.checks import UserError


def gradients(model, batch):
    """Return the gradients of one step in training mode, and how often each layer has run."""
    calls = Counter()
    hooks = [
        layer.register_forward_pre_hook(lambda *args, i=i: calls.update([i]))
        for i, layer in enumerate(model.backbone.layers)
    ]
    model.train().zero_grad()
    torch.manual_seed(5)
    model.loss(batch).backward()
    for hook in hooks:
        hook.remove()
    return {n: p.grad for n, p in model.trained_parameters().items()}, calls


def assert_checkpointing_changes_nothing(model, batch):
    """Compare gradients with and without, and return the calls of the layers."""
    model.gradient_checkpointing = False
    expected, n_without = gradients(model, batch)
    model.gradient_checkpointing = True
    actual, n_with = gradients(model, batch)
    assert any(grad is not None and grad.any() for grad in expected.values())
    for name, grad in expected.items():
        assert (grad is None) == (actual[name] is None)
        if grad is not None:
            torch.testing.assert_close(actual[name], grad, atol=1e-6, rtol=1e-5)
    return n_without, n_with


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_equal_and_trained_layers_run_twice(method):
    task = small_task()
    model = model_of(method, backbone(), task, layer=1, gradient_checkpointing=True)
    assert model.gradient_checkpointing
    n_without, n_with = assert_checkpointing_changes_nothing(model, batch_of(model.backbone, task))
    first = max(model.first_trained_layer, 0)
    n_layers = model.backbone.n_layers
    # a pass that computes M(x) has no gradients and runs one time
    assert all(n_with[i] == n_without[i] + 1 for i in range(first, n_layers))
    assert first < n_layers or method == "head-only"


def test_layers_run_twice_below_a_head_that_reads_one_position():
    task = small_task()
    model = model_of("prompt-tuning", backbone(), task, pooling="cls", gradient_checkpointing=True)
    assert model.backbone.supports_single_position
    n_without, n_with = assert_checkpointing_changes_nothing(model, batch_of(model.backbone, task))
    assert all(n_with[i] == n_without[i] + 1 for i in range(model.backbone.n_layers - 1))


@pytest.mark.parametrize("name", SMALL_CONFIGS)
@pytest.mark.parametrize("method", ["prompt-tuning", "p-tuning-v2", "lora"])
def test_gradients_are_equal_in_every_family(name, method):
    bb = small_backbone(name, attention_implementations(name)[0])
    task = small_task()
    model = build_model(config(method=method, prompt_length=3), bb, task)
    batch = random_batch()
    batch["label"] = torch.arange(len(batch["input_ids"])) % 2
    assert_checkpointing_changes_nothing(model, batch)


@pytest.mark.parametrize("method", ["p-tuning-v2", "lpt-npg"])
def test_a_run_with_checkpointing_gives_the_same_result(method):
    task = small_task()
    logs = []
    for enabled in (False, True):
        cfg = config(method=method, gradient_checkpointing=enabled, steps=3, lr=1e-3)
        model = build_model(cfg, backbone(), task)
        logs.append(numbers(fit(model, task, cfg)))
    assert logs[0] == logs[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_checkpointing_of_transformers_is_refused_where_it_drops_keys_and_values():
    task = small_task()
    for method in ("p-tuning-v2", "prompt-tuning"):
        model = model_of(method, backbone(), task, pooling="cls")
        model.backbone.model.gradient_checkpointing_enable()
        with pytest.raises(
            UserError, match="drops a prompt's keys and values.* gradient_checkpointing=True"
        ):
            model.train().loss(batch_of(model.backbone, task))
        model.backbone.model.gradient_checkpointing_disable()
        model.loss(batch_of(model.backbone, task))

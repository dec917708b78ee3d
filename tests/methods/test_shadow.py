"""The shadow network corrects hidden states as peft's model does."""

import pytest
import torch
from small_models import random_batch, small_backbone

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters

pytest.importorskip("peft")


def peft_model(bb):
    """Return peft's own shadow model around the backbone's Hugging Face model."""
    from peft import ShadowConfig, get_peft_model

    path = bb.layers_path.replace(".", r"\.")
    config = ShadowConfig(target_modules=rf"(.*\.)?{path}\.\d+", task_type="FEATURE_EXTRACTION")
    return get_peft_model(bb.base, config).eval()


def state_of_peft(model):
    """Return the parameters of peft's model under the names of `ShadowNetwork`."""
    state = {}
    for name, p in model.named_parameters():
        if ".shadow_backbone.default." in name:
            state["initial." + name.split(".shadow_backbone.default.")[1]] = p
        elif ".shadow_" in name:
            before, rest = name.split(".shadow_")
            state[f"layers.{before.rpartition('.')[2]}.shadow_{rest}"] = p
    return state


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "roberta", "bert"])
def test_states_equal_those_of_peft(family):
    bb = small_backbone(family)
    cfg = RunConfig("shadow")
    plan = cfg.method_config.plan(bb, cfg)
    source = plan[0].source.eval()
    for p in source.parameters():
        p.data += 0.1 * torch.randn_like(p)  # W_up begins at 0
    batch = random_batch()
    with torch.no_grad():
        h = run_layers(bb, batch, plan).h
    without = run_layers(bb, batch).h
    reference = peft_model(bb)
    expected = state_of_peft(reference)
    for name, p in source.named_parameters():
        expected[name].data.copy_(p)
    with torch.no_grad():
        output = reference(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
    is_real = batch["attention_mask"] == 1
    torch.testing.assert_close(h[is_real], output[is_real], rtol=0, atol=2e-6)
    assert (h - without)[is_real].abs().max() > 0.01


@pytest.mark.parametrize("family", ["gpt2", "roberta"])
def test_it_begins_as_the_frozen_model(family):
    bb = small_backbone(family)
    cfg = RunConfig("shadow")
    batch = random_batch()
    with torch.no_grad():
        h = run_layers(bb, batch, cfg.method_config.plan(bb, cfg)).h
        expected = run_layers(bb, batch).h
    torch.testing.assert_close(h, expected, rtol=0, atol=0)


def test_parameters_are_one_layer_and_bottlenecks():
    """In each layer 2rd for W_down and W_up, and 2(2rd + r + d) for the update, but the last."""
    bb = small_backbone("llama")
    cfg = RunConfig("shadow", bottleneck=4)
    model = PlannedModel(bb, ClassificationHead(bb.d, 2, "last"), cfg.method_config.plan(bb, cfg))
    r, d, n = 4, bb.d, bb.n_layers
    layer = sum(p.numel() for p in [*bb.layers[0].parameters(), *bb.norm.parameters()])
    expected = layer + n * 2 * r * d + (n - 1) * 2 * (2 * r * d + r + d)
    assert count_parameters(model)["prompt"] == expected
    assert count_parameters(model)["backbone"] == 0

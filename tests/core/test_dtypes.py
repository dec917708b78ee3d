"""Frozen weights in bfloat16: when they are used, how exact they are, and what stays float32.

Frozen linear layers in int8: rounding, gradients, families, files, and what is refused.
"""

import pytest
import torch
import torch.nn.functional as F
from small import config, small_task
from small_models import (
    SMALL_CONFIGS,
    attention_implementations,
    random_batch,
    small_backbone,
)
from torch import nn

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.dtypes import (
    Int8Linear,
    cast_weights,
    is_quantised,
    quantise_linear_layers,
)
from idp_tutorial.core.loop import run_layers
from idp_tutorial.runs.experiment import Experiment, run_experiment, train_and_save
from idp_tutorial.saving.prompt_files import from_pretrained
from idp_tutorial.utils.checks import UserError


def test_other_dtypes_are_refused():
    for dtype in ("float16", "auto"):
        for call in (
            lambda dtype=dtype: RunConfig(dtype=dtype),
            lambda dtype=dtype: load_backbone("tiny", dtype=dtype),
        ):
            with pytest.raises(
                ValueError, match=f"dtype must be 'float32', 'bfloat16' or 'int8', got '{dtype}'"
            ):
                call()


def test_a_record_contains_the_dtype_of_the_weights():
    cfg = config(
        method="lpt-npg", backbone="tiny", dtype="bfloat16", steps=2, eval_every=2, cache="none"
    )
    record = run_experiment(cfg, small_task())
    assert (record["dtype"], record["weights_dtype"]) == ("bfloat16", "bfloat16") and record[
        "score"
    ] >= 0


@pytest.mark.parametrize(
    "name",
    [n for n in SMALL_CONFIGS if small_backbone(n, attention_implementations(n)[0]).has_lm_head],
)
@torch.no_grad()
def test_logits_of_every_family_are_near_those_in_float32(name):
    bb = small_backbone(name, attention_implementations(name)[0])
    b = random_batch()
    want = bb.lm_logits(run_layers(bb, b).state_at("mask"))
    cast_weights(bb.model, torch.bfloat16)
    got = bb.lm_logits(run_layers(bb, b).state_at("mask"))
    assert got.dtype == torch.float32 and ((got - want).abs().mean() / want.std()).item() < 0.03


def test_weights_are_rounded_to_127_steps_of_each_row():
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.27, -0.01, 0.504], [0.0, 0.0, 0.0]]))
    layer = Int8Linear(linear.weight, linear.bias)
    assert layer.weight.tolist() == [[127, -1, 50], [0, 0, 0]] and layer.weight.dtype == torch.int8
    x = torch.tensor([[1.0, 2.0, 3.0]])
    expected = torch.tensor([[1.27 - 0.02 + 1.5, 0.0]]) + linear.bias
    torch.testing.assert_close(layer(x), expected)


def test_the_gradient_of_the_input_is_that_of_the_rounded_matrix():
    layer = Int8Linear(torch.randn(4, 5), nn.Parameter(torch.randn(4), requires_grad=False))
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)


@pytest.mark.parametrize("name", SMALL_CONFIGS)
@torch.no_grad()
def test_states_of_every_family_are_near_those_in_float32(name):
    bb = small_backbone(name, attention_implementations(name)[0])
    batch = random_batch()
    expected = run_layers(bb, batch).h
    quantise_linear_layers(bb.layers)
    assert is_quantised(bb.layers)
    kinds = {type(m).__name__ for m in bb.layers.modules()}
    assert not kinds & {"Linear", "Conv1D"}
    is_real = batch["attention_mask"] == 1
    h = run_layers(bb, batch).h
    assert F.cosine_similarity(h[is_real], expected[is_real], dim=-1).min() > 0.999


@pytest.mark.parametrize("backbone", ["tiny", "tiny-gpt2"])
def test_a_backbone_in_int8_has_a_quarter_of_the_bytes(backbone):
    def count_bytes(bb):
        tensors = [*bb.layers.parameters(), *bb.layers.buffers()]
        return sum(t.numel() * t.element_size() for t in tensors)

    share = count_bytes(load_backbone(backbone, dtype="int8")) / count_bytes(
        load_backbone(backbone)
    )
    assert 0.25 < share < 0.27


def test_prompts_are_trained():
    cfg = config(method="lpt-npg", backbone="tiny", dtype="int8", steps=8, lr=1e-2, cache="none")
    model, log = Experiment(cfg, small_task()).fit()
    assert log.losses[-1] < log.losses[0]
    assert {p.dtype for p in model.trained_parameters().values()} == {torch.float32}


def test_a_trained_model_is_loaded_in_int8_and_the_record_names_the_dtype(tmp_path):
    cfg = config(method="prompt-tuning", backbone="tiny", dtype="int8", steps=2, lr=1e-2)
    record = train_and_save(cfg, tmp_path, small_task())
    assert (record["dtype"], record["weights_dtype"]) == ("int8", "int8")
    model = from_pretrained(tmp_path)[0]
    assert is_quantised(model.backbone.layers)


def test_methods_that_change_the_linear_layers_are_refused():
    cfg = config(method="lora", backbone="tiny", dtype="int8", lr=1e-3)
    with pytest.raises(UserError, match="'lora' changes the linear layers .* use dtype='bfloat16'"):
        Experiment(cfg, small_task()).build_model()
    int8_backbone = load_backbone("tiny", dtype="int8")
    with pytest.raises(UserError, match="'efl' changes the linear layers"):
        build_model(config(method="efl"), int8_backbone, small_task())
    cfg = config(method="fine-tuning", backbone="tiny", dtype="int8", lr=1e-3)
    model = build_model(cfg, load_config_backbone(cfg), small_task())
    assert not is_quantised(model.backbone.layers)  # it trains the weights in float32


def test_a_network_beside_a_backbone_in_int8_is_trained():
    pytest.importorskip("peft")
    cfg = config(method="shadow", backbone="tiny", dtype="int8", steps=2, lr=1e-3)
    record = run_experiment(cfg, small_task())
    assert (record["weights_dtype"], record["params"]["backbone"]) == ("int8", 0)


def test_four_bits_are_refused_in_a_sentence():
    for call in (
        lambda: RunConfig("lpt", dtype="int4"),
        lambda: load_backbone("tiny", dtype="int4"),
    ):
        with pytest.raises(UserError, match=r"weights in 4 bits are not supported; int8"):
            call()

"""Frozen weights in bfloat16: when they are used, how exact they are, and what stays float32."""

import pytest
import torch
from small import backbone, config, small_task

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core import dtypes
from idp_tutorial.core.dtypes import cast_weights, choose_faster_dtype, measure_bfloat16_speedup
from idp_tutorial.core.loop import run_layers
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.runs.experiment import run_experiment
from idp_tutorial.testing.small_models import (
    SMALL_CONFIGS,
    attention_implementations,
    random_batch,
    small_backbone,
)


def test_each_size_is_measured_once(monkeypatch):
    calls = []
    times = {torch.float32: 2.0, torch.bfloat16: 1.0}
    monkeypatch.setattr(
        dtypes, "_time_product", lambda x, w: calls.append(x.dtype) or times[x.dtype]
    )
    measure_bfloat16_speedup.cache_clear()
    assert (
        measure_bfloat16_speedup("cpu", 8, 16) == measure_bfloat16_speedup("cpu", 8, 16) == 2.0
        and len(calls) == 12
    )
    assert choose_faster_dtype(backbone().model, "cpu") == torch.bfloat16 and len(calls) == 24
    measure_bfloat16_speedup.cache_clear()
    monkeypatch.setattr(dtypes, "_time_product", lambda x, w: 1.0)
    assert choose_faster_dtype(backbone().model, "cpu") == torch.float32
    measure_bfloat16_speedup.cache_clear()


def test_auto_uses_the_faster_dtype(monkeypatch):
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(dtypes, "choose_faster_dtype", lambda model, device=None: dtype)
        assert load_backbone("tiny", dtype="auto").word_embeddings.weight.dtype == dtype
    assert load_backbone("tiny").word_embeddings.weight.dtype == torch.float32  # whatever is faster
    with pytest.raises(
        ValueError, match="dtype must be 'float32', 'bfloat16', 'int8' or 'auto', got 'float16'"
    ):
        RunConfig(dtype="float16")
    with pytest.raises(
        ValueError, match="dtype must be 'float32', 'bfloat16', 'int8' or 'auto', got 'float8'"
    ):
        load_backbone("tiny", dtype="float8")  # and no word of damage


@pytest.mark.parametrize("method", METHODS)
def test_trainable_parameters_are_float32(method):
    if method == "m-idpg-phm-glove":
        return  # reads a file
    cfg = config(method=method, backbone="tiny", dtype="bfloat16")
    model = build_model(cfg, load_config_backbone(cfg), small_task())
    assert {p.dtype for p in model.trained_parameters().values()} == {torch.float32}
    held = "float32" if method in ("fine-tuning", "efl", "bitfit") else "bfloat16"
    assert model.backbone.weights_info["weights_dtype"] == held


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

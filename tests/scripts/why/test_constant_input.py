"""Check `results/why/constant_input.py`, the static prompt with NPG's network."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from small import backbone, batch_of

from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.methods.lpt import lpt_plan
from idp_tutorial.methods.method_registry import METHODS
from idp_tutorial.methods.npg import NaivePromptGenerator

WHY = Path(__file__).parents[3] / "results/why"

pytestmark = pytest.mark.skipif(not WHY.exists(), reason="results/why is not in this installation")


@pytest.fixture
def constant_input(monkeypatch):
    """Return the script as a module, imported beside `factorial.py`; then remove its method."""
    monkeypatch.syspath_prepend(WHY)
    for name in ("constant_input", "factorial"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("constant_input")
    yield module
    del METHODS[module.NAME]


def collect_prompts(source, layer=1):
    """Return the prompts `[2,t,d]` of two texts."""
    bb = backbone("roberta")
    model = PlannedModel(bb, ClassificationHead(bb.d, 2), lpt_plan(bb, source, layer)).eval()
    prompts = []
    source.register_forward_hook(lambda _module, _inputs, prompt: prompts.append(prompt))
    with torch.inference_mode():
        model(batch_of(bb, n=2))
    return prompts[0]


def test_the_control_has_npgs_size_and_does_not_read_the_text(constant_input):
    torch.manual_seed(0)
    d = backbone("roberta").d
    control = constant_input.ConstantInputGenerator(d, t=5, m=16, dropout=0.1)
    npg = NaivePromptGenerator(d, t=5, m=16)
    sizes = [[p.shape for p in source.parameters()] for source in (control, npg)]
    assert sizes[0] == sizes[1]
    first, second = collect_prompts(control)
    assert first.shape == (5, d)
    assert torch.equal(first, second) and first.abs().sum() > 0
    first, second = collect_prompts(npg)
    assert not torch.allclose(first, second)


def test_the_control_is_trained_like_npg(constant_input):
    factorials = constant_input.factorial.FACTORIALS
    control, layers = factorials["constant-input"], factorials["layers"]
    assert control["learning_rates"] == layers["learning_rates"]["lpt-npg"]
    assert [*control["prompt_lengths"].values()] == [layers["prompt_lengths"]["lpt-npg"]]
    for key in ("backbone", "head", "dtype", "initial_heads"):
        assert control[key] == layers[key]

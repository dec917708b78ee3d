"""The table of families."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import transformers

from idp_tutorial.families.family import FAMILIES, get_family, register_family
from idp_tutorial.families.modernbert import ModernBertBackbone
from idp_tutorial.utils.checks import UserError


def test_registering_a_family():
    class Loop:
        causal = False
        default_pooling = "cls"

    before = deepcopy(dict(FAMILIES))
    try:
        register_family("mine", Loop, "causal", causal=True)
        assert (
            FAMILIES["mine"].backbone_class.causal
            and not Loop.causal
            and FAMILIES["mine"].auto_class_name == "AutoModelForCausalLM"
        )
        with pytest.raises(ValueError, match="Loop has no attribute 'casual'"):
            register_family("mine", Loop, casual=True)
    finally:
        for k in set(FAMILIES) - set(before):
            del FAMILIES[k]
    with pytest.raises(
        ValueError, match="'state/mamba' is a 'mamba' model.*bert.*t5.*Add a family"
    ):
        get_family(SimpleNamespace(model_type="mamba"), "state/mamba")


def test_modernbert_of_transformers_5_0_is_refused(monkeypatch):
    """Its config has `local_attention` and no `sliding_window`."""
    model = SimpleNamespace(config=SimpleNamespace(local_attention=128))
    monkeypatch.setattr(transformers, "__version__", "5.0.0")
    with pytest.raises(UserError, match="needs transformers 5.1 or newer, found 5.0.0: pip"):
        ModernBertBackbone(model, None)

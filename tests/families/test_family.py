"""The table of families."""

from copy import deepcopy
from types import SimpleNamespace

import pytest

from idp_tutorial.families.family import FAMILIES, get_family, register_family


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
        ValueError, match="'state/mamba' is a 'mamba' model.*bert.*t5.*add its family"
    ):
        get_family(SimpleNamespace(model_type="mamba"), "state/mamba")

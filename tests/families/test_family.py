"""The table of families, and the version of transformers that they need."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest

from idp_tutorial.families import _OLDEST_TRANSFORMERS, _check_transformers
from idp_tutorial.families.family import FAMILIES, get_family, register_family
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


def test_an_early_version_of_transformers_is_refused():
    settings = (Path(__file__).parents[2] / "settings.ini").read_text(encoding="utf-8")
    assert f" transformers>={_OLDEST_TRANSFORMERS} " in settings
    for version in ("4.57.6", "5.0.0", "5.14.1"):
        with pytest.raises(UserError, match=f"{version} is installed, but 5.15 or newer is needed"):
            _check_transformers(version)
    for version in ("5.15.0", "5.23.0", "6.0.0.dev0"):
        _check_transformers(version)

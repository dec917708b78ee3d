"""The model of a config: what a method, a head and a task need of each other."""

from dataclasses import dataclass

import pytest
from small import backbone, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.efl import EntailmentConfig
from idp_tutorial.methods.method_registry import register


def test_class_weights_of_an_entailment_method_are_refused_with_its_name():
    rows = dict(METHODS)

    @register(
        "my-efl",
        reference="this test",
        learning_rates=(1e-5, 2e-5, 3e-5),
        insertion_point="weights",
        kind="entailment",
        trains_backbone=True,
    )
    @dataclass(frozen=True, kw_only=True)
    class MyConfig(EntailmentConfig):
        """Options of another method that scores pairs."""

    try:
        with pytest.raises(ValueError, match="a classification head, but method 'my-efl' scores"):
            build_model(RunConfig("my-efl", class_weight="balanced"), backbone(), small_task())
    finally:
        METHODS.clear()
        METHODS.update(rows)

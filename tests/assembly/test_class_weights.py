"""Class weights: their values, and what they need of a method and a task."""

from dataclasses import dataclass, replace

import pytest
from small import backbone, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.efl import EFLConfig
from idp_tutorial.methods.method_registry import register


def test_class_weights_of_an_entailment_method_are_refused_with_its_name():
    rows = dict(METHODS)

    @register(
        "my-efl",
        reference="this test",
        learning_rates=(1e-5, 2e-5, 3e-5),
        trains_backbone=True,
    )
    @dataclass(frozen=True, kw_only=True)
    class MyConfig(EFLConfig):
        """Options of another method that scores pairs."""

    try:
        with pytest.raises(ValueError, match="method 'my-efl' scores pairs"):
            build_model(RunConfig("my-efl", class_weight="balanced"), backbone(), small_task())
    finally:
        METHODS.clear()
        METHODS.update(rows)


def class_weights(class_weight, train):
    """Return the weights in the head's loss, with training rows of the given labels."""
    rows = [dict(sentence1="a text", label=label) for label in train]
    task = replace(small_task(), splits=dict(train=rows))
    cfg = RunConfig("head-only", class_weight=class_weight)
    return build_model(cfg, backbone(), task).head.class_weights


def test_balanced_weights_are_inverse_to_the_frequencies():
    weights = class_weights("balanced", [0, 0, 0, 1])
    assert weights.tolist() == pytest.approx([4 / (2 * 3), 4 / (2 * 1)])


def test_a_class_without_rows_gets_a_finite_weight():
    assert class_weights("balanced", [0, 0]).tolist() == [0.5, 1.0]  # as if it had one row


def test_weights_by_name_leave_the_other_classes_at_one():
    first = small_task().labels[0]
    assert class_weights({first: 7}, [0, 1]).tolist() == [7, 1]
    with pytest.raises(ValueError, match="class in class_weight"):
        class_weights({"no such class": 7}, [0, 1])

"""A diagram of a method describes its plan."""

import pytest
from method_diagrams import (
    OPERATION_LABELS,
    draw_prompted_model,
)

from idp_tutorial.core.context import INPUT


def test_a_diagram_describes_layer_operation_and_input():
    for op in OPERATION_LABELS:
        steps = {2: op} if op in ("insert", "kv") else {0: "insert", 2: op}
        assert OPERATION_LABELS[op] in str(draw_prompted_model(4, steps))
    assert "before every layer" in str(draw_prompted_model(4, dict.fromkeys(range(4), "kv")))
    assert "before layer 1, 2, 3 " in str(
        draw_prompted_model(4, {INPUT: "insert", **dict.fromkeys((1, 2, 3), "add")})
    )
    assert "through 4 of 4" in str(draw_prompted_model(4, {INPUT: "insert"}, "first_pass"))
    with pytest.raises(ValueError, match="generator_input must be .*got 'minds'"):
        draw_prompted_model(4, {0: "insert"}, "minds")


@pytest.mark.parametrize("layers", [1, 8, 24])
def test_a_diagram_has_a_box_for_each_layer(layers):
    p = draw_prompted_model(layers, {layers - 1: "insert"}, "first_state")
    assert sum(s.kind == "layer" for s in p.shapes) == layers and p.h < 600

"""Functions of the scripts in `results/`, which write the records beside them."""

import importlib.util
from pathlib import Path

import pytest
import torch

from idp_tutorial.methods.phm import PHMLinear

RESULTS = Path(__file__).resolve().parents[1] / "results"


def load_script(path):
    """Return a script of `results/` as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, RESULTS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_implementations_of_phm_are_the_same_function():
    phm = load_script("speed/phm.py")
    layer = PHMLinear(8, 12, 4).double()
    x = torch.randn(3, 8).double()
    expected = x @ layer.weight + layer.bias  # test_phm.py checks it entry by entry
    for way in ("auto", "factored", "materialised", "idpg", "compacter"):
        torch.testing.assert_close(phm.PHM_IMPLEMENTATIONS[way](layer, x), expected)
    records = phm.measure_phm(256, 2, (32,), (4, 3), (1,), min_seconds=0.001)
    assert [(r["n"], r["way"]) for r in records] == [  # 3 does not divide
        (4, way) for way in phm.PHM_IMPLEMENTATIONS
    ]
    mb = {r["way"]: r["peak_mb"] for r in records}
    # IDPG's code stores n matrices (both layers), the materialised path one, the factored path none
    W = (256 * 32 + 32 * 512) * 4 / 1e6
    assert mb["factored"] < W < mb["materialised"] < 3 * W and mb["idpg"] > 4 * W


@pytest.mark.parametrize(
    "text,parts",
    [
        ("hot soup, good", ["hot soup", "good"]),
        ("hot, spicy soup, good", ["hot, spicy soup", "good"]),
        ("good", ["", "good"]),
    ],
)
def test_the_verdict_is_the_last_part_of_a_short_answer(text, parts):
    assert load_script("writing/short_answers.py").split_answer(text) == parts

"""Check `results/crossing/crossing.py`, which measures who reads."""

import importlib
from collections import Counter
from pathlib import Path

import pytest

CROSSING = Path(__file__).parents[3] / "results/crossing"

pytestmark = pytest.mark.skipif(
    not CROSSING.exists(), reason="results/crossing is not in this installation"
)


@pytest.mark.parametrize(("n_rows", "expected"), [(2000, 1000), (1001, 501), (1000, 1000), (3, 3)])
def test_rows_of_a_sorted_split_are_selected_from_every_class(monkeypatch, n_rows, expected):
    monkeypatch.syspath_prepend(CROSSING)
    crossing = importlib.import_module("crossing")
    rows = [dict(label=2 * i // n_rows) for i in range(n_rows)]
    selected = crossing.select_evenly(rows, 1000)
    labels = Counter(row["label"] for row in selected)
    assert len(selected) == expected and abs(labels[0] - labels[1]) <= 1

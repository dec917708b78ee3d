"""Compare today's values with the golden ones.

`golden/make.py` writes the golden values into `golden/*.json`.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from golden import make

load_stored = cache(make.load_stored)
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def compare_mappings(new: dict, old: dict, is_exact: bool, path: str) -> Iterator[str]:
    """Yield the differences between two mappings, whose keys must be in the same order."""
    if [*new] != [*old]:
        yield f"{path}: keys {[*new]}, not {[*old]}"
        return
    for key in old:
        if is_exact or key != "bits":
            yield from differences(new[key], old[key], is_exact, f"{path}/{key}")


def compare_lists(new: list, old: list, is_exact: bool, path: str) -> Iterator[str]:
    """Yield the differences between two lists."""
    if len(new) != len(old):
        added = [entry for entry in new if entry not in old][:5]
        missing = [entry for entry in old if entry not in new][:5]
        yield f"{path}: {len(new)} entries, not {len(old)}; new {added}, missing {missing}"
        return
    for i, (new_entry, old_entry) in enumerate(zip(new, old, strict=True)):
        yield from differences(new_entry, old_entry, is_exact, f"{path}[{i}]")


def are_floats_close(new: float, old: float, path: str) -> bool:
    """Return whether two floats of different machines are equal up to rounding."""
    tolerance = 1e-5
    if "/bf16" in path:
        tolerance = 1e-2
    elif "/logits" in path or "/losses" in path:  # AdamW amplifies rounding
        tolerance = 5e-4
    relative = 1e-3 if "/choice" in path else 1e-4
    return new == pytest.approx(old, rel=relative, abs=tolerance)


def are_texts_close(new: str, old: str) -> bool:
    """Return whether two texts are equal up to the last digits of their numbers."""
    new_numbers = [float(number.replace(",", "")) for number in NUMBER.findall(new)]
    old_numbers = [float(number.replace(",", "")) for number in NUMBER.findall(old)]
    return NUMBER.sub("#", new) == NUMBER.sub("#", old) and new_numbers == pytest.approx(
        old_numbers, rel=1e-3, abs=0.06
    )


def are_equal(new: Any, old: Any, is_exact: bool, path: str) -> bool:
    """Return whether two values, neither mappings nor lists, are equal."""
    if isinstance(old, float) and is_exact and isinstance(new, float):
        # two processors of one name differ in the sums of numpy
        return new == pytest.approx(old, rel=1e-12, abs=0, nan_ok=True)
    if isinstance(old, float) and not is_exact and isinstance(new, (int, float)):
        return are_floats_close(new, old, path)
    is_message = "/help" in path or "/error" in path
    if isinstance(old, str) and isinstance(new, str) and not is_exact and not is_message:
        return are_texts_close(new, old)
    return type(new) is type(old) and new == old


def differences(new: Any, old: Any, is_exact: bool, path: str = "") -> Iterator[str]:
    """Yield the differences between two values of JSON.

    If `is_exact`, only the last digits may differ, otherwise values may differ by rounding.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        yield from compare_mappings(new, old, is_exact, path)
    elif isinstance(old, list) and isinstance(new, list):
        yield from compare_lists(new, old, is_exact, path)
    elif not are_equal(new, old, is_exact, path):
        yield f"{path}: {new!r}, not {old!r}"


def assert_as_stored(new: Any, old: Any, machine: dict[str, str], path: str = "") -> None:
    """Assert that a value equals the stored one, exactly on the machine that stored it."""
    all_differences = [*differences(new, old, machine == make.describe_machine(), path)]
    count = f"{len(all_differences)} differences"
    assert not all_differences, "\n".join([count, *all_differences[:12]])


@pytest.mark.parametrize(
    "file,name", [(f, n) for f, (_, names) in make.FILES.items() for n in names], ids=lambda v: v
)
def test_values_equal_the_stored_ones(file, name):
    machine, old = load_stored(file)
    assert_as_stored(make.compute_value(file, name), old[name], machine, f"{file}/{name}")


@pytest.mark.parametrize("file", make.FILES)
def test_every_value_is_stored(file):
    assert [*load_stored(file)[1]] == [*make.FILES[file][1]]


def test_rounding_is_a_difference_only_on_the_machine_that_stored():
    stored = {"x": [1.0, 2], "s": "score 21.7", "bits": "ab"}
    rounded = {"x": [1.0 + 1e-7, 2], "s": "score 21.74", "bits": "cd"}
    assert [*differences(stored, stored, True)] == []
    assert [*differences(rounded, stored, False)] == []
    assert len([*differences(rounded, stored, True)]) == 3


def test_the_last_digits_are_never_a_difference():
    assert [*differences({"x": 1.0 + 1e-15}, {"x": 1.0}, True)] == []
    assert [*differences({"x": 1.0 + 1e-11}, {"x": 1.0}, True)] != []


@pytest.mark.parametrize(
    "change",
    [
        {"x": [1.001, 2]},
        {"x": [1.0, 3]},
        {"x": [1.0]},
        {"s": "score 22.7"},
        {"s": "scores 21.7"},
        {"new": 1},
    ],
    ids=str,
)
def test_a_changed_value_is_a_difference(change):
    stored = {"x": [1.0, 2], "s": "score 21.7", "bits": "ab"}
    assert len([*differences({**stored, **change}, stored, False)]) == 1

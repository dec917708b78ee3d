"""The defaults of a comparison are declared once, in a module that imports nothing heavy."""

import subprocess
import sys

import pytest

from idp_tutorial.cli.compare import compare_command
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.runs.defaults import DEFAULT_METHODS, DEFAULT_OPTIONS, default_minutes


def test_the_defaults_are_those_of_the_command():
    options = compare_command.options()
    assert options["methods"].default == ",".join(DEFAULT_METHODS)
    assert {name: options[name].default for name in DEFAULT_OPTIONS} == DEFAULT_OPTIONS
    assert {*DEFAULT_METHODS} <= {*ALL_METHODS}


@pytest.mark.parametrize(
    "length,minutes", [((240, None), 15), ((60, None), 0), ((240, 2.0), 0), ((60, 2.0), 0)]
)
def test_a_time_is_the_default_of_the_default_length_alone(length, minutes):
    assert default_minutes(*length, n_seeds=3) == minutes


def test_the_defaults_are_read_without_pytorch():
    code = "import sys, idp_tutorial.runs.defaults; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

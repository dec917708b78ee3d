"""Names that a user imports from the package, and when they are imported."""

import importlib
import subprocess
import sys

import pytest

from idp_tutorial.utils.checks import EXTRA_OF_PACKAGE

PACKAGES = ["core", "data", "families", "backbones", "training", "methods", "assembly", "saving"]
PACKAGES = ["idp_tutorial", *(f"idp_tutorial.{name}" for name in [*PACKAGES, "runs", "serving"])]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_listed_name_is_importable(package):
    module = importlib.import_module(package)
    assert module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_the_package_hands_on_what_a_first_experiment_needs():
    import idp_tutorial

    needed = "load_backbone load_task RunConfig METHODS register fit run_experiment generate"
    assert set(needed.split()) <= set(idp_tutorial.__all__) <= set(dir(idp_tutorial))
    assert 20 <= len(idp_tutorial.__all__) <= 23


def test_importing_the_package_imports_no_large_library():
    code = "import sys, idp_tutorial; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.long
def test_the_public_names_need_no_optional_package():
    hidden = dict.fromkeys(EXTRA_OF_PACKAGE)  # Python finds no package that is None
    code = f"""import sys; sys.modules |= {hidden}
import importlib
for package in {PACKAGES}:
    module = importlib.import_module(package)
    for name in module.__all__:
        getattr(module, name)"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_an_unknown_name_is_an_attribute_error():
    import idp_tutorial

    with pytest.raises(AttributeError, match="load_backbones"):
        idp_tutorial.load_backbones  # noqa: B018

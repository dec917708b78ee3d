"""The Makefile: which build of PyTorch it installs, and what its commands inherit."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is missing")


def make(*arguments, **variables):
    """Return what `make` prints in the root of the project, which has no other variables."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", ""), **variables}
    process = subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return process.stdout


@pytest.mark.parametrize("cpu", ["0", "1"])
def test_the_cpu_build_of_pytorch_is_installed_if_asked_for(cpu):
    lines = make("-n", "-B", ".venv/.dev", f"CPU={cpu}").splitlines()
    torch, *_ = [i for i, line in enumerate(lines) if "/whl/cpu" in line] or [None]
    everything = next(i for i, line in enumerate(lines) if ".[dev]" in line)
    assert (torch is not None) == (cpu == "1")
    assert torch is None or torch < everything


def test_installed_modules_are_compiled_and_commands_may_write_bytecode(tmp_path):
    assert "-m compileall" in make("-n", "-B", ".venv/.dev")
    extended = tmp_path / "Makefile"
    extended.write_text(f"include {ROOT / 'Makefile'}\nshow-environment:\n\t@env\n")
    names = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
    output = make("-f", str(extended), "show-environment", **dict.fromkeys(names, "x"), KEPT="x")
    assert "KEPT=x" in output.splitlines()
    assert not any(line.startswith(names) for line in output.splitlines())

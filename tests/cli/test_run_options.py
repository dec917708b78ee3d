import os
import subprocess
import sys
from pathlib import Path

import pytest

from idp_tutorial.cli.main import COMMAND_NAMES

LIVE = """
import sys
from idp_tutorial.assembly.config import describe_all_options
"""
STORED = """
import sys
from importlib.resources import files
assert "idp_tutorial.assembly.config" not in sys.modules
"""


def run(code, *, complete=""):
    """Run code in a process of its own, in which no test has registered a method."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    if complete:
        point = str(len(complete))
        environment |= dict(_ARGCOMPLETE="1", COMP_LINE=complete, COMP_POINT=point, COMP_TYPE="9")
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, encoding="utf-8"
    )
    return result.stdout, result.stderr, result.returncode


def test_the_file_has_the_options_of_the_classes():
    read = (
        "sys.stdout.write((files('idp_tutorial') / 'assets/run_options.json').read_text('utf-8'))"
    )
    stored, error, _ = run(STORED + read)
    docs = str(Path(__file__).parents[2] / "docs")
    write = f"sys.path.insert(0, {docs!r})\nfrom options import format_run_options\n"
    write += "sys.stdout.write(format_run_options(describe_all_options()))"
    live, *_ = run(LIVE + write)
    assert stored == live, "run `python docs/options.py`" + error


@pytest.mark.parametrize("name", COMMAND_NAMES)
def test_help_is_the_same_without_the_classes(name):
    show = f"from idp_tutorial.cli.main import main\nmain([{name!r}, '--help'])"
    without, _, code = run(f"{STORED}\n{show}")
    assert (without, 0) == (run(f"{LIVE}\n{show}")[0], code) and "--" in without


@pytest.mark.parametrize("word", ["--help", "--prompt_lenght=3"])
@pytest.mark.parametrize("name", ["train", "compare", "predict"])
def test_help_and_a_misspelt_option_need_no_pytorch(name, word):
    code = f"""
import sys
from idp_tutorial.cli.main import main
try:
    main([{name!r}, {word!r}])
finally:
    loaded = {{"torch", "transformers", "datasets", "pandas"}} & {{*sys.modules}}
    sys.stderr.write(f"loaded: {{sorted(loaded)}}")
"""
    _, error, status = run(code)
    assert "loaded: []" in error and status == (0 if word == "--help" else 2)


def test_a_method_of_a_program_is_in_its_help(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
from dataclasses import dataclass
from idp_tutorial.cli.main import main
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.method_registry import register
@register("own-method", reference="here", learning_rates=(1e-3, 1e-2, 1e-1))
@dataclass(frozen=True, kw_only=True)
class OwnConfig(METHODS["lpt"].config_class):
    option_group = "the method"
    own_option: int = 3  # a number of one's own
main(["train", "--help"])
"""
    )
    shown, error, _ = run(f"import runpy\nrunpy.run_path({str(program)!r}, run_name='program')")
    assert "--own_option" in shown, error

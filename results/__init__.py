"""The records of this project, and the scripts that write and read them.

The package `idp_tutorial` imports nothing from here, and a wheel does not contain it. A script
that imports others runs from the root of the repository: `python -m results.depth.sweep --help`.
A notebook adds the root to `sys.path` first.
"""

import shlex
from importlib import import_module
from typing import Any

from idp_tutorial.cli.main import SCRIPTS as FORMER_COMMANDS
from idp_tutorial.cli.main import load_command

__all__ = ["SCRIPTS", "load_script", "split_command", "find_command"]

# name: script whose options are declared as those of a command
SCRIPTS = {**FORMER_COMMANDS, "figures": "results.figures.run"}


def load_script(
    name: str,  # a key of `SCRIPTS`
) -> Any:  # a `Command` of `idp_tutorial.cli.commands`
    """Return the command that a script runs."""
    return getattr(import_module(SCRIPTS[name]), f"{name}_command")


def split_command(
    text: str,  # such as 'idp train --task rte' or 'python -m results.depth.sweep --task rte'
) -> tuple[str, list[str]]:
    """Return the name of a command or of a script, and its arguments."""
    program, *words = shlex.split(text)
    if program == "idp":
        return words[0], words[1:]
    modules = {module: name for name, module in SCRIPTS.items()}
    return modules[words[1]], words[2:]


def find_command(
    name: str,  # of a command of `idp`, or a key of `SCRIPTS`
) -> Any:  # a `Command`
    """Return the command of `idp` or of a script."""
    return load_script(name) if name in SCRIPTS else load_command(name)

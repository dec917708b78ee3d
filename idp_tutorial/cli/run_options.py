"""The options of runs as a command line needs them, read from a file and not from the classes.

The classes that declare the options belong to methods, whose modules import PyTorch, which takes
seconds. Help, Tab completion and the message about a misspelt option need only names, defaults and
help texts. `python docs/options.py` writes these into `assets/run_options.json`; values are checked
by the classes. Where those are imported already, as in a program that has registered a method of
its own, they are asked.
"""

import json
import sys
from dataclasses import MISSING
from importlib.resources import files

from idp_tutorial.utils.options import Option

_KINDS = {kind.__name__: kind for kind in (bool, int, float, str)}


def read_run_options() -> dict[str, Option]:  # name: option
    """Return the options of all runs and of all methods, as `describe_all_options` does."""
    if "idp_tutorial.methods.method_registry" in sys.modules:
        from idp_tutorial.assembly.config import describe_all_options

        return describe_all_options()
    text = (files("idp_tutorial") / "assets/run_options.json").read_text(encoding="utf-8")
    options = {}
    for row in json.loads(text):
        options[row["name"]] = Option(
            row["name"],
            _KINDS[row["kind"]],
            row.get("default", MISSING),
            row["help"],
            row["group"],
            is_optional=True,
            choices=tuple(row.get("choices", ())),
        )
    return options

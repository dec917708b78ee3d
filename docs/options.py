"""Write the tables of all options, and the file that commands read, from the declaring classes.

The tables are in `docs/options.md`. Commands read `assets/run_options.json` of the package.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from idp_tutorial.assembly.config import (
    describe_all_options,
    general_options,
    methods_with_option,
)
from idp_tutorial.cli.commands import Command
from idp_tutorial.cli.main import COMMAND_NAMES, load_command
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.utils.checks import Range
from idp_tutorial.utils.options import Option, declared_options

FILE = Path(__file__).with_name("options.md")
READ_BY_COMMANDS = FILE.parents[1] / "idp_tutorial/assets/run_options.json"
INTRODUCTION = """# Options

Say `--backbone` first: the default of most commands, `tiny`, is a small model that was trained for
this course, and no measure of what a method can do. `idp compare` chooses a real one by itself.
`minilm`, a sentence encoder, comes with the extra `backbones`; any name on the hub works too.

Every option can be given in Python (`RunConfig("lpt-npg", bottleneck=64, steps=100)`), on the
command line (`idp train --method lpt-npg --bottleneck 64 --steps 100`) and in a YAML file (`idp
train --config run.yaml`). A method refuses an option that it does not have. `python
docs/options.py` writes this page from the classes that declare the options.
"""
FIRST_GROUPS = "the model", "a known task", "training", "the head"  # in this order, then the others
METHOD_PREFIXES = "s-idpg", "m-idpg", "lpt", "id-spam"
LARGE = 10_000  # a limit from here on is there to catch mistakes, and is not shown
SHARED_BY = 3  # commands; an option of so many is listed once


def _format_cell(value: object) -> str:
    # `<s>` would strike out the text after it
    return str(value).replace("|", "\\|").replace("<s>", "`<s>`")


def _format_limits(limits: Range) -> str:
    """Return the limits of a number that a reader needs: `0 to 1`, `from 1`, `above 0`."""
    low = f"{limits.low:g}" if limits.low > -LARGE else ""
    high = f"{limits.high:g}" if limits.high < LARGE else ""
    if limits.is_high_excluded and high:
        high = f"below {high}"
    if low and high:
        return f"{low} to {high}"
    if low:
        return f"{'above' if limits.is_low_excluded else 'from'} {low}"
    return f"at most {high}" if high else ""


def _format_values(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    kinds = {bool: "true, false", int: "integer", float: "number"}
    limits = [_format_limits(check) for check in option.checks if isinstance(check, Range)]
    return " ".join(filter(None, [kinds.get(option.kind, "text"), *limits]))


def _format_default(default: object) -> str:
    return "" if default in (None, MISSING, "") else f"`{default}`"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(map(_format_cell, line))} |" for line in lines)


def _group_tables(options: dict[str, Option]) -> str:
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name, option in options.items():
        row = (f"`{name}`", _format_values(option), _format_default(option.default), option.help)
        groups.setdefault(option.group, []).append(row)
    heads = ("option", "values", "default", "meaning")
    names = dict.fromkeys([*FIRST_GROUPS, *groups])
    return "\n\n".join(f"### {name}\n\n{_table(heads, groups[name])}" for name in names)


def _format_methods(methods: list[str]) -> str:
    """Return the names of methods; `lpt*` stands for all whose names begin so."""
    names = list(methods)
    for prefix in METHOD_PREFIXES:
        group = [method for method in ALL_METHODS if method.startswith(prefix)]
        if set(group) <= set(names):
            position = names.index(group[0])
            names = [name for name in names if name not in group]
            names.insert(position, f"{prefix}*")
    return ", ".join(names)


def _method_table() -> str:
    """Return a table with a row for each meaning of each option of methods."""
    meanings: dict[tuple[str, str, str], dict[str, list[str]]] = {}  # methods by default
    for name in describe_all_options().keys() - general_options().keys():
        for method in methods_with_option(name):
            option = ALL_METHODS[method].options[name]
            meaning = (f"`{name}`", option.help, _format_values(option))
            methods = meanings.setdefault(meaning, {})
            methods.setdefault(_format_default(option.default) or "none", []).append(method)
    rows = []
    for (name, text, values), methods_by_default in meanings.items():
        users = "; ".join(f"{v}: {_format_methods(m)}" for v, m in methods_by_default.items())
        rows.append((name, values, users, text))
    return _table(("option", "values", "default: methods", "meaning"), sorted(rows))


def _describe_run_options(command: Command) -> str:
    """Return which options of runs a command takes, and which have another default."""
    defaults = ", ".join(f"`{name}` {_format_default(v)}" for name, v in command.defaults.items())
    other_defaults = f" Other defaults: {defaults}." if defaults else ""
    if command.run_options == ():
        return "It takes no options of runs and methods."
    if command.run_options is None:
        *names, last = (f"`{name}`" for name in command.excluded)
        excluded = f"{', '.join(names)} and {last}" if names else last
        return f"It also takes the options of runs and methods, except {excluded}.{other_defaults}"
    taken = ", ".join(f"`{name}`" for name in command.run_options)
    return f"Of the options of runs and methods it takes {taken}.{other_defaults}"


def _own_options() -> dict[str, list[Option]]:
    """Return the options of each command's own class."""
    return {
        name: [*declared_options(load_command(name).options_class).values()]
        for name in COMMAND_NAMES
    }


def _shared_table(commands_by_option: dict[tuple[str, str, str], list[str]]) -> str:
    """Return a table of the options that several commands have."""
    rows = [
        (f"`{name}`", default, meaning, ", ".join(commands))
        for (name, default, meaning), commands in commands_by_option.items()
    ]
    return _table(("option", "default", "meaning", "commands"), rows)


def _command_tables() -> str:
    uses: dict[tuple[str, str, str], list[str]] = {}  # commands by option, default and meaning
    own_options = _own_options()
    for command_name, options in own_options.items():
        for option in options:
            row = (option.name, _format_default(option.default), option.help)
            uses.setdefault(row, []).append(command_name)
    shared = {row: commands for row, commands in uses.items() if len(commands) >= SHARED_BY}
    parts = [f"### Several commands\n\n{_shared_table(shared)}"]
    for name in COMMAND_NAMES:
        command = load_command(name)
        rows = [
            (f"`{option.name}`", _format_default(option.default), option.help)
            for option in own_options[name]
            if (option.name, _format_default(option.default), option.help) not in shared
        ]
        summary = (command.function.__doc__ or "").partition("\n")[0]
        table = _table(("option", "default", "meaning"), rows) if rows else ""
        parts.append(f"### idp {name}\n\n{summary}\n\n{_describe_run_options(command)}\n\n{table}")
    return "\n\n".join(part.strip() for part in parts)


def render() -> str:
    """Return the text of the page."""
    parts = [
        INTRODUCTION,
        "## All runs",
        _group_tables(general_options()),
        "## Methods",
        "`lpt*` stands for all methods whose names begin with `lpt`.",
        _method_table(),
        "## Commands",
        _command_tables(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def format_run_options(options: Mapping[str, Option]) -> str:
    """Return options as the text that commands read; a kind that is a union is a text."""
    lines = []
    for option in options.values():
        row: dict[str, Any] = dict(name=option.name, help=option.help, group=option.group)
        row["kind"] = option.kind.__name__ if option.kind in (bool, int, float, str) else "str"
        if option.default is not MISSING:
            row["default"] = option.default
        if option.choices:
            row["choices"] = option.choices
        lines.append(json.dumps(row, ensure_ascii=False))
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
    READ_BY_COMMANDS.write_text(format_run_options(describe_all_options()), encoding="utf-8")

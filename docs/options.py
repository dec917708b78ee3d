"""Write `docs/options.md`, the tables of all options, from the classes that declare them."""

from dataclasses import MISSING
from pathlib import Path

from idp_tutorial.assembly.config import (
    describe_all_options,
    general_options,
    methods_with_option,
)
from idp_tutorial.cli.commands import Command
from idp_tutorial.cli.main import COMMAND_NAMES, load_command
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.utils.options import Option, declared_options

FILE = Path(__file__).with_name("options.md")
INTRODUCTION = """# Options

An option is declared once, as a field of a dataclass: of `TaskConfig`, `HeadConfig`,
`MachineConfig` or `TrainingConfig` for all runs, or of the config class of a method.
`RunConfig("lpt-npg", bottleneck=64, steps=100)` takes them by name, and so do `idp train --method
lpt-npg --bottleneck 64 --steps 100`, a YAML file (`idp train --config run.yaml`) and a record. A
method refuses what it does not have. `python docs/options.py` writes this page.
"""


def _format_cell(value: object) -> str:
    # `<s>` would strike out the text after it
    return str(value).replace("|", "\\|").replace("<s>", "`<s>`")


def _format_values(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    kinds = {bool: "true, false", int: "integer", float: "number", str: "text"}
    limits = [str(check) for check in option.checks if type(check).__name__ == "Range"]
    return ", ".join([kinds.get(option.kind, ""), *limits])


def _format_default(default: object) -> str:
    return "" if default in (None, MISSING, "") else f"`{default}`"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(map(_format_cell, line))} |" for line in lines)


def _group_tables(options: dict[str, Option]) -> str:
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name, option in options.items():
        row = (f"`{name}`", _format_values(option), _format_default(option.default), option.help)
        groups.setdefault(option.group, []).append(row)
    heads = ("option", "values", "default", "meaning")
    return "\n\n".join(f"### {group}\n\n{_table(heads, rows)}" for group, rows in groups.items())


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
        users = "; ".join(f"{value}: {', '.join(m)}" for value, m in methods_by_default.items())
        rows.append((name, values, users, text))
    return _table(("option", "values", "default: methods", "meaning"), sorted(rows))


def _describe_run_options(command: Command) -> str:
    """Return which options of runs a command takes, and which have another default."""
    defaults = ", ".join(f"`{name}` {_format_default(v)}" for name, v in command.defaults.items())
    other_defaults = f" Other defaults: {defaults}." if defaults else ""
    if command.run_options == ():
        return "It takes only these options:"
    if command.run_options is None:
        *names, last = (f"`{name}`" for name in command.excluded)
        excluded = f"{', '.join(names)} and {last}" if names else last
        return f"It also takes the options of runs and methods, except {excluded}.{other_defaults}"
    names = ", ".join(f"`{name}`" for name in command.run_options)
    return f"Of the options of runs and methods it takes {names}.{other_defaults}"


def _command_tables() -> str:
    parts = []
    for name in COMMAND_NAMES:
        command = load_command(name)
        own_options = declared_options(command.options_class)
        rows = [
            (f"`{option.name}`", _format_default(option.default), option.help)
            for option in own_options.values()
        ]
        summary = (command.function.__doc__ or "").partition("\n")[0]
        table = _table(("option", "default", "meaning"), rows)
        run_options = _describe_run_options(command)
        parts.append(f"### idp {name}\n\n{summary}\n\n{run_options}\n\n{table}")
    return "\n\n".join(parts)


def render() -> str:
    """Return the text of the page."""
    parts = [
        INTRODUCTION,
        "## All runs",
        _group_tables(general_options()),
        "## Methods",
        _method_table(),
        "## Commands",
        _command_tables(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")

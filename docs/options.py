"""Write `docs/options.md`, the tables of all options, from the classes that declare them."""

from dataclasses import MISSING
from pathlib import Path

from idp_tutorial.assembly.config import (
    describe_all_options,
    general_options,
    methods_with_option,
)
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
    rows = []
    for name in describe_all_options().keys() - general_options().keys():
        methods = methods_with_option(name)
        options = {method: ALL_METHODS[method].options[name] for method in methods}
        defaults: dict[str, list[str]] = {}
        for method, option in options.items():
            defaults.setdefault(_format_default(option.default) or "none", []).append(method)
        texts = list(dict.fromkeys(option.help for option in options.values()))
        users = "; ".join(f"{default}: {', '.join(m)}" for default, m in defaults.items())
        values = list(dict.fromkeys(_format_values(option) for option in options.values()))
        rows.append((f"`{name}`", " or ".join(values), users, "; or ".join(texts)))
    return _table(("option", "values", "default: methods", "meaning"), sorted(rows))


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
        parts.append(f"### idp {name}\n\n{summary}\n\n{table}")
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
        "Each command has options of its own besides those above.",
        _command_tables(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")

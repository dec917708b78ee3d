"""The command line and files of options, derived from the fields of dataclasses.

The parser is built here, with `argparse`, because an option may belong to several methods with
different defaults, and methods may be registered at run time: `tyro` and `jsonargparse` describe
one dataclass, so each method would be a subcommand. Options that are not given are left out, so
that the config classes decide about defaults and check all values.
"""

import json
import re
import shutil
from argparse import SUPPRESS, ArgumentParser, HelpFormatter
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NoReturn

from idp_tutorial.utils.checks import UserError, parse_number
from idp_tutorial.utils.options import Option, check_option_name

_BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class OneLineParser(ArgumentParser):
    """An `ArgumentParser` whose error messages are one line."""

    def error(self, message: str) -> NoReturn:
        """Print a message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _build_mapping(pairs: list[tuple[Any, Any]]) -> dict:
    """Return a dictionary of pairs; raise `ValueError` for a key that occurs twice."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"{key} occurs twice")
    return dict(pairs)


def parse_value(
    option: Option,
    text: str,  # value on the command line or in a file
    name: str,  # how the option was given, for the message
) -> Any:
    """Return the value of an option."""
    needed = "balanced, or one weight for each class in JSON, such as '{\"rare\": 5}'"
    try:
        if option.kind is bool:  # in a file
            needed = "true or false"
            return _BOOLEAN_WORDS[text.lower()]
        if option.kind in (int, float):
            needed = "a whole number" if option.kind is int else "a number"
            return parse_number(text, option.kind)
        if text.startswith("{") and option.name == "class_weight":
            weights = json.loads(text, object_pairs_hook=_build_mapping)
            # the scalars of a YAML file are strings
            return {label: parse_number(str(weight)) for label, weight in weights.items()}
    except (ValueError, KeyError, RecursionError):
        raise UserError(f"{name} {text:.80}: give {needed}.") from None
    return text


def _add_option(group: Any, option: Option) -> None:
    """Add one option to a group of an `ArgumentParser`."""
    text = option.help
    if option.choices:
        text += f" [{', '.join(map(str, option.choices))}]"
    has_default = not any(option.default is nothing for nothing in (None, MISSING, True, False))
    if has_default and "(default:" not in text:
        text += f" (default: {option.default})"
    text = text.replace("%", "%%")
    flag = f"--{option.name}"
    if option.is_positional:
        group.add_argument(option.name, nargs="?", default=SUPPRESS, help=text)
    elif option.kind is bool:
        text_of_no = text.partition("; False: ")[2] or f"turn off: {text}"
        shown = (SUPPRESS, text_of_no) if option.default else (text, SUPPRESS)
        common = dict(dest=option.name, default=SUPPRESS, action="store_const")
        group.add_argument(flag, const=True, help=shown[0], **common)
        group.add_argument(f"--no_{option.name}", const=False, help=shown[1], **common)
    else:
        group.add_argument(flag, default=SUPPRESS, help=text)


def build_parser(
    name: str,  # name of the command, such as 'idp train'
    description: str,  # its docstring: one line, and an example
    options: Mapping[str, Option],  # its options by name, those of a group together
) -> OneLineParser:
    """Return the parser of a command, with its options in groups."""
    width = shutil.get_terminal_size((120, 30)).columns
    first_line, _, example = description.partition("\n\n")
    positional = "".join(f"[{o.name.upper()}] " for o in options.values() if o.is_positional)
    parser = OneLineParser(
        name,
        usage=f"{name} {positional}[--OPTION VALUE ...]",
        description=first_line,
        epilog=example and f"Example: {' '.join(example.split())}",
        allow_abbrev=False,
        formatter_class=partial(HelpFormatter, max_help_position=width // 3, width=width),
    )
    file_help = "a YAML file whose keys are the options below; options on the command line win"
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help=file_help)
    for title, members in groupby(options.values(), key=attrgetter("group")):
        group = parser.add_argument_group(title)
        for option in members:
            _add_option(group, option)
    return parser


_MAX_FILE_BYTES = 2**16  # of a file of options; a device such as /dev/zero never ends


def _read_text(file: str) -> str:
    """Return the text of a small file, which may be a pipe; raise `ValueError` for a large one."""
    with open(file, "rb") as f:
        data = f.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise ValueError(f"it has more than {_MAX_FILE_BYTES:,} bytes")
    return data.decode("utf-8-sig")


def _load_yaml(file: str) -> dict[str, Any]:
    """Return the options in a YAML file, whose scalars are strings as on the command line.

    A column may be called `on`, `12:30` or `010`. Aliases are refused: options need none, and
    aliases of aliases can describe more values than any memory holds.
    """
    import yaml

    class StringLoader(yaml.BaseLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            """Return the next node, which must not be an alias."""
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"line {self.peek_event().start_mark.line + 1} has an alias, *")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            """Build a mapping without repeated keys."""
            return _build_mapping(self.construct_pairs(node, deep))

    try:
        content = yaml.load(_read_text(file), StringLoader)
        if not isinstance(content, dict):
            raise ValueError("it contains no options")
        return _build_mapping([(str(k).replace("-", "_"), v) for k, v in content.items()])
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as e:
        reason = getattr(e, "strerror", None) or str(e).replace("\n", " ")
        needed = "give a YAML file with a line for each option, such as method: lpt-npg"
        raise UserError(f"--config {file} cannot be read ({reason}): {needed}.") from None


def read_option_file(
    file: str,  # YAML file
    options: Mapping[str, Option],  # the options of the command
) -> dict[str, Any]:  # option: value
    """Return the options of a file, with the names and checks of the command line."""
    values = {}
    for name, value in _load_yaml(file).items():
        option = options[check_option_name(name, options, f"option in {file}")]
        if value not in ("null", "~"):  # the default
            parts = value if isinstance(value, list) else [value]
            text = ",".join(json.dumps(v) if isinstance(v, dict) else str(v) for v in parts)
            values[name] = parse_value(option, text, f"--config {file}: {name}")
    return values


def parse_arguments(
    parser: ArgumentParser,  # from `build_parser`
    options: Mapping[str, Option],  # the options of the command
    argv: list[str],  # arguments, with hyphens or underscores in the names of options
) -> dict[str, Any]:  # option: value; an option that was not given is left out
    """Return the options on the command line and in its files.

    Raises: `UserError` for a value that cannot be read, and for an unknown option.
    """
    arguments = [
        re.sub(r"^--[\w-]+", lambda m: "--" + m[0][2:].replace("-", "_"), argument)
        for argument in argv
    ]
    namespace, unknown = parser.parse_known_args(arguments)
    for argument in unknown:
        if argument.startswith("--"):
            check_option_name(argument[2:].split("=")[0], options)
    if unknown:
        positional = ", ".join(o.name.upper() for o in options.values() if o.is_positional)
        advice = f": give {positional} without its name" if positional else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)[:200]}{advice}")
    given = vars(namespace)
    values: dict[str, Any] = {}
    for file in given.pop("config"):
        values |= read_option_file(file, options)
    for name, value in given.items():
        is_text = isinstance(value, str)
        values[name] = parse_value(options[name], value, f"--{name}") if is_text else value
    for name, option in options.items():
        if option.default is MISSING and name not in values:
            raise UserError(f"{name} is missing: {option.help}.")
    return values

"""Options of a command from a YAML file: the same names and checks as on the command line."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any

from idp_tutorial.utils.checks import UserError, check_name

__all__ = ["parse_class_weights", "is_positional", "expand_config_files"]


def parse_class_weights(
    text: str,  # such as '{"rare": 5}'
) -> dict[str, float]:  # class: its weight in the loss
    """Return the class weights in the JSON value of `--class_weight`."""
    try:
        return {name: float(weight) for name, weight in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"--class_weight {text}: give balanced, or a weight for each class in JSON, such as "
            "'{\"rare\": 5}'."
        ) from None


_BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def is_positional(
    name: str,  # name of the option
    option: Any,  # something with its `default`
) -> bool:
    """Return whether an option of a command is given by its position instead of its name."""
    return option.default is Parameter.empty or (name == "table" and option.default is None)


def _load_yaml(text: str) -> tuple[Any, list[str]]:
    """Return the content of a YAML file, and the keys that occur twice in one mapping.

    Scalars stay strings, as on the command line: a column may be called `on`, `12:30` or `010`.
    """
    import yaml

    repeated: list[str] = []
    kept_resolvers = {}
    for character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items():
        kept_resolvers[character] = [r for r in resolvers if r[0].endswith((":null", ":merge"))]

    class StringLoader(yaml.SafeLoader):
        yaml_implicit_resolvers = kept_resolvers

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            keys = Counter(k.value for k, _ in node.value if isinstance(k, yaml.ScalarNode))
            repeated.extend(key for key, count in keys.items() if count > 1)
            return super().construct_mapping(node, deep)

    return yaml.load(text, StringLoader), repeated


def _read_mapping(file: str) -> tuple[dict, list[str]]:
    """Return the keys and values of a file of options, and the keys that occur twice."""
    import yaml

    try:
        content, repeated = _load_yaml(Path(file).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as e:
        reason = getattr(e, "strerror", None) or str(e).replace("\n", " ")
        raise UserError(
            f"--config {file} cannot be read ({reason}): give a YAML file with lines such as "
            "method: lpt-npg."
        ) from None
    if not isinstance(content, dict):
        raise UserError(
            f"--config {file} contains no options: write lines such as method: lpt-npg."
        )
    return content, repeated


def _option_name(key: object, file: str, options: Mapping[str, Any]) -> str:
    """Return the name of the option of a key in a file."""
    name = str(key).replace("-", "_")
    return check_name(name, options, f"option in {file}")


def _parse_boolean(value: object, key: object, file: str) -> bool:
    if str(value).lower() not in _BOOLEAN_WORDS:
        raise UserError(f"--config {file}: {key} is {value!r}: write true or false.")
    return _BOOLEAN_WORDS[str(value).lower()]


def _read_options(file: str, options: Mapping[str, Any]) -> Iterator[tuple[str, list[str] | str]]:
    """Yield the options of a file: the name, and its flags or a positional value."""
    content, repeated = _read_mapping(file)
    names = [_option_name(key, file, options) for key in content]
    repeated += [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f"--config {file}: {repeated[0]} occurs twice: keep one of the two lines.")
    for name, (key, value) in zip(names, content.items()):
        default = options[name].default
        if isinstance(default, bool):
            is_on = _parse_boolean(value, key, file)
            flag = f"--no_{name}" if default else f"--{name}"
            yield name, [flag] if is_on != default else []
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            text = ",".join(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)
            yield name, text if is_positional(name, options[name]) else [f"--{name}={text}"]


def expand_config_files(
    argv: list[str],  # arguments with underscores in the names of options
    options: Mapping[str, Any],  # options of the command: name: something with its `default`
) -> tuple[list[str], dict[str, str]]:  # arguments; name: value of positional arguments in files
    """Return the arguments with the options of each `--config FILE` put in front of the others."""
    remaining = [*argv]
    files: list[str] = []
    for i in reversed(range(len(remaining))):
        if remaining[i] == "--config" and i + 1 < len(remaining):
            files.insert(0, remaining.pop(i + 1))
            remaining.pop(i)
        elif remaining[i].startswith("--config="):
            files.insert(0, remaining.pop(i).removeprefix("--config="))
    flags: list[str] = []
    positional_values: dict[str, str] = {}
    for file in files:
        for name, value in _read_options(file, options):
            if isinstance(value, str):
                positional_values[name] = value
            else:
                flags += value
    return flags + remaining, positional_values

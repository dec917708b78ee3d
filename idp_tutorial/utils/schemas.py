"""What a type hint says about a value: the check of options and of what was read from a file.

`check_type` reads `Literal`, `Annotated[int, Range(1, 10)]`, `list[str]`, dataclasses and the like.
The options of a config are checked with it, and the content of files: a digest shows that a file is
complete, not that its content makes sense, since whoever writes a file can also write its digest.
So what a file describes is checked before anything is built from it. A dataclass is the schema: its
fields are the keys, their types the types of the values, and a field without a default is needed.
The state of an optimizer or of a random generator has no dataclass; it must have the structure of
the state of the object that it is loaded into.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from idp_tutorial.utils.checks import MismatchError, Range, UserError, is_number, list_choices

_LARGEST = sys.float_info.max  # JSON has integers beyond it


@dataclass(frozen=True)
class Rule:
    """Restrict the values of a field beyond its type, as in `Annotated[int, Rule(...)]`."""

    expected: str  # what is needed, for the message
    accepts: Callable[[Any], bool] = field(repr=False)  # for a value of the right type

    def check(self, value: Any, name: str) -> None:
        """Raise `MismatchError` for a value that is not accepted."""
        _require(self.accepts(value), name, self.expected, value)


Finite = Annotated[float, Rule("a finite number", lambda x: -_LARGEST <= x <= _LARGEST)]
Count = Annotated[int, Rule("a whole number from 0 to 10^12", lambda x: 0 <= x <= 10**12)]


def _has_type(value: Any, kind: type) -> bool:
    if kind is float:
        return is_number(value) and (isinstance(value, float) or abs(value) <= _LARGEST)
    return is_number(value, int) if kind is int else isinstance(value, kind)


def _require(fits: bool, name: str, expected: str, value: Any, hint: str = "") -> None:
    """Raise `MismatchError` unless a value fits."""
    if not fits:
        raise MismatchError(name, expected, value, hint)


_NAMES = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "null",
}


def _check_any_of(types: tuple, value: Any, name: str) -> None:
    expected = []
    for member in types:
        try:
            check_type(member, value, name)
            return
        except MismatchError as e:
            if e.args[0] != name:  # the right kind of value, with an entry that does not fit
                raise
            expected.append(e.args[1])
    raise MismatchError(name, " or ".join(expected), value)


@lru_cache
def _type_hints(schema: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass; every line of a file is checked against it."""
    return get_type_hints(schema, include_extras=True)


def _check_fields(schema: Any, value: Any, name: str) -> None:
    _require(isinstance(value, Mapping), name, "an object", value)
    hints = _type_hints(schema)
    for member in fields(schema):
        inner = f"{name}.{member.name}" if name else member.name
        if member.name in value:
            check_type(hints[member.name], value[member.name], inner)
        elif member.default is MISSING and member.default_factory is MISSING:
            raise UserError(f"{inner} is missing")


def _check_items(origin: Any, types: tuple, value: Any, name: str) -> None:
    """Check a value against `dict[K, V]`, `list[T]`, `tuple[T, ...]` or `tuple[T, U]`."""
    if issubclass(origin, Mapping):
        _require(isinstance(value, dict), name, "an object", value)
        for key, item in value.items():
            check_type(types[0], key, f"{name} key")
            check_type(types[1], item, f"{name}.{key!s:.40}")
        return
    _require(isinstance(value, (list, tuple)), name, "a list", value)  # JSON has no tuples
    if origin is list or types[1:] == (...,):
        types = (types[0],) * len(value)
    _require(len(types) == len(value), name, f"{len(types)} values", value)
    for i, (kind, item) in enumerate(zip(types, value)):
        check_type(kind, item, f"{name}[{i}]")


def _check_annotated(inner: Any, rules: tuple, value: Any, name: str) -> None:
    if not (inner is float and isinstance(rules[0], Range)):  # which names the range at once
        check_type(inner, value, name, next((rule for rule in rules if isinstance(rule, str)), ""))
    for rule in rules:
        if not isinstance(rule, str):
            rule.check(value, name)


def check_type(
    kind: Any,  # a type, or a type hint
    value: Any,
    name: str,  # of the option or the field; '': the whole content of a file
    hint: str = "",  # added to the message of a choice
) -> None:
    """Check that a value has a type.

    Raises: `MismatchError`, which names the first entry that does not fit.
    """
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Annotated:
        _check_annotated(arguments[0], arguments[1:], value, name)
    elif origin is Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in arguments)
        _require(fits, name, list_choices(arguments), value, hint)
    elif origin in (Union, UnionType):
        _check_any_of(arguments, value, name)
    elif origin is not None:
        _check_items(origin, arguments, value, name)
    elif is_dataclass(kind) and not isinstance(value, kind):  # type: ignore[arg-type]
        _check_fields(kind, value, name)
    elif kind is not Any:
        needed = _NAMES.get(kind) or f"a {kind.__name__.lower()}"
        _require(_has_type(value, kind), name, needed, value)


def check_schema(
    schema: Any,  # a dataclass, or another type, such as `dict[str, int]`
    value: Any,  # what was read from a file
    source: Any,  # name of the file, for the message
    remedy: str = "save it again, or download it again",  # what usually fixes it, for the message
) -> Any:  # `value`
    """Return a value that was read from a file, if it has the fields and types of a schema.

    Fields that the schema does not have are ignored. Raises: `UserError` that names the first
    field which is missing or has a value of another type.
    """
    try:
        check_type(schema, value, "")
    except UserError as e:
        raise UserError(f"{source}: {str(e).rstrip('.')}: {remedy}.") from None
    return value


_PlainValue = Annotated[
    Any, Rule("null or a plain value", lambda x: isinstance(x, (NoneType, bool, int, float, str)))
]
_PLAIN_TYPES: dict[type, Any] = {bool: bool | None, int: Finite, float: Finite, str: str}


def _check_like(value: Any, example: Any, name: str) -> None:
    """Raise `MismatchError` unless a value has the structure of an example."""
    if isinstance(example, dict):
        names = ", ".join(map(str, example)) or "nothing"
        fits = isinstance(value, dict) and value.keys() == example.keys()
        _require(fits, name, f"an object with {names:.100}", value)
        for key, item in example.items():
            _check_like(value[key], item, f"{name}.{key}" if name else str(key))
    elif isinstance(example, (list, tuple)):
        fits = type(value) is type(example) and len(value) == len(example)
        _require(fits, name, f"a list of {len(example)} values", value)
        for i, item in enumerate(example):
            _check_like(value[i], item, f"{name}[{i}]")
    elif hasattr(example, "dtype"):  # a tensor; `idp --help` imports this module, and no torch
        kinds = [(getattr(t, "dtype", None), *getattr(t, "shape", ())) for t in (example, value)]
        _require(kinds[0] == kinds[1], name, f"a tensor {kinds[0]}", kinds[1])
    else:
        check_type(_PLAIN_TYPES.get(type(example), _PlainValue), value, name)


def check_structure(
    value: Any,  # what was read from a file
    example: Any,  # the same state of a new object: dictionaries, lists, tensors, plain values
    source: Any,  # name of the file, for the message
    remedy: str = "delete it to start this run again",  # what usually fixes it, for the message
) -> Any:  # `value`
    """Return a value that was read from a file, if it has the keys, lengths, types and shapes.

    Raises: `UserError` that names the first place where it differs from the example.
    """
    try:
        _check_like(value, example, "")
    except UserError as e:
        raise UserError(f"{source}: {str(e).rstrip('.')}: {remedy}.") from None
    return value

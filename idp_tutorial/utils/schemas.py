"""Checks of values that were read from a file, against a dataclass or against a live object.

A digest shows that a file is complete, not that its content makes sense: whoever writes a file can
also write its digest. So what a file describes is checked before anything is built from it. A
dataclass is the schema: its fields are the keys, their types the types of the values, and a field
without a default is needed. The state of an optimizer or of a random generator has no dataclass;
it must have the structure of the state of the object that it is loaded into.
"""

import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from idp_tutorial.utils.checks import UserError, is_number

__all__ = ["Rule", "Finite", "Count", "check_schema", "check_structure"]


_LARGEST = sys.float_info.max  # JSON has integers beyond it


@dataclass(frozen=True)
class Rule:
    """Restrict the values of a field beyond its type, as in `Annotated[int, Rule(...)]`."""

    expected: str  # what is needed, for the message
    accepts: Callable[[Any], bool] = field(repr=False)  # for a value of the right type


Finite = Annotated[float, Rule("a finite number", lambda x: -_LARGEST <= x <= _LARGEST)]
Count = Annotated[int, Rule("a whole number from 0 to 10^12", lambda x: 0 <= x <= 10**12)]


def _has_type(value: Any, kind: type) -> bool:
    if kind is float:
        is_too_large = isinstance(value, int) and abs(value) > _LARGEST
        return is_number(value) and not is_too_large
    return is_number(value, int) if kind is int else isinstance(value, kind)


class _MismatchError(Exception):
    """A value that does not fit, with the path to it and what is expected."""

    def __init__(self, path: str, expected: str, value: Any) -> None:
        super().__init__(path)
        self.path = path
        self.expected = expected
        self.value = value

    def explain(self) -> str:
        """Return what the file has, and what it needs."""
        name = self.path or "its content"
        if self.value is MISSING:
            return f"has no {name}"
        return f"has {name}={reprlib.repr(self.value)}, but it must be {self.expected}"


def _require(fits: bool, path: str, expected: str, value: Any) -> None:
    """Raise `_MismatchError` unless a value fits."""
    if not fits:
        raise _MismatchError(path, expected, value)


_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Tensor: "a tensor",
    NoneType: "null",
}


def _check_any_of(types: tuple, value: Any, path: str) -> None:
    expected = []
    for member in types:
        try:
            _check(member, value, path)
            return
        except _MismatchError as e:
            if e.path != path:  # the right kind of value, with an entry that does not fit
                raise
            expected.append(e.expected)
    raise _MismatchError(path, " or ".join(expected), value)


@lru_cache
def _type_hints(schema: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass; every line of a file is checked against it."""
    return get_type_hints(schema, include_extras=True)


def _check_fields(schema: Any, value: Any, path: str) -> None:
    _require(isinstance(value, Mapping), path, "an object", value)
    hints = _type_hints(schema)
    for member in fields(schema):
        inner = f"{path}.{member.name}" if path else member.name
        if member.name in value:
            _check(hints[member.name], value[member.name], inner)
        elif member.default is MISSING and member.default_factory is MISSING:
            raise _MismatchError(inner, "", MISSING)


def _check_items(origin: Any, types: tuple, value: Any, path: str) -> None:
    """Check a value against `list[T]`, `tuple[T, ...]` or `tuple[T, U]`."""
    _require(isinstance(value, (list, tuple)), path, "a list", value)  # JSON has no tuples
    if origin is list or types[1:] == (...,):
        types = (types[0],) * len(value)
    _require(len(types) == len(value), path, f"{len(types)} values", value)
    for i, (kind, item) in enumerate(zip(types, value)):
        _check(kind, item, f"{path}[{i}]")


def _check(kind: Any, value: Any, path: str) -> None:
    """Raise `_MismatchError` unless a value has a type."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Annotated:
        _check(arguments[0], value, path)
        for rule in arguments[1:]:
            _require(rule.accepts(value), path, rule.expected, value)
    elif origin is Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in arguments)
        _require(fits, path, " or ".join(map(repr, arguments)), value)
    elif origin in (Union, UnionType):
        _check_any_of(arguments, value, path)
    elif origin is dict:
        _require(isinstance(value, dict), path, "an object", value)
        for key, item in value.items():
            _check(arguments[0], key, f"{path} key")
            _check(arguments[1], item, f"{path}.{key!s:.40}")
    elif origin is not None:
        _check_items(origin, arguments, value, path)
    elif is_dataclass(kind):
        _check_fields(kind, value, path)
    elif kind is not Any:
        _require(_has_type(value, kind), path, _NAMES.get(kind, f"a {kind.__name__}"), value)


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
        _check(schema, value, "")
    except _MismatchError as e:
        raise UserError(f"{source} {e.explain()}: {remedy}.") from None
    return value


_PlainValue = Annotated[
    Any, Rule("null or a plain value", lambda x: isinstance(x, (NoneType, bool, int, float, str)))
]
_PLAIN_TYPES: dict[type, Any] = {bool: bool | None, int: Finite, float: Finite, str: str}


def _check_like(value: Any, example: Any, path: str) -> None:
    """Raise `_MismatchError` unless a value has the structure of an example."""
    if isinstance(example, Tensor):
        _check(Tensor, value, path)
        expected, actual = (f"{tuple(t.shape)} of {t.dtype}" for t in (example, value))
        _require(actual == expected, path, f"a tensor {expected}", actual)
    elif isinstance(example, dict):
        names = ", ".join(map(str, example)) or "nothing"
        fits = isinstance(value, dict) and value.keys() == example.keys()
        _require(fits, path, f"an object with {names:.100}", value)
        for key, item in example.items():
            _check_like(value[key], item, f"{path}.{key}" if path else str(key))
    elif isinstance(example, (list, tuple)):
        fits = type(value) is type(example) and len(value) == len(example)
        _require(fits, path, f"a list of {len(example)} values", value)
        for i, item in enumerate(example):
            _check_like(value[i], item, f"{path}[{i}]")
    else:
        _check(_PLAIN_TYPES.get(type(example), _PlainValue), value, path)


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
    except _MismatchError as e:
        raise UserError(f"{source} {e.explain()}: {remedy}.") from None
    return value

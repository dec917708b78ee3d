"""Options: fields of dataclasses, from which checks, commands, help and tables are derived.

An option is declared once, as a field of a dataclass:

    steps: Annotated[int, Range(1, 10**9)] = 300  # number of optimizer steps

Its type says which values are allowed: `Literal` lists choices, `Range` limits a number, `| None`
allows None. The comment after the field, or in the lines above it, is the help text. The
attribute `option_group` of the class that declares it is the heading in `--help`.
"""

import ast
import inspect
import io
import math
import os
import textwrap
import tokenize
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from idp_tutorial.utils.checks import (
    UserError,
    check_bool,
    check_choice,
    check_int,
    check_name,
    check_number,
    closest_match,
    describe_lower_limit,
    describe_upper_limit,
)

__all__ = [
    "Range",
    "AllowEmpty",
    "Probability",
    "Option",
    "declared_options",
    "check_options",
    "OPTION_SYNONYMS",
    "find_option",
    "check_option_name",
]


@dataclass(frozen=True)
class Range:
    """The numbers that an option may have."""

    low: float  # smallest allowed number
    high: float = math.inf  # largest allowed number
    hint: str = ""  # what the number is, or a usual value, for the message
    is_low_excluded: bool = False  # the number must be greater than `low`
    is_high_excluded: bool = False  # the number must be smaller than `high`

    def __str__(self) -> str:
        lower = describe_lower_limit(self.low, self.is_low_excluded)
        if self.high == math.inf:
            return lower
        return f"{lower} and {describe_upper_limit(self.high, self.is_high_excluded)}"

    def check(self, value: Any, name: str) -> None:
        """Check that a number is in the range.

        Raises: `UserError` for another number, NaN, or something that is not a number.
        """
        check_number(value, name, *astuple(self))


@dataclass(frozen=True)
class AllowEmpty:
    """A text option may be empty, which has a meaning of its own."""

    def check(self, value: Any, name: str) -> None:
        """Check that a value is a text."""
        if not isinstance(value, str):
            raise UserError(f"{name} must be a string, got {value!r:.40}.")


Probability = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class Option:
    """Name, type, default, help and checks of an option, read from a field of a dataclass."""

    name: str
    kind: type  # bool, int, float, str or dict
    default: Any
    help: str  # the comment at the field
    group: str  # heading in `--help`
    is_optional: bool  # None is allowed
    choices: tuple = ()  # the allowed values; (): every value of `kind`
    is_positional: bool = False  # on the command line it is given without its name
    checks: tuple = ()  # `Range`, or another object with a method `check(value, name)`

    @property
    def may_be_empty(self) -> bool:
        """Return whether an empty text is a value of the option."""
        return any(isinstance(check, AllowEmpty) for check in self.checks)

    def _convert_for_json(self, value: Any) -> Any:
        """Return a NumPy scalar, such as one from a row of pandas, or a path as Python's type."""
        if type(value).__module__ == "numpy" and value.ndim == 0:
            return value.item()
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
        if self.choices:
            hint = next((c for c in self.checks if isinstance(c, str)), "")
            return check_choice(value, self.choices, self.name, hint)
        if self.kind is bool:
            check_bool(value, self.name)
        elif self.kind is int:
            check_int(value, self.name)
        elif self.kind is float and not self.checks:
            check_number(value, self.name)
        elif self.kind is str and not self.checks and not isinstance(value, str):
            raise UserError(f"{self.name} must be a string, got {value!r:.40}.")
        if isinstance(value, str) and not value.strip() and not self.may_be_empty:
            raise UserError(f"{self.name} is empty: give a value, or leave it out.")
        for check in self.checks:
            check.check(value, self.name)
        return value


def _split_type(hint: Any) -> tuple[type, bool, tuple, tuple]:
    """Return the type, whether None is allowed, the choices, and the checks of a type hint."""
    if get_origin(hint) is Annotated:
        kind, is_optional, choices, checks = _split_type(get_args(hint)[0])
        return kind, is_optional, choices, (*checks, *hint.__metadata__)
    if get_origin(hint) in (Union, UnionType):
        members = [member for member in get_args(hint) if member is not NoneType]
        kind, _, choices, checks = _split_type(members[0])
        return kind, len(members) < len(get_args(hint)), choices, checks
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0]), False, get_args(hint), ()
    return hint, False, (), ()


def _field_comments(cls: type) -> dict[str, str]:  # field: its comment
    """Return the comments after the fields that a class declares, or in the lines above them."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class that was typed into an interpreter
        return {}
    comments = {}
    whole_lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
            if not token.line[: token.start[1]].strip():
                whole_lines.add(token.start[0])
    texts = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        first = node.lineno
        while first - 1 in whole_lines:
            first -= 1
        above = " ".join(comments[line] for line in range(first, node.lineno))
        texts[node.target.id] = comments.get(node.end_lineno or 0, above)
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
            field.default,
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


# Options of this package: names of options with the same meaning in peft, transformers' Trainer,
# scikit-learn, SetFit and other libraries; of several options the first known one is suggested
_NAMES_ELSEWHERE = {
    "lr": "learning_rate body_learning_rate lr_init alpha",
    "head_lr": "head_learning_rate classifier_lr",
    "learning_rates": "lrs learning_rate_grid",
    "prompt_length": "num_virtual_tokens n_tokens num_prompt_tokens pre_seq_len prefix_length",
    "epochs": "num_train_epochs num_epochs n_epochs max_epochs",
    "steps": "max_steps num_training_steps train_steps max_iter num_iterations",
    "batch_size": "per_device_train_batch_size per_gpu_train_batch_size train_batch_size "
    "per_device_eval_batch_size eval_batch_size bs",
    "accumulate": "gradient_accumulation_steps grad_accum accum_steps",
    "max_len": "max_length max_seq_length max_seq_len seq_length model_max_length",
    "models model backbone": "model_name_or_path pretrained_model_name_or_path base_model "
    "base_model_name_or_path model_name model_id model checkpoint encoder lm",
    "seed seeds": "random_state random_seed data_seed seed",
    "seeds": "n_seeds num_seeds n_runs",
    "warmup": "warmup_ratio warmup_proportion warmup_steps",
    "schedule": "lr_scheduler lr_scheduler_type scheduler",
    "weight_decay": "wd l2 adam_weight_decay",
    "beta2": "adam_beta2 adam_beta_2",
    "eps": "adam_epsilon adam_eps epsilon",
    "clip": "max_grad_norm gradient_clip_val grad_clip grad_norm",
    "class_weight": "class_weights sample_weight",
    "eval_every": "eval_steps evaluation_steps logging_steps",
    "evaluations eval_every": "eval_strategy evaluation_strategy",
    "patience": "early_stopping_patience early_stopping n_iter_no_change",
    "save_every": "save_steps save_strategy checkpoint_every",
    "out": "output_dir output output_file save_dir save_path",
    "init_from": "resume_from_checkpoint init_checkpoint",
    "table task": "dataset dataset_name train_file training_file",
    "task": "task_name",
    "data": "data_dir dataset_dir",
    "texts": "test_file predict_file input_file inputs",
    "text": "text_column text_column_name text_field sentence1_key",
    "text2": "text_pair text_pair_column sentence2_key",
    "label": "label_column label_column_name label_field label_key target_column",
    "sep": "delimiter separator field_delimiter",
    "encoding": "charset file_encoding",
    "skip_empty": "dropna drop_empty ignore_empty skip_blank",
    "validation": "validation_split validation_fraction val_size",
    "test": "test_size test_split",
    "shots": "num_samples n_shots k_shot max_train_samples",
    "stratified": "stratify",
    "method methods": "peft_type peft_method adapter prompt_type technique",
    "bottleneck": "r lora_r rank encoder_hidden_size hidden_dim reduction_factor",
    "prompt_dropout": "lora_dropout dropout encoder_dropout",
    "layer": "prompt_layer layer_index insert_layer",
    "template": "prompt_template verbalizer_template",
    "dtype": "torch_dtype load_in_4bit load_in_8bit",
    "precision": "bf16 fp16 mixed_precision",
    "compile": "torch_compile",
    "device": "device_map no_cuda use_cpu",
    "cache_dir": "cache_folder",
    "pooling": "pooling_mode pool",
    "proba": "predict_proba probabilities return_all_scores",
}
OPTION_SYNONYMS: dict[str, tuple[str, ...]] = {  # name in another library: options of this package
    name: tuple(options.split())
    for options, names in _NAMES_ELSEWHERE.items()
    for name in names.split()
}


def find_option(
    name: str,  # a name that is not an option, such as 'learning_rate'
    known: Collection[str],  # names of the options
) -> str | None:
    """Return the option that a name of another library, or a misspelt name, stands for."""
    name = str(name).replace("-", "_")
    synonyms = (option for option in OPTION_SYNONYMS.get(name.lower(), ()) if option in known)
    return next(synonyms, None) or closest_match(name, known)


def check_option_name(
    name: str,  # the name to check
    known: Collection[str],  # names of the options
    kind: str = "option",  # what is named, for the message
) -> str:  # `name`
    """Return `name` if it is the name of an option.

    Raises: `UserError` with the option that another library calls so, and all known names.
    """
    option = None if name in known else find_option(name, known)
    if option is None or option == closest_match(str(name), known):
        return check_name(name, known, kind)
    raise UserError(f"unknown {kind} {name!r}: use {option!r}. Known: {', '.join(known)}.")

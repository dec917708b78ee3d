"""What all commands share: options that are declared once, one parser, and errors as one line.

A `UserError`, an error of the operating system, a lack of memory or a damaged compressed file
ends a command with one line on stderr and exit status 2. Any other exception is a bug and keeps
its traceback.
"""

import lzma
import os
import re
import shutil
import sys
from argparse import SUPPRESS, ArgumentParser, HelpFormatter
from collections.abc import Callable, Mapping
from functools import partial, wraps
from inspect import currentframe, signature
from io import TextIOWrapper
from pathlib import Path
from types import FrameType, NoneType
from typing import Annotated, Any, NoReturn, get_args

from fastcore.docments import docments

from idp_tutorial.cli.config_file import expand_config_files, is_positional, parse_class_weights
from idp_tutorial.utils.checks import UserError, check_between, explain_os_error, is_out_of_memory
from idp_tutorial.utils.config import RunConfig

__all__ = [
    "Inherited",
    "OPTION_GROUPS",
    "exit_with_message",
    "shared_options",
    "command_options",
    "build_parser",
    "normalise_option_names",
    "command",
    "config_from_options",
    "split_names",
    "parse_ints",
]


def _error_message(
    error: Exception,
) -> str | None:  # None: not a user error, so that the traceback is shown
    """Return the message for an error that the user can fix."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{explain_os_error(error)}." if error.errno else str(error)
    if isinstance(error, (lzma.LZMAError, EOFError)):
        return f"a compressed file is damaged or incomplete ({error}): download it again."
    if is_out_of_memory(error):
        return (
            "there is not enough memory: use a smaller batch_size, max_len, prompt_length or "
            "backbone."
        )
    return None


def exit_with_message(f: Callable) -> Callable:
    """Wrap a function so that user errors are printed as one line and exit with status 2."""

    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return f(*args, **kwargs)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None
        except Exception as e:
            message = _error_message(e)
            if message is None:
                raise
            print(f"{f.__name__}: {message}", file=sys.stderr)
            raise SystemExit(2) from e

    return call


def shared_options(
    # labelled texts: a CSV, TSV, Parquet or JSON-lines file, a folder with train.csv and the like,
    # or a data set of the hub, org/name
    table: str | None = None,
    text: str | None = None,  # column of the texts (default: text, sentence1 or sentence)
    text2: str | None = None,  # column of the second texts, for pairs
    label: str | None = None,  # column of the labels (default: label)
    # csv, tsv, jsonl, parquet, lines or auto (default: by the extension of the file)
    format: str | None = None,
    regression: bool = False,  # the labels are numbers, not classes
    validation: float = 0.1,  # fraction of the rows for validation, if there is no such split
    test: float = 0.1,  # fraction of the rows for testing, if there is no such split; 0: none
    task: str = "questions",  # a task of `TASKS`, bundled or in the folder --data
    seeds: int = 3,  # number of seeds: 0 … seeds-1
    steps: int = 300,  # optimizer steps of a run
    batch_size: int = 32,  # examples in a step
    lr: float | None = None,  # one learning rate for all methods (default: each method's own)
    # learning rates that every method tries, such as 1e-3,3e-3; up to 4 more if the best is an end
    learning_rates: str | None = None,
    tune: bool = False,  # choose each method's learning rate from three, on the validation split
    # choose the head's learning rate from three without a prompt, and use it for every method
    tune_head_first: bool = False,
    evaluations: int = 10,  # evaluations on the validation split in a run; the best one is kept
    precision: str = "no",  # 'bf16' or 'fp16': autocast in training; scores are computed in float32
) -> None:
    """Declare options of commands that train several runs, besides those of `RunConfig`."""


# the type of a parameter whose type, default and help text are those of the option with its name
# in `RunConfig` or `shared_options`; for a type checker it is `Any`
Inherited = Annotated[Any, "inherited option"]


def _inherited_names(f: Callable) -> list[str]:
    """Return the names of the parameters that are annotated as inherited options."""
    return [p.name for p in signature(f).parameters.values() if p.annotation == Inherited]


def command_options(
    f: Callable,  # function of a command
) -> dict[str, Any]:  # name: its comment (`docment`), type (`anno`) and `default`
    """Return the options of a command, also those of `shared_options` or `RunConfig`."""
    describe = partial(docments, full=True, returns=False)
    inheritable = {**describe(RunConfig), **describe(shared_options)}
    return {**describe(f), **{name: inheritable[name] for name in _inherited_names(f)}}


OPTION_GROUPS = {  # heading in `--help`: its options; other options are in the group "this command"
    "your own texts": "table texts text text2 label format regression validation test",
    "a known task": "task data shots split_seed split_seeds stratified",
    "the method": "method methods backbone prompt_length layer position bottleneck head "
    "tune_head_first pooling standardise glove template loss_vocab",
    "variants of the papers": "sentence_pooling parameter_sharing generator_input insertion "
    "generator exclude_last_token attention_input prompt_relu init_std sentence_dropout "
    "generator_dropout glove_noise two_layer_head head_init schedule beta2 eps "
    "no_decay_on_bias_and_norm",
    "training": "lr head_lr learning_rates tune seed seeds steps epochs batch_size accumulate "
    "warmup weight_decay clip max_len prompt_dropout dropout_below_prompt evaluations patience "
    "class_weight",
    "this machine": "cache precision compile device",
}


def _group_heading(name: str) -> str:
    """Return the heading of an option in `--help`."""
    for heading, names in OPTION_GROUPS.items():
        if name in names.split():
            return heading
    return "this command"


def _add_option(group: Any, name: str, option: Any, positional_values: Mapping[str, str]) -> None:
    """Add one option to a group of an `ArgumentParser`."""
    text = " ".join((option.docment or "").split())  # a comment may have several lines
    # of `int | None` the first type
    kind = next((t for t in get_args(option.anno) if t is not NoneType), option.anno)
    if is_positional(name, option):
        is_optional = name in positional_values or option.default is None
        nargs = "?" if is_optional else None
        default = positional_values.get(name)
        group.add_argument(name, type=kind, nargs=nargs, default=default, help=text)
        return
    if option.default is not None:
        text += f" (default: {option.default})"
    if kind is bool and option.default:  # a switch that is on by default: its option turns it off
        group.add_argument(f"--no_{name}", dest=name, help=text, action="store_false")
    elif kind is bool:
        group.add_argument(f"--{name}", help=text, action="store_true")
    else:
        group.add_argument(f"--{name}", help=text, type=kind, default=option.default)


def build_parser(
    f: Callable,  # function of a command
    **positional_values: str,  # values of positional arguments from files of options
) -> ArgumentParser:
    """Return the parser of a command, with one argument for each option, in their order."""
    width = shutil.get_terminal_size((120, 30)).columns
    description, _, example = (f.__doc__ or "").partition("\n\n")
    parser = ArgumentParser(
        f.__name__,
        description=description,
        epilog=example and f"Example: {example.strip()}",
        allow_abbrev=False,
        formatter_class=partial(HelpFormatter, max_help_position=width // 2, width=width),
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=SUPPRESS,
        help="a YAML file whose keys are the options below; options on the command line win",
    )
    groups: dict[str, Any] = {}
    for name, option in command_options(f).items():
        heading = _group_heading(name)
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        _add_option(groups[heading], name, option, positional_values)
    return parser


def normalise_option_names(argv: list[str]) -> list[str]:
    """Replace hyphens by underscores in option names, as in parameter names."""
    return [
        re.sub(r"^--[\w-]+", lambda m: "--" + m[0][2:].replace("-", "_"), argument)
        for argument in argv
    ]


def _is_script_frame(frame: FrameType | None) -> bool:
    """Return whether a frame is the top level of the file that Python runs."""
    if frame is None:
        return False
    module = frame.f_globals
    is_main = module.get("__name__") == "__main__" and "__file__" in module
    if not (is_main and frame.f_locals is module):
        return False
    return Path(module["__file__"]).resolve() == Path(frame.f_code.co_filename).resolve()


def _refuse_unknown_arguments(parser: ArgumentParser, arguments: list[str]) -> NoReturn:
    """Exit with the arguments that the command does not have."""
    is_table = any(re.search(r"\.(csv|tsv|jsonl|parquet)$", a) for a in arguments)
    hint = "; a table of your own goes to idp_train, idp_compare or idp_sweep, one at a time"
    parser.error(f"unrecognized arguments: {' '.join(arguments)}{hint if is_table else ''}")


def _parse_command_line(f: Callable) -> dict[str, Any]:
    """Return the values of a command's options on the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, TextIOWrapper
        ):  # characters that the locale lacks are written as \u2026
            stream.reconfigure(errors="backslashreplace")

    @exit_with_message
    @wraps(f)
    def expand_arguments() -> tuple[list[str], dict[str, str]]:
        options = command_options(f)
        argv = normalise_option_names(sys.argv[1:])
        return expand_config_files(argv, options)

    argv, positional_values = expand_arguments()
    parser = build_parser(f, **positional_values)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse_unknown_arguments(parser, unknown)
    return vars(values)


def _full_signature(f: Callable) -> Any:
    """Return the signature of a command with types and defaults of inherited options."""
    options = command_options(f)
    inherited = _inherited_names(f)
    parameters = []
    for p in signature(f).parameters.values():
        if p.name in inherited:
            option = options[p.name]
            p = p.replace(annotation=option.anno, default=option.default)
        parameters.append(p)
    return signature(f).replace(parameters=parameters)


def command(f: Callable) -> Callable:
    """Make a command of a function: inherited options, a parser, and errors as one line."""
    options = command_options(f)
    inherited = {name: options[name].default for name in _inherited_names(f)}

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        frame = currentframe()
        if not (args or kwargs) and frame and _is_script_frame(frame.f_back):
            kwargs = _parse_command_line(f)
        return exit_with_message(f)(*args, **{**inherited, **kwargs})

    run.__signature__ = _full_signature(f)  # type: ignore[attr-defined]
    frame = currentframe()
    if frame and _is_script_frame(frame.f_back):  # `python -m` of the module of the command
        f.__globals__[f.__name__] = run  # the function may look up its own defaults
        sys.exit(run(**_parse_command_line(f)))
    return run


def config_from_options(
    options: dict[str, Any],  # options of a command: its `locals()`, in its first line
    default_task: str = "questions",  # the command's task if none is given
    **fields: Any,  # fields that are not options of the command, or have another name there
) -> RunConfig:
    """Return the configuration that a command's options describe; a table becomes a task."""
    evaluations = options["evaluations"]
    hint = "the number of evaluations on the validation split in a run"
    check_between(evaluations, 0, 10**9, "evaluations", hint)
    table_options = OPTION_GROUPS["your own texts"].split()
    is_table_given = any(
        name in table_options and options.get(name, p.default) != p.default
        for name, p in signature(shared_options).parameters.items()
    )
    if is_table_given:
        from idp_tutorial.cli.own_data import register_table_from_options

        options = {**options, "task": register_table_from_options(options, default_task)}
    values = {k: v for k, v in options.items() if k in RunConfig.__dataclass_fields__}
    if str(values.get("class_weight")).startswith("{"):
        values["class_weight"] = parse_class_weights(values["class_weight"])
    eval_every = max(1, options["steps"] // max(1, evaluations))
    return RunConfig(**values, **fields, eval_every=eval_every)


def split_names(text: str) -> list[str]:
    """Return the names in a comma-separated list, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def parse_ints(
    text: str | None,  # such as '6,12,18'; None: the option was not given
    option: str,  # name of the option
) -> list[int] | None:
    """Return the integers in the value of an option."""
    try:
        return [int(v) for v in text.split(",")] if text else None
    except ValueError:
        raise UserError(
            f"--{option} {text!r}: give whole numbers with commas between them, such as 6,12,18."
        ) from None

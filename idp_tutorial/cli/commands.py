"""What all commands share: their options, the options of runs, and errors as one line.

A command is a function of two objects: its own options, a dataclass, and the `RunOptions` of the
runs that it makes. `idp NAME --help`, files of options and calls in Python are derived from both.
A `UserError`, an error of the operating system, a lack of memory or a damaged compressed file
ends a command with one line on stderr and exit status 2. Any other exception is a bug and keeps
its traceback.
"""

import lzma
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, replace
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar

from idp_tutorial.cli.arguments import build_parser, parse_arguments
from idp_tutorial.cli.run_options import read_run_options
from idp_tutorial.data.config import TableConfig
from idp_tutorial.utils.checks import (
    Range,
    UserError,
    explain_os_error,
    is_out_of_memory,
    is_panic,
    parse_number,
)
from idp_tutorial.utils.options import Option, check_option_name, check_options, declared_options
from idp_tutorial.utils.process import show_warnings


def _error_message(
    error: BaseException,
) -> str | None:  # None: not a user error, so that the traceback is shown
    """Return the message for an error that the user can fix."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{explain_os_error(error)}." if error.errno else str(error)
    if isinstance(error, (lzma.LZMAError, EOFError)):
        return f"a compressed file is damaged or incomplete ({error}): download it again."
    if is_panic(error):
        return f"a library stopped with an internal error ({str(error)[:100]}): check the model."
    if is_out_of_memory(error):
        return "not enough memory: use a smaller batch_size, max_len, prompt_length or backbone."
    return None


def exit_with_message(
    name: str,  # name of the command, for the message
    f: Callable[[], Any],
    translate: Callable[[str], str] = str,  # function that changes the message
) -> Any:  # what `f` returns
    """Call a function; print a user error as one line, and exit with status 2."""
    try:
        return f()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except BaseException as e:  # a panic is no `Exception`
        message = _error_message(e)
        if message is None:
            raise
        print(f"{name}: {translate(message)}", file=sys.stderr)
        raise SystemExit(2) from e


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options that only one command has."""

    option_group: ClassVar[str] = "this command"
    positional_options: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class TableOptions(TableConfig, CommandOptions):
    """A table of labelled texts, and the options that describe it."""

    positional_options: ClassVar[tuple[str, ...]] = ("table",)

    # labelled texts: a CSV, TSV, JSON, Parquet or Excel file, a folder with train.csv and the like
    # or of save_to_disk, or a data set of the hub, org/name
    table: str | None = None

    def register_task(
        self,
        given: dict[str, Any],  # options of runs that were given; the task becomes one of them
        default_task: str,  # the command's task if none is given
    ) -> None:
        """Add the table to `TASKS` if one is described, and print its description to stderr.

        The folder `data` is a table too, if `save_to_disk` wrote it.
        """
        from idp_tutorial.data.user_data import is_saved_dataset, register_table_task

        options = {name: getattr(self, name) for name in declared_options(TableOptions)}
        described = [name for name in _given_options(self) if name in options]
        table = options.pop("table")
        data = given.get("data")
        if data and not table and is_saved_dataset(data):
            table = str(given.pop("data"))
        if not described and not table:
            return
        if not table:
            raise UserError(f"no table is given, which {', '.join(described)} would describe.")
        if given.get("data") or given.get("task", default_task) != default_task:
            name = "data" if given.get("data") else "task"
            raise UserError(f"{name}={given[name]} and the table {table} are two tasks: give one.")
        task, description = register_table_task(table, **options, seed=given.get("split_seed", 0))
        print(description, file=sys.stderr)
        given["task"] = task.name


@dataclass(frozen=True, kw_only=True)
class TrainingRunOptions(CommandOptions):
    """Options of the commands that train."""

    option_group: ClassVar[str] = "training"

    # learning rates to try, such as 1e-3,3e-3; up to 4 more if the best is an end
    learning_rates: str | None = None
    # evaluations on the validation split in a run; the best one is kept
    evaluations: Annotated[int, Range(0, 10**9)] = 10

    def learning_rate_grid(
        self,
        lr: float | None,  # the one learning rate that was given
    ) -> tuple[float, ...]:  # (): each method's own learning rate, or those of `tune`
        """Return the learning rates to try.

        Raises: `UserError` if `lr` is given beside `learning_rates` or `tune`.
        """
        grid = parse_numbers(self.learning_rates, "learning_rates", float)
        for name in ("learning_rates", "tune"):
            if lr and getattr(self, name, None):
                raise UserError(f"{name} and lr={lr:g} exclude each other: give one of them.")
        for learning_rate in grid:
            Range(0, 1e40, is_low_excluded=True).check(learning_rate, "learning_rates")
        return tuple(grid)


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions(TrainingRunOptions):
    """Options of the commands that train several methods."""

    option_group: ClassVar[str] = "training"

    methods: str  # comma-separated
    seeds: Annotated[int, Range(1, 10**6)] = 3  # number of seeds: 0 … seeds-1
    tune: bool = False  # choose each method's learning rate from three, on the validation split
    # choose the head's learning rate from three without a prompt, and use it for every method
    tune_head_first: bool = False

    def refuse_unread(
        self,
        methods: list[str],  # methods to train
        base: Any,  # the `RunOptions` that were given
        allow_controls: bool = False,  # controls may be trained, too
    ) -> None:
        """Refuse an unknown method, and options that none of the methods reads.

        Raises: `UserError` that names the method or the option.
        """
        from idp_tutorial.assembly.config import refuse_unread_options
        from idp_tutorial.methods.all_methods import METHODS
        from idp_tutorial.methods.method_registry import ALL_METHODS

        refuse_unread_options(
            methods,
            base,
            ALL_METHODS if allow_controls else METHODS,
            learning_rates=self.learning_rates,
            tune=self.tune,
            tune_head_first=self.tune_head_first,
        )


@dataclass(frozen=True)
class Command:
    """A command: `idp NAME`, and a function of keyword arguments in Python."""

    function: Callable[[Any, Any], None]  # of its own options and `RunOptions`
    options_class: type[CommandOptions]
    # the options of runs that the command has; None: all but `excluded`
    run_options: tuple[str, ...] | None
    excluded: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # other defaults of options of runs

    @property
    def name(self) -> str:
        """The command as it is typed, such as `idp train`."""
        module = self.function.__module__
        if module.startswith("idp_tutorial.cli."):
            return f"idp {module.rpartition('.')[2]}"
        if module == "__main__":
            spec = sys.modules[module].__spec__  # None for a script that is run by its path
            module = spec.name if spec else ""
        return f"python -m {module}" if module else Path(sys.argv[0]).name

    def _options_of_runs(self) -> dict[str, Option]:
        if self.run_options == ():
            return {}
        options = read_run_options()
        selected = options if self.run_options is None else self.run_options
        return {
            name: replace(options[name], default=self.defaults.get(name, options[name].default))
            for name in selected
            if name not in self.excluded
        }

    def options(self) -> dict[str, Option]:
        """Return all options of the command, by name."""
        own_options: dict[str, Option] = {}
        for name, option in declared_options(self.options_class).items():
            positional = self.options_class.positional_options
            is_positional = name in positional or option.default is MISSING
            own_options[name] = replace(option, is_positional=is_positional)
        groups = [
            *("your own texts", "a known task", "the model", "the method", "the head"),
            *("training", "this machine", "this command", "limits"),
        ]
        return dict(
            sorted(
                {**own_options, **self._options_of_runs()}.items(),
                key=lambda pair: (groups.index(pair[1].group), not pair[1].is_positional),
            )
        )

    @show_warnings()
    def _run(self, values: Mapping[str, Any]) -> None:
        known = self.options()
        for name in values:
            check_option_name(name, known)
        own_names = declared_options(self.options_class)
        own_options = self.options_class(**{n: v for n, v in values.items() if n in own_names})
        given = {name: value for name, value in values.items() if name not in own_names}
        base = self._run_options_from(own_options, given) if self.run_options != () else None
        self.function(own_options, base)

    def _run_options_from(self, own_options: CommandOptions, given: dict[str, Any]) -> Any:
        """Return the `RunOptions` of the given options; a table becomes a task."""
        from idp_tutorial.assembly.config import RunOptions, general_options, methods_with_option

        names = None
        if isinstance(own_options, ComparisonOptions) and own_options.methods != "all":
            names = split_names(own_options.methods)
        defaults = {
            name: value
            for name, value in self.defaults.items()
            if name in general_options() or methods_with_option(name, names)
        }
        if isinstance(own_options, TableOptions):
            own_options.register_task(given, self.defaults.get("task", ""))
        if given.get("epochs") is not None and given.get("steps") is not None:
            pair = f"steps={given['steps']} has no effect with epochs={given['epochs']}"
            raise UserError(f"{pair}: leave one of them out.")
        base = RunOptions(**{**defaults, **given})
        if isinstance(own_options, TrainingRunOptions):
            base = replace(base, eval_every=max(1, base.steps // max(1, own_options.evaluations)))
        return base

    def parse(
        self,
        argv: list[str],  # arguments after the name of the command
    ) -> dict[str, Any]:  # the options that were given, on the command line or in a file
        """Return the options of a command line."""
        options = self.options()
        parser = build_parser(self.name, self.function.__doc__ or "", options)
        return parse_arguments(parser, options, argv)

    def __call__(self, **values: Any) -> None:
        """Run the command with options by name, as in Python."""
        exit_with_message(self.name, lambda: self._run(values))

    def main(
        self,
        argv: list[str],  # arguments after the name of the command
    ) -> None:
        """Run the command with the arguments of a command line."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):  # characters that the locale lacks: \u2026
                stream.reconfigure(errors="backslashreplace")
        exit_with_message(self.name, lambda: self._run(self.parse(argv)), self._name_options)

    def _name_options(self, message: str) -> str:
        """Return a message that names options as they are typed: `--shots 5` for `shots=5`."""
        options = self.options()
        names = "|".join(sorted(options, key=len, reverse=True))
        not_inside = r"(?<![\w./'\"=(-])"  # a path, a quotation, a call in Python
        value = r"'[^']*'|(?!\.\.\.)[^\s,;()]*[^\s,;().:]"
        message = re.sub(f"{not_inside}({names})=({value})", _type_option, message)
        compound = "|".join(name for name in options if "_" in name)  # no word of a sentence
        return re.sub(rf"{not_inside}({compound})(?![\w=(./])", r"--\1", message)


def _type_option(match: re.Match[str]) -> str:
    """Return an option as it is typed, from a match of its name and its value in Python."""
    name, value = match.groups()
    words = {"True": f"--{name}", "False": f"--no_{name}", "None": f"no --{name}"}
    plain = value.strip("'") if re.fullmatch(r"'[\w.+-]+'", value) else value
    return words.get(value, f"--{name} {plain}")


def command(
    options_class: type[CommandOptions],  # its own options
    run_options: tuple[str, ...] | None = (),  # as in `Command`
    excluded: tuple[str, ...] = (),
    **defaults: Any,  # defaults of options of runs that differ from those of a run
) -> Callable[[Callable[[Any, Any], None]], Command]:
    """Make a command of a function of its own options and `RunOptions`."""
    return lambda function: Command(function, options_class, run_options, excluded, defaults)


def split_names(text: str) -> list[str]:
    """Return the names in a comma-separated list, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def parse_numbers(
    text: str | None,  # such as '6,12,18'; None: the option was not given
    option: str,  # name of the option
    kind: type[int] | type[float] = int,  # int: whole numbers
) -> list:
    """Return the numbers in the value of an option."""
    try:
        return [parse_number(number, kind) for number in text.split(",")] if text else []
    except ValueError:
        raise UserError(f"{option}={text!r}: give numbers such as '6,12,18'.") from None


def _given_options(options: CommandOptions) -> dict[str, Any]:  # name: value
    """Return the options that have other values than their defaults."""
    declared = declared_options(type(options))
    values = {name: getattr(options, name) for name in declared}
    return {name: value for name, value in values.items() if value != declared[name].default}


def refuse_given(
    options: CommandOptions,
    names: str,  # names of options, with spaces between them
    reason: str,  # why they are not used, such as 'without probe'
) -> None:
    """Refuse an option that was given but has no effect.

    Raises: `UserError` with the reason.
    """
    given = _given_options(options)
    for name in names.split():
        if name in given:
            raise UserError(f"{name}={given[name]} is not used {reason}: leave it out.")


def print_report(
    folder: str,  # from `write_report`
    stream: IO,  # to print to
) -> None:
    """Print the text of a report without its pictures, and where its files are."""
    from idp_tutorial.runs.report import REPORT_FILE

    lines = (Path(folder) / REPORT_FILE).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("!["))
    text = text.replace("\n\n\n", "\n\n")
    print(f"\n{text}\n\nwritten: {folder}/{REPORT_FILE}, with tables and pictures", file=stream)

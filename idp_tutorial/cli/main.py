"""The command `idp`, with a subcommand for each module of this package that defines one.

`idp --help` lists them; `idp train --help` lists the options of one. A subcommand imports what it
needs when it is called, so that the list appears at once.
"""

import os
import sys
from importlib import import_module

from idp_tutorial.cli.arguments import OneLineParser, build_parser
from idp_tutorial.cli.commands import Command, exit_with_message
from idp_tutorial.utils.checks import check_name

__all__ = ["COMMAND_NAMES", "load_command", "main"]

COMMAND_NAMES = (
    *("train", "predict", "compare", "serve", "fetch", "params", "bench", "sweep", "transfer"),
    *("pretrain", "supplement", "reproduce"),
)


def load_command(
    name: str,  # one of `COMMAND_NAMES`
) -> Command:
    """Return a command by its name."""
    module = import_module(f"idp_tutorial.cli.{name}")
    return getattr(module, f"{name}_command")


def _build_main_parser() -> OneLineParser:
    """Return the parser of `idp`, whose help lists the commands."""
    parser = OneLineParser("idp", description="Train, compare and use soft prompts.")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name in COMMAND_NAMES:
        summary = (load_command(name).function.__doc__ or "").partition("\n")[0]
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _complete() -> None:
    """Print completions, if the shell asks for them."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    if len(words) > 1 and words[1] in COMMAND_NAMES:
        # the options of one command, as if its name were a part of the program's name
        command = load_command(words[1])
        parser = build_parser(command.name, "", command.options())
        line = os.environ["COMP_LINE"]
        shortened = line.replace(f"{words[0]} {words[1]}", words[0], 1)
        point = int(os.environ["COMP_POINT"]) - len(line) + len(shortened)
        os.environ.update(COMP_LINE=shortened, COMP_POINT=str(point))
    else:
        parser = _build_main_parser()
    argcomplete.autocomplete(parser)


def main(
    argv: list[str] | None = None,  # arguments; None: those of the process
) -> None:
    """Run the command that the arguments name."""
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        _build_main_parser().print_help()
        return
    name, *rest = arguments
    exit_with_message("idp", lambda: check_name(name, COMMAND_NAMES, "command"))
    load_command(name).main(rest)


if __name__ == "__main__":
    main()

"""The command `idp`, with a subcommand for each module of this package that defines one.

`idp --help` lists them; `idp train --help` lists the options of one. A subcommand imports what it
needs when it is called, so that the list appears at once.
"""

import os
import sys
from importlib import import_module

from idp_tutorial.cli.arguments import OneLineParser, build_parser
from idp_tutorial.cli.commands import Command, exit_with_message
from idp_tutorial.utils.checks import UserError, check_name

COMMAND_NAMES = ("train", "predict", "compare", "serve", "fetch", "params", "reproduce")
# former commands: the scripts of the repository that have their options
SCRIPTS = {
    "bench": "results.speed.bench",
    "pretrain": "results.pretraining.run",
    "supplement": "results.supplement.run",
    "sweep": "results.depth.sweep",
    "transfer": "results.transfer.run",
}


def load_command(
    name: str,  # one of `COMMAND_NAMES`
) -> Command:
    """Return a command by its name."""
    module = import_module(f"idp_tutorial.cli.{name}")
    return getattr(module, f"{name}_command")


def _check_command(name: str) -> None:
    """Raise `UserError` for a name that is no command, with the script that has replaced it."""
    if name in SCRIPTS:
        raise UserError(
            f"the command {name!r} is a script now: python -m {SCRIPTS[name]}, from the root of "
            "the repository (a wheel does not contain it)."
        )
    check_name(name, COMMAND_NAMES, "command")


def _build_main_parser(complete_command: str = "") -> OneLineParser:
    """Return the parser of `idp`, with the commands, and all options of the one to complete."""
    parser = OneLineParser("idp", description="Train, compare and use soft prompts.")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    for name in COMMAND_NAMES:
        command = load_command(name)
        summary = (command.function.__doc__ or "").partition("\n")[0]
        parents = []
        if name == complete_command:
            parents.append(build_parser(command.name, "", command.options()))
        commands.add_parser(name, help=summary, parents=parents, add_help=False)
    return parser


def main(
    argv: list[str] | None = None,  # arguments; None: those of the process
) -> None:
    """Run the command that the arguments name."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        words = [*os.environ.get("COMP_LINE", "").split(), "", ""]
        argcomplete.autocomplete(_build_main_parser(words[1]))
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        _build_main_parser().print_help()
        return
    name, *rest = arguments
    exit_with_message("idp", lambda: _check_command(name))
    load_command(name).main(rest)


if __name__ == "__main__":
    main()

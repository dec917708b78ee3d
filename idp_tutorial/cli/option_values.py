"""Options with several numbers, and checks that every given option is used.

`--learning_rates 1e-3,3e-3,1e-2` lets every method try the same learning rates on the
validation split. As long as the best one is the first or the last of them, one more beyond it
is tried, up to four. If the best one is still at an end, the record says `lr_at_grid_edge` and
the table marks the learning rate.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from idp_tutorial.utils.checks import UserError, check_positive

__all__ = ["parse_floats", "parse_learning_rates", "refuse_unused_options"]


def parse_floats(
    text: str | None,  # such as '1e-3,3e-3'; None: the option was not given
    option: str,  # name of the option
) -> tuple[float, ...]:
    """Return the numbers in the value of an option."""
    try:
        return tuple(float(v) for v in text.split(",")) if text else ()
    except ValueError:
        raise UserError(
            f"--{option} {text!r}: give numbers with commas between them, such as 1e-3,3e-3."
        ) from None


def parse_learning_rates(
    options: Mapping[str, Any],  # options of a command
) -> tuple[float, ...]:  # (): each method's own learning rate, or those of `--tune`
    """Return the learning rates of `--learning_rates`.

    Raises: `UserError` if `--lr` is given beside `--learning_rates` or `--tune`.
    """
    learning_rates = parse_floats(options.get("learning_rates"), "learning_rates")
    if options["lr"] and (learning_rates or options.get("tune")):
        other = f"--learning_rates {options['learning_rates']}" if learning_rates else "--tune"
        raise UserError(f"{other} and --lr {options['lr']:g} exclude each other: give one of them.")
    for learning_rate in learning_rates:
        check_positive(learning_rate, "learning_rates", "learning rates, such as 1e-3,3e-3")
    return learning_rates


def refuse_unused_options(
    command: Callable,  # the command, whose signature has the defaults
    options: Mapping[str, Any],  # its options: its `locals()`
    option_names: str,  # names of options, with spaces between them
    reason: str,  # why they are not used, such as 'without --probe'
) -> None:
    """Refuse an option that was given but has no effect.

    Raises: `UserError` with the reason.
    """
    for name in option_names.split():
        if options[name] != signature(command).parameters[name].default:
            raise UserError(f"--{name} {options[name]} is not used {reason}: leave it out.")

"""A command: from Python and from the shell, and its errors."""

import re
from dataclasses import dataclass

import pytest
import torch

from idp_tutorial.cli.commands import CommandOptions, command, exit_with_message
from idp_tutorial.cli.main import load_command, main
from idp_tutorial.cli.train import train_command
from idp_tutorial.utils.checks import Range


@dataclass(frozen=True, kw_only=True)
class DoubleOptions(CommandOptions):
    """Options of a command for these tests."""

    n: int = 1  # a number


@command(DoubleOptions, run_options=("batch_size",))
def double_command(options, base):
    """Double a number."""
    print(2 * Range(1).check(options.n, "n"), base.batch_size)


def test_a_command_is_called_from_python_and_from_the_shell(capsys):
    double_command(n=4)
    double_command.main(["--n", "3", "--batch-size", "7"])
    assert capsys.readouterr().out == "8 32\n6 7\n"
    for call in (lambda: double_command(n=0), lambda: double_command.main(["--n=0"])):
        with pytest.raises(SystemExit) as e:
            call()
        assert e.value.code == 2 and "n must be at least 1, got 0." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        double_command(steps=3)
    assert "unknown option 'steps'" in capsys.readouterr().err


def test_an_unknown_option_of_a_command_without_runs_is_refused(capsys):
    with pytest.raises(SystemExit):
        load_command("predict")(modle="runs/train")
    assert "unknown option 'modle': did you mean 'model'?" in capsys.readouterr().err


FULL = [
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80040 bytes"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
]


def _raise(error):
    raise error


@pytest.mark.parametrize("error", FULL, ids=lambda e: type(e).__name__)
def test_a_lack_of_memory_is_one_line(error, capsys):
    with pytest.raises(SystemExit) as e:
        exit_with_message("idp train", lambda: _raise(error))
    assert e.value.code == 2
    assert "not enough memory: use a smaller batch_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes"), ValueError("an internal inconsistency")]
)
def test_an_error_that_is_not_of_the_user_keeps_its_traceback(error):
    with pytest.raises(type(error), match=str(error)):
        exit_with_message("idp train", lambda: _raise(error))


@pytest.mark.parametrize(
    "arguments,message",
    [
        ("train --no_stratified", "--no_stratified needs shots.* such as --shots 100"),
        ("train --two_layer_head --head verbalizer", "--two_layer_head has no effect: "),
        (
            "train --method p-tuning-v2 --insertion add --prompt_dropout .3",
            "--prompt_dropout 0.3 has no effect with --insertion add: leave one of them out",
        ),
        ("train --method lpt --init_text x", "option 'init_text'"),
        (
            "compare --methods lpt --lr 1 --learning_rates 1,2",
            "--learning_rates and --lr 1 exclude",
        ),
        ("train --epochs 2 --steps 5", "--steps 5 has no effect with --epochs 2.0"),
        ("train --data no/lr=3/x", "no/lr=3/x"),
    ],
)
def test_messages_name_options_as_they_are_typed(arguments, message, capsys):
    command, *rest = arguments.split()
    with pytest.raises(SystemExit):
        main([command, *rest])
    assert re.search(message, capsys.readouterr().err), capsys.readouterr().err


def test_messages_in_python_speak_python(capsys):
    with pytest.raises(SystemExit):
        train_command(task="sentiment", stratified=False, out="unused")
    assert "stratified=False needs shots" in capsys.readouterr().err

"""What all commands share: one parser, both spellings, errors as one line, a quick `--help`."""

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from idp_tutorial.cli.command_line import (
    Inherited,
    build_parser,
    command,
    command_options,
    config_from_options,
    exit_with_message,
    normalise_option_names,
)
from idp_tutorial.cli.config_file import expand_config_files
from idp_tutorial.utils.checks import check_at_least
from idp_tutorial.utils.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
COMMAND_MODULES = ROOT / "idp_tutorial/cli"
NO_COMMANDS = ("command_line", "config_file", "option_values")  # what several commands need
COMMANDS = [
    "idp_" + p.stem for p in sorted(COMMAND_MODULES.glob("[a-z]*.py")) if p.stem not in NO_COMMANDS
]
HEAVY = [
    "transformers",
    "datasets",
    "sklearn",
    "scipy",
    "pandas",
    "matplotlib",
    "peft",
    "accelerate",
]


def load(name):
    return getattr(importlib.import_module(f"idp_tutorial.cli.{name[4:]}"), name)


def run(code, *argv):
    """A fresh interpreter with this package."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)


# --- start-up: modules are counted, not seconds

HELP = """
import importlib, json
from idp_tutorial.cli.command_line import build_parser
f = getattr(importlib.import_module('idp_tutorial.cli.{short}'), '{name}')
try:
    build_parser(f.__wrapped__).parse_args(['--help'])
except SystemExit as e:
    assert not e.code
print(json.dumps([m for m in {heavy} if m in sys.modules]))
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_neither_torch_nor_what_is_heavier(name):
    res = run(HELP.format(short=name[4:], name=name, heavy=[*HEAVY, "torch", "numpy"]))
    assert res.returncode == 0 and f"usage: {name}" in res.stdout, res.stderr
    assert json.loads(res.stdout.splitlines()[-1]) == []


def test_a_method_imports_torch_and_nothing_heavier():
    res = run(
        "import idp_tutorial.methods.lpt, json\n"
        f"print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    )
    assert res.returncode == 0 and json.loads(res.stdout) == [], res.stderr or res.stdout


def test_a_shell_completes_options(tmp_path):
    pytest.importorskip("argcomplete")
    asks = dict(
        _ARGCOMPLETE="1",
        _ARGCOMPLETE_IFS=" ",
        _ARGCOMPLETE_STDOUT_FILENAME=str(tmp_path / "completions"),
    )
    for line, follows in (
        ("idp_train a.csv --batch", ["--batch_size"]),
        ("idp_predict --te", ["--texts", "--text", "--text2"]),
    ):
        module = f"idp_tutorial.cli.{line.split()[0][4:]}"
        env = {
            **os.environ,
            **asks,
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "PYTHONPATH": str(ROOT),
        }
        subprocess.run([sys.executable, "-m", module], env=env, check=True)
        assert sorted((tmp_path / "completions").read_text().split()) == sorted(follows)


# --- options


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_both_spellings(name):
    f = load(name)
    needed = [
        "x" for o in command_options(f.__wrapped__).values() if o.default is inspect.Parameter.empty
    ]
    given = {k: o for k, o in command_options(f.__wrapped__).items() if "_" in k}
    for k, o in given.items():
        value = [] if o.default is False else ["0.5" if isinstance(o.default, float) else "3"]
        parser = build_parser(f.__wrapped__)
        parsed = [
            vars(parser.parse_args(normalise_option_names([*needed, f"--{spelling}", *value])))
            for spelling in (k, k.replace("_", "-"))
        ]
        assert parsed[0] == parsed[1] != vars(parser.parse_args(needed))


def test_values_keep_their_hyphens():
    argv = ["--batch-size=3", "--methods", "lpt-npg,id-spam", "--out=a-b/c-d", "-h", "--", "x-y"]
    assert normalise_option_names(argv) == [
        "--batch_size=3",
        "--methods",
        "lpt-npg,id-spam",
        "--out=a-b/c-d",
        "-h",
        "--",
        "x-y",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_signature_has_all_options(name):
    """Types and defaults of inherited options are in the signature of the function."""
    f = load(name)
    shown = {n: p.default for n, p in inspect.signature(f).parameters.items()}
    assert shown == {n: o.default for n, o in command_options(f.__wrapped__).items()}
    assert all(o.docment for n, o in command_options(f.__wrapped__).items() if n != "weight_decay")


@pytest.mark.parametrize(
    "name,argument,value",
    [
        ("idp_train", "table", "a.csv"),
        ("idp_serve", "models", "[a, b]"),
        ("idp_fetch", "name", "mpnet"),
        ("idp_pretrain", "text", "a.txt"),
    ],
)
def test_a_file_of_options_gives_positional_arguments(name, argument, value, tmp_path):
    function = load(name).__wrapped__
    file = tmp_path / "run.yaml"
    file.write_text(f"{argument}: {value}")
    for more, want in (([], value.strip("[]").replace(" ", "")), (["other"], "other")):
        flags, given = expand_config_files(
            ["--config", str(file), *more], command_options(function)
        )
        assert vars(build_parser(function, **given).parse_args(flags))[argument] == want


def test_an_option_cannot_be_abbreviated(capsys):
    with pytest.raises(SystemExit):
        build_parser(load("idp_predict").__wrapped__).parse_args(["--conf", "x.yaml"])
    assert "unrecognized arguments: --conf" in capsys.readouterr().err


def test_an_inherited_option_must_be_declared():
    def idp_odd(*, backbone: Inherited, colour: Inherited):
        pass

    with pytest.raises(KeyError, match="colour"):
        command(idp_odd)


def test_the_options_of_a_command_become_a_config():
    given = dict(task="trec", steps=10, evaluations=4, seeds=3, out="x")
    assert config_from_options(given) == RunConfig(task="trec", steps=10, eval_every=2)
    assert config_from_options({**given, "evaluations": 0}, shots=5) == RunConfig(
        task="trec", steps=10, eval_every=10, shots=5
    )
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        config_from_options({**given, "steps": 0})


def test_the_script_for_accelerate_has_help():
    res = subprocess.run(
        [sys.executable, ROOT / "configs/train.py", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert res.returncode == 0 and "usage: idp_train" in res.stdout, res.stderr


# --- errors

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from idp_tutorial.utils.checks import check_at_least
from idp_tutorial.cli.command_line import Inherited, command

def double(n):
    return print(2*check_at_least(n, 1, 'n'))

@command
def idp_double(*,
    n:int=1, # a number
    batch_size: Inherited,
):
    "Double a number"
    double(n)
    print(batch_size)
{call}
"""


@pytest.mark.parametrize(
    "call", ["", 'if __name__=="__main__": idp_double()', "sys.exit(idp_double())"]
)
def test_a_script_reads_the_command_line_once(call, tmp_path):
    (tmp_path / "double.py").write_text(SCRIPT.format(root=str(ROOT), call=call))

    def call_script(*argv):
        res = subprocess.run(
            [sys.executable, tmp_path / "double.py", *argv], capture_output=True, text=True
        )
        return res.returncode, res.stdout, res.stderr

    assert call_script("--n", "3", "--batch-size", "7") == (0, "6\n7\n", "")
    assert call_script() == (0, "2\n32\n", "")
    assert call_script("--n", "0") == (2, "", "idp_double: n must be at least 1, got 0.\n")
    code, out, err = call_script("--help")
    assert code == 0 and "Double a number" in out and "--batch_size" in out and not err
    for more, words in (
        (("--bottleneck", "3"), "--bottleneck 3\n"),
        (("mine.csv",), "mine.csv; a table of your own goes to idp_train"),
    ):
        code, out, err = call_script(*more)
        assert code == 2 and not out and f"unrecognized arguments: {words}" in err


def test_a_command_is_an_ordinary_function_in_python():
    @command
    def idp_double(n: int = 1, *, batch_size: Inherited):
        return 2 * check_at_least(n, 1, "n"), batch_size

    assert idp_double(4) == (8, 32)
    assert idp_double(batch_size=2) == (2, 2) and idp_double() == (2, 32)


def test_a_closed_pipe_is_not_an_error():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    code += "from idp_tutorial.cli.command_line import exit_with_message\n"
    code += "@exit_with_message\ndef f():\n    for i in range(100_000): print(i)\nf()"
    p = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert p.stdout.readline() == "0\n"
    p.stdout.close()
    assert p.stderr.read() == "" and p.wait() == 141


def test_modules_of_commands_import_little():
    """They import the standard library, fastcore and light modules; functions import the rest."""
    for path in COMMAND_MODULES.glob("[a-z]*.py"):
        for n in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(n, ast.ImportFrom) and n.level:
                light = {
                    *((1, name) for name in NO_COMMANDS),
                    (2, "config"),
                    (2, "checks"),
                    (2, "files"),
                }
                assert (n.level, n.module) in light, (path.name, n.module)
            elif isinstance(n, (ast.Import, ast.ImportFrom)):
                tops = [n.module] if isinstance(n, ast.ImportFrom) else [a.name for a in n.names]
                assert {t.split(".")[0] for t in tops} <= set(sys.stdlib_module_names) | {
                    "fastcore"
                }, (path.name, tops)


FULL = [
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80040 bytes"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
]


@pytest.mark.parametrize("error", FULL, ids=lambda e: type(e).__name__)
def test_a_lack_of_memory_is_one_line(error, capsys):
    @exit_with_message
    def idp_large():
        raise error

    with pytest.raises(SystemExit) as e:
        idp_large()
    assert (
        e.value.code == 2
        and "not enough memory: use a smaller batch_size" in capsys.readouterr().err
    )


def test_another_error_of_pytorch_keeps_its_traceback():
    @exit_with_message
    def idp_broken():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        idp_broken()


def test_a_value_error_that_is_no_user_error_keeps_its_traceback():
    @exit_with_message
    def idp_broken():
        raise ValueError("an internal inconsistency")

    with pytest.raises(ValueError, match="internal"):
        idp_broken()

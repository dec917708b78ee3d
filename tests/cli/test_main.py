"""What all commands share: one parser, both spellings, errors as one line, a quick `--help`."""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import MISSING
from pathlib import Path

import pytest

from idp_tutorial.cli.commands import Command
from idp_tutorial.cli.main import COMMAND_NAMES, SCRIPTS, load_command, main
from results import find_command

ROOT = Path(__file__).resolve().parents[2]
COMMAND_MODULES = ROOT / "idp_tutorial/cli"
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


def run(code, *argv):
    """A fresh interpreter with this package."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)


def parse(name, *argv):
    """Return the values that a command line gives."""
    return find_command(name).parse([*argv])


# --- start-up: modules are counted, not seconds

HELP = """
import json
from idp_tutorial.cli.main import main
try:
    main({argv})
except SystemExit as e:
    assert not e.code
print(json.dumps([m for m in {heavy} if m in sys.modules]))
"""


@pytest.mark.parametrize("argv", [[], ["fetch", "--help"], ["predict", "--help"]], ids=str)
def test_help_without_options_of_methods_imports_no_torch(argv):
    res = run(HELP.format(argv=argv, heavy=[*HEAVY, "torch", "numpy"]))
    assert res.returncode == 0 and "usage: idp" in res.stdout, res.stderr
    assert json.loads(res.stdout.splitlines()[-1]) == []
    if not argv:
        assert {*COMMAND_NAMES} <= {*res.stdout.split()}


def test_help_with_options_of_methods_imports_nothing_heavier_than_torch():
    res = run(HELP.format(argv=["train", "--help"], heavy=["sklearn", "pandas", "matplotlib"]))
    assert res.returncode == 0 and "usage: idp train" in res.stdout, res.stderr
    assert json.loads(res.stdout.splitlines()[-1]) == []


def test_a_method_imports_torch_and_nothing_heavier():
    res = run(
        "import idp_tutorial.methods.lpt, json\n"
        f"print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    )
    assert res.returncode == 0 and json.loads(res.stdout) == [], res.stderr or res.stdout


@pytest.mark.long
def test_a_shell_completes_options(tmp_path):
    pytest.importorskip("argcomplete")
    asks = dict(
        _ARGCOMPLETE="1",
        _ARGCOMPLETE_IFS=" ",
        _ARGCOMPLETE_STDOUT_FILENAME=str(tmp_path / "completions"),
    )
    for line, follows in (
        ("idp train a.csv --batch", ["--batch_size"]),
        ("idp predict --te", ["--texts", "--text", "--text2"]),
        ("idp ser", ["serve"]),
    ):
        env = {
            **os.environ,
            **asks,
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
            "PYTHONPATH": str(ROOT),
        }
        subprocess.run([sys.executable, "-m", "idp_tutorial"], env=env, check=True)
        completions = (tmp_path / "completions").read_text().split()
        assert sorted(completions) == sorted(follows)


# --- options


@pytest.mark.parametrize("name", [*COMMAND_NAMES, *SCRIPTS])
def test_every_option_has_both_spellings_and_a_help_text(name):
    options = find_command(name).options()
    needed = ["x" for option in options.values() if option.default is MISSING]
    for key, option in options.items():
        assert option.help, key
        if "_" not in key or option.is_positional:
            continue
        flag = f"--no_{key}" if option.default is True else f"--{key}"
        value = [] if option.kind is bool else ["3"]
        parsed = [
            parse(name, *needed, spelling, *value) for spelling in (flag, flag.replace("_", "-"))
        ]
        assert parsed[0] == parsed[1] != parse(name, *needed)


def test_values_keep_their_hyphens():
    argv = ["--batch-size=3", "--methods", "lpt-npg,id-spam", "--out=a-b/c-d"]
    assert parse("compare", *argv) == dict(batch_size=3, methods="lpt-npg,id-spam", out="a-b/c-d")


def test_a_boolean_has_two_flags():
    assert parse("train", "--standardise", "--no-stratified") == dict(
        standardise=True, stratified=False
    )
    assert parse("train", "--no_standardise") == dict(standardise=False)


@pytest.mark.parametrize("name", ["train", "compare", "sweep", "transfer"])
def test_commands_that_train_have_the_same_options(name):
    options = find_command(name).options().keys()
    shared = load_command("train").options().keys() - {
        *("seed", "task", "layer", "method", "out", "save_every", "dry_run"),
        *("table", "text", "text2", "label", "format", "regression", "validation", "test"),
        *("encoding", "sep", "skip_empty", "skip_unlabelled", "group_duplicates", "multi_label"),
        *("report", "progress", "log_with", "controls"),
    }
    if name == "transfer":  # whose metric follows from the two tasks
        shared -= {"metric"}
    assert shared <= options
    assert {"class_weight", "pooling", "beta2", "warmup", "dtype", "two_layer_head"} <= options


@pytest.mark.parametrize(
    "name,argument,value",
    [
        ("train", "table", "a.csv"),
        ("serve", "models", "[a, b]"),
        ("fetch", "name", "mpnet"),
        ("pretrain", "text", "a.txt"),
    ],
)
def test_a_file_of_options_gives_positional_arguments(name, argument, value, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"{argument}: {value}")
    for more, want in (([], value.strip("[]").replace(" ", "")), (["other"], "other")):
        assert parse(name, "--config", str(file), *more)[argument] == want


@pytest.mark.parametrize(
    "argv,words",
    [
        (["trian"], "idp: unknown command 'trian': did you mean 'train'"),
        (
            ["train", "--botleneck", "3"],
            "unknown option 'botleneck': did you mean 'bottleneck'",
        ),
        (
            ["train", "--method", "lpt", "--bottleneck", "3"],
            "method .* has no option 'bottleneck' .*: .*p-tuning",
        ),
        (["train", "--steps", "x"], "idp train: --steps x: give a whole number"),
        (["train", "--beta2", "1"], "beta2 must be below 1, got 1.0"),
        (
            ["train", "--schedule", "cosine"],
            "schedule must be 'linear' or .*, got 'cosine'",
        ),
        (["predict", "--conf", "x.yaml"], "unknown option 'conf'. "),
        (["fetch"], "idp fetch: name is missing"),
        (
            ["compare", "--methods", "head-only,lpt", "--bottleneck", "3"],
            "--bottleneck 3 has no effect on head-only, lpt",
        ),
    ],
)
def test_a_mistake_is_one_line(argv, words, capsys):
    with pytest.raises(SystemExit) as e:
        main(argv)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1
    assert re.search(words, err), err


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_former_command_names_its_script(name, capsys):
    with pytest.raises(SystemExit) as e:
        main([name, "--help"])
    err = capsys.readouterr().err
    module = re.search(r"python -m ([\w.]+)", err)[1]
    assert e.value.code == 2 and err.count("\n") == 1
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


@pytest.mark.long
def test_the_script_for_accelerate_has_help():
    res = subprocess.run(
        [sys.executable, ROOT / "configs/train.py", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert res.returncode == 0 and "usage: idp train" in res.stdout, res.stderr


# --- a command of one's own, and errors


def test_a_closed_pipe_is_not_an_error():
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    code += "from idp_tutorial.cli.commands import exit_with_message\n"
    code += "def f():\n    for i in range(100_000): print(i)\nexit_with_message('f', f)"
    p = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert p.stdout.readline() == "0\n"
    p.stdout.close()
    assert p.stderr.read() == "" and p.wait() == 141


def test_modules_of_commands_import_little():
    """They import the standard library and light modules; functions import the rest."""
    light = {"utils.checks", "utils.durable_files", "utils.options", "utils.process"}
    light |= {"data.config", "runs.defaults", "serving.limits"}
    for path in COMMAND_MODULES.glob("[a-z]*.py"):
        for n in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(n, ast.ImportFrom) and n.module.startswith("idp_tutorial."):
                _, package, name = n.module.split(".")
                assert package == "cli" or f"{package}.{name}" in light, (path.name, name)
            elif isinstance(n, (ast.Import, ast.ImportFrom)):
                tops = [n.module] if isinstance(n, ast.ImportFrom) else [a.name for a in n.names]
                assert {t.split(".")[0] for t in tops} <= set(sys.stdlib_module_names), (
                    path.name,
                    tops,
                )


def test_every_command_is_a_command():
    assert all(isinstance(load_command(name), Command) for name in COMMAND_NAMES)
    modules = {p.stem for p in COMMAND_MODULES.glob("[a-z]*.py")}
    assert {*COMMAND_NAMES} == modules - {
        "arguments",
        "commands",
        "main",
        "progress",
        "run_options",
    }

"""Values on the command line and in files of options: numbers, empty values, class weights."""

import os
import threading

import pytest

from idp_tutorial.cli.arguments import build_parser
from idp_tutorial.cli.commands import parse_numbers
from idp_tutorial.cli.train import train_command
from idp_tutorial.utils.checks import parse_number
from idp_tutorial.utils.options import Option
from idp_tutorial.utils.schemas import Rule


@pytest.mark.parametrize("text", ["12", "+12", "-3", " 12 ", "0012"])
def test_whole_numbers_are_read(text):
    assert parse_number(text, int) == int(text)


@pytest.mark.parametrize("text", ["1e-3", ".5", "5.", "-2.5E4", "inf", "NaN", "7"])
def test_numbers_are_read(text):
    assert repr(parse_number(text)) == repr(float(text))


NOT_NUMBERS = ["١٢", "1_0", "２", "1,5", "0x10", "", " ", "1 2", "½", "\u00a05", "--1"]


@pytest.mark.parametrize("text", [*NOT_NUMBERS, "1.0", "1e3"])
def test_what_is_not_a_whole_number_is_refused_everywhere(text, tmp_path):
    with pytest.raises(ValueError):
        parse_number(text, int)
    with pytest.raises(ValueError, match="--steps"):
        train_command.parse([f"--steps={text}"])
    (tmp_path / "a.yaml").write_text(f'steps: "{text}"\n')
    with pytest.raises(ValueError, match="steps"):
        train_command.parse(["--config", str(tmp_path / "a.yaml")])
    if text != "1,5":
        with pytest.raises(ValueError, match="layers"):
            parse_numbers(f"1,{text}", "layers")


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_what_is_not_a_number_is_refused_everywhere(text, tmp_path):
    with pytest.raises(ValueError):
        parse_number(text)
    with pytest.raises(ValueError, match="--lr"):
        train_command.parse([f"--lr={text}"])
    if text != "1,5":
        with pytest.raises(ValueError, match="learning_rates"):
            parse_numbers(f"1e-3,{text}", "learning_rates", float)
    with pytest.raises(ValueError, match="class_weight"):
        train_command.parse([f'--class_weight={{"rare": "{text}"}}'])


@pytest.mark.parametrize("text", ["", "  "])
@pytest.mark.parametrize("name", ["text", "data", "backbone", "learning_rates", "template", "out"])
def test_an_empty_value_is_refused(name, text, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(f"{name}:\n")
    for argv in ([f"--{name}={text}"], ["--config", str(tmp_path / "a.yaml")]):
        with pytest.raises(SystemExit):
            train_command.main(argv)
        assert f"{name} is empty: give a value, or leave it out" in capsys.readouterr().err
    (tmp_path / "a.yaml").write_text(f"{name}: null\n")  # the default, in words
    assert train_command.parse(["--config", str(tmp_path / "a.yaml")]) == {}


def test_an_option_may_declare_that_empty_is_a_value():
    option = Option(
        "teacher", str, "minilm", "", "", False, checks=(Rule("a text", lambda text: True),)
    )
    assert option.check("") == ""
    with pytest.raises(ValueError, match="teacher must be a text, got 3"):
        option.check(3)


def test_a_class_has_one_weight(tmp_path):
    parsed = train_command.parse(['--class_weight={"rare": 5, "often": ".5"}'])
    assert parsed == dict(class_weight=dict(rare=5.0, often=0.5))
    for value in ('{"rare": 5, "rare": 6}', '{"rare": 5, "rare": 5}'):
        with pytest.raises(ValueError, match="give balanced, or one weight for each class"):
            train_command.parse([f"--class_weight={value}"])
    for value in ('{"rare": true}', '{"rare": [1]}', '{"rare": null}', '{"rare": {"a": 1}}'):
        with pytest.raises(ValueError, match="give balanced, or one weight for each class"):
            train_command.parse([f"--class_weight={value}"])


def test_a_file_of_options_runs_no_code(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "a.yaml").write_text(f"steps: !!python/object/apply:os.mkdir [{ran}]\n")
    with pytest.raises(ValueError, match="a.yaml"):
        train_command.parse(["--config", str(tmp_path / "a.yaml")])
    assert not ran.exists()


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
TOO_MUCH = {"aliases of aliases": f"{ALIASES}method: *a11\n", "one alias": "a: &x 1\nb: *x\n"}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_file_of_options_has_no_aliases(name, tmp_path):
    (tmp_path / "a.yaml").write_text(TOO_MUCH[name])
    with pytest.raises(ValueError, match="a.yaml cannot be read .line .* has an alias"):
        train_command.parse(["--config", str(tmp_path / "a.yaml")])


def test_a_file_of_options_has_a_limited_size(tmp_path):
    with pytest.raises(ValueError, match="/dev/zero cannot be read .it has more than 65,536 bytes"):
        train_command.parse(["--config", "/dev/zero"])
    (tmp_path / "a.yaml").write_text("steps: 5\n" + "#" * 70_000)
    with pytest.raises(ValueError, match="it has more than 65,536 bytes"):
        train_command.parse(["--config", str(tmp_path / "a.yaml")])


def test_a_file_of_options_may_be_a_pipe(tmp_path):
    """As a shell makes one of `--config <(command)`."""
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("steps: 7\n",))
    writer.start()
    assert train_command.parse(["--config", str(tmp_path / "pipe")]) == dict(steps=7)
    writer.join()


def test_the_help_of_an_option_to_turn_off_says_what_happens_then():
    options = train_command.options()
    help_text = " ".join(build_parser("idp train", "", options).format_help().split())
    assert "--no_stratified sample at random (IDPG)" in help_text
    assert "--no_group_duplicates they are held out one by one" in help_text
    option = Option("warm", bool, True, "warm up", "training", False)
    help_text = " ".join(build_parser("x", "", dict(warm=option)).format_help().split())
    assert "--no_warm turn off: warm up" in help_text

"""Values on the command line and in files of options: numbers, empty values, class weights."""

import pytest

from idp_tutorial.cli.commands import parse_numbers
from idp_tutorial.cli.train import train_command
from idp_tutorial.utils.checks import parse_number
from idp_tutorial.utils.options import AllowEmpty, Option


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
    option = Option("teacher", str, "minilm", "", "", False, checks=(AllowEmpty(),))
    assert option.check("") == ""
    with pytest.raises(ValueError, match="teacher must be a string, got 3"):
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

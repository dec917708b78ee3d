"""`idp reproduce`: plans, and figures that are not its own."""

import pytest

from idp_tutorial.cli.reproduce import reproduce_command


def test_full_states_what_it_does_not_search(capsys):
    reproduce_command(table="id-spam-3", scale="full", plan=True)
    words = capsys.readouterr().out.splitlines()[-1]
    assert "one point of the paper's search space" in words
    assert "batch_size 16, 32, 64 (here 32)" in words and "layer 1 to 23" in words


@pytest.mark.parametrize("name", ["lpt-f6", "idpg-f5"])
def test_a_figure_without_scores_names_its_script(name, tmp_path, capsys):
    with pytest.raises(SystemExit):
        reproduce_command(table=name, out=str(tmp_path / "out"))
    assert f"Run: python -m results.figures.run --figure {name}" in capsys.readouterr().err

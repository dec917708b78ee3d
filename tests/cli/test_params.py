"""The command that counts parameters."""

import json

import pytest

from idp_tutorial.cli.params import params_command


@pytest.mark.long
def test_the_command_prints_every_row(capsys):
    params_command(published=True, json=True)
    lines = [json.loads(l) for l in capsys.readouterr().out.splitlines()]
    assert len(lines) == 120 and all(
        {"reported", "exact", "ours", "status"} <= set(l) and isinstance(l["ours"], int)
        for l in lines
    )


def test_the_command_counts_methods(capsys):
    params_command(backbone="roberta-base", prompt_length=5, methods="prompt-tuning, lpt-npg")
    out = capsys.readouterr().out.splitlines()
    assert (
        len(out) == 3
        and out[0].split() == ["method", "prompt", "head", "backbone", "trained", "percent"]
        and out[1].split()[:3] == ["prompt-tuning", "3,840", "1,538"]
        and "593,792" in out[2]
    )
    params_command(
        backbone="roberta-base",
        prompt_length=5,
        methods="lpt-npg",
        head="verbalizer",
        bottleneck=64,
        json=True,
    )
    r = json.loads(capsys.readouterr().out)
    assert (
        r["prompt"] == 64 * 769 + 5 * 768 * 65
        and r["head"] == r["backbone"] == 0
        and r["refused"] is None
    )


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(backbone="flan-t5-xl"), ["only the size is known", "published_counts()"]),
        (dict(methods="lpt-ngp"), ["did you mean 'lpt-npg'"]),
        (dict(methods="lpt", prompt_length=0), ["at least 1", "got 0"]),
        (dict(methods="lpt", head="verbaliser"), ["'verbalizer'"]),
        (dict(backbone="nowhere"), ["no backbone 'nowhere'"]),
    ],
)
def test_the_command_explains_refusals(kw, words, capsys):
    with pytest.raises(SystemExit) as e:
        params_command(**kw)
    err = capsys.readouterr().err
    assert (
        e.value.code == 2
        and err.startswith("idp params: ")
        and err.count("\n") == 1
        and all(w in err for w in words)
    ), err


def test_each_method_has_the_prompt_length_of_its_own_paper(capsys):
    params_command(methods="m-idpg-phm,lpt-npg,lpt-mppg,p-tuning-v2,lpt", json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    counts = {r["method"]: r["prompt"] for r in rows}
    assert counts == {
        "m-idpg-phm": 137_232,  # IDPG: 134K
        "lpt-npg": 791_680,  # LPT: 792K
        "lpt-mppg": 263_296,
        "p-tuning-v2": 983_040,  # LPT: 985K with its head
        "lpt": 20_480,
    }

"""`results/transfer/run.py`: its label map, its methods, and a run."""

import json

import pytest

from idp_tutorial.runs.logits import has_logits
from results.transfer import run as transfer
from results.transfer import scores as R
from results.transfer.run import parse_label_map


def test_a_label_map_is_parsed():
    assert parse_label_map(" a = b,c=b ") == dict(a="b", c="b") and parse_label_map(None) is None
    with pytest.raises(ValueError, match="label 'a' is mapped twice"):
        parse_label_map("a = b,a=c")
    with pytest.raises(ValueError, match="'b' is not a pair"):
        parse_label_map("a=c,b")


@pytest.mark.long
def test_command(small_folder, tmp_path, capsys):
    def run(**kw):
        return transfer.transfer_command(
            **{
                **dict(
                    backbone=str(small_folder),
                    methods="head-only",
                    seeds=1,
                    steps=2,
                    test_rows=20,
                    target_shots=10,
                    max_len=32,
                    device="cpu",
                    out=str(tmp_path),
                ),
                **kw,
            }
        )

    run(source="sentiment", target="two-domains", shots=40)
    text = capsys.readouterr().out
    file = tmp_path / f"transfer-sentiment-k40-two-domains-{small_folder.name}.jsonl"
    assert "majority" in text and str(file) in text and len(file.read_text().splitlines()) == 3
    run(
        source="questions",
        target="sentiment",
        shots=40,
        target_shots=0,
        precision="bf16",
        labels="abbreviation=negative,entity=negative,description=negative,"
        "human=positive,location=positive,numeric=positive",
    )
    (line,) = (
        (tmp_path / file.name.replace("sentiment", "questions").replace("two-domains", "sentiment"))
        .read_text()
        .splitlines()
    )
    assert json.loads(line)["precision"] == "bf16"
    run(
        source="sentiment",
        target="two-domains",
        shots=30,
        methods="head-only,lpt",
        target_shots=0,
        tune_head_first=True,
        evaluations=1,
    )
    bare, late = map(
        json.loads, (tmp_path / file.name.replace("k40", "k30")).read_text().splitlines()
    )
    assert (
        bare["head_lr"] is None
        and late["head_lr"] in R.METHODS["head-only"].learning_rates
        and late["eval_every"] == 2
    )
    run(
        source="sentiment",
        target="two-domains",
        shots=20,
        methods="lpt-npg",
        target_shots=0,
        learning_rates="1e-3,2e-3",
        bottleneck=3,
        prompt_length=2,
    )
    (r,) = map(json.loads, (tmp_path / file.name.replace("k40", "k20")).read_text().splitlines())
    assert (
        r["bottleneck"] == 3
        and r["lr"] in (1e-3, 2e-3)
        and r["lr_selection"] == "best of 2 (0.001, 0.002) on validation"
    )
    assert has_logits(r, tmp_path)
    for kw, words in (
        (dict(source="questions"), "do not correspond"),
        (dict(learning_rates="1e-3", lr=0.1), "learning_rates and lr"),
        (dict(bottleneck=4), "bottleneck=4 has no effect on head-only"),
        (dict(learning_rates="a"), "learning_rates='a': give numbers"),
        (dict(labels="a"), "'a' is not a pair"),
        (dict(source="sentment"), "did you mean 'sentiment'"),
        (dict(methods="lptt"), "did you mean 'lpt'"),
        (dict(seeds=0), "seeds must be at least 1"),
        (dict(out=str(file)), "is a file: give a folder"),
        (dict(precision="half"), "precision must be 'no', 'bf16' or 'fp16', got 'half'"),
    ):
        with pytest.raises(SystemExit) as e:
            run(**kw)
        assert e.value.code == 2 and words in capsys.readouterr().err


def test_the_commands_methods_are_those_of_table_6():
    """ID-SPAM's LPT has a generator."""
    named = transfer.transfer_command.options()["methods"].default.split(",")
    assert {*named} <= {*R.published_transfer_table().index} and "lpt-npg" in named

"""`results/pretraining/run.py` trains a backbone, and another run can start from its weights."""

import pytest
import torch

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.synthetic import make_rows
from results.pretraining import distillation
from results.pretraining.run import pretrain_command


@pytest.fixture
def text(tmp_path):
    f = tmp_path / "text.txt"
    f.write_text(
        "\n".join(
            r["sentence1"] for t in ("sentiment", "questions") for r in make_rows(t, "train", n=400)
        )
    )
    return f


def refused(capsys, **kw):
    """Return the message of a command that ends with status 2 and one line."""
    with pytest.raises(SystemExit) as e:
        pretrain_command(**kw)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1, err
    return err


@pytest.mark.grid
@pytest.mark.parametrize("family,teacher", [("gpt2", ""), ("roberta", "minilm")])
def test_the_command_trains_a_backbone(family, teacher, text, tmp_path, capsys):
    kw = dict(
        text=str(text),
        out=str(tmp_path / "run"),
        family=family,
        n_layers=2,
        d=32,
        steps=6,
        tokens_per_step=256,
        every=3,
        teacher=teacher,
        dtype="float32",
    )
    kw["held_out_tokens"] = 2000
    pretrain_command(**kw)
    bb = load_backbone(str(tmp_path / "run/backbone"))
    out = capsys.readouterr().out
    assert (
        (bb.family, bb.d, bb.n_layers) == (family, 32, 2)
        and "step 6/6" in out
        and ("distil" in out) == bool(teacher)
    )
    assert len((tmp_path / "run/log.jsonl").read_text().splitlines()) == 2
    if teacher:
        return
    pretrain_command(
        **{
            **kw,
            "out": str(tmp_path / "more"),
            "corpus_dir": kw["out"],
            "init_from": kw["out"],
            "lr": 1e-12,
            "steps": 1,
            "every": 1,
        }
    )
    on = load_backbone(str(tmp_path / "more/backbone"))
    # the second run began where the first had ended
    assert all(torch.equal(p, q) for p, q in zip(bb.model.parameters(), on.model.parameters()))


def test_a_short_text_is_refused_before_the_teacher_reads_it(text, tmp_path, capsys, monkeypatch):
    def read(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(distillation, "project_teacher_embeddings", read)
    monkeypatch.setattr(distillation, "DistillationLoss", read)
    message = refused(capsys, text=str(text), out=str(tmp_path / "run"), d=32, n_layers=2)
    assert "held_out_tokens=200000" in message


def test_errors_are_one_line(tmp_path, capsys):
    kw = dict(text=str(tmp_path / "none.txt"), out=str(tmp_path / "o"), teacher="")
    assert refused(capsys, **kw).startswith("python -m results.pretraining.run: no text file")
    (tmp_path / "t.csv").write_text("text,label\na cold soup,0\n")
    assert "t.csv is a table" in refused(capsys, **{**kw, "text": str(tmp_path / "t.csv")})
    assert refused(capsys, **kw, dtype="half").startswith(
        "python -m results.pretraining.run: dtype must be"
    )
    assert not (tmp_path / "o").exists()

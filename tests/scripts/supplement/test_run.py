"""The command of IDPG's supplementary training; the training itself has tests beside its module."""

import pytest

from results.supplement import supplementary_training
from results.supplement.run import supplement_command


@pytest.fixture
def calls(monkeypatch):
    recorded = []

    def record_call(cfg, build_model, task, folder, **kwargs):
        recorded.append((cfg, kwargs))
        return dict(validation=50.0, steps=2)

    monkeypatch.setattr(supplementary_training, "run_supplementary_training", record_call)
    return recorded


def test_stage_1_has_the_settings_of_the_paper(calls, tmp_path, capsys):
    out = tmp_path / "stage1"
    supplement_command(backbone="tiny", task="entailment", out=str(out))
    ((cfg, kwargs),) = calls
    assert (cfg.method, cfg.get("prompt_length"), cfg.pooling) == ("s-idpg-phm", 5, "cls")
    assert (cfg.lr, cfg.epochs, cfg.batch_size, cfg.weight_decay, cfg.warmup) == (
        1e-5,
        10,
        32,
        0.1,
        0,
    )
    assert kwargs == dict(with_swapped_pairs=True)
    assert (cfg.beta2, cfg.eps, cfg.schedule, cfg.clip) == (0.98, 1e-6, "linear", float("inf"))
    assert f"--init_from {out} --prompt_length 5 --task TASK" in capsys.readouterr().out


def test_single_sentences_are_not_swapped(calls, tmp_path):
    options = dict(backbone="tiny", out=str(tmp_path / "a"))
    supplement_command(task="sentiment", **options)
    supplement_command(task="entailment", one_order=True, **options)
    supplement_command(task="sentiment", method="fine-tuning", **options)
    assert [kwargs["with_swapped_pairs"] for _, kwargs in calls] == [False] * 3


def test_an_option_that_the_method_lacks_is_refused(calls, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        supplement_command(
            method="fine-tuning", task="sentiment", bottleneck=8, out=str(tmp_path / "a")
        )
    assert e.value.code == 2 and "has no option 'bottleneck'" in capsys.readouterr().err
    assert not calls

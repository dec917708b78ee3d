"""Figures from the command line."""

import pytest
from small import small_task

from results.claims.decision import has_enough_runs
from results.figures import paper_figures
from results.figures.paper_figures import FIGURE_EXPERIMENTS
from results.figures.run import figures_command


@pytest.mark.parametrize("name", FIGURE_EXPERIMENTS)
def test_a_figure_writes_a_record_for_each_method(
    name, monkeypatch, small_folder, tmp_path, capsys
):
    """A second call runs nothing."""
    bundled = dict(subj="questions", stsb="similarity", mnli="entailment", mrpc="entailment")
    monkeypatch.setattr(
        paper_figures, "load_config_task", lambda cfg: small_task(bundled[cfg.task])
    )
    for _ in range(2):
        figures_command(
            figure=name, backbone=str(small_folder), out=str(tmp_path), steps=1, seeds=1
        )
        monkeypatch.setattr(paper_figures, "_run_and_record", lambda *a: pytest.fail("run again"))
    lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
    assert len(lines) == len(FIGURE_EXPERIMENTS[name][1]) and capsys.readouterr().out.count(
        "seed 0"
    ) == 2 * len(lines)


def test_the_plan_of_a_figure_is_printed_and_nothing_is_trained(tmp_path, capsys):
    for name, (method, tasks, _) in FIGURE_EXPERIMENTS.items():
        for scale, model in (("small", "minilm"), ("full", "roberta-large")):
            figures_command(figure=name, plan=True, scale=scale, seeds=2, out=str(tmp_path / "a"))
            lines = capsys.readouterr().out.splitlines()
            assert len(lines) == len(tasks) * (2 if method else 1)
            assert all(line.startswith(model) for line in lines)
            if method and scale == "full":
                assert all("epochs" in line for line in lines)
    assert not (tmp_path / "a").exists()


def test_a_figure_has_enough_seeds_for_a_verdict(monkeypatch, small_folder, tmp_path):
    seed_counts = []
    monkeypatch.setattr(
        paper_figures,
        "reproduce_figure",
        lambda name, base, seeds, file: seed_counts.append(seeds) or [],
    )
    figures_command(figure="lpt-f6", backbone=str(small_folder), out=str(tmp_path))
    assert seed_counts == [5] and has_enough_runs(dict(runs=5))


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(figure="lpt-f6", seeds=0), "seeds must be at least 1, got 0"),
        (dict(figure="lpt-f6", steps=0), "steps must be at least 1, got 0"),
        (dict(figure="lpt-f7"), "figure must be "),
    ],
)
def test_what_is_refused(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        figures_command(out=str(tmp_path / "out"), **options)
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()

"""Figures: what they measure, the provenance of their records, and other data or weights."""

import json

import pytest
import torch
from small import backbone, config, model_of, small_task

from idp_tutorial.runs import record as run_records
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.utils.records import SCHEMA_VERSION, read_records
from results.figures import paper_figures


@pytest.fixture
def drawn(small_folder, tmp_path, monkeypatch):
    """Reproduce LPT's Figure 6 on a small task; the list has the configs that were trained."""
    ran = []
    real = Experiment.fit
    out = tmp_path / "f.jsonl"

    def trained(self, checkpoint_dir=None):
        ran.append(self.cfg)
        return real(self)

    monkeypatch.setattr(Experiment, "fit", trained)
    base = config(backbone=str(small_folder), lr=1e-3, steps=2, eval_every=2)

    def call(task=None, name="lpt-f6", seeds=1):
        task = task or small_task()
        monkeypatch.setattr(paper_figures, "load_config_task", lambda cfg: task)
        return paper_figures.reproduce_figure(name, base, seeds, out)

    return call, ran, out


def test_a_figure_record_has_its_provenance(drawn):
    call, ran, out = drawn
    records = call(seeds=2)
    assert read_records(out) == json.loads(json.dumps(records)) and len(ran) == 2
    for r in records:
        assert (r["schema"], r["status"], r["figure"], r["texts"], r["lr"]) == (
            SCHEMA_VERSION,
            "done",
            "lpt-f6",
            1500,
            1e-3,
        )
        assert r["digests"] == dict(
            weights=records[0]["digests"]["weights"], data=small_task().digest()
        )
        assert (
            len(r["losses"]) == 2
            and r["split_sizes"] == dict(train=64, validation=24, test=24)
            and r["provenance"]["started_at"]
        )
        assert {*r["measurements"]} == {"trained", "untrained", "validation"}
    call(seeds=2)
    assert len(ran) == 2


def test_a_figure_without_training_has_records(drawn):
    call, ran, _ = drawn
    pairs = small_task("entailment")
    a, b = call(pairs, "idpg-f5")
    assert (
        not ran
        and "losses" not in a
        and a["digests"]["data"] == pairs.digest()
        and a["digests"]["weights"]
    )
    assert (a["task"], b["task"]) == ("mnli", "mrpc") and {*a["measurements"]} == {
        "mean",
        "median",
        "nine_tenths",
    }
    assert json.loads(json.dumps(a)) == json.loads(json.dumps(call(pairs, "idpg-f5")[0]))


def test_other_data_make_another_record(drawn):
    call, ran, _ = drawn
    call()
    call(small_task(train=32))
    call(small_task(train=32))
    assert len(ran) == 2


def test_other_weights_make_another_record(drawn, monkeypatch):
    call, ran, _ = drawn
    call()
    call()
    assert len(ran) == 1
    monkeypatch.setattr(run_records, "backbone_digest", lambda cfg: "of others")
    call()
    assert len(ran) == 2


def test_a_figure_whose_run_diverges_leaves_a_record(drawn, monkeypatch):
    call, ran, out = drawn
    real = Experiment.fit

    def wild(self):
        if self.cfg.seed == 0:
            ran.append(self.cfg)
            raise FloatingPointError("the loss is not finite: lower the learning rate")
        return real(self)

    monkeypatch.setattr(Experiment, "fit", wild)
    for _ in range(2):
        assert [r["seed"] for r in call(seeds=2)] == [1] and len(ran) == 2
    lost, done = read_records(out)
    assert (lost["status"], lost["figure"], done["status"]) == ("diverged", "lpt-f6", "done")
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        call(seeds=1)
    assert len(ran) == 2


def test_a_ranking_puts_similar_pairs_first():
    """Pairs of equal sentences come first."""
    task = small_task("similarity")
    bb = backbone()
    texts = [r["sentence1"] for r in task.splits["train"][:8]]
    rows = [dict(sentence1=t, sentence2=t, label=5.0) for t in texts[:4]]
    rows += [dict(sentence1=t, sentence2="no", label=0.0) for t in texts[4:]]
    model = model_of("head-only", bb, task)
    cosines = paper_figures.pair_cosines(model, task, rows, config())
    similar = torch.arange(8) < 4
    assert [paper_figures.precision_at_n(cosines, similar, n) for n in (4, 8)] == [100.0, 50.0]


def test_the_bootstrap_error_of_a_difference_of_precisions():
    """For independent rankings it is that of two means of 100 answers; for equal ones it is 0."""
    g = torch.Generator().manual_seed(1)
    a, b = torch.rand(2, 1000, generator=g)
    similar = torch.rand(1000, generator=g) < 0.4
    assert paper_figures.bootstrap_precision_error(a, a, similar, 100) == 0
    assert (
        abs(
            paper_figures.bootstrap_precision_error(a, b, similar, 100)
            - 100 * (2 * 0.4 * 0.6 / 100) ** 0.5
        )
        < 1
    )
    assert paper_figures.bootstrap_precision_error(
        a, b, similar, 100
    ) == paper_figures.bootstrap_precision_error(a, b, similar, 100)


def test_a_figure_uses_the_sample_that_its_config_states(monkeypatch, small_folder):
    loaded = []
    monkeypatch.setattr(
        paper_figures, "load_config_task", lambda cfg: loaded.append(cfg) or small_task("questions")
    )
    base = config(
        backbone=str(small_folder), shots=8, split_seed=3, stratified=False, lr=1e-4, steps=1
    )
    (r,) = paper_figures.reproduce_figure("lpt-f6", base, 1)
    (cfg,) = loaded
    assert (cfg.task, cfg.data, cfg.shots) == ("subj", None, 8) and r["lr"] == 1e-4
    assert (cfg.split_seed, cfg.stratified) == (3, False)

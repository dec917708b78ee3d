"""Records of figures: their provenance, and records of other data or weights."""

import json

import pytest
from small import config, small_task

from idp_tutorial.reproduction.analysis import paper_figures
from idp_tutorial.runs import record as run_records
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.utils.records import SCHEMA_VERSION, read_records


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

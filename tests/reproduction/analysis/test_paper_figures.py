"""Records of figures: their provenance, older records, and records of other data or weights."""

import json

import pytest
from idp_tutorial.runs.record_checks import data_digest
from small import config, small_task

from idp_tutorial.reproduction.analysis import paper_figures as figures
from idp_tutorial.reproduction.analysis.paper_figures import reproduce_figure
from idp_tutorial.runs import record_checks as evidence
from idp_tutorial.utils.provenance import SCHEMA_VERSION
from idp_tutorial.utils.records import append_record, read_records

NEW = {
    "schema",
    "status",
    "digests",
    "losses",
    "split_sizes",
    "provenance",
    "weights_dtype",
}  # what older records do not say


@pytest.fixture
def drawn(small_folder, tmp_path, monkeypatch):
    """Reproduce LPT's Figure 6 on a small task; the list has the configs that were trained."""
    ran = []
    real = figures.train_model
    out = tmp_path / "f.jsonl"

    def trained(cfg, task):
        ran.append(cfg)
        return real(cfg, task)

    monkeypatch.setattr(figures, "train_model", trained)
    base = config(backbone=str(small_folder), lr=1e-3, steps=2, eval_every=2)

    def call(task=None, name="lpt-f6", seeds=1, **kw):
        task = task or small_task()
        return reproduce_figure(
            name,
            base,
            seeds,
            out,
            {t: task for t in ("subj", "mnli", "mrpc")},
            max_examples=8,
            **kw,
        )

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
            8,
            1e-3,
        )
        assert r["digests"] == dict(
            weights=records[0]["digests"]["weights"], data=data_digest(small_task())
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
        and a["losses"] == []
        and a["digests"]["data"] == data_digest(pairs)
        and a["digests"]["weights"]
    )
    assert (a["task"], b["task"]) == ("mnli", "mrpc") and {*a["measurements"]} == {
        "mean",
        "median",
        "nine_tenths",
    }
    assert json.loads(json.dumps(a)) == json.loads(json.dumps(call(pairs, "idpg-f5")[0]))


def test_an_older_record_of_a_figure_is_accepted(drawn):
    call, ran, out = drawn
    (r,) = call()
    old = {
        k: v for k, v in r.items() if k not in NEW | {"insertion", "glove_noise"}
    }  # nor options of later
    out.unlink()
    append_record(old, out)
    assert call()[0]["measurements"] == r["measurements"] and len(ran) == 1
    call(small_task(train=32))  # which rows it read is not said
    assert len(ran) == 1


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
    monkeypatch.setattr(evidence, "backbone_fingerprint", lambda bb: "of others")
    call()
    assert len(ran) == 2


def test_a_figure_whose_run_diverges_leaves_a_record(drawn, monkeypatch):
    call, ran, out = drawn
    real = figures.train_model

    def wild(cfg, task):
        if cfg.seed == 0:
            ran.append(cfg)
            raise FloatingPointError("the loss is not finite: lower the learning rate")
        return real(cfg, task)

    monkeypatch.setattr(figures, "train_model", wild)
    for _ in range(2):
        assert [r["seed"] for r in call(seeds=2)] == [1] and len(ran) == 2
    lost, done = read_records(out)
    assert (lost["status"], lost["figure"], done["status"]) == ("diverged", "lpt-f6", "done")
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        call(seeds=1)
    assert len(ran) == 2

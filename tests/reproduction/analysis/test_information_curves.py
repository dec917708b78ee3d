"""Information curves: three prompt layers, different settings, and files that are extended."""

import json

import pytest
from small import config, setting, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.reproduction.analysis import information_curves as module
from idp_tutorial.reproduction.analysis.information_curves import (
    measure_information_curves,
    plot_information_curves,
)
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.training.fit import TrainLog
from idp_tutorial.utils.records import SCHEMA_VERSION, read_records


@pytest.fixture
def curves_of(monkeypatch):
    """Measure curves of a three-layer model; list the trained layers, seeds and learning rates."""
    trained = []
    bb = setting()[0]
    monkeypatch.setattr(module, "load_backbone", lambda name: bb)
    monkeypatch.setattr(Backbone, "initial_fingerprint", lambda self: "of the weights")

    def quick(self, checkpoint_dir=None):
        trained.append((self.cfg.get("layer"), self.cfg.seed, self.cfg.lr))
        return build_model(self.cfg, bb, self.task), TrainLog(50.0, losses=[2.0, 1.0])

    monkeypatch.setattr(Experiment, "fit", quick)

    def call(cfg={}, rows=64, **kw):
        return measure_information_curves(
            config(method="lpt", lr=0.2, **cfg),
            small_task(train=rows),
            **{**dict(seeds=2, max_examples=24, depth=0, steps=3), **kw},
        )

    return call, trained


def test_curves_for_three_prompt_layers(curves_of):
    call, trained = curves_of
    records = call(layer_learning_rates={1: 0.7})
    assert trained == [(p, s, 0.7 if p == 1 else 0.2) for s in (0, 1) for p in (0, 1, 2)]
    assert [(r["seed"], r["prompt_layer"], r["layer"]) for r in records] == [
        (s, p, k) for s in (0, 1) for p in (0, 1, 2) for k in (1, 2, 3)
    ]
    bits = {(r["prompt_layer"], r["layer"]): r["bits"] for r in records if r["seed"] == 0}
    assert (
        bits[1, 1] == bits[2, 1] and bits[1, 2] != bits[2, 2] != bits[0, 2]
    )  # below a prompt there is nothing of it
    ax = plot_information_curves(records)
    assert {l.get_label() for l in ax.lines if not l.get_label().startswith("_")} == {
        f"prompt at layer {p}" for p in range(3)
    }
    thick = next(l for l in ax.lines if l.get_label() == "prompt at layer 1")
    assert list(thick.get_ydata()) == pytest.approx(
        [
            sum(r["bits"] for r in records if (r["prompt_layer"], r["layer"]) == (1, k)) / 2
            for k in (1, 2, 3)
        ]
    )


def test_curves_are_extended(curves_of, tmp_path):
    call, trained = curves_of
    out = tmp_path / "i.jsonl"
    call(prompt_layers=[1], out=out)
    n = len(trained)
    records = call(prompt_layers=[1, 2], out=out)
    assert (
        n == 2
        and [t[0] for t in trained[2:]] == [2, 2]
        and len(records) == 12 == len(out.read_text().splitlines())
    )
    assert all(
        r["prompt_length"] == 4
        and r["data"] is None
        and r["cache_dir"] is None
        and r["probe"]
        == dict(
            n=24,
            prompt=False,
            depth=0,
            width=64,
            heads=4,
            steps=3,
            lr=3e-3,
            batch_size=64,
            evaluations=10,
            seed=0,
        )
        for r in records
    )


def test_other_weights_make_another_curve(curves_of, tmp_path, monkeypatch):
    call, trained = curves_of
    kw = dict(prompt_layers=[1], seeds=1, layers=[2], out=tmp_path / "i.jsonl")
    call(**kw)
    monkeypatch.setattr(Backbone, "initial_fingerprint", lambda self: "of others")
    call(**kw)
    assert len(trained) == 2


@pytest.mark.parametrize(
    "change",
    [
        dict(depth=1),
        dict(width=8),
        dict(steps=4),
        dict(seed=1),
        dict(max_examples=20),
        dict(include_prompt=True),
        dict(cfg=dict(prompt_length=5)),
        dict(cfg=dict(steps=5)),
        dict(cfg=dict(head_lr=0.1)),
        dict(rows=60),
        dict(layer_learning_rates={1: 0.7}),
    ],
    ids=str,
)
def test_other_settings_make_another_curve(curves_of, tmp_path, change):
    call, trained = curves_of
    out = tmp_path / "i.jsonl"
    kw = dict(prompt_layers=[1], seeds=1, layers=[2], out=out)
    call(**kw)
    call(**kw)
    assert len(trained) == 1
    call(**{**kw, **change})
    assert len(trained) == 2 and len(read_records(out)) == 2
    if "layer_learning_rates" not in change:
        with pytest.raises(ValueError, match="records of several sweeps"):
            plot_information_curves(read_records(out))


def test_a_record_has_its_provenance(curves_of, tmp_path):
    """A record has its provenance, and other data make another curve."""
    call, trained = curves_of
    out = tmp_path / "i.jsonl"
    kw = dict(prompt_layers=[1], seeds=1, layers=[2], out=out)
    (r,) = call(**kw)
    assert (r["schema"], r["status"], r["losses"], r["digests"]["weights"]) == (
        SCHEMA_VERSION,
        "done",
        [2.0, 1.0],
        "of the weights",
    )
    assert (
        r["digests"]["data"] == small_task(train=64).digest()
        and r["versions"]
        and r["provenance"]["started_at"]
    )
    out.write_text(json.dumps({**r, "digests": {**r["digests"], "data": "another"}}) + "\n")
    call(**kw)
    assert len(trained) == 2


@pytest.mark.parametrize("cut", [0, 30])
def test_a_curve_cut_short_is_not_done(curves_of, tmp_path, cut):
    """Where lines are missing or cut, only the missing layers are probed again."""
    call, trained = curves_of
    out = tmp_path / "i.jsonl"
    kw = dict(prompt_layers=[1], seeds=1, out=out)
    whole = call(**kw)
    lines = out.read_text().splitlines(True)
    out.write_text("".join(lines[:1]) if not cut else "".join(lines)[:-cut])
    again = call(**kw)
    timeless = [[{**r, "provenance": None} for r in rs] for rs in (again, whole)]
    assert (
        timeless[0] == timeless[1]
        and sorted(r["layer"] for r in read_records(out)) == [1, 2, 3]
        and len(trained) == 2
    )
    assert call(**{**kw, "layers": [3, 1]}) == [again[2], again[0]] and len(trained) == 2


def test_a_curve_whose_run_diverges_leaves_a_record(curves_of, monkeypatch, tmp_path):
    """Other runs continue, a second call trains nothing; if all diverge, the error is raised."""
    call, trained = curves_of
    train = Experiment.fit
    out = tmp_path / "i.jsonl"

    def wild(self):
        if self.cfg.get("layer") == 1:
            trained.append("wild")
            raise FloatingPointError("the loss is not finite: lower the learning rate")
        return train(self)

    monkeypatch.setattr(Experiment, "fit", wild)
    for _ in range(2):
        records = call(prompt_layers=[1, 2], seeds=1, out=out)
        assert {r["prompt_layer"] for r in records} == {2} and trained == ["wild", (2, 0, 0.2)]
    lost, *done = read_records(out)
    assert lost["status"] == "diverged" and lost["prompt_layer"] == 1 and len(done) == 3
    assert plot_information_curves(read_records(out)).get_legend_handles_labels()[1] == [
        "prompt at layer 2"
    ]
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        call(prompt_layers=[1], seeds=1, out=out)

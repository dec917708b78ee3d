"""Sweeps over layers: every layer and seed once, resumed when interrupted, one sweep a file.

Summaries of a sweep: its profile over layers, score and cost, and the regret of a choice.

The file of a choice: which sweep, weights and data it is for.

Information curves: three prompt layers, different settings, and files that are extended.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
from small import config, refused, setting, small_task
from sweeps import BASE, HUMP, SETTINGS, TASK, fake, pretend, swept

from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.config import RunConfig, RunOptions
from idp_tutorial.backbones import load as backbone_loading
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.runs import record as run_records
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.training.fit import TrainLog
from idp_tutorial.utils.records import SCHEMA_VERSION, read_records
from results.depth import layer_sweep as module
from results.depth.layer_sweep import (
    check_single_sweep,
    choice_matches_sweep,
    depth_profile_table,
    layer_choice_regret,
    load_or_choose_layer,
    measure_information_curves,
    sweep_file,
    sweep_prompt_layer,
    sweep_table,
    try_choose_layer,
)


def test_sweep_runs_every_layer_and_seed_once(monkeypatch):
    ran = pretend(monkeypatch)
    records = swept(["head-only", "lpt", "lpt-npg"])
    assert [r[:3] for r in ran] == [("head-only", None, 0), ("head-only", None, 1)] + [
        (m, k, s) for m in ("lpt", "lpt-npg") for k in (0, 2) for s in (0, 1)
    ]
    assert {r["lr_selection"] for r in records} == {"default"}
    assert all(r["n_layers"] > 2 and r["seconds"] >= 0 for r in records)
    assert {(r[0], r[3]) for r in ran} == {
        (m, METHODS[m].default_learning_rate) for m in ("head-only", "lpt", "lpt-npg")
    }


def test_a_sweep_moves_late_prompts_and_nothing_else():
    cfgs, _ = module.plan_layer_sweep(
        ["adapterdrop", "lpt", "head-only"], RunOptions().with_options(layer=3), [0, 2], 1
    )
    assert [(c.method, c.get("layer")) for c in cfgs] == [
        ("adapterdrop", None),
        ("lpt", 0),
        ("lpt", 2),
        ("head-only", None),
    ]


def test_all_layers_by_default(monkeypatch):
    ran = pretend(monkeypatch)
    L = load_backbone("tiny").n_layers
    swept(layers=None, seeds=1)
    assert [r[1] for r in ran] == list(range(L))


def test_learning_rates_are_tuned_at_every_layer(monkeypatch):
    ran = pretend(monkeypatch)
    records = swept(tune_learning_rate=True)
    grid = METHODS["lpt"].learning_rates
    # seed 0 of the best rate is not trained twice
    assert [r[1:] for r in ran] == [
        x for k in (0, 2) for x in [*[(k, 0, lr) for lr in grid], (k, 1, grid[2])]
    ]
    assert [(r["layer"], r["seed"], r["lr"]) for r in records] == [
        (k, s, grid[2]) for k in (0, 2) for s in (0, 1)
    ]
    assert {r["lr_selection"] for r in records} == {"best of 3 on validation, seed 0"}


def test_given_learning_rate(monkeypatch):
    ran = pretend(monkeypatch)
    records = swept(base=replace(BASE, lr=0.5), tune_learning_rate=True)
    assert {r[3] for r in ran} == {0.5} and {r["lr_selection"] for r in records} == {"given"}


@pytest.mark.grid
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_killed_sweep_goes_on(monkeypatch, tmp_path, tuned, half):
    out = tmp_path / "a" / "sweep.jsonl"
    ran = pretend(monkeypatch, crash_after=5 if tuned else 3)
    with pytest.raises(KeyboardInterrupt):
        swept(tune_learning_rate=tuned, out=out)
    n = len(out.read_text().splitlines())
    if half:
        out.write_text(out.read_text()[:-30])
        n -= 1
    ran = pretend(monkeypatch)
    records = swept(tune_learning_rate=tuned, out=out)
    assert [(r["layer"], r["seed"]) for r in records] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    # layer 0 has its rate
    assert len(ran) == (2 - n + 4 if tuned else 4 - n)
    assert not (tuned and any(r[1] == 0 and r[3] != METHODS["lpt"].learning_rates[2] for r in ran))
    assert [json.loads(l)["layer"] for l in out.read_text().splitlines()] == [0, 0, 2, 2]
    ran = pretend(monkeypatch)
    assert [r["score"] for r in swept(tune_learning_rate=tuned, out=out)] == [
        r["score"] for r in records
    ] and not ran


# the other settings are compared in `test_different_experiments_are_not_averaged`
@pytest.mark.grid
@pytest.mark.parametrize(
    "change",
    [dict(steps=4), dict(head="verbalizer"), dict(lr=0.7), dict(shots=5), dict(metric="macro_f1")],
    ids=str,
)
def test_a_file_has_one_sweep(monkeypatch, tmp_path, change):
    out = tmp_path / "s.jsonl"
    ran = pretend(monkeypatch)
    swept(out=out)
    before = out.read_text()
    ran = pretend(monkeypatch)
    field = "lr_selection" if "lr" in change else next(iter(change))
    with pytest.raises(
        ValueError, match=f"contains another sweep.*{field} is .* in some of them.*out="
    ):
        swept(out=out, base=replace(BASE, **change))
    assert not ran and out.read_text() == before
    swept(out=out, base=replace(BASE, device="auto"))
    assert not ran  # the device changes nothing
    swept(["lpt-npg"], [1], 3, out=out)
    assert len(ran) == 3  # nor does another method, layer or seed


def test_a_metric_of_ones_own_is_that_of_the_file(monkeypatch, tmp_path):
    out = tmp_path / "s.jsonl"
    macro = replace(BASE, metric="macro_f1")
    ran = pretend(monkeypatch)
    swept(out=out, base=macro)
    assert len(ran) == 4 and {r["metric"] for r in read_records(out)} == {"macro_f1"}
    swept(out=out, base=macro)
    assert len(ran) == 4
    with pytest.raises(ValueError, match='metric is "macro_f1" in some of them and "accuracy"'):
        swept(out=out)
    assert len(ran) == 4


def test_other_texts_are_another_sweep(monkeypatch, tmp_path):
    pretend(monkeypatch)
    swept(out=tmp_path / "s.jsonl")
    with pytest.raises(ValueError, match="contains another sweep.*split_sizes is"):
        sweep_prompt_layer(
            ["lpt"], BASE, [0], 1, task=small_task(train=32), out=tmp_path / "s.jsonl"
        )


def test_a_real_sweep_of_one_run(tmp_path, messages):
    (r,) = sweep_prompt_layer(
        ["lpt-npg"],
        replace(BASE, batch_size=8, prompt_length=2),
        [1],
        1,
        task=TASK,
        out=tmp_path / "s.jsonl",
    )
    messages.clear()
    (s,) = sweep_prompt_layer(
        ["lpt-npg"],
        replace(BASE, batch_size=8, prompt_length=2),
        [1],
        1,
        task=TASK,
        out=tmp_path / "s.jsonl",
    )
    assert (
        s == json.loads(json.dumps(r))
        and not messages
        and r["layer"] == 1
        and r["seconds"] > 0
        and len(sweep_table([r])) == 1
    )


def test_a_bare_heads_records_belong_to_the_sweep():
    """Its head learning rate and its number of steps may differ from those of the sweep."""
    check_single_sweep(
        fake([60, 61], head_lr=0.03, steps=300)
        + fake([50], method="head-only", layer=None, steps=0)
        + fake([90], method="fine-tuning", layer=None, head_lr=0.03, steps=300)
    )


def test_a_sweep_by_epochs_goes_on(monkeypatch, tmp_path):
    ran = pretend(monkeypatch)
    base = replace(BASE, epochs=1.0, batch_size=8)
    sweeps = [swept(layers=[1], base=base, out=tmp_path / "s.jsonl") for _ in range(2)]
    assert len(ran) == 2 == len(read_records(tmp_path / "s.jsonl"))
    assert {r["steps"] for r in sweeps[1]} == {-(-len(TASK.splits["train"]) // 8)}


def test_the_split_seed_reaches_the_sweep(monkeypatch):
    monkeypatch.setattr(module, "run_seeds", lambda cfg, task, *a, **kw: [task])
    want, other = [load_task("sentiment", None, 8, i).splits["train"] for i in (3, 0)]
    (task,) = sweep_prompt_layer(["lpt"], replace(BASE, shots=8, split_seed=3), (0,), 1)
    assert task.splits["train"] == want != other


def test_table_of_a_sweep():
    t = sweep_table(fake([60, 62]) + fake([90], method="fine-tuning", layer=None))
    assert (
        t.score.tolist() == [60, 62, 90]
        and t["std"].tolist() == [0.5] * 3
        and t.seeds.tolist() == [3] * 3
    )
    assert t.params.tolist() == [12] * 3 and t.layer.isna().tolist() == [False, False, True]


def test_the_table_has_the_mean():
    records = fake([60])
    records[0]["score"] += 3
    assert sweep_table(records).score.item() == 61


def test_sweep_file_names():
    assert (
        sweep_file(
            "r", RunConfig(task="sst2", shots=1000, backbone="a/b/minilm", head="verbalizer")
        ).as_posix()
        == "r/sweep-sst2-k1000-verbalizer-minilm.jsonl"
    )
    assert sweep_file("r", RunConfig(task="trec"), "choice").name == "choice-trec-tiny.jsonl"


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: swept(["ltp"]), ["unknown method 'ltp'", "'lpt'"]),
        (lambda: swept(seeds=0), ["seeds must be at least 1, got 0"]),
        (lambda: swept(layers=[99]), ["layers must be between 0 and", "'tiny'", "got 99"]),
        (lambda: sweep_table([]), ["no finished records", "sweep_prompt_layer"]),
    ],
)
def test_what_is_refused(make, words):
    refused(make, *words)


@pytest.mark.parametrize(
    "read",
    [
        check_single_sweep,
        sweep_table,
        depth_profile_table,
        lambda r: layer_choice_regret(r, dict(layer=1, seconds=1.0)),
    ],
    ids=["check_single_sweep", "table", "profile", "regret"],
)
def test_different_experiments_are_not_averaged(read):
    for change in [
        *SETTINGS,
        dict(task="b"),
        dict(backbone="b"),
        dict(data="b"),
        dict(split_sizes=dict(train=5)),
        dict(compile=True),
        dict(lr_selection="given"),
    ]:
        with pytest.raises(ValueError, match="several sweeps.*one sweep at a time"):
            read(
                HUMP
                + [
                    {
                        **r,
                        "seed": r["seed"] + 3,
                        **({"lr_selection": "given"} if "lr" in change else change),
                    }
                    for r in HUMP
                ]
            )
    with pytest.raises(ValueError, match="'lpt' at layer 0 with seed 0 has 2 records"):
        read([*HUMP, {**HUMP[0], "lr": 0.7}])
    read(HUMP + [{**r, "seed": r["seed"] + 3, "lr": 0.3, "device": "cpu"} for r in HUMP])


STORED = sorted((Path(__file__).parents[3] / "results/depth").glob("sweep-*.jsonl"))


@pytest.mark.parametrize("path", STORED, ids=lambda p: p.stem)
def test_stored_sweeps_are_read(path):
    r = read_records(path)
    choice = path.with_name(path.name.replace("sweep", "choice"))
    assert check_single_sweep(r) == r and len(depth_profile_table(r)) > 0
    if choice.exists():
        c = read_records(choice)[-1]
        assert choice_matches_sweep(c, r[0]) and (layer_choice_regret(r, c).regret >= 0).all()


@pytest.mark.parametrize(
    "scores,noise,is_one",
    [
        ([60, 63, 66, 66, 63, 60], 0.5, True),
        ([60, 62, 63, 64, 66, 67], 0.5, False),
        ([67, 66, 64, 63, 62, 60], 0.5, False),
        ([60, 63, 66, 66, 63, 60], 9, False),
        ([66, 60, 60, 60, 60, 66], 0.5, False),
        ([60, 60.2, 60.4, 60.4, 60.2, 60], 0.5, False),
    ],
    ids=["hump", "rising", "falling", "noise", "valley", "too small"],
)
def test_middle_maximum(scores, noise, is_one):
    (s,) = depth_profile_table(fake(scores, noise)).to_dict("records")
    assert s["middle_maximum"] is is_one or bool(s["middle_maximum"]) == is_one
    assert (s["first"], s["last"], s["best"]) == (scores[0], scores[-1], max(scores)) and s[
        "middle"
    ] == sum(scores[2:4]) / 2
    assert s["error"] == pytest.approx(noise * (1.5 / 3) ** 0.5)


def test_no_maximum_without_seeds_or_ends():
    assert not depth_profile_table(fake([60, 63, 66, 66, 63, 60], seeds=1)).middle_maximum[
        0
    ]  # one seed has no error
    assert not depth_profile_table([r for r in HUMP if r["layer"] not in (0,)]).middle_maximum[0]


def test_regret():
    (r,) = layer_choice_regret(HUMP, dict(layer=4, seconds=3.0)).to_dict("records")
    assert (r["best"], r["chosen"], r["regret"], r["middle"], r["random"]) == (2, 4, 3, 0, 3)
    assert r["share_of_sweep"] == 3 / 270 and r["noise"] == pytest.approx(0.5 / 3**0.5)
    both = layer_choice_regret(
        HUMP + fake([1, 2, 3, 4, 5, 6], method="lpt-npg"), dict(layer=5, seconds=3.0)
    )
    assert both.method.tolist() == ["lpt", "lpt-npg"] and both.regret.tolist() == [6, 0]


@pytest.mark.parametrize(
    "make,words",
    [
        (
            lambda: depth_profile_table(fake([1], method="fine-tuning")),
            ["none of the 3 records has a late method", "lpt-npg"],
        ),
        (lambda: depth_profile_table(HUMP + fake([1, 2, 3], task="b")), ["one sweep at a time"]),
        (
            lambda: layer_choice_regret(HUMP, dict(layer=7, seconds=1.0)),
            ["not 7", "sweep every layer first"],
        ),
        (
            lambda: layer_choice_regret(HUMP, dict(layer=4, seconds=1.0, prompt_length=20)),
            ["made for another", "Choose again"],
        ),
        (
            lambda: layer_choice_regret(HUMP, dict(layer=4, seconds=1.0, backbone="minilm")),
            ["made for another"],
        ),
    ],
)
def test_what_is_refused_of_sweep_summaries(make, words):
    refused(make, *words)


def test_choice_matches_only_its_prompt_length():
    assert choice_matches_sweep(dict(layer=4, prompt_length=10), HUMP[0]) and choice_matches_sweep(
        dict(layer=4), HUMP[0]
    )
    assert not choice_matches_sweep(dict(layer=4, prompt_length=20), HUMP[0])


def test_a_choice_is_for_its_settings(monkeypatch, tmp_path):
    """A stored choice with digests is used for the same length, head and data only."""
    chosen = []
    out = tmp_path / "choice.jsonl"

    def choose(bb, task, head, prompt_length, max_len, template):
        chosen.append((head, prompt_length, max_len))
        return dict(
            layer=len(chosen),
            head=head,
            prompt_length=prompt_length,
            max_len=max_len,
            template=template,
            seconds=1.0,
        )

    monkeypatch.setattr(module, "choose_prompt_layer", choose)

    def layer(task=TASK, **kw):
        return load_or_choose_layer(replace(BASE, **kw), task, out)["layer"]

    got = [
        layer(),
        layer(),
        layer(prompt_length=3),
        layer(prompt_length=3, max_len=64),
        layer(prompt_length=3, head="verbalizer"),
        layer(small_task(train=32)),
        layer(prompt_length=3),
        layer(lr=0.5),
        layer(prompt_length=3, head="verbalizer", template="paper"),
    ]
    assert got == [1, 1, 2, 3, 4, 5, 2, 1, 6]
    assert len(chosen) == 6
    assert [
        (r["prompt_length"], r["max_len"], r["split_sizes"]["train"]) for r in read_records(out)
    ] == [(10, 128, 64), (3, 128, 64), (3, 64, 64), (3, 128, 64), (10, 128, 32), (3, 128, 64)]
    assert all(
        r["provenance"]["command"] and r["provenance"]["started_at"] for r in read_records(out)
    )
    old = dict(task="sentiment", head="classification", layer=17, seconds=1.0)
    out.write_text(json.dumps(old) + "\n")
    assert [layer(), layer(prompt_length=3), layer()] == [7, 8, 7]
    assert choice_matches_sweep(
        read_records(out)[0], HUMP[0] | dict(task="sentiment")
    )  # a page may show it
    out.write_text('{"task": \n')  # damaged: an error, and no sweep without a choice
    with pytest.raises(ValueError, match="line 1 is not a record"):
        try_choose_layer(["lpt"], BASE, TASK, out)


def test_a_choice_of_other_weights_or_rows_is_another(small_folder, monkeypatch, tmp_path):
    """The contents of weights and data decide, not the names of folders."""
    chosen = []
    out = tmp_path / "choice.jsonl"

    def choose(bb, task, *a, **kw):
        chosen.append(1)
        return dict(layer=len(chosen), seconds=1.0)

    monkeypatch.setattr(module, "choose_prompt_layer", choose)
    for folder in "abc":
        shutil.copytree(
            small_folder, tmp_path / folder / "bb", ignore=shutil.ignore_patterns("SHA256SUMS")
        )
    weights = safetensors.torch.load_file(tmp_path / "c" / "bb" / "model.safetensors")
    name = next(k for k in weights if "word_embeddings" in k)
    changed = {**weights, name: weights[name] + 1}
    safetensors.torch.save_file(
        changed, tmp_path / "c" / "bb" / "model.safetensors", {"format": "pt"}
    )
    turned = replace(
        TASK,
        splits={
            s: [{**r, "label": 1 - r["label"]} for r in rows] for s, rows in TASK.splits.items()
        },
    )

    def layer(folder, task=TASK):
        return load_or_choose_layer(
            replace(BASE, backbone=str(tmp_path / folder / "bb")), task, out
        )["layer"]

    assert [layer("a"), layer("b"), layer("c"), layer("a", turned), layer("b"), layer("c")] == [
        1,
        1,
        2,
        3,
        1,
        2,
    ]
    r = read_records(out)[0]
    assert r["digests"] == dict(
        weights=backbone_id(load_backbone(str(small_folder))), data=TASK.digest()
    )


@pytest.fixture
def curves_of(monkeypatch):
    """Measure curves of a three-layer model; list the trained layers, seeds and learning rates."""
    trained = []
    bb = setting()[0]
    monkeypatch.setattr(module, "load_backbone", lambda name: bb)
    monkeypatch.setattr(run_records, "backbone_digest", lambda cfg: "of the weights")

    def quick(self, checkpoint_dir=None):
        trained.append((self.cfg.get("layer"), self.cfg.seed, self.cfg.lr))
        return build_model(self.cfg, bb, self.task), TrainLog(50.0, losses=[2.0, 1.0])

    monkeypatch.setattr(Experiment, "fit", quick)

    def call(cfg={}, rows=64, **kw):
        return measure_information_curves(
            config(method="lpt", lr=0.2, **cfg),
            small_task(train=rows),
            **{**dict(seeds=2, depth=0, steps=3), **kw},
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
            n=1000,
            prompt=False,
            depth=0,
            width=128,
            heads=4,
            steps=3,
            lr=3e-3,
            batch_size=64,
            evaluations=10,
            seed=0,
        )
        for r in records
    )


@pytest.mark.grid
@pytest.mark.parametrize(
    "change",
    [
        dict(depth=1),
        dict(seed=1),
        dict(cfg=dict(steps=5)),
        dict(rows=60),
        dict(layer_learning_rates={1: 0.7}),
    ],
    ids=str,
)
def test_other_settings_make_another_curve(curves_of, tmp_path, change):
    call, trained = curves_of
    out = tmp_path / "i.jsonl"
    kw = dict(prompt_layers=[1], seeds=1, out=out)
    call(**kw)
    call(**kw)
    assert len(trained) == 1
    call(**{**kw, **change})
    assert len(trained) == 2 and len(read_records(out)) == 6
    if "layer_learning_rates" not in change:
        with pytest.raises(ValueError, match="records of several sweeps"):
            check_single_sweep(read_records(out))


def test_a_record_has_its_provenance(curves_of, tmp_path):
    """A record has its provenance, and other data make another curve."""
    call, trained = curves_of
    out = tmp_path / "i.jsonl"
    kw = dict(prompt_layers=[1], seeds=1, out=out)
    r, *_ = call(**kw)
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
    other = [{**p, "digests": {**p["digests"], "data": "another"}} for p in read_records(out)]
    out.write_text("".join(json.dumps(p) + "\n" for p in other))
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
    assert {r["prompt_layer"] for r in check_single_sweep(read_records(out))} == {2}
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        call(prompt_layers=[1], seeds=1, out=out)


def test_error_is_that_of_the_layer_with_the_fewest_seeds():
    records = [r for r in HUMP if (r["layer"], r["seed"]) != (2, 2)]
    (row,) = depth_profile_table(records).to_dict("records")
    assert row["error"] == pytest.approx(((5 * 0.25 + 0.125) / 6 * 1.5 / 2) ** 0.5)


def test_a_layer_given_twice_is_swept_once(monkeypatch):
    ran = pretend(monkeypatch)
    swept(["lpt", "lpt"], [2, 2], 1)
    assert len(ran) == 1


def test_other_weights_make_another_curve(curves_of, tmp_path, monkeypatch):
    call, trained = curves_of
    kw = dict(prompt_layers=[1], seeds=1, out=tmp_path / "i.jsonl")
    call(**kw)
    monkeypatch.setattr(run_records, "backbone_digest", lambda cfg: "of others")
    call(**kw)
    assert len(trained) == 2


def test_a_sweep_loads_a_backbone_for_each_run_and_once_for_its_digest(small_folder, monkeypatch):
    loads = []
    load_pretrained = backbone_loading.load_pretrained

    def load(*args, **kwargs):
        loads.append(args)
        return load_pretrained(*args, **kwargs)

    monkeypatch.setattr(backbone_loading, "load_pretrained", load)
    base = replace(BASE, backbone=str(small_folder), steps=1, eval_every=1)
    records = sweep_prompt_layer(["lpt"], base, [0, 1, 2], 2, task=small_task())
    # one load counts the layers
    assert len(records) == 6 and len(loads) == 1 + 1 + 6
    assert len({r["digests"]["weights"] for r in records}) == 1

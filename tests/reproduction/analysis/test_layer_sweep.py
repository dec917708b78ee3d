"""Sweeps over layers: every layer and seed once, resumed when interrupted, one sweep a file."""

import json
from dataclasses import replace

import pytest
from small import small_task
from sweeps import BASE, HUMP, SETTINGS, TASK, fake, pretend, swept

from idp_tutorial.assembly.config import RunConfig, RunOptions
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.reproduction.analysis import layer_sweep as module
from idp_tutorial.reproduction.analysis.layer_sweep import (
    check_single_sweep,
    plot_convergence,
    plot_sweep,
    sweep_file,
    sweep_prompt_layer,
    sweep_table,
)
from idp_tutorial.utils.records import read_records


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


@pytest.mark.parametrize("change", SETTINGS, ids=str)
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
    module.plan_layer_sweep(["lpt"], macro, [0], 1, out=out)  # without the task, too
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


def test_a_layer_given_twice_is_swept_once(monkeypatch):
    ran = pretend(monkeypatch)
    swept(["lpt", "lpt"], [2, 2], 1)
    assert len(ran) == 1


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


def test_a_sweep_by_epochs_goes_on(tmp_path):
    base = replace(BASE, epochs=1.0, batch_size=8, prompt_length=2, eval_every=1)
    for tuned in (False, True):
        file = tmp_path / f"{tuned}.jsonl"
        two = [
            sweep_prompt_layer(["lpt"], base, [1], 2, tuned, file, TASK, (1e-3,) * tuned)
            for _ in (0, 1)
        ]
        assert len(read_records(file)) == 2 == len(two[1])
        assert {r["steps"] for r in two[0]} == {-(-len(TASK.splits["train"]) // 8)}
        sweep_table(two[0])


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


def test_plots():
    ax = plot_sweep(HUMP + fake([90], method="fine-tuning", layer=None))
    (line,) = [l for l in ax.lines if len(l.get_xdata()) == 6 and l.get_linestyle() == "-"]
    assert list(line.get_ydata()) == [60, 63, 66, 66, 63, 60] and {
        l.get_label() for l in ax.lines
    } >= {"lpt", "fine-tuning"}
    ax = plot_convergence(HUMP, "lpt")
    assert {l.get_label() for l in ax.lines if not l.get_label().startswith("_")} == {
        "layer 0",
        "layer 3",
        "layer 5",
    }
    thick = next(l for l in ax.lines if l.get_label() == "layer 3")
    assert list(thick.get_ydata()) == [61, 67]


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
        (lambda: plot_convergence(HUMP, "lpt-npg"), ["'lpt-npg'", "choose one of lpt"]),
        (
            lambda: plot_convergence([{**HUMP[0], "layer": None}], "lpt"),
            ["no records of 'lpt' at layers"],
        ),
    ],
)
def test_what_is_refused(make, words):
    with pytest.raises(ValueError) as e:
        make()
    assert all(w in str(e.value) for w in words), str(e.value)

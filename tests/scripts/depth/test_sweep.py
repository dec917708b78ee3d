"""A sweep over layers: a choice, its curves, and errors before anything is written."""

import json

import pytest
from sweeps import fake, pretend, swept

from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.utils.records import read_records
from results.depth.probe_config import ProbeConfig
from results.depth.sweep import sweep_command

pytestmark = pytest.mark.usefixtures("small_splits")

LIB = "results.depth.layer_sweep."


def choose_at_once(monkeypatch):
    monkeypatch.setattr(LIB + "choose_prompt_layer", lambda *a, **kw: dict(layer=1, seconds=1.0))


def test_the_command(small_sentiment, tmp_path, capsys):
    """A second call finds all runs done."""
    kw = dict(
        task="sentiment",
        data=str(small_sentiment),
        methods="lpt",
        layers="1",
        seeds=1,
        steps=1,
        batch_size=4,
        max_len=16,
        shots=16,
        device="cpu",
        out=str(tmp_path),
    )
    sweep_command.main([word for k, v in kw.items() for word in (f"--{k}", str(v))])
    assert "layer 1  seed 0" in capsys.readouterr().out
    choice = tmp_path / "choice-sentiment-k16-tiny.jsonl"
    sweep = tmp_path / "sweep-sentiment-k16-tiny.jsonl"
    sweep_command(**kw)
    assert (
        "seed 0" not in (printed := capsys.readouterr().out)
        and sweep.name in printed
        and choice.name in printed
    )
    assert len(choice.read_text().splitlines()) == len(sweep.read_text().splitlines()) == 1
    assert json.loads(choice.read_text())["rows"]


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(probe_depth=3), "probe_depth=3 is not used without probe"),
        (dict(tune=True, lr=0.1), "tune and lr=0.1 exclude each other: give one"),
    ],
    ids=str,
)
def test_options_that_nothing_would_read(kw, words, capsys, tmp_path):
    with pytest.raises(SystemExit):
        sweep_command(task="sentiment", out=str(tmp_path), **kw)
    assert words in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_the_command_probes_with_the_sweeps_rates(monkeypatch, tmp_path):
    pretend(monkeypatch)
    seen = {}
    choose_at_once(monkeypatch)

    def curves(cfg, task, layers, seeds, lrs, out, **size):
        seen.update(method=cfg.method, seeds=seeds, lrs=lrs, out=out.name, size=ProbeConfig(**size))

    monkeypatch.setattr(LIB + "measure_information_curves", curves)
    sweep_command(
        task="sentiment",
        methods="lpt,lpt-npg",
        layers="0,1",
        seeds=2,
        tune=True,
        probe=True,
        probe_depth=2,
        probe_width=32,
        out=str(tmp_path),
    )
    kinds = []
    monkeypatch.setattr(
        LIB + "sweep_prompt_layer",
        lambda names, cfg, *a, **kw: kinds.append(cfg.cache) or swept(),
    )
    for kind in ("none", "hidden"):
        sweep_command(
            task="sentiment", methods="lpt", layers="0,2", cache=kind, out=str(tmp_path / kind)
        )
    assert kinds == ["none", "hidden"]
    assert seen == dict(
        method="lpt",
        seeds=2,
        lrs={0: METHODS["lpt"].learning_rates[2], 1: METHODS["lpt"].learning_rates[2]},
        out="information-sentiment-tiny.jsonl",
        size=ProbeConfig(depth=2, width=32, steps=400),
    )


@pytest.mark.long
def test_a_sweep_without_a_choice(tmp_path, capsys):
    """A regression has no classes for the probes of the choice, and can be swept all the same."""
    sweep_command(
        task="similarity",
        methods="lpt",
        layers="1",
        seeds=1,
        steps=1,
        batch_size=4,
        max_len=16,
        shots=16,
        device="cpu",
        out=str(tmp_path),
    )
    printed = capsys.readouterr().out
    assert (
        "No layer is chosen without training" in printed
        and "needs one class for each row" in printed
        and [p.name for p in tmp_path.glob("*.jsonl")] == ["sweep-similarity-k16-tiny.jsonl"]
    )


def test_numbers_have_no_classes_to_probe(monkeypatch, tmp_path, capsys):
    pretend(monkeypatch)
    with pytest.raises(SystemExit) as e:
        sweep_command(task="similarity", methods="lpt", probe=True, out=str(tmp_path))
    assert (
        e.value.code == 2
        and "probe needs one class for each row" in capsys.readouterr().err
        and not [*tmp_path.iterdir()]
    )


def test_baselines_alone(monkeypatch, tmp_path, capsys):
    pretend(monkeypatch)
    choose_at_once(monkeypatch)
    sweep_command(task="sentiment", methods="head-only", out=str(tmp_path))
    assert "written" in capsys.readouterr().out


def test_a_table_of_ones_own(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(
        TASKS, "tickets", None
    )  # the name that the table takes is free again after the test
    del TASKS["tickets"]
    pretend(monkeypatch)
    choose_at_once(monkeypatch)
    rows = [
        f"{word} {i},{kind}"
        for i in range(20)
        for word, kind in (("parcel", "delivery"), ("refund", "money"))
    ]
    (tmp_path / "tickets.csv").write_text("\n".join(["message,topic", *rows]))
    sweep_command(
        table=str(tmp_path / "tickets.csv"),
        text="message",
        label="topic",
        methods="lpt",
        layers="1",
        out=str(tmp_path),
    )
    printed = capsys.readouterr()
    assert (
        "32 train, 4 validation, 4 test" in printed.err
        and "sweep-tickets-tiny.jsonl" in printed.out
    )


@pytest.mark.long
def test_a_grid_of_ones_own(monkeypatch, tmp_path):
    """Every layer tries it, and more rates at its edge; a second start tries nothing."""
    ran = pretend(monkeypatch)
    choose_at_once(monkeypatch)
    kw = dict(
        task="sentiment",
        methods="head-only,lpt",
        layers="0,2",
        seeds=2,
        learning_rates="1e-3,2e-3",
        out=str(tmp_path),
    )
    for _ in range(2):
        sweep_command(**kw)
        assert [r[1:] for r in ran if r[0] == "lpt"] == [
            (k, s, lr)
            for k in (0, 2)
            for s, lr in (
                (0, 1e-3),
                (0, 2e-3),
                (0, 4e-3),
                (0, 8e-3),
                (0, 0.016),
                (0, 0.032),
                (1, 0.032),
            )
        ]
    records = read_records(tmp_path / "sweep-sentiment-tiny.jsonl")
    lr_selection = "best of 2 (0.001, 0.002; up to 4 more at an edge) on validation, seed 0"
    assert {r["lr_selection"] for r in records} == {lr_selection}
    with pytest.raises(SystemExit):
        sweep_command(**{**kw, "learning_rates": "1e-3,5e-3"})  # another choice is another sweep


@pytest.mark.long
def test_a_sweep_whose_runs_diverge(monkeypatch, tmp_path, capsys):
    """Diverged runs are printed, others go on; an error without retraining if all diverge."""
    ran = pretend(monkeypatch)
    bad = {0}
    choose_at_once(monkeypatch)
    trained = Experiment.fit

    def broken(self, checkpoint_dir=None):
        model_and_log = trained(self)
        if self.cfg.get("layer") in bad:
            raise FloatingPointError("nan")
        return model_and_log

    monkeypatch.setattr(Experiment, "fit", broken)
    kw = dict(task="sentiment", methods="lpt", layers="0,2", seeds=2, tune=True, out=str(tmp_path))
    for _ in range(2):
        sweep_command(**kw)
        printed = capsys.readouterr().out
        assert "lpt at layer 0 with seed 0 diverged" in printed and len(ran) == 3 + 4
    bad.add(2)
    for _ in range(2):
        with pytest.raises(SystemExit) as e:
            sweep_command(**{**kw, "out": str(tmp_path / "b")})
        assert (
            e.value.code == 2
            and "with every learning rate of" in capsys.readouterr().err
            and len(ran) == 7 + 6
        )


WRONG = [
    (dict(learning_rates="a"), "learning_rates='a': give numbers"),
    (dict(learning_rates="1e-3", lr=0.1), "learning_rates and lr=0.1"),
    (dict(methods="ltp"), "did you mean 'lpt'?"),
    (dict(methods="none"), "efl, fine-tuning.\n"),
    (dict(task="sst-2"), "did you mean 'sst2'?"),
    (dict(lr=-1.0), "positive number"),
    (dict(layers="99"), "layers must be between 0 and 7"),
    (dict(layers="a"), "layers='a': give numbers"),
    (dict(seeds=0), "seeds must be at least 1"),
    (dict(prompt_length=0), "must be at least 1, got 0"),
    (dict(head="verbaliser"), "must be 'classification' or 'verbalizer', got 'verbaliser'"),
    (dict(backbone="nowhere"), "no backbone 'nowhere'"),
    (dict(probe=True, probe_width=10), "width must be a multiple of heads, got width=10"),
    (dict(probe=True, probe_steps=0), "steps must be at least 1, got 0"),
    (dict(probe=True, probe_depth=-1), "depth must be at least 0, got -1"),
]


@pytest.mark.parametrize("kw,word", WRONG, ids=lambda v: str(v)[:40])
def test_the_command_says_what_is_wrong(kw, word, tmp_path, capsys, monkeypatch):
    ran = pretend(monkeypatch)
    with pytest.raises(SystemExit) as e:
        sweep_command(
            **{"task": "sentiment", "methods": "lpt,lpt-npg", **kw}, out=str(tmp_path / "x")
        )
    assert (
        e.value.code == 2
        and word in capsys.readouterr().err
        and not (tmp_path / "x").exists()
        and not ran
    )


def test_another_sweep_writes_nothing(monkeypatch, tmp_path, capsys):
    ran = pretend(monkeypatch)
    choose_at_once(monkeypatch)
    kw = dict(task="sentiment", methods="lpt", layers="0", seeds=1, out=str(tmp_path))
    sweep_command(**kw)
    n = len(ran)
    before = {p.name: p.read_text() for p in tmp_path.glob("[!.]*")}
    with pytest.raises(SystemExit):
        sweep_command(**kw, prompt_length=3)
    assert (
        "prompt_length is 10 in some of them and 3 in others" in capsys.readouterr().err
        and len(ran) == n
    )
    assert {p.name: p.read_text() for p in tmp_path.glob("[!.]*")} == before


def test_the_bottleneck_reaches_the_sweep(monkeypatch, tmp_path):
    pretend(monkeypatch)
    choose_at_once(monkeypatch)
    sweep_command(
        task="sentiment", methods="lpt-npg", layers="0", seeds=1, bottleneck=32, out=str(tmp_path)
    )
    assert {r["bottleneck"] for r in read_records(tmp_path / "sweep-sentiment-tiny.jsonl")} == {32}


def test_the_command_trains_on_the_sample_of_its_options(monkeypatch, small_folder, tmp_path):
    choose_at_once(monkeypatch)
    monkeypatch.setattr("idp_tutorial.runs.compare.dry_run_comparison", lambda *a: None)
    tasks = []
    monkeypatch.setattr(
        LIB + "sweep_prompt_layer",
        lambda methods, base, layers, seeds, tune, file, task, *a: (
            tasks.append(task) or fake([60, 63])
        ),
    )
    sample = dict(shots=8, split_seed=3, stratified=False)
    options = dict(backbone=str(small_folder), methods="lpt", layers="1", out=str(tmp_path))
    sweep_command(task="sentiment", **options, **sample)
    assert tasks[0].digest() == load_task("sentiment", None, *sample.values()).digest()

"""Saved prompts predict as the trained model did; runs survive a kill; idp train, idp predict."""

import csv
import io
import json
import os
import sys
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from small import EACH_METHOD, backbone, config, small_task, stop_at, write_glove

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.cli import progress
from idp_tutorial.cli.predict import PREDICTION_COLUMNS, predict_command, read_texts
from idp_tutorial.cli.train import train_command
from idp_tutorial.core.planned_model import trained_state
from idp_tutorial.data.config import TextConfig
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.methods.glove import backbone_word_vectors
from idp_tutorial.runs.experiment import run_experiment, train_and_save
from idp_tutorial.saving.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.training.evaluation import evaluate, predict, predict_logits
from idp_tutorial.training.fit import fit
from idp_tutorial.utils.records import read_records
from idp_tutorial.utils.tensor_files import deserialise_tensors, save_tensors


@pytest.fixture(scope="module")
def cfg(small_folder):
    return lambda **kw: config(**{**dict(backbone=str(small_folder), steps=3), **kw})


def rows(task, bb, template=None):
    return task.encode(task.splits["test"], bb.tokenizer, 60, template)


def timeless(r):
    return {k: v for k, v in r.items() if k not in ("provenance", "ms_per_step", "peak_memory_mb")}


WORDS = [
    dict(sentence1=s)
    for s in ("the soup was cold .", "tea", "a great film with a long and slow end")
]

# --- prompt files


@pytest.mark.parametrize("method", EACH_METHOD)
def test_what_is_saved_answers_as_before(method, cfg, tmp_path):
    c = cfg(method=method, lr=1e-2, standardise=True, steps=1)
    task = small_task(train=8, validation=4, test=4)
    model = build_model(c, load_backbone(c.backbone), task)
    fit(model, task, c)
    save_pretrained(model, tmp_path / "a/b", task, c)
    torch.manual_seed(5)
    again, task2, c2 = from_pretrained(tmp_path / "a/b")
    assert (
        c2 == replace(c, data=None)
        and task2 == task
        and not again.training
        and sorted(os.listdir(tmp_path / "a/b"))
        == ["README.md", "prompts.json", "prompts.safetensors"]
    )
    for n, t in trained_state(model).items():
        assert torch.equal(t, trained_state(again)[n]), n
    assert predict(again, task2, c2, WORDS) == predict(model, task, c, WORDS)


@pytest.mark.long
def test_word_vectors_of_a_file(cfg, tmp_path, capsys):
    bb = backbone()
    task = small_task()
    index, v = backbone_word_vectors(bb)
    for name, x in (("a", v), ("b", -v)):
        (tmp_path / name).mkdir()
        write_glove(index, x, tmp_path / name / "own.txt")
    c = cfg(method="m-idpg-phm-glove", glove=str(tmp_path / "a/own.txt"))
    model = build_model(c, load_backbone(c.backbone), task)
    save_pretrained(model, f := tmp_path / "bottleneck", task, c)
    about = (f / "prompts.json").read_text()
    assert json.loads(about)["cfg"]["glove"] == "own.txt" and str(tmp_path / "a") not in about
    again, t, c2 = from_pretrained(f, glove=tmp_path / "a")
    assert c2.get("glove") == str(tmp_path / "a") and predict(again, t, c2, WORDS) == predict(
        model, task, c, WORDS
    )
    with pytest.raises(ValueError, match="give the path of own.txt as glove="):
        from_pretrained(f)
    with pytest.raises(ValueError, match="need other word vectors than .*/b"):
        from_pretrained(f, glove=tmp_path / "b")
    (tmp_path / "in").write_text("who ?\n")
    predict_command(model=str(f), texts=str(tmp_path / "in"), glove=str(tmp_path / "a"))
    assert json.loads(capsys.readouterr().out)["prediction"] in task.labels
    with pytest.raises(SystemExit):
        predict_command(model=str(f), texts=str(tmp_path / "in"))
    assert "give the path of own.txt as glove=" in capsys.readouterr().err
    c = cfg(method="m-idpg-phm-glove")
    save_pretrained(build_model(c, load_backbone(c.backbone), task), f, task, c)
    from_pretrained(f)  # the bundled ones
    with pytest.raises(ValueError, match="other word vectors"):
        from_pretrained(f, glove=tmp_path / "a")
    c = cfg(glove=str(tmp_path / "a"))
    save_pretrained(build_model(c, load_backbone(c.backbone), task), f, task, c)
    from_pretrained(f)  # a method that reads none


def test_only_what_was_learnt_is_saved(cfg, tmp_path):
    for m in ("prompt-tuning", "lpt-npg", "lora", "fine-tuning"):
        c = cfg(method=m)
        model = build_model(c, load_backbone(c.backbone), task := small_task())
        save_pretrained(model, tmp_path / m, task, c)
        n = 4 * sum(p.numel() for p in model.trained_parameters().values())
        assert n < (tmp_path / m / "prompts.safetensors").stat().st_size < n + 10_000


def test_a_verbalizer_and_a_regression(cfg, tmp_path):
    task = small_task()
    c = cfg(head="verbalizer", max_len=60)
    model = build_model(c, load_backbone(c.backbone), task)
    save_pretrained(model, tmp_path / "v", task, c)
    again, t, c2 = from_pretrained(tmp_path / "v")
    predictions = predict(again, t, c2, WORDS)
    e = task.encode(WORDS, again.backbone.tokenizer, 60, "code")
    want = predict_logits(again, e).softmax(-1)
    torch.testing.assert_close(
        torch.tensor([list(s["probabilities"].values()) for s in predictions]), want
    )
    assert [s["label"] for s in predictions] == [task.labels[i] for i in want.argmax(-1)]
    task = small_task("similarity")
    c = cfg(task="similarity")
    model = build_model(c, load_backbone(c.backbone), task)
    save_pretrained(model, tmp_path / "r", task, c)
    again, t, c2 = from_pretrained(tmp_path / "r")
    pairs = [{k: r[k] for k in ("sentence1", "sentence2")} for r in task.splits["test"]]
    assert [s["value"] for s in predict(again, t, c2, pairs)] == pytest.approx(
        evaluate(model, rows(task, model.backbone), task)[1], abs=1e-5
    )


@pytest.mark.parametrize("name", ["copa", "wic", "multirc"])
def test_tasks_of_nested_lines_are_saved_too(name, cfg, tmp_path):
    task, c = TASKS[name], cfg(task=name)
    model = build_model(c, load_backbone(c.backbone), task)
    save_pretrained(model, tmp_path, task, c)
    again, t, c2 = from_pretrained(tmp_path)
    pairs = [
        dict(sentence1=f"it fell {i // 2}", sentence2=s, group=i // 2)
        for i, s in enumerate(["it broke", "we ate"] * 4)
    ]
    predictions = [s["label"] for s in predict(again, t, c2, pairs)]
    assert predictions == [s["label"] for s in predict(model, task, c, pairs)]
    if name == "copa":
        assert [sorted(predictions[i : i + 2]) for i in range(0, 8, 2)] == [["false", "true"]] * 4
        with pytest.raises(
            ValueError,
            match="has no 'group', and task 'copa' chooses one of the rows of a question",
        ):
            predict(again, t, c2, [dict(sentence1="a", sentence2="b")])
        with pytest.raises(
            ValueError, match="has no 'group'"
        ):  # a list is none: rows are told apart by it
            predict(again, t, c2, [dict(sentence1="a", sentence2="b", group=[1])])


def test_the_order_and_the_batch_do_not_matter(cfg):
    task, c = small_task("questions"), cfg(task="questions")
    model = build_model(c, load_backbone(c.backbone), task)
    torch.nn.init.normal_(model.head.net.weight, std=3.0)
    texts = [{"sentence1": r["sentence1"]} for r in task.splits["test"]]
    whole = predict(model, task, c, texts)
    assert len({s["label"] for s in whole}) > 1
    for s, t in zip(whole, texts):
        (one,) = predict(model, task, c, [t])
        assert one["label"] == s["label"] and one["probabilities"] == pytest.approx(
            s["probabilities"], abs=1e-5
        )
    assert predict(model, task, c, []) == [] and [
        s["label"] for s in predict(model, task, c, texts, batch_size=3)
    ] == [s["label"] for s in whole]


def test_files_that_are_refused(cfg, tmp_path):
    c = cfg()
    task = small_task()
    model = build_model(c, load_backbone(c.backbone), task)
    save_pretrained(model, f := tmp_path / "bottleneck", task, c)
    with pytest.raises(
        FileNotFoundError, match="no prompts.safetensors in .*nowhere: give a folder"
    ):
        from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="belong to another backbone"):
        from_pretrained(f, backbone(std=0.3))
    about, tensors = deserialise_tensors((f / "prompts.safetensors").read_bytes())
    about["cfg"]["prompt_length"] = 7
    save_tensors(f / "prompts.safetensors", tensors, about)
    with pytest.raises(ValueError, match="do not fit the model that its config describes"):
        from_pretrained(f)


def test_a_tuned_backbone_is_no_starting_point(cfg, tmp_path):
    """The prompts belong to the weights before training."""
    c = cfg(method="fine-tuning", lr=1e-2)
    task = small_task()
    model = build_model(c, load_backbone(c.backbone), task)
    fit(model, task, c)
    save_pretrained(model, tmp_path, task, c)
    with pytest.raises(ValueError, match="another backbone"):
        from_pretrained(tmp_path, model.backbone)


# --- one run


@pytest.mark.grid
@pytest.mark.parametrize(
    "kw",
    [
        {},
        dict(method="s-idpg-phm", cache="sentence", glove=None),
        dict(head="verbalizer"),
        dict(method="head-only", head="verbalizer"),
    ],
    ids=str,
)
def test_the_record_is_that_of_run(kw, cfg, tmp_path):
    c = cfg(**kw, **({"cache_dir": str(tmp_path / "cache")} if "cache" in kw else {}))
    r = train_and_save(c, tmp_path / "run", small_task())
    assert timeless(r) == timeless(run_experiment(c, small_task()))
    assert read_records(tmp_path / "run/record.jsonl") == [json.loads(json.dumps(r))]


def test_a_run_that_is_stopped_and_started_again(cfg, tmp_path, monkeypatch):
    c = cfg(steps=6, eval_every=2, lr=None)
    want = train_and_save(c, tmp_path / "whole", small_task())
    n = stop_at(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        train_and_save(c, tmp_path / "run", small_task())
    assert sorted(p.name for p in (tmp_path / "run").glob("[!.]*")) == ["checkpoint-2.safetensors"]
    got = train_and_save(c, tmp_path / "run", small_task())
    assert timeless(got) == timeless(want) and len(n) == 4 + 4  # steps 3 to 6
    for f in ("prompts.json", "prompts.safetensors"):
        assert (tmp_path / "run" / f).read_bytes() == (tmp_path / "whole" / f).read_bytes()


def test_without_checkpoints(cfg, tmp_path):
    train_and_save(cfg(), tmp_path / "run", small_task(), save_every=0)
    assert sorted(p.name for p in (tmp_path / "run").glob("[!.]*")) == [
        "README.md",
        "prompts.json",
        "prompts.safetensors",
        "record.jsonl",
    ]


# --- the commands


def test_train_then_predict(small_folder, tmp_path, capsys, monkeypatch):
    train_command(
        task="questions",
        backbone=str(small_folder),
        steps=4,
        batch_size=8,
        prompt_length=3,
        bottleneck=8,
        shots=24,
        device="cpu",
        out=str(tmp_path / "run"),
    )
    assert "lpt-npg on questions, seed 0: accuracy" in capsys.readouterr().out
    (tmp_path / "in").write_text('who ?\n\n{"sentence1": "where is it ?", "id": 3}\n')
    predict_command(model=str(tmp_path / "run"), texts=str(tmp_path / "in"), proba=True)
    a = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO((tmp_path / "in").read_text()))
    predict_command(model=str(tmp_path / "run"), out=str(tmp_path / "out"), proba=True)
    predictions = [json.loads(l) for l in a.splitlines()]
    assert (
        (tmp_path / "out").read_text() == a
        and [s["sentence1"] for s in predictions] == ["who ?", "where is it ?"]
        and predictions[1]["id"] == 3
    )
    (tmp_path / "in").write_text('who ?\n{"word": "what ?"}\n')
    with pytest.raises(SystemExit):
        predict_command(
            model=str(tmp_path / "run"), texts=str(tmp_path / "in"), out=str(tmp_path / "new")
        )
    assert not [*tmp_path.glob("new*")]
    assert "line 2: no column 'text' among word" in capsys.readouterr().err
    assert all(
        s["prediction"] == max(s["probabilities"], key=s["probabilities"].get)
        and sum(s["probabilities"].values()) == pytest.approx(1)
        for s in predictions
    )


def test_a_clip_of_ones_own(small_folder, tmp_path):
    train_command(
        task="questions",
        backbone=str(small_folder),
        steps=2,
        batch_size=8,
        prompt_length=3,
        shots=24,
        clip=0.25,
        device="cpu",
        method="lpt",
        out=str(tmp_path),
    )
    assert read_records(tmp_path / "record.jsonl")[0]["clip"] == 0.25


def test_options_reach_the_run(small_folder, tmp_path, capsys):
    index, v = backbone_word_vectors(backbone())
    write_glove(index, v, tmp_path / "own.txt")
    train_command(
        task="questions",
        method="m-idpg-phm-glove",
        backbone=str(small_folder),
        glove=str(tmp_path / "own.txt"),
        standardise=True,
        position=4,
        pooling="cls",
        steps=2,
        batch_size=8,
        prompt_length=3,
        bottleneck=8,
        shots=24,
        device="cpu",
        out=str(tmp_path / "run"),
    )
    r = json.loads((tmp_path / "run/record.jsonl").read_text())
    assert (r["glove"], r["standardise"], r["position"], r["pooling"]) == (
        "own.txt",
        True,
        4,
        "cls",
    )
    with safe_open(tmp_path / "run/prompts.safetensors", "pt") as f:
        assert sum(k.endswith("scale.n") for k in f.keys())  # noqa: SIM118 (not a dictionary) == 1
    capsys.readouterr()


def test_texts(tmp_path):
    one = small_task()
    pair = small_task("similarity")

    def read(content, task, **columns):
        (tmp_path / "in").write_text(content)
        return [*read_texts(str(tmp_path / "in"), task, TextConfig(**columns))]

    assert [row for row, _ in read(' a b \n\n{"sentence1": "c", "x": 1}', one)] == [
        dict(sentence1="a b"),
        dict(sentence1="c", x=1),
    ]
    assert read("a\tb\n", pair) == [(dict(sentence1="a", sentence2="b"),) * 2]
    mine = replace(one, columns=("{message}", None, "topic"))
    for row in (
        dict(message="a", label=3),
        dict(text="a", sentence2="b"),
    ):  # no second text is asked for
        assert read(json.dumps(row), mine) == [(row, dict(sentence1="a"))]
    assert read('{"a": "x", "b": "y"}', pair, text="a", text2="b")[0][1] == dict(
        sentence1="x", sentence2="y"
    )
    for text, task, columns, words in (
        (
            'a\n{"word": "b"}',
            one,
            {},
            "in, line 2: no column 'text' among word: pass its name in text=",
        ),
        ("a", pair, {}, "line 1: 1 columns, but a pair has two: give two texts separated by a tab"),
        ('{"text": "a"}', pair, {}, "line 1: no column 'sentence2' among text: .* in text2="),
        ("a\tb\tc", pair, {}, "line 1: 3 columns"),
        ("{a", one, {}, "line 1 is not valid JSON"),
        ('{"sentence1": " "}', one, {}, "1 of 1 rows has no text in column 'sentence1' .*line 1"),
        (
            '{"text": ""}\n{"text": "a"}\n\n{"text": null}',
            one,
            {},
            r"2 of 3 rows have no text .*in, line 1, line 4\): .* .skip_empty",
        ),
        ('{"text": "a"}', one, dict(text="b"), "line 1: no column 'b' among text"),
        ('{"sentence1": 3}', one, {}, "line 1: sentence1 must be a text"),
        ('{"message": ""}', mine, {}, "1 of 1 rows has no text .*line 1"),
        (f'{{"text": "a", "{PREDICTION_COLUMNS[0]}": 1}}', one, {}, "rename it"),
    ):
        with pytest.raises(ValueError, match=words):
            read(text, task, **columns)
    rows = read('{"text": ""}\n{"text": "a"}\n{"text": null}', one, skip_empty=True)
    assert rows == [(dict(text="a"), dict(sentence1="a"))]


def test_answers_stand_beside_what_a_row_has(small_folder, tmp_path, capsys):
    run = str(tmp_path / "run")
    train_command(
        task="questions",
        backbone=str(small_folder),
        steps=2,
        batch_size=8,
        prompt_length=3,
        bottleneck=8,
        shots=24,
        device="cpu",
        out=run,
    )
    (tmp_path / "in.csv").write_bytes(
        b'\xef\xbb\xbftext,label\n"who, then ?",mine\n{x} is what ?,\n'
    )
    for name in ("a.csv", "a.jsonl"):
        predict_command(
            model=run, texts=str(tmp_path / "in.csv"), out=str(tmp_path / name), proba=True
        )
    with open(tmp_path / "a.csv", newline="", encoding="utf-8-sig") as f:
        table = [*csv.DictReader(f)]
    lines = [json.loads(l) for l in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [{k: r[k] for k in ("text", "label", "prediction")} for r in table] == [
        {k: v for k, v in r.items() if k != "probabilities"} for r in lines
    ]
    assert [r["label"] for r in lines] == ["mine", ""] and [*table[0]][:3] == [
        "text",
        "label",
        "prediction",
    ]
    assert (
        float(table[0]["probability human"]) == lines[0]["probabilities"]["human"]
        and len(table[0]) == 3 + 6
    )
    capsys.readouterr()
    (tmp_path / "in.txt").write_text("{x} is what ?\n")
    predict_command(model=run, texts=str(tmp_path / "in.txt"), format="lines")
    assert json.loads(capsys.readouterr().out)["sentence1"] == "{x} is what ?"
    (tmp_path / "in.csv").write_bytes("text\nwho ?\ncaf\u00e9\n".encode("latin-1"))
    with pytest.raises(SystemExit):
        predict_command(model=run, texts=str(tmp_path / "in.csv"), out=str(tmp_path / "new.csv"))
    assert "in.csv, line 3 is not a text in utf-8" in capsys.readouterr().err and not [
        *tmp_path.glob("new*")
    ]


@pytest.mark.parametrize(
    "command,kw,words",
    [
        (train_command, dict(method="lpt-npgg"), "did you mean 'lpt-npg'"),
        (train_command, dict(task="question"), "did you mean 'questions'"),
        (train_command, dict(steps=0), "steps must be at least 1, got 0"),
        (train_command, dict(save_every=-2, shots=8), "save_every must be at least 0, got -2"),
        (predict_command, dict(model="nowhere"), "no prompts.safetensors in nowhere"),
        (predict_command, dict(batch_size=0), "batch_size must be at least 1, got 0"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_one_line_and_status_2(command, kw, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        command(**kw)
    err = capsys.readouterr().err
    assert e.value.code == 2 and words in err and err.count("\n") == 1 and not os.listdir(tmp_path)


def test_another_run_in_the_folder(small_folder, tmp_path, capsys):
    kw = dict(
        task="questions",
        backbone=str(small_folder),
        steps=2,
        batch_size=8,
        prompt_length=3,
        bottleneck=8,
        shots=24,
        device="cpu",
        out=str(tmp_path),
    )
    train_command(**kw)
    before = {f: (tmp_path / f).read_bytes() for f in os.listdir(tmp_path)}
    with pytest.raises(SystemExit):
        train_command(**{**kw, "seed": 1})
    assert "holds another run (seed was 0 and is now 1" in capsys.readouterr().err
    assert before == {f: (tmp_path / f).read_bytes() for f in os.listdir(tmp_path)}


def test_a_finished_model_is_not_replaced_without_checkpoints(cfg, tmp_path):
    def files():
        return {f.name: f.read_bytes() for f in tmp_path.glob("[!.]*") if f.name != "record.jsonl"}

    r = train_and_save(cfg(), tmp_path, small_task(), save_every=0)
    before = files()
    for every in (0, None):  # no checkpoint is there that could say so
        for kw, task, words in (
            (dict(seed=4), small_task(), "seed was 0 and is now 4"),
            (dict(), small_task(train=60), "data was '"),
        ):
            with pytest.raises(ValueError, match=f"holds another run .{words}"):
                train_and_save(cfg(**kw), tmp_path, task, save_every=every)
            assert files() == before
    assert (
        timeless(train_and_save(cfg(), tmp_path, small_task(), save_every=0)) == timeless(r)
        and files() == before
    )
    (tmp_path / "prompts.safetensors").write_bytes(b"half")
    train_and_save(cfg(), tmp_path, small_task(), save_every=0)  # of a damaged one nothing is lost
    assert files() == before


def test_the_draw_reaches_the_task(cfg, tmp_path, monkeypatch):
    class SeenError(Exception):
        pass

    def see(c, bb, task):
        raise SeenError(task)

    monkeypatch.setattr(sys.modules["idp_tutorial.runs.experiment"], "build_model", see)
    with pytest.raises(SeenError) as e:
        train_and_save(cfg(shots=8, split_seed=3), tmp_path / "a")
    assert (
        e.value.args[0].splits["train"]
        == load_task("sentiment", None, 8, 3).splits["train"]
        != load_task("sentiment", None, 8).splits["train"]
    )


def test_a_log_and_a_progress_bar(small_folder, tmp_path, capsys):
    run = dict(task="sentiment", method="lpt", backbone=str(small_folder), prompt_length=2, steps=4)
    pytest.importorskip("tensorboard")
    train_command(**run, evaluations=2, out=str(tmp_path), log_with="tensorboard", progress=True)
    captured = capsys.readouterr()
    assert "4/4" in captured.err and "validation=" in captured.err and "4/4" not in captured.out
    assert len([*tmp_path.glob("runs/*/events.out.tfevents.*")]) == 1
    with pytest.raises(SystemExit):
        train_command(**run, out=str(tmp_path / "b"), log_with="excel")
    assert "log_with must be" in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_a_dry_run_prints_an_estimate_and_writes_nothing(small_folder, tmp_path, capsys):
    run = dict(task="sentiment", method="lpt", backbone=str(small_folder), prompt_length=2, steps=4)
    train_command(**run, out=str(tmp_path / "out"), dry_run=True)
    printed = capsys.readouterr().out
    assert "trained parameters" in printed and "4 steps of 32 examples" in printed
    assert "memory about" in printed and "from one step on this machine" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["probe", "majority"])
def test_a_control_leads_to_the_command_that_scores_it(method, capsys):
    with pytest.raises(SystemExit):
        train_command(method=method)
    assert f"score it with `idp compare --methods {method}`" in capsys.readouterr().err


def test_a_run_replaces_no_table_that_it_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [dict(text=f"text {i}", label="ab"[i % 2]) for i in range(40)]
    table = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "record.jsonl").write_text(table)
    with pytest.raises(SystemExit):
        train_command(table="record.jsonl", out=".", backbone="tiny", steps=1)
    assert "is the folder of the table record.jsonl" in capsys.readouterr().err
    assert (tmp_path / "record.jsonl").read_text() == table


def test_progress_is_a_line_now_and_then_without_a_terminal(
    small_folder, tmp_path, monkeypatch, capsys
):
    table = "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(40))
    (tmp_path / "a.csv").write_text("text,label\n" + table)
    options = dict(table=str(tmp_path / "a.csv"), backbone=str(small_folder), steps=4)
    options |= dict(batch_size=4, evaluations=2, max_len=20, out=str(tmp_path / "out"))
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.0)
    train_command(**options)
    lines = [line for line in capsys.readouterr().err.splitlines() if ": step " in line]
    assert [line.split(",")[0] for line in lines] == [
        f"lpt-npg on a: step {n} of 4" for n in (1, 2, 3, 4)
    ]
    assert ", validation " in lines[-1]
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 30.0)
    train_command(**options | dict(out=str(tmp_path / "again")))
    assert ": step " not in capsys.readouterr().err

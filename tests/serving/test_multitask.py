"""Several tasks in one batch: outputs, gradients, counts, files, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small import backbone, config, model_of, small_task, topic_task, write_glove
from task_models import IN_WEIGHTS, alone, everything, rows_of, task_model

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.prompted_model import PromptedModel, count_parameters
from idp_tutorial.core.steps import Insert
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.prompt_tuning import SoftPrompt
from idp_tutorial.saving import descriptions
from idp_tutorial.saving.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.serving.multitask import (
    MultiTaskModel,
    TaskModel,
    load_multitask_model,
    save_multitask_model,
)
from idp_tutorial.training.evaluation import predict
from idp_tutorial.utils.tensor_files import deserialise_tensors, save_tensors


def test_a_generation_task_cannot_be_mixed():
    bb = backbone("gpt2")
    written = TaskModel(
        model_of("lpt", bb, task := small_task("in-short")), task, config(task="in-short")
    )
    with pytest.raises(ValueError, match="task 'b' generates text"):
        MultiTaskModel({"a": task_model("lpt", bb), "b": written})


def test_predictions_are_labels_and_numbers():
    bb = backbone()
    members = {"mood": task_model("lpt", bb), "close": task_model("id-spam", bb, "similarity")}
    model = MultiTaskModel(members).train()
    rows = [{k: v for k, v in r.items() if k != "label"} for r in rows_of(members, 2)]
    got = model.predict(rows)
    assert not bb.model.training
    for r, a in zip(rows, got):
        o = alone(members, r)
        assert (
            a == ("negative", "positive")[int(o.argmax())]
            if r["task"] == "mood"
            else abs(a - 5 * o.item()) < 1e-4
        )


def test_parameter_counts_per_task():
    bb = load_backbone("roberta-large", weights="meta")

    def npg(name):
        cfg = config(prompt_length=5, bottleneck=128, task=name)
        return TaskModel(build_model(cfg, bb, TASKS[name]), TASKS[name], cfg)

    model = MultiTaskModel(
        {
            "sst2": npg("sst2"),
            "trec": npg("trec"),
            "soft": TaskModel(
                build_model(config(method="lpt", prompt_length=20), bb, TASKS["rte"]),
                TASKS["rte"],
                config(method="lpt", prompt_length=20),
            ),
        }
    )
    counts = {name: count_parameters(m.model) for name, m in model.task_models.items()}
    assert counts == {
        "sst2": dict(prompt=791_680, head=2050, backbone=0),
        "trec": dict(prompt=791_680, head=6150, backbone=0),
        "soft": dict(prompt=20_480, head=2050, backbone=0),
    }
    assert (
        sum(p.numel() for p in model.trained_parameters().values())
        == 2 * 791_680 + 20_480 + 2050 + 6150 + 2050
    )
    # one backbone
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in bb.model.parameters()
    ) + sum(p.numel() for p in model.trained_parameters().values())


# --- files


@pytest.fixture(scope="module")
def served():
    bb = backbone()
    members = everything(bb) | {
        "standard": task_model("s-idpg-phm", bb, standardise=True),
        "words": task_model("lpt-npg", bb, head="verbalizer"),
    }
    scale = members["standard"].model.sources[0].read.scale
    scale.n.fill_(3)
    scale.total.normal_()
    scale.square.uniform_(5, 9)  # what training would have seen
    return bb, MultiTaskModel(members).eval()


def test_a_loaded_model_has_equal_outputs(served, tmp_path):
    _, model = served
    rows = rows_of(model.task_models)
    save_multitask_model(model, tmp_path / "new" / "tasks")
    assert sorted(p.name for p in (tmp_path / "new").rglob("*")) == ["tasks", "tasks.safetensors"]
    again = load_multitask_model(tmp_path / "new" / "tasks", backbone())
    with torch.no_grad():
        a = model(model.encode(rows))
        b = again(again.encode(rows))
        assert all(torch.equal(x, y) for x, y in zip(a, b))
    stored = load_file(tmp_path / "new" / "tasks" / "tasks.safetensors")
    buffers = {k for k in stored if k.startswith("standard.") or k.endswith("frozen_embedding")}
    assert not any(k.startswith("lm") for k in stored)
    assert sum(t.numel() for k, t in stored.items() if k not in buffers) == sum(
        p.numel() for n, p in model.trained_parameters().items() if not n.startswith("standard.")
    )
    a = again.task_models["words"]
    b = model.task_models["words"]
    assert a.task == b.task and a.cfg == b.cfg
    with pytest.raises(ValueError, match="already holds a model"):
        save_multitask_model(model, tmp_path / "new" / "tasks")


def test_damaged_and_foreign_files_are_refused(served, tmp_path):
    bb, _ = served
    folder = tmp_path / "t"
    save_multitask_model(MultiTaskModel({"a": task_model("lpt", bb)}), folder)
    with pytest.raises(ValueError, match="belong to another backbone"):
        load_multitask_model(folder, backbone(std=0.1))
    file = folder / "tasks.safetensors"
    good = file.read_bytes()
    for i in range(0, len(good), 97):
        file.write_bytes(good[:i] + bytes([good[i] ^ 16]) + good[i + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            load_multitask_model(folder, bb)
    about, old = deserialise_tensors(good)
    save_tensors(file, dict([*old.items()][1:]), about)
    with pytest.raises(ValueError, match="do not match the models that its configs describe"):
        load_multitask_model(folder, bb)
    save_tensors(file, old, {**about, "format": 9, "version": "3.0"})
    with pytest.raises(ValueError, match="has format 9 of idp_tutorial 3.0"):
        load_multitask_model(folder, bb)
    (folder / "tasks.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no tasks.safetensors"):
        load_multitask_model(folder, bb)
    with pytest.raises(FileNotFoundError, match="a folder that `save_multitask_model` made"):
        load_multitask_model(tmp_path / "nowhere", bb)


def test_a_failed_save_leaves_no_folder(served, tmp_path, monkeypatch):
    bb, _ = served
    monkeypatch.setattr(json, "dumps", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_multitask_model(MultiTaskModel({"a": task_model("lpt", bb)}), tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_a_model_that_could_not_be_loaded_is_not_saved(served, tmp_path):
    bb, _ = served
    m = task_model("lpt", bb, layer=1)
    handmade = PromptedModel(
        bb, ClassificationHead(bb.d, 2, "mean"), {2: Insert(SoftPrompt(4, bb.d))}
    )
    for bad in (
        m._replace(model=handmade),
        m._replace(cfg=replace(m.cfg, prompt_length=9)),
        m._replace(cfg=replace(m.cfg, layer=2)),
        m._replace(cfg=replace(m.cfg, pooling="cls")),
        m._replace(task=TASKS["questions"]),
    ):
        with pytest.raises(ValueError, match="'x' is not what its config builds"):
            save_multitask_model(MultiTaskModel({"x": bad}), tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_saving_draws_no_random_numbers(served, tmp_path):
    _, model = served
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    mode = model.training
    save_multitask_model(model, tmp_path / "t")
    assert torch.equal(torch.rand(1), want) and model.training == mode


def test_a_task_can_have_any_name(served, tmp_path):
    """Also names with dots and names of torch's attributes; names of tensors stay as they were."""
    bb, _ = served
    names = "a", "a.b", "train", "items", "keys", "training", "type", "_modules", "1"
    model = MultiTaskModel({n: task_model("lpt", bb) for n in names}).train().eval()
    assert [*model.trained_parameters()][:4] == [
        "a.sources.0.p",
        "a.head.net.weight",
        "a.head.net.bias",
        "a\u2024b.sources.0.p",
    ]
    save_multitask_model(model, tmp_path / "t")
    rows = [dict(task=n, sentence1="tea") for n in names]
    again = load_multitask_model(tmp_path / "t", bb)
    with torch.no_grad():
        assert all(
            torch.equal(x, y) for x, y in zip(model(model.encode(rows)), again(again.encode(rows)))
        )
    other = MultiTaskModel({n: task_model("lpt", bb) for n in names})
    other.load_state_dict(model.state_dict())
    assert all(
        torch.equal(t, model.trained_parameters()[n]) for n, t in other.trained_parameters().items()
    )
    assert model.predict(
        [dict(task=1, sentence1="tea"), dict(task="1", sentence1="tea")], probabilities=True
    )[0]


# --- rows of one question


def test_grouped_rows_get_one_positive_prediction_per_question(tmp_path):
    bb = backbone()
    m = task_model("lpt", bb, "copa")
    model = MultiTaskModel({"choose": m, "mood": task_model("lpt", bb)})
    save_multitask_model(model, tmp_path / "t")
    rows = [
        dict(task="choose", sentence1=f"it fell {i // 2}", sentence2=s, group=i // 2)
        for i, s in enumerate(["it broke", "we ate"] * 4)
    ]
    for o in (model, load_multitask_model(tmp_path / "t", bb)):
        predictions = o.predict([*rows, dict(task="mood", sentence1="tea")])[:8]
        assert [sorted(predictions[i : i + 2]) for i in range(0, 8, 2)] == [
            ["false", "true"]
        ] * 4  # one of the two, of each question
    with pytest.raises(ValueError, match="group"):
        model.predict([{k: v for k, v in rows[0].items() if k != "group"}])


# --- refused


@pytest.mark.parametrize("method", IN_WEIGHTS)
def test_methods_that_change_weights(method):
    m = task_model(method, backbone())
    with pytest.raises(
        ValueError, match="makes several pairs" if method == "efl" else "changes the backbone"
    ):
        MultiTaskModel({"a": m})


def test_bad_models_rows_and_batches_are_refused(bbs):
    bb = bbs("roberta")
    m = task_model("lpt", bb)
    model = MultiTaskModel({"mood": m, "other": m})
    for f, words in (
        (lambda: MultiTaskModel({}), "give at least one task"),
        (lambda: MultiTaskModel({"": m}), "a task name must be a string that is not empty"),
        (lambda: MultiTaskModel({1: m}), "a task name must be a string that is not empty, got 1"),
        (
            lambda: model.loss(model.encode([dict(task="mood", sentence1="x")])),
            "no labels to learn from",
        ),
        (
            lambda: MultiTaskModel({"a": m, "b": task_model("lpt", backbone())}),
            "build every model on that object",
        ),
        (
            lambda: model.encode([dict(task="moood", sentence1="x")]),
            "unknown task in row 0: 'moood': did you mean 'mood'",
        ),
        (
            lambda: model.encode([dict(task="mood", sentence1="x"), dict(sentence1="x")]),
            "unknown task in row 1: 'None'",
        ),
        (
            lambda: model.encode(
                [dict(task="mood", sentence1="x", label=0), dict(task="mood", sentence1="x")]
            ),
            "some rows have a label",
        ),
        (
            lambda: model(
                {**model.encode([dict(task="mood", sentence1="x")]), "task": torch.tensor([2])}
            ),
            "Make the batch with `encode`",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            f()
    with pytest.raises(ValueError, match="no rows"):
        model.encode([])


ROWS = {
    "a pair without its second text": (
        dict(task="pair", sentence1="x"),
        "row 1: no sentence2 and no label among task, sentence1. Task 'entailment' needs "
        "sentence1, sentence2, label in every row \\(a label only to train\\)",
    ),
    "one text too many": (
        dict(task="one", sentence1="x", sentence2="y"),
        "row 1: the row has a sentence2, but task 'sentiment' has one sentence",
    ),
    "an empty text": (
        dict(task="one", sentence1=" "),
        "row 1: sentence1 must be a text that is not empty, got ' '",
    ),
    "no text": (dict(task="one", text="x"), "row 1: no sentence1 and no label among task, text"),
    "None": (dict(task="one", sentence1=None), "row 1: no sentence1"),
    "a number as text": (
        dict(task="one", sentence1=3),
        "row 1: sentence1 must be a text that is not empty, got 3",
    ),
    "a name that is none": (
        dict(task="one", sentence1="x", label="fine"),
        "row 1: label must be an index from 0 to 1 or a class name \\(negative, positive\\) for "
        "task 'sentiment', got 'fine'",
    ),
    "a class too high": (dict(task="one", sentence1="x", label=2), "row 1: label must be .* got 2"),
    "a number beyond the scale": (
        dict(task="number", sentence1="x", sentence2="y", label=9.0),
        "row 1: label must be a number from 0.0 to 5.0 for task 'similarity', got 9.0",
    ),
    "no dict": ("x", "row 1: 'x' is not a row"),
    "half a character": (
        dict(task="one", sentence1="a \ud83d"),
        "row 1: sentence1 contains a lone surrogate",
    ),
}


@pytest.fixture(scope="module")
def three():
    bb = backbone()
    return MultiTaskModel(
        {
            "one": task_model("lpt", bb),
            "pair": task_model("lpt", bb, "entailment"),
            "number": task_model("lpt", bb, "similarity"),
        }
    )


@pytest.mark.parametrize("row,words", ROWS.values(), ids=ROWS)
def test_rows_that_do_not_fit_their_task_are_refused(three, row, words):
    for f in (three.encode, three.predict):
        with pytest.raises(ValueError, match=words):
            f([dict(task="one", sentence1="x"), row])


def test_labels_are_indices_or_names(three):
    rows = [
        dict(task="one", sentence1="x"),
        dict(task="pair", sentence1="x", sentence2="y"),
        dict(task="number", sentence1="x", sentence2="y"),
    ]
    by_name, by_index = [
        three.encode([{**r, "label": y} for r, y in zip(rows, ys)])
        for ys in (("positive", "not_entailment", 2.5), (1, 1, 2.5))
    ]
    assert (
        by_name.keys() == by_index.keys()
        and all(torch.equal(by_name[k], by_index[k]) for k in by_name)
        and by_name["label"].tolist() == [1.0, 1.0, 2.5]
    )
    assert (
        "label" not in three.encode([{**r, "label": None} for r in rows])
        and len(three.predict(rows)) == 3
    )


# --- many rows, saved models


def test_batches_of_similar_length_predict_as_one_batch(three):
    words = [
        "the",
        "soup",
        "was",
        "cold",
        "and",
        "nobody",
        "wanted",
        "any",
        "more",
        "of",
        "it",
        "today",
    ]
    rows = [
        dict(
            task=n,
            sentence1=" ".join(words[: 1 + i % 11]),
            **({} if n == "one" else {"sentence2": "x"}),
        )
        for i, n in enumerate(["one", "pair", "number"] * 9)
    ]
    shapes = []
    whole = three.predict(rows, probabilities=True)
    hook = three.register_forward_pre_hook(
        lambda m, args: shapes.append(args[0]["input_ids"].shape)
    )
    try:
        parts = three.predict(rows, batch_size=5, probabilities=True)
    finally:
        hook.remove()
    assert (
        len(shapes) == 6
        and [s[1] for s in shapes] == sorted(s[1] for s in shapes)
        and shapes[0][1] < shapes[-1][1]
    )
    for a, b, r in zip(whole, parts, rows):
        if r["task"] == "number":
            assert a["value"] == pytest.approx(b["value"], abs=1e-4)
        else:
            assert a["label"] == b["label"] and a["probabilities"] == pytest.approx(
                b["probabilities"], abs=1e-5
            )
    assert three.predict(rows) == [a.get("label", a.get("value")) for a in whole]
    with pytest.raises(ValueError, match="batch_size"):
        three.predict(rows, batch_size=0)


def test_one_constructor_from_saved_folders(tmp_path, small_folder, monkeypatch):
    task = small_task()
    tasks = small_task("similarity")
    for name, method, t in (
        ("mood", "lpt-npg", task),
        ("close", "prompt-tuning", tasks),
        ("lora", "lora", task),
    ):
        cfg = config(backbone=str(small_folder), method=method, task=t.name)
        save_pretrained(build_model(cfg, load_backbone(cfg.backbone), t), tmp_path / name, t, cfg)
    reads = []
    deserialise = descriptions.deserialise_tensors
    monkeypatch.setattr(
        descriptions,
        "deserialise_tensors",
        lambda data, file: reads.append(file.parent.name) or deserialise(data, file),
    )
    model = MultiTaskModel.from_pretrained([tmp_path / "mood", tmp_path / "close"])
    assert reads == ["mood", "close"]  # each file once
    assert model.task_names == ["sentiment", "similarity"] and not model.training
    rows = [
        dict(task="sentiment", sentence1="tea"),
        dict(task="similarity", sentence1="a", sentence2="b"),
    ]
    for folder, r, a in zip(("mood", "close"), rows, model.predict(rows, probabilities=True)):
        (alone,) = predict(
            *from_pretrained(tmp_path / folder), [{k: v for k, v in r.items() if k != "task"}]
        )
        flat = [{**x.get("probabilities", {}), "value": x.get("value", 0.0)} for x in (a, alone)]
        assert flat[0] == pytest.approx(flat[1], abs=1e-5)
    named = MultiTaskModel.from_pretrained(
        {"x": tmp_path / "mood", "y": tmp_path / "mood"}, str(small_folder)
    )
    assert (
        named.task_names == ["x", "y"]
        and named.task_models["x"].model.backbone is named.task_models["y"].model.backbone
    )
    with pytest.raises(ValueError, match="two of .* have the same name. Give a dict"):
        MultiTaskModel.from_pretrained([tmp_path / "mood", tmp_path / "mood"])
    bb = load_backbone(str(small_folder))
    with pytest.raises(ValueError, match=r"'lora' \(lora\) changes the backbone's weights"):
        MultiTaskModel.from_pretrained([tmp_path / "mood", tmp_path / "lora"], bb)
    assert bb.active_edit is None


def test_a_saved_shadow_network_shares_its_backbone(tmp_path, small_folder):
    task = small_task()
    for method in ("shadow", "lpt"):
        cfg = config(backbone=str(small_folder), method=method, task=task.name)
        model = build_model(cfg, load_backbone(cfg.backbone), task)
        save_pretrained(model, tmp_path / method, task, cfg)
    folders = {method: tmp_path / method for method in ("shadow", "lpt")}
    served = MultiTaskModel.from_pretrained(folders)
    answers = served.predict([dict(task=m, sentence1="tea") for m in folders], probabilities=True)
    for folder, answer in zip(folders.values(), answers):
        (alone,) = predict(*from_pretrained(folder), [dict(sentence1="tea")])
        assert answer["probabilities"] == pytest.approx(alone["probabilities"], abs=1e-5)


def test_a_task_of_several_labels_is_served_beside_others():
    bb = backbone()
    topics = topic_task(8, 4, 4)
    cfg = config("lpt-npg", task="topics", max_len=60)
    member = TaskModel(model_of("lpt-npg", bb, topics), topics, cfg)
    model = MultiTaskModel({"topics": member, "mood": task_model("lpt", bb)})
    rows = [dict(task="topics", sentence1="pizza is the price"), dict(task="mood", sentence1="a")]
    answers = model.predict(rows, probabilities=True)
    chosen = [name for name, p in answers[0]["probabilities"].items() if p > 0.5]
    assert answers[0]["label"] == chosen and answers[1]["label"] in TASKS["sentiment"].labels
    (alone,) = predict(member.model, topics, cfg, [dict(sentence1=rows[0]["sentence1"])])
    assert answers[0]["probabilities"] == pytest.approx(alone["probabilities"], abs=1e-5)
    with pytest.raises(ValueError, match="can be trained only by itself"):
        model.encode([{**rows[0], "label": ["food"]}])


def test_moved_word_vectors_of_a_task_can_be_given(tmp_path):
    file = tmp_path / "glove.txt"
    write_glove(dict(tea=0, rain=1), torch.randn(2, 8).numpy(), file)
    task = task_model("m-idpg-phm-glove", backbone(), glove=str(file))
    model = MultiTaskModel({"mood": task}).eval()
    save_multitask_model(model, tmp_path / "tasks")
    moved = file.rename(tmp_path / "moved.txt")
    with pytest.raises(ValueError, match="not saved with them: give its path"):
        load_multitask_model(tmp_path / "tasks", backbone())
    loaded = load_multitask_model(tmp_path / "tasks", backbone(), glove=moved)
    rows = [dict(task="mood", sentence1="tea and rain")]
    assert loaded.predict(rows, probabilities=True) == model.predict(rows, probabilities=True)

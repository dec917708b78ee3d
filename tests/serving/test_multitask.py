"""Several tasks in one batch: outputs, predictions, saved models, and what is refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small import FAMILY, backbone, config, model_of, same, small_task, topic_task, write_glove
from task_models import IN_WEIGHTS, alone, everything, mixed, rows_of, task_model

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.saving import descriptions
from idp_tutorial.saving.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.serving.multitask import MultiTaskModel, TaskModel
from idp_tutorial.training.evaluation import predict


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
    model = MultiTaskModel(members)
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


# --- rows of one question


def test_grouped_rows_get_one_positive_prediction_per_question():
    bb = backbone()
    m = task_model("lpt", bb, "copa")
    model = MultiTaskModel({"choose": m, "mood": task_model("lpt", bb)})
    rows = [
        dict(task="choose", sentence1=f"it fell {i // 2}", sentence2=s, group=i // 2)
        for i, s in enumerate(["it broke", "we ate"] * 4)
    ]
    predictions = model.predict([*rows, dict(task="mood", sentence1="tea")])[:8]
    pairs = [sorted(predictions[i : i + 2]) for i in range(0, 8, 2)]
    assert pairs == [["false", "true"]] * 4  # one of the two, of each question
    with pytest.raises(ValueError, match="group"):
        model.predict([{k: v for k, v in rows[0].items() if k != "group"}])


# --- refused


@pytest.mark.parametrize("method", IN_WEIGHTS)
def test_methods_that_change_weights(method):
    m = task_model(method, backbone())
    with pytest.raises(
        ValueError, match="passes of its own" if method == "efl" else "changes the backbone"
    ):
        MultiTaskModel({"a": m})


def test_bad_models_and_rows_are_refused(bbs):
    bb = bbs("roberta")
    m = task_model("lpt", bb)
    pair = task_model("lpt", bb, "entailment")
    model = MultiTaskModel({"mood": m, "pair": pair})
    for f, words in (
        (lambda: MultiTaskModel({}), "give at least one task"),
        (
            lambda: MultiTaskModel({"a": m, "b": task_model("lpt", backbone())}),
            "build every model on it",
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
            lambda: model.predict([dict(task="pair", sentence1="x")]),
            "row 0: .* has no text 'sentence2', which task 'entailment' needs",
        ),
        (lambda: model.predict([dict(task="mood", sentence1=" ")]), "has no text 'sentence1'"),
        (lambda: model.predict([dict(task="mood", sentence1=3)]), "has no text 'sentence1'"),
        (
            lambda: model.predict([dict(task="mood", sentence1="a \ud83d")]),
            "row 0: sentence1 contains a lone surrogate",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            f()
    assert model.predict([]) == []


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


# --- many rows, saved models


def test_batches_of_similar_length_predict_as_one_batch(three, monkeypatch):
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
    whole = three.predict(rows, batch_size=99, probabilities=True)
    lengths = []
    compute = three.compute_outputs
    with monkeypatch.context() as patched:
        patched.setattr(
            three,
            "compute_outputs",
            lambda batch: lengths.append(max(len(e["input_ids"]) for e in batch)) or compute(batch),
        )
        parts = three.predict(rows, batch_size=5, probabilities=True)
    assert len(lengths) == 6 and lengths == sorted(lengths) and lengths[0] < lengths[-1]
    for a, b, r in zip(whole, parts, rows):
        if r["task"] == "number":
            assert a["value"] == pytest.approx(b["value"], abs=1e-4)
        else:
            assert a["label"] == b["label"] and a["probabilities"] == pytest.approx(
                b["probabilities"], abs=1e-5
            )
    assert three.predict(rows, batch_size=99) == [a.get("label", a.get("value")) for a in whole]
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
    assert model.task_names == ["sentiment", "similarity"]
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


def test_moved_word_vectors_of_a_task_can_be_given(tmp_path, small_folder):
    file = tmp_path / "glove.txt"
    write_glove(dict(tea=0, rain=1), torch.randn(2, 8).numpy(), file)
    task = small_task()
    cfg = config(backbone=str(small_folder), method="m-idpg-phm-glove", glove=str(file))
    cfg = replace(cfg, task=task.name)
    trained = build_model(cfg, load_backbone(cfg.backbone), task)
    save_pretrained(trained, tmp_path / "mood", task, cfg)
    moved = file.rename(tmp_path / "moved.txt")
    with pytest.raises(ValueError, match="give the path of .* as glove="):
        MultiTaskModel.from_pretrained([tmp_path / "mood"])
    loaded = MultiTaskModel.from_pretrained([tmp_path / "mood"], glove=moved)
    (want,) = predict(trained, task, cfg, [dict(sentence1="tea and rain")])
    rows = [dict(task=task.name, sentence1="tea and rain")]
    (got,) = loaded.predict(rows, probabilities=True)
    assert got["probabilities"] == pytest.approx(want["probabilities"], abs=1e-5)


# ---- one pass for the rows of several tasks equals a pass for each task


@pytest.mark.grid
@pytest.mark.parametrize("family", FAMILY)
def test_every_row_is_as_if_its_task_were_alone(family):
    members = everything(backbone(family))
    rows = rows_of(members)
    out = mixed(members, rows)
    assert len({len(r["sentence1"].split()) for r in rows}) > 3 and len(out) == 2 * len(members)
    for r, o in zip(rows, out):
        assert len(o) == (len(members[r["task"]].task.labels) or 1)
        same(o, alone(members, r), 1e-5)
    outputs = [torch.stack([o for r, o in zip(rows, out) if r["task"] == name]) for name in members]
    assert all((o[0] - o[1]).abs().max() > 1e-4 for o in outputs)  # they depend on the text


def test_float64_outputs_equal_those_of_each_task_alone():
    bb = backbone()
    members = everything(bb)
    bb.model.double()
    for m in members.values():
        m.model.double()
    rows = rows_of(members)
    for r, o in zip(rows, mixed(members, rows)):
        assert o.dtype == torch.float64
        torch.testing.assert_close(o, alone(members, r), atol=1e-11, rtol=0)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_keys_of_one_task_are_not_seen_by_another(family, attn):
    """Tasks with different numbers of keys, and without keys."""
    bb = backbone(family, attn=attn)
    members = {
        "a": task_model("p-tuning-v2", bb, prompt_length=2),
        "b": task_model("p-tuning-v2", bb, prompt_length=7),
        "c": task_model("lpt", bb, prompt_length=3),
        "d": task_model("head-only", bb),
    }
    with torch.no_grad():
        for m in members.values():
            [p.mul_(5) for p in m.model.sources.parameters()]  # large keys
    rows = rows_of(members, 3)
    out = mixed(members, rows)
    for r, o in zip(rows, out):
        same(o, alone(members, r), 2e-5)
    with torch.no_grad():
        [p.mul_(3) for p in members["b"].model.sources.parameters()]
    changed = mixed(members, rows)
    for r, a, b in zip(rows, out, changed):
        assert (r["task"] == "b") == bool((a - b).abs().max() > 1e-3)


@pytest.mark.parametrize("family", FAMILY)
def test_heads_and_templates_mix(family):
    bb = backbone(family)
    members = {
        "words": task_model("lpt-npg", bb, head="verbalizer"),
        "class": task_model("prompt-tuning", bb, "questions"),
        "number": task_model("id-spam", bb, "similarity"),
        "pair": task_model("lpt", bb, "entailment", head="verbalizer", layer=2),
    }
    rows = rows_of(members, 3)
    for r, o in zip(rows, mixed(members, rows)):
        same(o, alone(members, r), 2e-5)


def test_outputs_equal_a_pure_hugging_face_model():
    """Prompt tuning as added word embeddings, and a late prompt before the hidden states."""
    bb = backbone()
    members = {
        "early": task_model("prompt-tuning", bb),
        "late": task_model("lpt", bb, "questions", layer=2),
    }
    rows = rows_of(members, 3)
    out = mixed(members, rows)
    for r, o in zip(rows, out):
        m = members[r["task"]]
        ids = torch.tensor([bb.tokenizer(r["sentence1"]).input_ids])
        p = m.model.sources[0].p[None]
        with torch.no_grad():
            if r["task"] == "early":
                e = bb.word_embeddings(ids)
                e = torch.cat([e[:, :1], p, e[:, 1:]], 1)
                h = bb.base(
                    inputs_embeds=e, attention_mask=torch.ones_like(e[..., 0]).long()
                ).last_hidden_state
                h = torch.cat([h[:, :1], h[:, 1 + p.shape[1] :]], 1)
            else:
                h = torch.cat([p, bb.base(ids, output_hidden_states=True).hidden_states[2]], 1)
                h = bb.base.encoder.layer[2](h)
                h = (h[0] if isinstance(h, tuple) else h)[:, p.shape[1] :]
            same(o, F.linear(h.mean(1)[0], m.model.head.net.weight, m.model.head.net.bias), 2e-5)


@pytest.mark.grid
@pytest.mark.parametrize("family", FAMILY)
def test_order_other_rows_and_padding_change_nothing(family):
    members = everything(backbone(family))
    rows = rows_of(members)
    out = mixed(members, rows)
    order = torch.randperm(len(rows)).tolist()
    for i, o in zip(order, mixed(members, [rows[i] for i in order])):
        same(o, out[i])
    chosen = [i for i, r in enumerate(rows) if r["task"] in list(members)[::3]]
    for i, o in zip(chosen, mixed(members, [rows[i] for i in chosen])):
        same(o, out[i])  # without the other tasks
    model = MultiTaskModel(members)
    longer = rows_of(dict([*members.items()][:1]), 1)[0]
    longer["sentence1"] = " ".join([longer["sentence1"]] * 5)
    for i, o in enumerate(model.compute_outputs(model.encode([*rows, longer]))[:-1]):
        same(o, out[i])  # with more padding


def test_each_layer_runs_once(monkeypatch):
    bb = backbone()
    members = {
        "a": task_model("prompt-tuning", bb),
        "b": task_model("p-tuning-v2", bb),
        "c": task_model("lpt-npg", bb, layer=2),
    }
    calls = []
    layer = bb.run_layer
    monkeypatch.setattr(
        bb, "run_layer", lambda k, h, *a: calls.append((k, len(h))) or layer(k, h, *a)
    )
    mixed(members, rows_of(members, 4))
    assert calls == [(0, 12), (1, 12), (2, 12)]

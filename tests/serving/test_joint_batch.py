"""One pass for the rows of several tasks equals a pass for each task."""

import pytest
import torch
import torch.nn.functional as F
from small import FAMILY, backbone, same
from task_models import alone, everything, mixed, rows_of, task_model

from idp_tutorial.data.encoding import collate
from idp_tutorial.serving.multitask import (
    MultiTaskModel,
    save_multitask_model,
)


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
    model = MultiTaskModel(members).eval()
    batch = model.encode(rows)
    far = {k: F.pad(v, (0, 9)) if v.dim() == 2 else v for k, v in batch.items()}
    with torch.no_grad():
        [same(a, b) for a, b in zip(model(far), out)]


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


@pytest.mark.parametrize("family", FAMILY)
def test_loss_and_gradients_are_each_tasks_own(family):
    bb = backbone(family)
    members = {
        "a": task_model("prompt-tuning", bb),
        "b": task_model("lpt-npg", bb, "questions", layer=2),
        "c": task_model("m-idpg-phm", bb, "similarity"),
        "d": task_model("p-tuning-v2", bb),
        "idle": task_model("lpt", bb),
    }
    model = MultiTaskModel(members).eval()
    rows = [r for r in rows_of(members, 3) if r["task"] != "idle"][:-1]  # 3, 3, 3 and 2 rows
    loss = model.loss(model.encode(rows))
    loss.backward()
    got = {
        n: [p.grad.clone() for p in m.model.trained_parameters().values()]
        for n, m in members.items()
        if n != "idle"
    }
    assert all(p.grad is None for p in members["idle"].model.trained_parameters().values()) and all(
        p.grad is None for p in bb.model.parameters()
    )
    total = 0.0
    for n in "abcd":
        m = members[n]
        task_rows = [r for r in rows if r["task"] == n]
        m.model.zero_grad(set_to_none=True)
        batch = collate(m.task.encode(task_rows, bb.tokenizer, 60), bb.tokenizer.pad_token_id)
        if m.task.is_regression:
            batch["label"] = batch["label"] / 5
        one = m.model.loss(batch)
        one.backward()
        total += one.item() * len(task_rows) / len(rows)
        for a, p in zip(got[n], m.model.trained_parameters().values()):
            assert a.any() and p.grad is not None
            same(a, p.grad * len(task_rows) / len(rows), 1e-5)
    assert abs(total - loss.item()) < 1e-5


def test_training_mode_leaves_dropout_off_below_the_first_prompt():
    bb = backbone()
    late = {"a": task_model("lpt", bb, layer=2), "b": task_model("lpt-npg", bb, layer=1)}
    model = MultiTaskModel(late).train()
    assert [l.training for l in bb.layers] == [False, True, True] and model.tasks["b"][
        "sources"
    ].training
    assert not any(m.training for m in model.eval().modules())
    assert all(
        l.training
        for l in MultiTaskModel({**late, "c": task_model("prompt-tuning", bb)}).train().lm.modules()
    )


def test_dropout_below_the_first_prompt(tmp_path):
    """On if all tasks were built with it; tasks that differ can predict, but not be trained."""
    bb = backbone()
    lower = {n: task_model("lpt", bb, layer=2, dropout_below_prompt=True) for n in "ab"}
    assert all(m.training for m in MultiTaskModel(lower).train().lm.modules())
    both = MultiTaskModel({**lower, "c": task_model("lpt", bb, layer=1)})
    with pytest.raises(ValueError, match="'a' has dropout_below_prompt=True and 'c' has not"):
        both.train()
    assert len(both.predict(rows_of(both.task_models))) == 6
    save_multitask_model(both, tmp_path / "model")
    assert (
        MultiTaskModel({**both.task_models, "d": task_model("prompt-tuning", bb)}).train().training
    )  # nothing lies below

"""Tests of EFL.

The pairs are the tokenizer's, loss and answer are by hand, padding and company change nothing, and
the head goes on from entailment.
"""

import pytest
import torch
import torch.nn.functional as F
from small import FAMILY, backbone, batch_of, config, one, same, small_task, text_of

from idp_tutorial.assembly.build import build_model
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.data.encoding import collate, tokenize_rows
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.methods.efl import (
    LABEL_DESCRIPTIONS,
    EntailmentModel,
    append_tails,
    describe_labels,
    encode_description_tails,
)
from idp_tutorial.methods.prompt_tuning import prompt_plan
from idp_tutorial.methods.soft_prompt import SoftPrompt
from idp_tutorial.runs.compare import compare_methods
from idp_tutorial.saving.prompt_files import load_first_stage
from idp_tutorial.training.cache import attach_cached_states
from idp_tutorial.training.evaluation import evaluate
from idp_tutorial.training.fit import fit
from results.supplement.supplementary_training import run_supplementary_training

families = pytest.mark.parametrize("family", FAMILY)
SENTENCES = ("Yes.", "This is much longer than the other one.", "It is so.")


@families
def test_pairs_are_the_tokenizers(family):
    bb = backbone(family)
    task = small_task("questions")
    rows = task.splits["train"][:5]
    batch = collate(task.encode(rows, bb.tokenizer, 60), bb.tokenizer.pad_token_id or 0)
    got = append_tails(batch, encode_description_tails(bb, SENTENCES))
    want = collate(
        tokenize_rows(
            [dict(sentence1=r["sentence1"], sentence2=s) for r in rows for s in SENTENCES],
            bb.tokenizer,
        ),
        0,
    )
    assert batch["attention_mask"].sum(1).min() < batch["attention_mask"].sum(1).max()
    for k in ("input_ids", "attention_mask", "token_type_ids"):
        assert torch.equal(got[k], want[k] * want["attention_mask"]), k


def test_bert_marks_the_second_text():
    """BERT's tokenizer gives type 1 to the description.

    Ours has no types, so they are written out.
    """
    bb = backbone("bert")
    t = encode_description_tails(bb, SENTENCES)
    batch = batch_of(bb)
    got = append_tails(batch, (t[0], [[1] * len(i) for i in t[0]], t[2]))
    end = batch["attention_mask"].sum(1).repeat_interleave(3)
    for i, (row, e) in enumerate(zip(got["token_type_ids"], end)):
        assert row.tolist() == [0] * e + [1] * len(t[0][i % 3]) + [0] * (
            len(row) - e - len(t[0][i % 3])
        )


def test_with_the_tokenizer_of_bert():
    from idp_tutorial.backbones.load import load_backbone

    try:
        bb = load_backbone("minilm")
    except ValueError as e:
        pytest.skip(str(e))
    rows = [dict(sentence1="a cold beer"), dict(sentence1="the soup was far too cold for me")]
    got = append_tails(
        collate(tokenize_rows(rows, bb.tokenizer), 0), encode_description_tails(bb, SENTENCES)
    )
    want = collate(
        tokenize_rows([{**r, "sentence2": s} for r in rows for s in SENTENCES], bb.tokenizer), 0
    )
    for k in want:
        assert torch.equal(got[k], want[k]), k
    assert got["token_type_ids"].sum() == want["token_type_ids"].sum() > 0


@families
def test_loss_and_answer_by_hand(family):
    bb = backbone(family)
    task = small_task("questions")
    batch = batch_of(bb, task)
    model = EntailmentModel(bb, SENTENCES * 2, pooling="last", n_wrong=None).eval()
    batch["label"] = torch.tensor([0, 5, 2, 3, 1, 4])
    with torch.no_grad():
        odds = model(batch)
        loss = model.loss(batch)
    texts = [
        bb.tokenizer.decode(i[k == 1], skip_special_tokens=True)
        for i, k in zip(batch["input_ids"], batch["attention_mask"])
    ]
    total = 0.0
    for i, y in enumerate(batch["label"].tolist()):
        for c, s in enumerate(SENTENCES * 2):
            pair = collate(
                tokenize_rows(
                    [dict(sentence1=task.splits["train"][i]["sentence1"], sentence2=s)],
                    bb.tokenizer,
                ),
                0,
            )
            with torch.no_grad():
                p = (
                    model.head.net.weight @ run_layers(bb, pair).h[0, -1] + model.head.net.bias
                ).exp()
            p = p[0] / p.sum()
            assert odds[i, c].sigmoid().item() == pytest.approx(p.item(), abs=1e-4)
            total -= (p if c == y else 1 - p).log().item() / 36
    assert loss.item() == pytest.approx(total, rel=1e-3) and len(set(texts)) > 1


@families
def test_training_asks_the_right_and_some_wrong(family):
    """The loss is the mean over the sampled pairs alone.

    Whatever else the batch could have asked.
    """
    bb = backbone(family)
    task = small_task("questions")
    batch = batch_of(bb, task)
    y = batch["label"]
    model = EntailmentModel(bb, SENTENCES * 2, pooling="last", n_wrong=2).eval()
    sampled = model.sample_descriptions(y)
    assert torch.equal(sampled[:, 0], y) and all(len({*row}) == 3 for row in sampled.tolist())
    model.sample_descriptions = lambda label: sampled
    with torch.no_grad():
        odds = model(batch)
        loss = model.loss(batch)
    chosen = odds.gather(1, sampled)
    slow = -(F.logsigmoid(chosen[:, 0]).sum() + F.logsigmoid(-chosen[:, 1:]).sum()) / 18
    assert loss.item() == pytest.approx(slow.item(), rel=1e-3)
    assert (
        model.compute_context(batch, sampled).h.shape[0] == 18
        and model.compute_context(batch).h.shape[0] == 36
    )


def test_wrong_descriptions_are_drawn_evenly_and_by_seed():
    model = EntailmentModel(backbone(), SENTENCES * 2)
    y = torch.arange(6).repeat(500)
    torch.manual_seed(1)
    a = model.sample_descriptions(y)
    b = model.sample_descriptions(y)
    torch.manual_seed(1)
    assert (
        torch.equal(a, model.sample_descriptions(y))
        and not torch.equal(a, b)
        and a.shape == (3000, 2)
    )
    for c in range(6):
        seen = torch.bincount(a[y == c, 1], minlength=6)
        assert seen[c] == 0 and (seen[torch.arange(6) != c] > 60).all()


def test_two_classes_are_always_both_asked():
    bb = backbone()
    task = small_task()
    batch = batch_of(bb, task)
    a, b = [EntailmentModel(bb, SENTENCES[:2], n_wrong=w).eval() for w in (1, None)]
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        same(a.loss(batch), b.loss(batch), 1e-5)


def test_the_most_probable_description_wins():
    bb = backbone()
    task = small_task("questions")
    model = EntailmentModel(bb, describe_labels(task)).eval()
    examples = task.encode(task.splits["test"], bb.tokenizer, 60)
    score, pred = evaluate(model, examples, task, 7)
    with torch.no_grad():
        alone = [int(model(collate([e], 0)).sigmoid().argmax()) for e in examples]
    assert (
        pred == alone
        and len(set(pred)) > 1
        and score["accuracy"]
        == pytest.approx(100 * sum(p == e["label"] for p, e in zip(pred, examples)) / 24)
    )


@families
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_padding_and_other_texts_change_nothing(family, pooling):
    if family == "gpt2" and pooling == "cls":
        pytest.skip("a decoder does not read its first row")
    bb = backbone(family)
    model = EntailmentModel(bb, SENTENCES, pooling=pooling).eval()
    batch = batch_of(bb)
    with torch.no_grad():
        out = model(batch)
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        same(torch.cat([model(one(batch, i)) for i in range(6)]), out, 2e-5)
        same(model({k: v[order] for k, v in text_of(batch).items()}), out[order], 2e-5)
    assert (out[0] - out[1]).abs().max() > 1e-3 and (out[:, 0] - out[:, 1]).abs().max() > 1e-3


def test_registry_trains_everything_and_a_head_of_two():
    bb = backbone()
    model = build_model(config(method="efl"), bb, small_task("questions"))
    assert (
        isinstance(model, EntailmentModel)
        and model.n_descriptions == 6
        and model.first_trained_layer == -1
    )
    assert count_parameters(model) == dict(
        prompt=0, head=2 * 32 + 2, backbone=sum(p.numel() for p in bb.base.parameters())
    )
    model.train().loss(batch_of(bb, small_task("questions"))).backward()
    idle = [n for n, p in model.trained_parameters().items() if p.grad is None or not p.grad.any()]
    assert not idle


def test_pair_tasks_are_asked_as_they_stand():
    task = small_task("entailment")
    a, b = [build_model(config(method=m), backbone(), task) for m in ("efl", "fine-tuning")]
    batch = batch_of(a.backbone, task)
    assert type(a) is PlannedModel
    same(a.eval()(batch), b.eval()(batch), 0)
    assert (
        type(build_model(config(method="efl"), backbone(), small_task("similarity")))
        is PlannedModel
    )


def test_it_learns():
    task = small_task("sentiment", train=8)
    bb = backbone(std=0.05)
    task.splits["validation"] = task.splits["train"]
    cfg = config(method="efl", steps=80, eval_every=20, lr=3e-3, batch_size=8, pooling="mean")
    log = fit(build_model(cfg, bb, task), task, cfg)
    assert log.losses[0] > 0.6 and log.losses[-1] < 0.4 and log.validation > 80


def test_a_plan_can_be_asked_too():
    """EFL with a prompt instead of fine-tuning: only the prompt and the head are trained."""
    bb = backbone()
    model = EntailmentModel(bb, SENTENCES, prompt_plan(bb, SoftPrompt(3, 32)))
    batch = batch_of(bb)
    model.train().loss({**text_of(batch), "label": torch.zeros(6, dtype=torch.long)}).backward()
    assert set(model.trained_parameters()) == {
        "sources.0.p",
        "head.net.weight",
        "head.net.bias",
    } and all(p.grad.any() for p in model.trained_parameters().values())
    assert model.compute_context(batch).h.shape[0] == 18


def test_it_goes_on_from_entailment(small_folder, tmp_path):
    """The first stage is EFL on an entailment task.

    Its backbone, and its head with entailment first, answer the questions of stage 2.
    """
    from idp_tutorial.backbones.load import load_backbone

    pairs = small_task("entailment")
    assert pairs.labels[0] == "entailment"
    stage = run_supplementary_training(
        config(method="efl", backbone=str(small_folder), epochs=0.1, lr=1e-3, batch_size=8),
        build_model,
        pairs,
        tmp_path / "stage",
    )
    bb = load_backbone(stage["folder"])
    model = build_model(config(method="efl"), bb, small_task())
    fresh = model.head.net.weight.clone()
    assert {*load_first_stage(model, stage["folder"])} == {
        "head.net.weight",
        "head.net.bias",
    } and not torch.equal(model.head.net.weight, fresh)


def test_caches_of_single_texts_are_not_used(tmp_path):
    bb = backbone()
    task = small_task()
    model = EntailmentModel(bb, SENTENCES[:2]).eval()
    examples = task.encode(task.splits["train"][:4], bb.tokenizer, 60)
    cached = attach_cached_states(model, examples, config(cache="hidden", cache_dir=str(tmp_path)))
    with torch.no_grad():
        same(model(collate(cached, 1)), model(collate(examples, 1)))


# --- descriptions


def test_every_single_text_task_has_its_own():
    for t in TASKS.values():
        if not t.pair and not t.is_generation:
            assert (
                len({*describe_labels(t)}) == len(t.labels) > 1 and t.labels in LABEL_DESCRIPTIONS
            )
    assert describe_labels(Task("news", labels=("sport", "world_politics"))) == (
        "This is about sport.",
        "This is about world politics.",
    )
    assert "negative" in describe_labels(TASKS["sst2"])[TASKS["sst2"].labels.index("negative")]


def test_real_questions(data_dir):
    task = load_task("trec", data_dir)
    bb = backbone()
    batch = collate(task.encode(task.splits["train"][:8], bb.tokenizer, 60), 1)
    pairs = append_tails(batch, encode_description_tails(bb, describe_labels(task)))
    y = int(batch["label"][3])
    assert bb.tokenizer.decode(
        pairs["input_ids"][6 * 3 + y][pairs["attention_mask"][6 * 3 + y] == 1],
        skip_special_tokens=True,
    ).endswith(describe_labels(task)[y].lower())


# --- refused


def test_what_is_refused(small_folder, messages):
    with pytest.raises(ValueError, match="premise and hypothesis"):
        describe_labels(TASKS["mnli"])
    with pytest.raises(ValueError, match="regression"):
        describe_labels(Task("grades", metric="pearson"))
    with pytest.raises(ValueError, match="head='classification'"):
        build_model(config(method="efl", head="verbalizer"), backbone(), small_task())
    with pytest.raises(ValueError, match="Leave it out"):
        compare_methods(
            ["head-only", "efl"],
            config(backbone=str(small_folder), head="verbalizer"),
            1,
            False,
        )
    assert not messages


def test_a_text_that_leaves_no_room():
    bb = backbone(max_position_embeddings=34)
    model = EntailmentModel(bb, SENTENCES).eval()
    n = max(len(t) for t in model.description_tails[0])

    def batch(m):
        return collate([dict(input_ids=[0] + [9] * (m - 2) + [2], token_type_ids=[0] * m)], 1)

    assert model(batch(32 - n)).shape == (1, 3)
    with pytest.raises(ValueError, match=f"max_len={32 - n}"):
        model(batch(33 - n))

"""Evaluation of the tasks of SuperGLUE: candidates, questions, batches."""

import math
import random
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import f1_score
from small import backbone, config, model_of, small_task, write_splits
from superglue import BENCHMARKS, THINGS, groups_of

from idp_tutorial.assembly.build import build_model
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.metrics import compute_metric
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import load_task
from idp_tutorial.training import evaluation
from idp_tutorial.training.evaluation import (
    batch_by_length,
    evaluate,
    format_predictions,
    predict,
)
from idp_tutorial.training.fit import fit


@pytest.mark.parametrize("head", ["classification", "verbalizer"])
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_fit_and_evaluate(superglue_folder, bbs, name, family, head):
    task = load_task(name, superglue_folder)
    bb = bbs(family)
    model = build_model(
        config(method="lpt-npg", head=head, pooling="mean" if family == "roberta" else "cls"),
        bb,
        task,
    )
    log = fit(model, task, config(head=head, steps=2, eval_every=1, max_len=48))
    examples = task.encode(
        task.splits["test"], bb.tokenizer, 48, "code" if head == "verbalizer" else None
    )
    scores, pred = evaluate(model, examples, task, 5)
    y = [r["label"] for r in task.splits["test"]]
    g = groups_of(task.splits["test"])
    assert len(log.losses) == 2 and log.validation >= 0 and next(iter(scores)) == task.metric
    assert [e["label"] for e in examples] == y
    assert scores["accuracy"] == pytest.approx(100 * sum(a == b for a, b in zip(pred, y)) / len(y))
    if name == "multirc":
        assert scores["f1+exact"] == pytest.approx(
            (100 * f1_score(y, pred, zero_division=0) + compute_metric("exact", pred, y, g)) / 2
        )
    if name == "copa":
        assert all(pred[i] + pred[i + 1] == 1 for i in range(0, len(pred), 2)) and g[::2] == g[1::2]


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_answers_do_not_depend_on_the_batch(superglue_folder, bbs, family):
    """Candidates of one question are in different batches, and are still compared."""
    task = load_task("copa", superglue_folder)
    bb = bbs(family)
    rows = task.splits["test"]
    model = build_model(
        config(method="prompt-tuning", pooling="mean" if family == "roberta" else "cls"), bb, task
    ).eval()
    examples = task.encode(rows, bb.tokenizer, 60)
    _, pred = evaluate(model, examples, task, 128)
    assert pred == evaluate(model, examples, task, 1)[1] == evaluate(model, examples, task, 7)[1]
    order = random.Random(0).sample(range(len(rows)), len(rows))
    _, mixed = evaluate(model, [examples[i] for i in order], task, 5)
    assert [pred[i] for i in order] == mixed and {pred[i] for i in range(0, len(pred), 2)} == {0, 1}
    with torch.no_grad():
        out = torch.cat([model(collate([e], 0)) for e in examples])
    odds = (out[:, 1] - out[:, 0]).tolist()
    assert pred == [int(odds[i] > odds[i ^ 1]) for i in range(len(odds))]


@pytest.mark.grid
@pytest.mark.parametrize("name", ["copa", "boolq"])
def test_training_fits_the_training_rows(superglue_folder, name):
    task = load_task(name, superglue_folder)
    bb = backbone(std=0.05)
    cfg = config(method="fine-tuning", pooling="mean", steps=60, eval_every=20, lr=3e-3, max_len=60)
    model = build_model(cfg, bb, task)
    examples = task.encode(task.splits["train"], bb.tokenizer, 60)
    fit(model, replace(task, splits={**task.splits, "validation": task.splits["train"]}), cfg)
    assert evaluate(model, examples, task)[0]["accuracy"] > 90


def test_more_than_two_candidates(tmp_path, bbs):
    """In a user-defined task the accuracy over questions is `exact`."""
    task = Task("pick", pair=True, labels=("no", "yes"), grouping="choose", metric="exact")
    rng = random.Random(0)
    rows = [
        dict(
            sentence1=f"The {rng.choice(THINGS)} fell {q} times.",
            sentence2=f"Answer {c}.",
            label=int(c == q % (2 + q % 3)),
            group=f"q{q}",
        )
        for q in range(30)
        for c in range(2 + q % 3)
    ]
    write_splits(tmp_path / "pick", train=rows, test=rows)
    task = load_task(task, tmp_path)
    bb = bbs("roberta")
    model = build_model(config(method="head-only", pooling="mean"), bb, task)
    examples = task.encode(task.splits["test"], bb.tokenizer)
    s, pred = evaluate(model, examples, task, 7)
    assert sum(pred) == 30 and next(iter(s)) == "exact"
    assert s["exact"] == pytest.approx(
        100 * sum(p == 1 and r["label"] == 1 for p, r in zip(pred, rows)) / 30
    )
    assert s["accuracy"] > s["exact"]


def test_batches_are_sorted_by_length_and_limited_in_examples_and_in_tokens():
    lengths = [9, 2, 2, 30, 2, 9]
    assert batch_by_length(lengths, 4) == [[1, 2, 4, 0], [5, 3]]
    assert batch_by_length(lengths, 4, max_tokens=18) == [[1, 2, 4], [0, 5], [3]]
    assert batch_by_length(lengths, 2, max_tokens=18) == [[1, 2], [4, 0], [5], [3]]


def test_a_limit_of_tokens_changes_neither_predictions_nor_their_order(monkeypatch):
    model = model_of("lpt-npg", backbone())
    words = ["good", "bad", "a long and dull film", "fine"]
    rows = [dict(sentence1=" ".join([word] * (1 + i % 7))) for i, word in enumerate(words * 9)]
    monkeypatch.setattr(evaluation, "CPU_BATCH_TOKENS", 10**9)
    expected = predict(model, small_task(), config(), rows, batch_size=len(rows))
    sizes = []
    forward = model.forward
    monkeypatch.setattr(
        model, "forward", lambda batch: sizes.append(batch["input_ids"].shape) or forward(batch)
    )
    monkeypatch.setattr(evaluation, "CPU_BATCH_TOKENS", 64)
    limited = predict(model, small_task(), config(), rows, batch_size=8)
    assert len(sizes) > len(rows) // 8 and all(n <= 8 and n * length <= 64 for n, length in sizes)
    assert [p["label"] for p in limited] == [p["label"] for p in expected]
    for prediction, reference in zip(limited, expected, strict=True):
        assert prediction["probabilities"] == pytest.approx(reference["probabilities"], abs=1e-5)


@pytest.mark.parametrize("allow_empty_text", [True, False])
def test_an_empty_text_is_predicted_if_the_task_allows_it(allow_empty_text):
    task = replace(small_task(), allow_empty_text=allow_empty_text)
    model = model_of("head-only", backbone(), task)
    if allow_empty_text:
        assert len(predict(model, task, config(), [dict(sentence1=""), dict(sentence1=" ")])) == 2
    else:
        with pytest.raises(ValueError, match="sentence1"):
            predict(model, task, config(), [dict(sentence1="")])


@pytest.mark.parametrize("multi_label", [True, False])
def test_only_labels_of_one_class_share_their_probability(multi_label):
    metric = "micro_f1" if multi_label else "accuracy"
    task = Task("a task", labels=("a", "b"), multi_label=multi_label, metric=metric)
    (prediction,) = format_predictions(task, torch.tensor([[2.0, 1.0]]), [None])
    a, b = prediction["probabilities"].values()
    assert prediction["label"] == (["a", "b"] if multi_label else "a")
    expected = 1 / (1 + math.exp(-2 if multi_label else -1))
    assert a == pytest.approx(expected, abs=1e-12)
    assert (a + b == pytest.approx(1)) is not multi_label

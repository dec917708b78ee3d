"""Rows without a prompt: what they choose, what they record, that they stand beside the methods."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import (
    backbone,
    batch_of,
    call_with_messages,
    config,
    one,
    small_task,
    topic_task,
)

from idp_tutorial.assembly import controls
from idp_tutorial.assembly.build import build_model
from idp_tutorial.assembly.controls import MajorityHead
from idp_tutorial.assembly.probe import (
    fit_linear_model,
)
from idp_tutorial.core.planned_model import count_parameters
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.method_registry import ALL_METHODS, CONTROL_METHODS
from idp_tutorial.runs.compare import compare_methods
from idp_tutorial.runs.experiment import Experiment, run_experiment
from idp_tutorial.runs.learning_rate_search import search_learning_rate
from idp_tutorial.runs.record import RunStore
from idp_tutorial.runs.tables import format_table, results_table
from idp_tutorial.training.evaluation import predict_logits
from idp_tutorial.training.examples import encode_for_model


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A side network that stops early."""
    monkeypatch.setattr(controls, "SIDE_NETWORK_PATIENCE", 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "name,cache",
    [pytest.param("sentiment", "none", marks=pytest.mark.slow), ("similarity", "both")],
)
def test_controls_stand_beside_methods(cfg, name, cache, tmp_path):
    """One table, one file, found again; the cache changes no score."""
    task = small_task(name, train=40, validation=16, test=16)
    base = cfg(task=name, cache=cache, cache_dir=str(tmp_path / "cache"), lr=None)
    out = tmp_path / "r.jsonl"
    methods = [*CONTROL_METHODS, "head-only"]
    records = [r for m in methods for r in _one(m, base, task, out)]
    table = results_table(records)
    assert [*table.method] == methods and "–" in format_table(table)
    probe = next(r for r in records if r["method"] == "probe")
    assert (
        probe["probe"]["validation"]
        == probe["validation"]
        >= max(0, next(r for r in records if r["method"] == "majority")["validation"])
    )
    assert (
        probe["params"] == dict(prompt=0, head=len(task.labels or "x") * 33, backbone=0)
        and probe["lr"] is None
    )


def _one(m, base, task, out):
    from idp_tutorial.runs.compare import run_seeds

    selection = "best of 3 on validation, seed 0"
    cfg = replace(base, method=m)
    new = run_seeds(cfg, task, selection, 2, RunStore(out))
    with call_with_messages(lambda message: pytest.fail("run twice")):
        old = run_seeds(cfg, task, selection, 2, RunStore(out))
    assert old == json.loads(json.dumps(new)) and [r["seed"] for r in new] == [0, 1]
    return new


def test_the_majority_is_the_most_frequent_label(cfg):
    task = small_task()
    labels = [r["label"] for r in task.splits["train"]]
    most = int(np.bincount(labels).argmax())
    r = run_experiment(cfg(method="majority"), task)
    want = np.mean([x["label"] == most for x in task.splits["test"]])
    assert r["score"] == pytest.approx(100 * want) and r["steps_done"] == 0


def test_the_test_split_has_no_say(cfg):
    task = small_task(train=40, validation=16, test=16)
    other = replace(task, splits={**task.splits, "test": task.splits["test"][:1]})
    for m in ("words", "probe", "side-network"):
        a, b = [run_experiment(cfg(method=m), t) for t in (task, other)]
        assert (a["validation"], a.get("probe")) == (b["validation"], b.get("probe"))


def test_words_are_scikit_learns_pipeline_and_know_the_second_text(cfg):
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    task = small_task(train=60, validation=16, test=30)
    model, _ = Experiment(cfg(method="words"), task).fit()
    rows = task.splits["train"], task.splits["test"]
    texts, labels = zip(*[(r["sentence1"], r["label"]) for r in rows[0]])
    vectorizer = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]", sublinear_tf=True)
    unseen = [*rows[1], {"sentence1": "☃", "label": 0}]  # a text without a known word
    outputs = predict_logits(model, encode_for_model(model, task, cfg(), unseen))
    expected = []
    for C in (1.0, 10.0, 100.0):
        pipeline = make_pipeline(vectorizer, LogisticRegression(C=C, max_iter=3000))
        pipeline.fit(texts, labels)
        expected.append(pipeline.predict_proba([r["sentence1"] for r in unseen]))
    probabilities = outputs.softmax(1).numpy()
    assert min(np.abs(probabilities - p).max() for p in expected) < 1e-5
    assert sum(count_parameters(model).values()) == len(task.labels) * (
        1 + len(model.head.vectorizer.vocabulary_)
    )
    first, second = model.head.encode(
        [dict(sentence1="good", sentence2=""), dict(sentence1="", sentence2="good")]
    )
    assert first["input_ids"] != second["input_ids"]


@pytest.mark.long
def test_a_side_network_learns_what_no_line_can(cfg):
    """XOR of two columns of M(x)."""
    torch.manual_seed(0)
    Z = torch.randn(600, 32)
    y = ((Z[:, 0] > 0) ^ (Z[:, 1] > 0)).long()
    task = small_task()
    rows = [{**task.splits["train"][0], "label": int(v)} for v in y]
    task = replace(task, splits=dict(train=rows[:500], validation=rows[500:], test=rows[500:]))
    model = build_model(cfg(method="side-network"), backbone(), task)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controls, "SIDE_NETWORK_PATIENCE", 15)
        patch.setattr(
            controls,
            "_encode_sentence_vectors",
            lambda m, t, g, split: Z[:500] if split == "train" else Z[500:],
        )
        # the middle of its learning rates
        log = controls.SideNetworkConfig().fit(model, task, cfg(method="side-network", lr=None))
    W, b, _ = fit_linear_model(Z[:500], y[:500], 1.0, 2)
    line = 100 * ((Z[500:] @ W.T + b).argmax(1) == y[500:]).float().mean().item()
    assert log.validation > line + 15 and log.history[-1][0] == log.steps == len(log.losses)


def test_a_side_network_keeps_the_lowest_loss_of_equal_scores(cfg, monkeypatch):
    task = small_task(train=40, validation=16)
    model = build_model(cfg(method="side-network"), backbone(), task)
    losses = iter([0.5, 0.3, *[0.4] * 400])
    states = []

    def score(*args):
        states.append({name: t.clone() for name, t in model.head.state_dict().items()})
        return 100.0

    monkeypatch.setattr(controls, "score_main_metric", score)
    monkeypatch.setattr(controls, "compute_output_loss", lambda *args: next(losses))
    log = controls.SideNetworkConfig().fit(model, task, cfg(method="side-network", lr=3e-3))
    assert len(log.history) == 2 + controls.SIDE_NETWORK_PATIENCE and log.validation == 100
    assert log.validation_losses[:3] == [0.5, 0.3, 0.4] and log.validation_loss == 0.3
    for name, tensor in model.head.state_dict().items():
        assert torch.equal(tensor, states[1][name])
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("name", ["similarity", "sentiment"])
def test_a_side_network_that_diverges_leaves_a_record_and_the_others_go_on(cfg, name):
    task = small_task(name, train=24, validation=12, test=12)
    _, r = Experiment(cfg(method="side-network", task=name, lr=1e30), task).train()
    assert r["status"] == "diverged" and "learning rate 1e+30): a lower lr" in r["message"]
    best = search_learning_rate(cfg(method="side-network", task=name), task, (1e30, 1e-3))
    assert best["learning_rates_tried"][0] == (1e30, "diverged") and best["lr"] <= 1e-3


def test_padding_and_order_change_nothing(cfg):
    bb = backbone()
    task = small_task()
    batch = batch_of(bb)
    for m in ("probe", "side-network"):
        model = build_model(cfg(method=m), bb, task).eval()
        with torch.no_grad():
            together = model(batch)
            alone = torch.cat([model(one(batch, i)) for i in range(len(together))])
        torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-4)


def test_rows_are_methods_and_controls():
    assert [*ALL_METHODS] == [
        *METHODS,
        *CONTROL_METHODS,
    ] and not METHODS.keys() & CONTROL_METHODS.keys()
    with pytest.raises(ValueError, match="did you mean 'probe'"):
        compare_methods(["prob"], config(), seeds=1)
    assert MajorityHead(3).out.shape == (3,)


# ---- several labels of a row


@pytest.mark.parametrize(
    "method,options",
    [
        ("words", {}),
        ("probe", {}),
        ("side-network", dict(lr=3e-3)),
        ("head-only", dict(lr=1e-4, head_init="probe")),
    ],
)
def test_several_labels_are_learnt(method, options, small_folder):
    task = topic_task()
    cfg = config(method, backbone=str(small_folder), **options)
    record = run_experiment(cfg, task)
    # predicting every label of every row is the best that a constant can do
    everything = task.score([[1, 1, 1]] * 24, [row["label"] for row in task.splits["test"]])
    assert record["metric"] == "micro_f1" and record["score"] > everything["micro_f1"] + 8


def test_the_majority_of_several_labels_is_each_labels_majority():
    task = topic_task()
    model, log = Experiment(config("majority"), task).fit()
    share = np.mean([row["label"] for row in task.splits["train"]], 0)
    assert model.head.out.sigmoid().numpy() == pytest.approx(share, abs=1e-5)
    assert log.validation == 0  # no topic is in half of the rows


@pytest.mark.parametrize(
    "options,words",
    [
        (dict(head="verbalizer"), "head='verbalizer' predicts one label word"),
        (dict(method="efl"), "method 'efl' scores pairs"),
        (dict(class_weight="balanced"), "class_weight='balanced' needs one class for each row"),
    ],
)
def test_what_cannot_predict_several_labels_is_refused(options, words):
    cfg = config(**{"method": "head-only", **options})
    with pytest.raises(ValueError, match=words):
        build_model(cfg, backbone(), topic_task())

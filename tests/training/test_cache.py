"""Cached states: same losses, nothing computed twice, nothing outdated, and fewer layers to run."""

import shutil
from collections import namedtuple
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import backbone, config, model_of, refused, small_task
from torch import nn

from idp_tutorial.core.context import INPUT
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.steps import Add, Insert, PromptSource
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.idpg import PromptGenerator, idpg_plan
from idp_tutorial.methods.idpg_multilayer import multilayer_idpg_plan
from idp_tutorial.methods.npg import NaivePromptGenerator
from idp_tutorial.methods.sentence_vectors import mean_sentence_vector, sentence_vector
from idp_tutorial.training import cache as caches
from idp_tutorial.training.cache import (
    attach_cached_states,
    cache_name,
    cache_states,
    required_sentence_vectors,
)
from idp_tutorial.training.evaluation import evaluate
from idp_tutorial.training.fit import fit
from idp_tutorial.training.state_store import cache_size_bytes

FAMILIES = ["roberta", "bert", "gpt2", "deberta"]


@pytest.fixture(scope="module")
def bbs():
    return {f: backbone(f) for f in FAMILIES}


class FromSentence(PromptSource):
    """A prompt generated from M(x), as in IDPG."""

    needs = ("sentence",)

    def __init__(self, d, t=3):
        super().__init__()
        self.net = nn.Linear(d, t * d)
        self.d = d
        self.drop = nn.Dropout(0.1)

    def forward(self, ctx):
        return self.drop(self.net(sentence_vector(ctx))).unflatten(-1, (-1, self.d))


class FromMean(FromSentence):
    """A prompt generated from the mean over the words."""

    needs = ("mean_sentence",)

    def forward(self, ctx):
        return self.drop(self.net(mean_sentence_vector(ctx))).unflatten(-1, (-1, self.d))


PLANS = {
    "late": lambda bb: {2: Insert(NaivePromptGenerator(bb.d, 3, 8))},
    "words": lambda bb: {INPUT: Insert(FromSentence(bb.d), 0 if bb.causal else 1)},
    "both": lambda bb: {1: Insert(FromSentence(bb.d))},
    "head": lambda bb: {},
}
IDPG = {
    "m-idpg": lambda bb: multilayer_idpg_plan(bb, 3, 8, n=4),
    "s-idpg": lambda bb: idpg_plan(
        bb, PromptGenerator(bb.d, bb.d, 3, 8, n=4), encoder=mean_sentence_vector
    ),
}


def create_model(bb, plan, task=None, head="mean"):
    torch.manual_seed(0)
    task = task or small_task()
    head = (
        VerbalizerHead(bb, task.word_ids(bb.tokenizer))
        if head == "mask"
        else ClassificationHead(
            bb.d, len(task.labels), bb.default_pooling if head == "cls" else head
        )
    )
    return PlannedModel(bb, head, (PLANS | IDPG)[plan](bb))


def encode_examples(bb, task=None, template=None, n=10, split="train"):
    task = task or small_task()
    return task.encode(task.splits[split][:n], bb.tokenizer, 60, template)


def assert_close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# --- files


def flip_bit(file, position=-1):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    ["shorter", "longer", "empty", "state", "key", "end", "number of entries", "index digest"],
)
def test_a_damaged_part_is_computed_again(damage, tmp_path, bbs):
    bb = bbs["roberta"]
    examples = encode_examples(bb, n=4)
    cached, _ = cache_states(bb, examples, 2, tmp_path)
    expected = [e["hidden_states"].copy() for e in cached]
    (part,) = tmp_path.rglob("*.states")
    data = part.read_bytes()
    index_start = len(data) - 4 * 32 - 24
    flipped = {
        "state": 5,
        "key": index_start + 3,
        "end": index_start + 16,
        "number of entries": -24,
        "index digest": -1,
    }
    part.unlink()  # the memory map of `cached` keeps the old file
    if damage in flipped:
        part.write_bytes(data)
        flip_bit(part, flipped[damage])
    else:
        part.write_bytes({"shorter": data[:-4], "longer": data + b"1234", "empty": b""}[damage])
    with pytest.warns(UserWarning, match="is damaged .*: its states are computed again"):
        recomputed, cost = cache_states(bb, examples, 2, tmp_path)
    assert cost["computed"] == len(examples)
    for e, states in zip(recomputed, expected):
        np.testing.assert_array_equal(e["hidden_states"], states)
    assert cache_states(bb, examples, 2, tmp_path)[1]["computed"] == 0


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch, bbs):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda f: usage(2**40, 2**40 - 70_000_000, 70_000_000)
    )
    runs = []
    monkeypatch.setattr(caches, "run_layers", lambda *a, **kw: runs.append(1))
    examples = [
        dict(input_ids=[7] * 50, token_type_ids=[0] * 50, label=i % 2)
        | dict(input_ids=[5 + i % 3000, 5 + i // 3000] + [7] * 48)
        for i in range(600)
    ]
    with pytest.raises(ValueError) as e:
        cache_states(bbs["roberta"], examples, 2, tmp_path)
    assert all(
        w in str(e.value)
        for w in [
            "hidden states after 2 layers for 600 texts",
            "needs 3.9 MB",
            "may have 2.9 MB",
            "nothing is written",
            "float16",
            "cache_dir",
        ]
    ), str(e.value)
    assert not runs and not [f for f in tmp_path.rglob("*") if f.is_file()]
    monkeypatch.undo()
    monkeypatch.setattr(
        shutil, "disk_usage", lambda f: usage(2**40, 0, 2**26 + cache_size_bytes([50] * 600, 32))
    )
    assert (
        cache_states(bbs["roberta"], examples, 2, tmp_path)[1]["computed"] == 600
    )  # exactly enough


# --- names of caches


def test_the_name_of_a_cache_depends_on_all_that_changes_the_states():
    a = backbone()
    b = backbone()
    name = cache_name(a)
    assert name == cache_name(b)
    b.model.train()
    b.tokenizer(["a text"] * 2, truncation=True, max_length=3, padding=True)
    b.name = "another"
    assert cache_name(b) == name  # none of these changes the states
    other_names = {
        cache_name(a, "cuda"),
        cache_name(backbone(attn="eager")),
        cache_name(backbone("bert")),
    }
    with torch.no_grad():
        for p in (a.word_embeddings.weight, a.layers[2].output.LayerNorm.bias):
            p.view(-1)[0] += 1e-5
            other_names.add(cache_name(a))
    a.config.layer_norm_eps = 1e-6
    other_names.add(cache_name(a))
    a.tokenizer = deepcopy(a.tokenizer)  # others share it
    a.tokenizer.add_tokens(["zyzzyva"])
    other_names.add(cache_name(a))
    a.model.half()
    other_names.add(cache_name(a))
    assert len(other_names) == 8 and name not in other_names


# --- the states

CASES = [("sentiment", None), ("sentiment", "code"), ("entailment", None), ("entailment", "code")]


@pytest.mark.parametrize(
    "name,template", CASES, ids=["text", "template", "pair", "pair in a template"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_continuing_from_cached_states_equals_a_full_forward_pass(
    family, name, template, bbs, tmp_path
):
    bb = bbs[family]
    task = small_task(name)
    examples = encode_examples(bb, task, template)
    batch = collate(examples, 1)
    assert len({len(e["input_ids"]) for e in examples}) > 2
    expected = run_layers(bb, batch)
    for layer in range(bb.n_layers + 1):
        cached, cost = cache_states(bb, examples, layer, tmp_path, batch_size=3)
        assert cost["computed"] == len(examples) and all(
            k["hidden_states"].shape == (len(k["input_ids"]), bb.d) for k in cached
        )
        cached_batch = collate(cached, 1)
        actual = run_layers(bb, cached_batch)
        assert (
            cached_batch["hidden_states"][cached_batch["attention_mask"] == 0] == 0
        ).all() and cached_batch["start_layer"].tolist() == [layer] * len(examples)
        assert_close(
            actual.h[batch["attention_mask"] == 1], expected.h[batch["attention_mask"] == 1]
        )
        assert_close(sentence_vector(actual), sentence_vector(expected))
        assert {k: v.tolist() for k, v in actual.tracked_positions.items()} == {
            k: v.tolist() for k, v in expected.tracked_positions.items()
        }
    with_sentence = collate(cache_states(bb, examples, "sentence", tmp_path, batch_size=3)[0], 1)
    assert_close(with_sentence["sentence"], expected.state_at(bb.default_pooling))
    assert_close(with_sentence["sentence"], sentence_vector(run_layers(bb, batch)))
    assert_close(
        collate(cache_states(bb, examples, "mean_sentence", tmp_path)[0], 1)["mean_sentence"],
        expected.mean_state(),
    )


@pytest.mark.parametrize(
    "plan,head,name,template",
    [
        ("late", "mean", "entailment", None),
        ("late", "mask", "sentiment", "code"),
        ("both", "cls", "sentiment", None),
        ("head", "mean", "entailment", "code"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_the_same_with_cached_states(
    family, plan, head, name, template, bbs, tmp_path
):
    bb = bbs[family]
    task = small_task(name)
    examples = encode_examples(bb, task, template)
    model = create_model(bb, plan, task, head).eval()
    cached = attach_cached_states(model, examples, config(cache="both", cache_dir=str(tmp_path)))
    assert ("hidden_states" in cached[0]) + ("sentence" in cached[0]) == (
        2 if plan == "both" else 1
    )

    def outputs_and_gradients(examples):
        model.zero_grad()
        b = collate(examples, 1)
        loss = model.loss(b)
        loss.backward()
        return model(b).detach(), {n: p.grad.clone() for n, p in model.trained_parameters().items()}

    (a, a_gradients), (b, b_gradients) = map(outputs_and_gradients, (examples, cached))
    assert_close(a, b, 2e-5)
    for n in a_gradients:
        assert_close(
            a_gradients[n], b_gradients[n], 1e-4 * max(1, a_gradients[n].abs().max().item())
        )
    # one example at a time, without padding
    separate = torch.cat([model(collate([e], 1)) for e in cached]).detach()
    assert_close(separate, a, 2e-5)


# --- through `fit`


def losses(family, plan, cache, tmp_path, steps=8, **kw):
    bb = backbone(family, std=0.1)
    task = small_task(train=48)
    model = create_model(bb, plan, task)
    log = fit(model, task, config(steps=steps, lr=1e-3, cache=cache, cache_dir=str(tmp_path), **kw))
    return log, {n: p.detach().clone() for n, p in model.trained_parameters().items()}


@pytest.mark.parametrize(
    "family,plan",
    [
        ("roberta", "late"),
        ("roberta", "words"),
        ("roberta", "both"),
        ("roberta", "head"),
        ("bert", "late"),
        ("gpt2", "late"),
        ("gpt2", "words"),
        ("deberta", "both"),
        ("roberta", "m-idpg"),
        ("gpt2", "m-idpg"),
        ("bert", "s-idpg"),
    ],
)
def test_training_with_a_cache_is_the_same_training(family, plan, tmp_path):
    (a, wa), (b, wb) = (
        losses(family, plan, "none", tmp_path),
        losses(family, plan, "both", tmp_path),
    )
    assert (
        a.losses == pytest.approx(b.losses, abs=1e-6)
        and a.history == b.history
        and len({*a.losses}) == 8
    )
    for n in wa:
        assert_close(wa[n], wb[n], 1e-5)
    assert any(tmp_path.rglob("*.states"))


def test_half_precision_changes_losses_by_rounding_only(tmp_path):
    a = losses("roberta", "late", "none", tmp_path)[0]
    half, full = tmp_path / "half", tmp_path / "full"
    b = losses("roberta", "late", "hidden", half, cache_dtype="float16")[0]
    difference = max(abs(x - y) for x, y in zip(a.losses, b.losses))
    assert 1e-7 < difference < 5e-3
    losses("roberta", "late", "hidden", full)
    bytes_half, bytes_full = [
        sum(file.stat().st_size for file in folder.rglob("*.states")) for folder in (half, full)
    ]
    assert 0 < bytes_half < 0.55 * bytes_full
    # float32 states are not read from the float16 cache
    c = losses("roberta", "late", "hidden", half)[0]
    assert c.losses == pytest.approx(a.losses, abs=1e-6)


def test_caches_of_different_precisions_are_separate(tmp_path):
    a, b = [
        losses("roberta", "both", c, tmp_path, precision="bf16")[0].losses for c in ("none", "both")
    ]
    assert a == pytest.approx(b, abs=2e-3)
    # full precision has its own cache, which validation always uses
    exact, cached = [losses("roberta", "both", c, tmp_path)[0].losses for c in ("none", "both")]
    assert cached == pytest.approx(exact, abs=1e-6)
    assert len([*tmp_path.iterdir()]) == 2


def count_layers(bb):
    calls = [0] * bb.n_layers
    for k, layer in enumerate(bb.layers):
        getattr(layer, "mlp", getattr(layer, "output", None)).register_forward_hook(
            lambda *a, k=k: calls.__setitem__(k, calls[k] + 1)
        )
    return calls


@pytest.mark.parametrize(
    "plan,cache,passes",
    [
        ("late", "hidden", [0, 0, 1]),
        ("late", "none", [1, 1, 1]),
        ("head", "hidden", [0, 0, 0]),
        ("words", "sentence", [1, 1, 1]),
        ("words", "none", [2, 2, 2]),
        ("both", "both", [0, 1, 1]),
    ],
)
def test_cached_layers_do_not_run(plan, cache, passes, tmp_path, monkeypatch):
    task = small_task()
    cfg = config(cache=cache, cache_dir=str(tmp_path), steps=3, eval_every=99)
    fit(create_model(backbone(), plan), task, cfg)  # fills the cache
    bb = backbone()
    model = create_model(bb, plan)
    calls = count_layers(bb)
    fit(model, task, cfg)
    assert calls == [n * (3 + 1) for n in passes]  # three steps and one evaluation


def test_a_model_without_frozen_layers_trains_without_a_cache(tmp_path):
    task = small_task()
    for method in ("prompt-tuning", "fine-tuning"):
        runs = [
            fit(
                model_of(method, backbone(), task, jolt=0),
                task,
                config(method=method, lr=1e-3, cache=c, cache_dir=str(tmp_path)),
            )
            for c in ("none", "both")
        ]
        assert runs[0].losses == runs[1].losses
    assert not any(tmp_path.iterdir())


def test_predictions_from_cached_states_are_in_order(bbs, tmp_path):
    bb = bbs["roberta"]
    task = small_task("questions", test=20)
    model = model_of("lpt-npg", bb, task, layer=2)
    rows = encode_examples(bb, task, split="test", n=20)
    cached = attach_cached_states(model, rows, config(cache="hidden", cache_dir=str(tmp_path)))
    assert evaluate(model, cached, task, batch_size=3) == evaluate(
        model, rows, task, batch_size=7
    ) and [k["input_ids"] for k in cached] == [r["input_ids"] for r in rows]


# --- shared and up to date


def test_tasks_share_the_states_of_a_text(tmp_path, bbs):
    bb = bbs["roberta"]
    rows = make_rows("sentiment", "train", n=40)
    a, b = [
        replace(TASKS["sentiment"], name=n, splits=dict(train=r))
        for n, r in (("one", rows[:30]), ("two", rows[10:]))
    ]
    new = [
        cache_states(bb, t.encode(t.splits["train"], bb.tokenizer, 60), "sentence", tmp_path)[1][
            "computed"
        ]
        for t in (a, b, a)
    ]
    texts = [len({r["sentence1"] for r in rows[i:j]}) for i, j in ((0, 30), (0, 40))]
    assert new == [texts[0], texts[1] - texts[0], 0]
    repeated, cost = cache_states(bb, encode_examples(bb, n=3) * 2, "sentence", tmp_path / "new")
    assert cost["computed"] == 3 and len(repeated) == 6


def test_states_are_computed_again_after_a_change(tmp_path):
    bb = backbone()
    bb.tokenizer = deepcopy(bb.tokenizer)  # a token is added below
    rows = encode_examples(bb, n=6)

    def count_computed(bb, rows):
        return [cache_states(bb, rows, layer, tmp_path)[1]["computed"] for layer in ("sentence", 2)]

    assert count_computed(bb, rows) == [6, 6] and count_computed(bb, rows) == [0, 0]
    other = [
        *rows[:5],
        {
            **rows[5],
            "input_ids": rows[5]["input_ids"][:-2] + rows[5]["input_ids"][-1:],
            "token_type_ids": rows[5]["token_type_ids"][1:],
        },
    ]
    assert count_computed(bb, other) == [1, 1]  # a text
    with torch.no_grad():
        bb.layers[0].attention.self.query.weight[0, 0] += 0.5
    assert count_computed(bb, rows) == [6, 6]  # a weight
    assert_close(
        collate(cache_states(bb, rows, "sentence", tmp_path)[0], 1)["sentence"],
        sentence_vector(run_layers(bb, collate(rows, 1))),
    )
    bb.tokenizer.add_tokens(["zyzzyva"])
    assert count_computed(bb, rows) == [6, 6]  # the tokenizer
    # a layer, a precision
    assert (
        cache_states(bb, rows, 1, tmp_path)[1]["computed"] == 6
        and cache_states(bb, rows, 2, tmp_path, "float16")[1]["computed"] == 6
    )


def test_required_sentence_vectors_are_those_that_sources_read(bbs, tmp_path):
    bb = bbs["roberta"]
    for plan in PLANS:
        needed = ["sentence"] * (plan in ("words", "both"))
        assert required_sentence_vectors(create_model(bb, plan)) == needed
    model = PlannedModel(
        bb,
        ClassificationHead(bb.d, 2),
        {INPUT: Insert(FromMean(bb.d)), 1: Add(FromSentence(bb.d))},
    )
    assert required_sentence_vectors(model) == ["sentence", "mean_sentence"]
    cached = attach_cached_states(
        model, encode_examples(bb), config(cache="both", cache_dir=str(tmp_path))
    )
    b = collate(cached, 1)
    assert (
        torch.equal(model.eval()(b), model(b))
        and {"sentence", "mean_sentence"} <= b.keys()
        and "hidden_states" not in b
    )
    assert_close(model(b), model(collate(encode_examples(bb), 1)))
    tuned = backbone()
    model = create_model(tuned, "words")
    tuned.base.requires_grad_(True)
    assert not required_sentence_vectors(model)  # M(x) changes with the backbone


def test_the_cache_folder_is_an_argument_a_variable_or_the_default(tmp_path, monkeypatch, bbs):
    monkeypatch.setenv("IDP_CACHE", str(tmp_path / "env"))
    rows = encode_examples(bbs["roberta"], n=2)
    cache_states(bbs["roberta"], rows)
    cache_states(bbs["roberta"], rows, folder=tmp_path / "arg")
    for name in ("env", "arg"):
        assert (tmp_path / name / cache_name(bbs["roberta"]) / "sentence").is_dir()
    monkeypatch.delenv("IDP_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    cache_states(bbs["roberta"], rows)
    assert (tmp_path / ".cache/idp_tutorial").is_dir()


def test_sentence_vectors_are_computed_from_cached_hidden_states(bbs, tmp_path):
    bb = bbs["gpt2"]
    rows = encode_examples(bb)
    calls = count_layers(bb)
    cached = cache_states(bb, rows, 2, tmp_path)[0]
    assert calls == [1, 1, 0]
    cached = cache_states(bb, cached, "sentence", tmp_path)[0]
    assert calls == [1, 1, 1]  # M(x) is computed from layer 2 on
    cached = cache_states(bb, cached, 1, tmp_path)[0]
    assert {e["start_layer"] for e in cached} == {1}
    b = collate(cached, 1)
    assert_close(b["sentence"], sentence_vector(run_layers(bb, collate(rows, 1))))
    assert_close(sentence_vector(run_layers(bb, b)), b["sentence"])


# --- refusals


def test_caches_that_would_change_results_are_refused(tmp_path, bbs):
    bb = bbs["roberta"]
    rows = encode_examples(bb)
    model = create_model(bb, "late")
    cached = attach_cached_states(model, rows, config(cache="hidden", cache_dir=str(tmp_path)))
    for options, words in (
        (dict(cache="all"), ["cache must be 'none', 'sentence', 'hidden' or 'both', got 'all'"]),
        (dict(cache_dtype="half"), ["cache_dtype must be ", "got 'half'", "float16"]),
    ):
        refused(lambda: config(**options), *words)
    head = ClassificationHead(bb.d, 2)
    noisy = PlannedModel(bb, head, PLANS["late"](bb), dropout_below_prompt=True)
    with pytest.raises(ValueError, match="dropout_below_prompt=True changes"):
        attach_cached_states(noisy, rows, config(cache="hidden", cache_dir=str(tmp_path)))
    batch = collate(cached, 1)
    noisy.eval()(batch)
    with pytest.raises(ValueError, match="dropout below that layer is on"):
        noisy.train()(batch)
    with pytest.raises(
        ValueError, match="states after 2 layers, but the model trains or inserts something below"
    ):
        create_model(bb, "both")(batch)
    with pytest.raises(ValueError, match="states after 2 layers"):
        create_model(bb, "words")(batch)
    tuned = backbone()
    model = create_model(tuned, "late")
    tuned.base.requires_grad_(True)
    with pytest.raises(ValueError, match="states after 2 layers"):
        model(batch)
    with pytest.raises(ValueError, match="the prompt would be left out"):
        run_layers(bb, batch, PLANS["both"](bb))


def test_states_too_large_for_half_precision_are_refused(tmp_path):
    bb = backbone()
    with torch.no_grad():
        bb.layers[1].output.LayerNorm.weight.mul_(1e6)
    with pytest.raises(
        ValueError,
        match=r"hidden states reach .*, beyond the range of float16: use cache_dtype='float32'",
    ):
        cache_states(bb, encode_examples(bb), 2, tmp_path, "float16")
    assert not [f for f in tmp_path.rglob("*") if f.is_file()]
    cache_states(bb, encode_examples(bb), 2, tmp_path)


def test_states_are_cached_without_dropout(tmp_path):
    bb = backbone()
    rows = encode_examples(bb, n=3)
    expected = run_layers(bb, collate(rows, 1)).mean_state()
    bb.model.train()
    cached = cache_states(bb, rows, 2, tmp_path)[0]
    assert bb.layers[0].training
    bb.model.eval()
    assert_close(run_layers(bb, collate(cached, 1)).mean_state(), expected)

"""Tests of P-tuning v2 with three insertions.

Against a forward pass written out by hand, against peft, padding, gradients, sizes, positions, and
what is refused.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import PrefixTuningConfig, get_peft_model
from small import backbone, batch_of, one, refused, same
from small_models import small_backbone
from torch import nn

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.context import INPUT
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.methods.key_value_prompt import KeyValuePrompt
from idp_tutorial.methods.p_tuning_v2 import _embed_shifted, deep_prompt_plan
from idp_tutorial.methods.prompt_tuning import prompt_plan
from idp_tutorial.methods.soft_prompt import SoftPrompt
from idp_tutorial.utils.checks import UserError

t = 4
d = 32
L = 3
CASES = [
    (f, w, s)
    for f in ("roberta", "bert", "gpt2", "deberta")
    for w in ("kv", "replace", "add")
    for s in (True, False)
    if (f, w) != ("deberta", "kv")
]
every = pytest.mark.parametrize(
    "family,insertion,shift",
    CASES,
    ids=[f"{f} {w} {'moved' if s else 'in place'}" for f, w, s in CASES],
)


def plan_of(bb, insertion, shift=True, std=1.0):
    plan = deep_prompt_plan(bb, t, insertion, shift, std=std)
    for s in plan.values():
        s.source.eval()
    return plan


def words(batch, ctx):
    return [
        ctx.h[i, ctx.word_mask[i] == 1] for i in range(len(ctx.h))
    ]  # the states of each text, without prompt and padding


# --- by hand: one text, lists of rows, nothing of the library but the weights


def norm(x, m):
    return (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, unbiased=False, keepdim=True) + m.eps
    ).sqrt() * m.weight + m.bias


def dense(x, m):
    return x @ m.weight.T + m.bias


def layer_by_hand(m, h, extra=None):
    """A post-norm encoder layer on `[T,d]`, head by head.

    With extra keys and values `[t,2d]` in front.
    """
    a = m.attention.self
    out = []
    q = dense(h, a.query)
    k = dense(h, a.key)
    v = dense(h, a.value)
    if extra is not None:
        k = torch.cat([extra[:, :d], k])
        v = torch.cat([extra[:, d:], v])
    for cols in torch.arange(d).split(d // 4):
        out.append((q[:, cols] @ k[:, cols].T / (d // 4) ** 0.5).softmax(-1) @ v[:, cols])
    h = norm(h + dense(torch.cat(out, -1), m.attention.output.dense), m.attention.output.LayerNorm)
    return norm(
        h + dense(F.gelu(dense(h, m.intermediate.dense)), m.output.dense), m.output.LayerNorm
    )


def by_hand(bb, ids, tables, insertion, shift):
    """SPEC's rows.

    P-tuning v2 with keys and values, rows overwritten in front, rows added after `<s>`; the states
    of the words at the end.
    """
    e = bb.base.embeddings
    start = 2 if bb.family == "roberta" else 0

    def embed(w, first):
        return norm(
            w
            + e.position_embeddings.weight[first : first + len(w)]
            + e.token_type_embeddings.weight[0],
            e.LayerNorm,
        )

    w = e.word_embeddings.weight[ids]
    if insertion == "add" and shift:
        h = embed(
            torch.cat([w[:1], tables[0], w[1:]]), start
        )  # <s> stays, the words after the prompt move up
    elif insertion == "add":
        h = embed(w, start)
        h = torch.cat([h[:1], tables[0], h[1:]])
    else:
        h = embed(w, start + t * shift)
        h = torch.cat([tables[0], h]) if insertion == "replace" else h
    for k, m in enumerate(bb.base.encoder.layer):
        if k and insertion == "replace":
            h = torch.cat([tables[k], h[t:]])
        if k and insertion == "add":
            h = torch.cat([h[:1], h[1 : 1 + t] + tables[k], h[1 + t :]])
        h = layer_by_hand(m, h, tables[k] if insertion == "kv" else None)
    return {"kv": h, "replace": h[t:], "add": torch.cat([h[:1], h[1 + t :]])}[insertion]


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("insertion", ["kv", "replace", "add"])
@pytest.mark.parametrize("family", ["roberta", "bert"])
def test_the_forward_pass_written_out(family, insertion, shift):
    bb = backbone(family)
    batch = batch_of(bb)
    plan = plan_of(bb, insertion, shift)
    with torch.no_grad():
        got = words(batch, run_layers(bb, batch, plan))
        plain = words(batch, run_layers(bb, batch))
        for i, h in enumerate(got):
            ids = batch["input_ids"][i, : int(batch["attention_mask"][i].sum())]
            same(h, by_hand(bb, ids, [s.source.p for s in plan.values()], insertion, shift))
            assert (h - plain[i]).abs().max() > 0.1
            other = by_hand(bb, ids, [s.source.p for s in plan.values()], insertion, not shift)
            assert (h - other).abs().max() > 1e-2


# --- peft


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2"])
def test_pefts_prefix_tuning(family, attn):
    bb = backbone(family, **({} if family == "bert" else dict(attn=attn)))
    batch = batch_of(bb)
    torch.manual_seed(2)
    peft_model = get_peft_model(
        copy.deepcopy(bb.base),
        PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=t),
    ).eval()
    table = peft_model.prompt_encoder["default"].embedding.weight.detach()  # N(0,1): loud
    assert table.shape == (t, 2 * d * L)
    with torch.no_grad():
        want = peft_model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
    gap = {}
    for shift in (True, False):
        plan = plan_of(bb, "kv", shift)
        for step, p in zip(plan.values(), table.chunk(L, 1)):
            step.source.p.data = p.clone()
        with torch.no_grad():
            gap[shift] = (
                (run_layers(bb, batch, plan).h - want)[batch["attention_mask"] == 1].abs().max()
            )
    assert gap[True] < 1e-5 and gap[False] > 1e-2
    assert sum(s.source.p.numel() for s in plan.values()) == table.numel()


# --- the three ways among themselves


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2"])
def test_replaced_rows_are_tied_keys_and_values(family, shift):
    bb = backbone(family)
    batch = batch_of(bb)
    rows = plan_of(bb, "replace", shift)
    kv = plan_of(bb, "kv", shift)
    for k, layer in enumerate(bb.layers):
        p = rows[k].source.p
        if family == "gpt2":
            pair = layer.attn.c_attn(layer.ln_1(p))[:, d:]
        else:
            pair = torch.cat([layer.attention.self.key(p), layer.attention.self.value(p)], -1)
        kv[k].source.p.data = pair.detach()
    with torch.no_grad():
        a = run_layers(bb, batch, rows)
        b = run_layers(bb, batch, kv)
    for x, y in zip(words(batch, a), words(batch, b)):
        same(x, y)
    assert a.h.shape[1] == b.h.shape[1] + t


def test_only_added_rows_listen():
    bb = backbone()
    batch = batch_of(bb)

    def last_rows(insertion):
        plan = plan_of(bb, insertion, std=0.02)
        ctx = run_layers(bb, batch, plan, stop=L - 1)
        p = plan[L - 1].source(ctx)
        first_row = int(ctx.prompt_span[0][0])
        return ctx.h[:, first_row : first_row + t] + p if insertion == "add" else p

    with torch.no_grad():
        heard = last_rows("add")
        deaf = last_rows("replace")
    assert (heard[0] - heard[1]).abs().max() > 0.1 and torch.equal(deaf[0], deaf[1])


# --- what every method owes


@every
def test_padding_and_order_change_nothing(family, insertion, shift):
    bb = backbone(family)
    batch = batch_of(bb)
    model = PlannedModel(bb, ClassificationHead(d, 3, "mean"), plan_of(bb, insertion, shift)).eval()
    with torch.no_grad():
        together = model(batch)
        order = torch.randperm(len(together))
        same(torch.cat([model(one(batch, i)) for i in range(len(together))]), together)
        same(model({k: v[order] for k, v in batch.items()}), together[order])
    assert (together[0] - together[1]).abs().max() > 1e-3


@every
def test_gradients_reach_every_layers_prompt_and_nothing_else(family, insertion, shift):
    bb = backbone(family)
    batch = batch_of(bb)
    model = PlannedModel(
        bb, ClassificationHead(d, 2, "mean"), deep_prompt_plan(bb, t, insertion, shift)
    ).train()
    model.loss(batch).backward()
    assert len(model.sources) == L and all(
        p.grad is not None and p.grad.abs().max() > 0 for p in model.sources.parameters()
    )
    assert all(p.grad is None for p in bb.model.parameters())


@pytest.mark.parametrize("insertion", ["kv", "replace", "add"])
def test_moving_up_is_a_switch(insertion):
    bb = backbone()
    batch = batch_of(bb)
    plan = plan_of(bb, insertion)
    torch.manual_seed(4)
    still = plan_of(bb, insertion, False)
    for a, b in zip(plan.values(), still.values()):
        b.source.p.data = a.source.p.data
    with torch.no_grad():
        assert (
            run_layers(bb, batch, plan).state_at("cls")
            - run_layers(bb, batch, still).state_at("cls")
        ).abs().max() > 1e-3
    assert list(plan) == ([INPUT, 1, 2] if insertion == "add" else [0, 1, 2]) and list(still) == [
        0,
        1,
        2,
    ]


def test_going_on_from_the_embeddings():
    bb = backbone()
    batch = batch_of(bb)
    plan = plan_of(bb, "kv")
    with torch.no_grad():
        h = run_layers(bb, batch, stop=0).h
        same(
            run_layers(bb, dict(batch, hidden_states=h, start_layer=torch.zeros(len(h))), plan).h,
            run_layers(bb, batch, plan).h,
            0,
        )


def test_room_for_moved_texts():
    bb = backbone(max_position_embeddings=42)
    ids = torch.randint(10, 99, (1, 36))  # 40 places
    batch = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids)
    )
    run_layers(bb, batch, deep_prompt_plan(bb, 4))
    with pytest.raises(ValueError) as e:
        run_layers(bb, batch, deep_prompt_plan(bb, 5))
    assert all(
        w in str(e.value)
        for w in (
            "36 tokens",
            "5 vectors",
            "40 positions",
            "max_len=35",
            "shift_positions=False",
        )
    ), str(e.value)
    run_layers(bb, batch, deep_prompt_plan(bb, 5, shift_positions=False))


def test_dropout_is_on_keys_and_values_in_training():
    bb = backbone()
    ctx = run_layers(bb, batch_of(bb), stop=0)
    source = KeyValuePrompt(50, d, 0.3, std=1.0)
    p = source(ctx)
    assert 0.25 < (p == 0).float().mean() < 0.35 and not torch.equal(
        p[0], p[1]
    )  # each text its own
    p = source.eval()(ctx)
    assert (p != 0).all() and torch.equal(p[0], p[1]) and p.shape == (6, 50, 2 * d)
    assert (
        abs(KeyValuePrompt(50, 1024).p.std() - 0.02) < 0.001
        and deep_prompt_plan(bb, 3, "kv", dropout=0.4)[2].source.dropout.p == 0.4
    )


# --- sizes


@pytest.mark.parametrize(
    "name,t,insertion,published",
    [
        ("roberta-large", 5, "add", 122_880),
        ("roberta-large", 5, "replace", 122_880),
        ("roberta-large", 20, "kv", 983_040),
        ("gpt2-large", 20, "kv", 1_843_200),
        ("deberta-large", 20, None, 491_520),
    ],
)
def test_published_sizes(name, t, insertion, published):
    bb = load_backbone(name, weights="meta")
    n = count_parameters(
        PlannedModel(bb, ClassificationHead(bb.d, 2), deep_prompt_plan(bb, t, insertion))
    )
    assert n == dict(prompt=published, head=2 * bb.d + 2, backbone=0)


def test_prompt_tuning_134():
    large = load_backbone("roberta-large", weights="meta")
    assert (
        count_parameters(
            PlannedModel(
                large, ClassificationHead(1024, 2), prompt_plan(large, SoftPrompt(134, 1024))
            )
        )["prompt"]
        == 137_216
    )
    bb = backbone()
    batch = batch_of(bb)
    ctx = run_layers(bb, batch, prompt_plan(bb, SoftPrompt(134, d)))
    assert ctx.h.shape[1] == batch["input_ids"].shape[1] + 134


# --- refused


@pytest.mark.parametrize(
    "call,words",
    [
        (
            lambda bb: deep_prompt_plan(bb, 5, "prefix"),
            ["insertion must be ", "got 'prefix'", "'kv'", "'add'"],
        ),
    ],
)
def test_what_is_refused(call, words):
    refused(lambda: call(backbone()), *words)


def test_deberta_takes_rows():
    bb = backbone("deberta")
    assert [s.name for s in deep_prompt_plan(bb, t).values()] == ["insert", "replace", "replace"]
    with pytest.raises(
        ValueError, match="'kv' at layer 0: the attention of a deberta backbone.*`Replace`"
    ):
        PlannedModel(bb, nn.Identity(), deep_prompt_plan(bb, t, "kv"))


def test_types_move_up_with_their_words():
    bb = backbone("bert")
    batch = batch_of(bb)
    batch["token_type_ids"] = batch["attention_mask"].clone()
    batch["token_type_ids"][:, :3] = 0
    T = batch["input_ids"].shape[1]
    same(
        _embed_shifted(run_layers(bb, batch, stop=0), t),
        bb.base.embeddings(
            input_ids=batch["input_ids"],
            token_type_ids=batch["token_type_ids"],
            position_ids=torch.arange(t, t + T)[None],
        ),
    )


def test_vectors_of_one_width_are_not_added_to_words_of_another():
    bb = small_backbone("electra")  # its word vectors are narrower than its hidden states
    with pytest.raises(UserError, match="equal width, not 16 and .* use insertion='kv'"):
        deep_prompt_plan(bb, t=t, insertion="add")
    deep_prompt_plan(bb, t=t, insertion="kv")

"""Tests of methods that change the backbone.

Published sizes, nothing left behind, nothing changed at the start, gradients, padding, and slow
references written out in plain torch.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from small import FAMILY, backbone, batch_of, config, one, same, small_task, text_of
from torch import nn
from transformers import DebertaV2Config

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.families.family import build_hf_model, wrap_hf_model
from idp_tutorial.methods.adapters import add_adapters, add_compacters, add_lora
from idp_tutorial.methods.backbone_edits import (
    BackboneEdit,
    train_biases,
    unfreeze,
)
from idp_tutorial.methods.phm import PHMLinear
from idp_tutorial.methods.prompt_tuning import prompt_plan
from idp_tutorial.methods.soft_prompt import SoftPrompt
from idp_tutorial.training.fit import fit

CHANGES = {
    "adapter": lambda b: add_adapters(b, 8),
    "adapterdrop": lambda b: add_adapters(b, 8, first_layer=2),
    "compacter": lambda b: add_compacters(b, 8),
    "lora": add_lora,
    "lora all": lambda b: add_lora(b, 4, 8, "all", 0.1, include_lm_head=True),
    "bitfit": train_biases,
    "bitfit, head": lambda b: train_biases(b, include_lm_head=True),
}
EXACT = (
    "lora",
    "lora all",
    "bitfit",
)  # compute at the start what the backbone computes
ADDS = [n for n in CHANGES if not n.startswith("bitfit")]
every = pytest.mark.parametrize("name", CHANGES)
families = pytest.mark.parametrize("family", FAMILY)


def jolt(bb, std=0.1):
    """Change the trainable parameters, since LoRA's B is zero and adapters are small initially."""
    with torch.no_grad():
        [p.add_(std * torch.randn_like(p)) for p in bb.model.parameters() if p.requires_grad]


def plan_of(method, bb, **options):
    """Return the plan of a method, which changes the backbone if the method does."""
    cfg = config(method=method, **options)
    return cfg.method_config.plan(bb, cfg)


def n_trained(bb):
    return sum(p.numel() for p in bb.model.parameters() if p.requires_grad)


def states(bb, batch, **kw):
    return run_layers(
        bb, {k: batch[k] for k in ("input_ids", "attention_mask", "token_type_ids")}, **kw
    ).h


# --- sizes, on meta devices: reference/param_counts.csv; LPT's counts include a head of 2,050
# (RoBERTa) or 2,560 (GPT-2, without bias)

SIZES = [
    ("roberta-large", add_adapters, 1_622_784, "IDPG T2 1.55M, LPT T1 1.6M"),
    ("roberta-large", lambda b: add_adapters(b, first_layer=12), 811_392, "LPT T1 811K"),
    ("roberta-large", add_compacters, 152_832, "IDPG T2 149K"),
    ("roberta-large", train_biases, 273_410 - 2050, "LPT T1 273K"),
    ("roberta-large", lambda b: train_biases(b, True), 273_408, "LPT T1, the other reading"),
    ("roberta-large", add_lora, 788_482 - 2050, "LPT T1 788K"),
    (
        "roberta-large",
        lambda b: add_lora(b, 16, target_modules="all", include_lm_head=True),
        7_931_280,
        "ID-SPAM T12",
    ),
    (
        "roberta-base",
        lambda b: add_lora(b, 16, target_modules="all", include_lm_head=True),
        3_495_312,
        "ID-SPAM T12",
    ),
    ("gpt2-large", add_adapters, 3_044_992 - 2560, "LPT T5 3.0M"),
    ("gpt2-large", lambda b: add_adapters(b, first_layer=18), 1_521_216, "LPT T5 1.5M"),
    ("gpt2-large", train_biases, 510_720 - 2560, "LPT T5 511K"),
    ("gpt2-large", lambda b: add_lora(b, 4, 32), 739_840 - 2560, "LPT T5 740K"),
    *[
        (n, lambda b: add_lora(b, 16, target_modules="all"), k, "ID-SPAM T13")
        for n, k in (
            ("gpt2", 2_359_296),
            ("gpt2-medium", 6_291_456),
            ("gpt2-large", 11_796_480),
            ("gpt2-xl", 19_660_800),
        )
    ],
]


@pytest.mark.parametrize(
    "name,change,exact,where", SIZES, ids=[f"{n} {k} {w}" for n, _, k, w in SIZES]
)
def test_published_sizes(name, change, exact, where):
    bb = load_backbone(name, weights="meta")
    with change(bb):
        assert n_trained(bb) == exact
    assert n_trained(bb) == 0


@pytest.mark.parametrize(
    "has_head,exact", [(False, 355_359_744 - 1024 * 1025), (True, 355_412_057)]
)
def test_published_sizes_of_fine_tuning(has_head, exact):
    """IDPG, Table 2: 355M, without the pooler."""
    bb = load_backbone("roberta-large", weights="meta")
    unfreeze(bb, has_head)
    assert n_trained(bb) == exact and bb.active_edit is None


def test_idspams_totals():  # Table 13's "backbone" column is the wrapped model
    bb = load_backbone("gpt2", weights="meta")
    with add_lora(bb, 16, target_modules="all"):
        assert sum(p.numel() for p in bb.model.parameters()) == 126_799_104


ROWS = [
    ("bitfit", 271_360, 273_408),
    ("lora", 786_432, 786_432),
    ("lora-all", 16 * 24 * (8 * 1024 + 2 * 5120), 7_931_280),
    ("adapter", 1_622_784, 1_622_784),
    ("adapterdrop", 811_392, 811_392),
    ("compacter", 152_832, 152_832),
]


@pytest.mark.parametrize("method,plain,verbalizer", ROWS)
def test_registry_rows_have_these_sizes(method, plain, verbalizer):
    bb = load_backbone("roberta-large", weights="meta")
    for head, n_head, n in (("classification", 2050, plain), ("verbalizer", 0, verbalizer)):
        assert count_parameters(
            build_model(config(method=method, head=head, bottleneck=None), bb, TASKS["sentiment"])
        ) == dict(prompt=0, head=n_head, backbone=n)
        bb.active_edit.restore()
        assert n_trained(bb) == 0


def trained_by_layer(bb):
    """Return the number of trainable parameters of each layer, and of the rest."""
    counts = [sum(p.numel() for p in l.parameters() if p.requires_grad) for l in bb.layers]
    return [*counts, n_trained(bb) - sum(counts)]


@families
def test_sizes_by_layer(family):
    bb = backbone(family)
    d = 32
    f = 64 if family != "gpt2" else 128
    m = 8
    adapters = 2 * (2 * d * m + m + d)
    with add_adapters(bb, m, first_layer=1):
        assert trained_by_layer(bb) == [0, adapters, adapters, 0]
    qv = 2 * 2 * 4 * d if family in ("roberta", "bert") else 4 * (d + 3 * d)
    with add_lora(bb, 4):
        assert trained_by_layer(bb) == [qv, qv, qv, 0]
    matrices = {
        "roberta": [(d, d)] * 4,
        "bert": [(d, d)] * 4,
        "gpt2": [(d, 3 * d), (d, d)],
        "deberta": [(d, 3 * d)] + [(d, d)] * 3,
    }[family] + [(d, f), (f, d)]
    V = bb.config.vocab_size
    head = 4 * (d + V) + (0 if family == "gpt2" else 4 * 2 * d)
    with add_lora(bb, 4, target_modules="all", include_lm_head=True):
        assert trained_by_layer(bb) == [sum(4 * (a + b) for a, b in matrices)] * 3 + [head]
    with train_biases(bb):
        assert trained_by_layer(bb)[-1] == d  # the embeddings' LayerNorm; GPT-2's last one


# --- as it was


def picture(bb):
    """Return everything that a change may affect: modules, classes, attributes and hooks.

    Tensors, their values, switches and gradients.
    """
    m = bb.model
    return (
        [
            (
                n,
                id(x),
                type(x),
                x.training,
                sorted(vars(x)),
                [(k, id(v), list(v)) for k, v in sorted(vars(x).items()) if isinstance(v, dict)],
            )
            for n, x in m.named_modules(remove_duplicate=False)
        ],
        [
            (n, id(p), p.requires_grad, p.grad is None)
            for n, p in m.named_parameters(remove_duplicate=False)
        ],
        {n: v.clone() for n, v in m.state_dict().items()},
        sorted(name for name, value in vars(bb).items() if value is not None),
    )


def assert_same(a, b):
    for x, y in zip(a[:2] + a[3:], b[:2] + b[3:]):
        assert x == y
    assert a[2].keys() == b[2].keys() and all(torch.equal(v, b[2][n]) for n, v in a[2].items())


@families
@every
def test_nothing_is_left_behind(name, family):
    bb = backbone(family)
    task = small_task(train=16, validation=8)
    handle = bb.layers[0].register_forward_hook(lambda m, x, y: None)
    bb.layers[1].train()  # must stay
    before = picture(bb)
    batch = batch_of(bb)
    h = states(bb, batch, stop=1)
    with CHANGES[name](bb):
        during = picture(bb)
        assert during[1] != before[1]
        bb.layers[0].register_forward_pre_hook(lambda m, x: None)  # of the change
        model = PlannedModel(bb, ClassificationHead(32, 2))
        if family == "roberta":
            fit(model, task, config(lr=0.1, steps=2, batch_size=8))  # as it is used
        model.train()
        model.loss(batch).backward()
        torch.optim.SGD(model.trained_parameters().values(), lr=0.1).step()
        assert any(p.grad is not None for p in bb.model.parameters())
    assert_same(picture(bb), before)
    assert torch.equal(states(bb, batch, stop=1), h)
    assert handle.id in bb.layers[0]._forward_hooks
    handle.remove()
    assert not bb.layers[0]._forward_hooks  # the handle still works


@every
def test_an_exception_leaves_nothing_behind(name):
    bb = backbone()
    before = picture(bb)
    with pytest.raises(KeyboardInterrupt), CHANGES[name](bb):
        jolt(bb)
        raise KeyboardInterrupt
    assert_same(picture(bb), before)


@pytest.mark.parametrize(
    "family,make",
    [
        ("roberta", lambda b: add_compacters(b, 8, 5)),
        ("gpt2", lambda b: add_lora(b, include_lm_head=True, target_modules="all")),
    ],
)
def test_a_change_that_fails_half_way(family, make, monkeypatch):
    bb = backbone(family)
    before = picture(bb)

    def injected(config, model):
        model.lm_head = nn.Identity()
        model.peft_config = 3
        raise RuntimeError("no more memory")

    monkeypatch.setattr("peft.inject_adapter_in_model", injected)
    with pytest.raises((ValueError, RuntimeError)):
        make(bb)
    assert_same(picture(bb), before)


def test_changes_do_not_pile_up():
    bb = backbone()
    change = add_adapters(bb, 8)
    inside = picture(bb)
    with pytest.raises(
        ValueError,
        match="LoRA: backbone .* is already modified by adapters; call `bb.active_edit.restore",
    ):
        add_lora(bb)
    assert_same(picture(bb), inside)  # a refused change is not one that undoes the first
    change.restore()
    before = picture(bb)
    with add_lora(bb):
        inside = picture(bb)
        change.restore()
        assert_same(picture(bb), inside)  # the old one has no say any more
    assert_same(picture(bb), before)
    plan_of("fine-tuning", bb)
    with pytest.raises(ValueError, match="being trained already"):
        train_biases(bb)
    assert bb.active_edit is None


@pytest.mark.parametrize("method", ["fine-tuning", "efl"])
def test_fine_tuning_does_not_train_what_another_method_put_in(method):
    bb = backbone()
    change = add_adapters(bb, 8)
    inside = picture(bb)
    with pytest.raises(
        ValueError, match="fine-tuning: backbone .* is already modified by adapters"
    ):
        plan_of(method, bb)
    assert_same(picture(bb), inside)
    change.restore()
    assert plan_of(method, bb) == {}


@families
@pytest.mark.parametrize("head", ["classification", "verbalizer"])
def test_fine_tuning_keeps_no_copy(head, family):
    bb = backbone(family)
    before = picture(bb)
    plan_of("fine-tuning", bb, head=head)
    trained = [n for n, p in bb.model.named_parameters() if p.requires_grad]
    assert trained and bb.active_edit is None
    bb.model.requires_grad_(False)
    assert_same(picture(bb), before)


def test_a_moved_model_comes_back_in_one_piece():
    bb = backbone("gpt2")
    batch = batch_of(bb)
    with add_adapters(bb, 8):
        bb.model.double()
    assert {p.dtype for p in bb.model.parameters()} == {torch.float64} and states(
        bb, batch
    ).dtype == torch.float64


def test_what_is_put_in_has_the_backbones_mode_and_dtype():
    bb = backbone()
    for f in CHANGES.values():
        with f(bb):
            assert not any(m.training for m in bb.model.modules())
    bb.model.to(torch.bfloat16)
    batch = batch_of(bb)
    old = {id(p) for p in bb.model.parameters()}
    for name in ("adapter", "compacter"):
        with CHANGES[name](bb):  # what is new stays in float32
            assert {p.dtype for p in bb.model.parameters() if id(p) not in old} == {torch.float32}
            h = states(bb, batch)
            assert h.dtype == torch.bfloat16 and h.isfinite().all()


# --- what they compute


@families
@every
def test_at_the_start(name, family):
    """LoRA, BitFit and fine-tuning begin exactly at the backbone.

    Adapters near it, and exactly at it once what they write is zero.
    """
    bb = backbone(family)
    batch = batch_of(bb)
    h = states(bb, batch)
    with CHANGES[name](bb):
        if name.startswith(EXACT):
            assert torch.equal(states(bb, batch).detach(), h)
        else:
            off = (states(bb, batch).detach() - h).abs().max()
            assert 0 < off < 0.2 * h.abs().max()
            for n, p in bb.model.named_parameters():
                if p.requires_grad and n.split(".")[-2:][0] == "up":
                    p.data.zero_()
            assert torch.equal(states(bb, batch).detach(), h)
            jolt(bb)
        jolt(bb)
        assert (states(bb, batch).detach() - h).abs().max() > 1e-2
    assert torch.equal(states(bb, batch), h)


@families
@every
def test_gradients(name, family):
    bb = backbone(family)
    batch = batch_of(bb, template="code" if family != "gpt2" else None)
    head = "head" in name or name == "lora all"
    old = {id(p) for p in bb.model.parameters()}
    with CHANGES[name](bb):
        jolt(bb)
        words = [5, 6]
        if head and family != "gpt2":
            model = PlannedModel(bb, VerbalizerHead(bb, words)).train()
        else:
            model = PlannedModel(bb, ClassificationHead(32, 2, "mean")).train()
        model.loss(batch).backward()
        trained = {n: p for n, p in bb.model.named_parameters() if p.requires_grad}
        idle = [n for n, p in trained.items() if p.grad is None or not p.grad.any()]
        if family == "gpt2" and head:
            idle = [n for n in idle if "lm_head" not in n]  # not read by this head
        assert (
            trained
            and not idle
            and all(p.grad is None for p in bb.model.parameters() if not p.requires_grad)
        )
        if name in ADDS:
            assert not {id(p) for p in trained.values()} & old  # only what is new


@families
@pytest.mark.parametrize("name", [n for n in CHANGES if "head" not in n])
def test_padding_and_company_change_nothing(name, family):
    bb = backbone(family)
    batch = batch_of(bb)
    keep = batch["attention_mask"].bool()
    with CHANGES[name](bb), torch.no_grad():
        jolt(bb, 0.05)
        h = states(bb, batch)
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        for i in range(3):
            same(states(bb, one(batch, i))[0], h[i][keep[i]], 2e-5)
        same(
            states(bb, {k: v[order] for k, v in text_of(batch).items()})[keep[order]],
            h[order][keep[order]],
            2e-5,
        )
        far = {k: F.pad(v, (0, 5)) for k, v in text_of(batch).items() if v.dim() == 2}
        same(states(bb, far)[:, : keep.shape[1]][keep], h[keep], 2e-5)
    assert (h[0, 0] - h[1, 1]).abs().max() > 1e-3


@families
@pytest.mark.parametrize("first", [0, 1, 2])
def test_adapterdrop_has_no_graph_and_no_dropout_below(first, family):
    bb = backbone(family)
    batch = batch_of(bb)
    with add_adapters(bb, 8, first):
        model = PlannedModel(bb, ClassificationHead(32, 2)).train()
        assert model.first_trained_layer == first and [l.training for l in bb.layers] == [
            k >= first for k in range(3)
        ]
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(1) or x, lambda x: x):
            h = states(bb, batch, stop=first)
            below = len(saved)
            g = states(bb, batch, stop=first + 1)
        assert not h.requires_grad and below == 0 and g.requires_grad and len(saved) > 0
        assert torch.equal(
            h, states(bb, batch, stop=first)
        )  # no dropout, or two passes would differ
        model.loss(batch).backward()
        assert all((p.grad is not None) == p.requires_grad for p in bb.model.parameters())
    assert PlannedModel(bb, ClassificationHead(32, 2)).first_trained_layer == 3


def test_first_is_where_training_begins():
    bb = backbone()
    head = ClassificationHead(32, 2)

    def first(change, plan=None):
        with change(bb):
            return PlannedModel(bb, head, plan).first_trained_layer

    assert [first(CHANGES[n]) for n in ("adapter", "lora", "bitfit", "lora all")] == [0, 0, -1, 0]
    assert (
        first(CHANGES["adapterdrop"], {1: prompt_plan(bb, SoftPrompt(2, 32), None)[0]}) == 1
        and first(CHANGES["adapterdrop"], prompt_plan(bb, SoftPrompt(2, 32))) == -1
    )
    with BackboneEdit(
        bb,
        "the last LayerNorm",
        lambda c: c.train_tensors(bb.layers[2].output.LayerNorm.parameters()),
    ):
        assert PlannedModel(bb, head).first_trained_layer == 2
    bb = backbone("gpt2")
    with BackboneEdit(bb, "final norm", lambda c: c.train_tensors(bb.norm.parameters())):
        assert PlannedModel(bb, head).first_trained_layer == 3


def test_adapterdrop_goes_on_from_cached_states():
    bb = backbone()
    batch = batch_of(bb)
    with add_adapters(bb, 8, first_layer=2):
        jolt(bb)
        model = PlannedModel(bb, ClassificationHead(32, 2)).eval()
        n = len(batch["input_ids"])
        cached = {
            **text_of(batch),
            "hidden_states": states(bb, batch, stop=2),
            "start_layer": torch.full((n,), 2),
        }
        same(model(cached), model(batch))
    with (
        add_adapters(bb, 8, first_layer=1),
        pytest.raises(ValueError, match="trains or inserts something below"),
    ):
        PlannedModel(bb, ClassificationHead(32, 2)).eval()(cached)


# --- references: RoBERTa's layer written out, one text at a time


def norm(x, l):
    return F.layer_norm(x, x.shape[-1:], l.weight, l.bias, l.eps)


def lin(x, w, b):
    return (
        torch.stack([(w * row).sum(-1) for row in x]) + b
    )  # `[n,d_in]` → `[n,d_out]`, `w` `[d_out,d_in]`


def matrix(phm):
    return sum(
        torch.kron(a, s @ t) for a, s, t in zip(phm.A, phm.s, phm.t)
    ).T  # `[d_out,d_in]`, Σ Aᵢ⊗sᵢtᵢ


def bottleneck(x, a):
    """X + W_up GELU(W_down x + b) + b, GELU by its definition."""
    W, V = [matrix(l) if isinstance(l, PHMLinear) else l.weight for l in (a.down, a.up)]
    z = lin(x, W, a.down.bias)
    z = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    return x + lin(z, V, a.up.bias)


def layer_by_hand(l, x, heads, low):
    """`[n,d]`; `low(module, x)` is what LoRA adds, and adapters stand behind the two dropouts."""

    def project(m, x):
        w = getattr(m, "base_layer", m)
        return lin(x, w.weight, w.bias) + low(m, x)

    q, k, v = [
        project(m, x).unflatten(-1, (heads, -1))
        for m in (l.attention.self.query, l.attention.self.key, l.attention.self.value)
    ]
    att = [
        ((q[:, i] @ k[:, i].T) / math.sqrt(q.shape[-1])).softmax(-1) @ v[:, i] for i in range(heads)
    ]

    def adapt(drop, x):
        return bottleneck(x, drop[1]) if isinstance(drop, nn.Sequential) else x

    o = l.attention.output
    x = norm(adapt(o.dropout, project(o.dense, torch.cat(att, -1))) + x, o.LayerNorm)
    z = project(l.intermediate.dense, x)
    z = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    return norm(adapt(l.output.dropout, project(l.output.dense, z)) + x, l.output.LayerNorm)


@pytest.mark.parametrize("name", ["adapter", "adapterdrop", "compacter", "lora", "lora all"])
def test_by_hand(name):
    bb = backbone()
    batch = batch_of(bb)
    start = states(bb, batch, stop=0)

    def low(m, x):
        if not hasattr(m, "lora_A"):
            return 0.0
        A = m.lora_A["default"].weight
        B = m.lora_B["default"].weight
        return 2.0 * lin(lin(x, A, 0.0), B, 0.0)  # α = 2r in both

    with CHANGES[name](bb), torch.no_grad():
        jolt(bb)
        h = states(bb, batch)
        for i in range(2):
            x = start[i, : int(batch["attention_mask"][i].sum())]
            for l in bb.layers:
                x = layer_by_hand(l, x, 4, low)
            same(h[i, : len(x)], x, 5e-5)
    assert (states(bb, batch) - h).abs().max() > 1e-2


@families
@pytest.mark.parametrize("where", ["qv", "all"])
def test_lora_is_a_sum_of_matrices(family, where):
    """Adding (α/r)·BA to the weights of an untouched backbone gives the same.

    GPT-2 keeps its weights transposed, GPT-2 and DeBERTa have one matrix for queries, keys and
    values.
    """
    bb = backbone(family)
    batch = batch_of(bb)
    start = states(bb, batch)
    with add_lora(bb, 4, 12, where), torch.no_grad():
        jolt(bb)
        h = states(bb, batch)
        add = {
            n: 3.0 * m.lora_B["default"].weight @ m.lora_A["default"].weight
            for n, m in bb.model.named_modules()
            if hasattr(m, "lora_A")
        }
    for n, delta in add.items():
        w = bb.model.get_submodule(n).weight
        w.data += delta.T if family == "gpt2" else delta
    leaves = {n.rpartition(".")[2] for n in add}
    qv = {"gpt2": {"c_attn"}, "deberta": {"in_proj"}}.get(family, {"query", "value"})
    assert leaves == qv if where == "qv" else leaves > qv
    same(states(bb, batch), h, 1e-4)
    assert (h - start).abs().max() > 1e-2


@families
@pytest.mark.parametrize(
    "change,first_layer",
    [(lambda b: add_adapters(b, 8, first_layer=1), 1), (lambda b: add_compacters(b, 8), 0)],
    ids=["adapter", "compacter"],
)
def test_adapters_stand_behind_both_projections(change, first_layer, family):
    """Hooks on the two projections of an untouched backbone, in eval mode.

    Do what the adapters do.
    """
    bb = backbone(family)
    batch = batch_of(bb)
    with change(bb):
        jolt(bb)
        h = states(bb, batch).detach()
        new = [m for m in bb.model.modules() if type(m).__name__ == "Adapter"]
    outs = (
        ("attn.c_proj", "mlp.c_proj")
        if family == "gpt2"
        else ("attention.output.dense", "output.dense")
    )

    def hook(a):
        return lambda m, x, y: bottleneck(y.flatten(0, 1), a).view_as(y)

    handles = [
        l.get_submodule(o).register_forward_hook(hook(a))
        for (l, o), a in zip(
            [(l, o) for l in bb.layers[first_layer:] for o in outs], new, strict=True
        )
    ]
    same(states(bb, batch).detach(), h, 5e-5)
    [x.remove() for x in handles]
    assert (states(bb, batch) - h).abs().max() > 1e-2


def test_dropout_of_adapters():
    bb = backbone()
    batch = batch_of(bb)
    for change in (
        lambda: add_adapters(bb, 8, dropout=0.5, std=0.2),
        lambda: add_compacters(bb, 8, dropout=0.5),
    ):
        with change():
            new = [m for m in bb.model.modules() if type(m).__name__ == "Adapter"]
            x = torch.randn(50, 32)
            [m.train() for m in new]
            out = new[0](x) - x
            assert 0.3 < (out.abs() < 1e-6).float().mean() < 0.7
            [m.eval() for m in new]
            assert ((new[0](x) - x).abs() < 1e-6).float().mean() < 0.05
            same(states(bb, batch), states(bb, batch), 0)


@families
def test_key_biases_do_nothing(family):
    """Softmax does not see what is added to all scores of a query."""
    if family in ("gpt2", "deberta"):
        pytest.skip("one bias for queries, keys and values, or none for keys")
    bb = backbone(family)
    with train_biases(bb):
        PlannedModel(bb, ClassificationHead(32, 2)).loss(batch_of(bb)).backward()
        s = bb.layers[0].attention.self
        assert s.key.bias.grad.abs().max() < 1e-5 * s.value.bias.grad.abs().max()


def test_what_bitfit_leaves_alone():
    bb = backbone("bert")
    V = bb.config.vocab_size
    with train_biases(bb, include_lm_head=True):
        names = {n for n, p in bb.model.named_parameters() if p.requires_grad}
        assert (
            all(n.endswith("bias") for n in names)
            and "cls.predictions.transform.dense.bias" in names
            and "cls.predictions.bias" not in names
        )
        assert {
            n for n, p in bb.model.named_parameters() if n.endswith("bias") and len(p) != V
        } == names


# --- refused


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda b: add_adapters(b, first_layer=3), ["layer 3", "0 to 2"]),
        (lambda b: add_adapters(b, first_layer=-1), ["layer -1", "0 to 2"]),
        (lambda b: add_compacters(b, 6), ["n=4", "n must divide both widths"]),
        (
            lambda b: add_lora(b, target_modules="query"),
            ["target_modules must be ", "got 'query'", "'qv'", "'all'"],
        ),
    ],
)
def test_what_is_refused(make, words):
    bb = backbone()
    before = picture(bb)
    with pytest.raises(ValueError) as e:
        make(bb)
    assert all(w in str(e.value) for w in words), str(e.value)
    assert_same(picture(bb), before)


changes_of_the_head = pytest.mark.parametrize(
    "make",
    [
        lambda b: add_lora(b, include_lm_head=True),
        lambda b: train_biases(b, True),
    ],
)


@changes_of_the_head
def test_no_head_to_change(make, monkeypatch):
    bb = backbone()
    monkeypatch.setattr(bb, "has_lm_head", False)
    with pytest.raises(ValueError, match="no language-model head"):
        make(bb)


@changes_of_the_head
def test_microsofts_head_of_deberta_can_be_changed(make):
    config = DebertaV2Config(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        legacy=False,
    )
    bb = wrap_hf_model(build_hf_model(config))
    with make(bb):
        head = bb.model.lm_predictions
        assert any(p.requires_grad for p in head.parameters())


# --- options that reach every changed layer


@pytest.mark.parametrize("earlier", ["adapter", "lora", "fine-tuning", "bitfit"])
@pytest.mark.parametrize("later", ["head-only", "prompt-tuning", "lpt-npg"])
def test_a_method_does_not_train_what_another_one_left(earlier, later):
    bb = backbone()
    task = small_task()
    build_model(config(method=earlier), bb, task)
    inside = picture(bb)
    with pytest.raises(ValueError, match="already"):
        build_model(config(method=later), bb, task)
    assert_same(picture(bb), inside)


@pytest.mark.parametrize("method", ["lora", "adapter", "fine-tuning", "lpt-npg"])
def test_a_build_that_is_refused_leaves_the_backbone_as_it_was(method):
    bb = backbone()
    task = small_task("similarity")  # numbers have no label words
    before = picture(bb)
    with pytest.raises(ValueError):
        build_model(config(method=method, head="verbalizer"), bb, task)
    assert_same(picture(bb), before)
    assert count_parameters(build_model(config(method="head-only"), bb, task))["backbone"] == 0

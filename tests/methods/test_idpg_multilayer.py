"""M-IDPG against a slow reference in loops over the raw weights of RoBERTa.

Parameter sharing, generator input and insertion; padding, gradients, parameter counts, and invalid
options.
"""

import math
from dataclasses import replace

import pytest
import torch
from small import FAMILY, backbone, batch_of, one, refused, same, text_of

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.context import INPUT
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.core.steps import Add, Insert, KeyValue, Replace
from idp_tutorial.data.encoding import collate
from idp_tutorial.methods.idpg import PromptGenerator
from idp_tutorial.methods.idpg_multilayer import multilayer_idpg_plan, read_previous_layer
from idp_tutorial.methods.prompt_tuning import prompt_plan
from idp_tutorial.methods.sentence_vectors import sentence_vector
from idp_tutorial.methods.soft_prompt import SoftPrompt

t = 3
d = 32
L = 3
INSERTIONS = ("add", "replace", "insert", "kv")


def supports(family, insertion):
    return (family, insertion) != ("deberta", "kv")


def model_of(bb, std=0.3, n=4, m=8, **kw):
    """Build a model whose prompts are large enough to have an effect."""
    model = PlannedModel(
        bb, ClassificationHead(bb.d, 2, "mean"), multilayer_idpg_plan(bb, t, m, n=n, **kw)
    ).eval()
    with torch.no_grad():
        [p.normal_(std=std) for p in model.sources.parameters()]
    return model


def generators(model):
    return [getattr(s, "source", s).generator for s in model.sources]


# --- the reference: SPEC §3.1 and §3.2, one text at a time, in loops; it uses tensors by Hugging
# Face's names and nothing of the package


def norm(x, w, b, eps):
    return torch.stack(
        [(r - r.mean()) / ((r - r.mean()).square().mean() + eps).sqrt() * w + b for r in x]
    )


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def layer(x, sd, k, heads, eps):
    """Apply one post-LayerNorm layer to `[n,d]`, one head and one position at a time."""

    def linear(x, name):
        return x @ sd[f"encoder.layer.{k}.{name}.weight"].T + sd[f"encoder.layer.{k}.{name}.bias"]

    q, key, v = [linear(x, f"attention.self.{o}") for o in ("query", "key", "value")]
    size = x.shape[1] // heads
    out = []
    for i in range(len(x)):
        row = []
        for a in range(heads):
            cols = slice(a * size, (a + 1) * size)
            scores = torch.stack(
                [(q[i, cols] * key[j, cols]).sum() / math.sqrt(size) for j in range(len(x))]
            )
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            row.append(sum(weights[j] * v[j, cols] for j in range(len(x))))
        out.append(torch.cat(row))
    x = norm(
        x + linear(torch.stack(out), "attention.output.dense"),
        *[sd[f"encoder.layer.{k}.attention.output.LayerNorm.{o}"] for o in ("weight", "bias")],
        eps,
    )
    return norm(
        x + linear(gelu(linear(x, "intermediate.dense")), "output.dense"),
        *[sd[f"encoder.layer.{k}.output.LayerNorm.{o}"] for o in ("weight", "bias")],
        eps,
    )


def embed(words, sd, pad, eps):
    """Embed the word and prompt vectors of one text.

    Position embeddings are consecutive over words and prompt, and LayerNorm comes last.
    """
    x = torch.stack(
        [
            w
            + sd["embeddings.position_embeddings.weight"][pad + 1 + i]
            + sd["embeddings.token_type_embeddings.weight"][0]
            for i, w in enumerate(words)
        ]
    )
    return norm(x, sd["embeddings.LayerNorm.weight"], sd["embeddings.LayerNorm.bias"], eps)


def generate(z, w, b2):
    """Compute W₂·GELU(W₁z + b₁) + b₂, with full Kronecker products.

    `w` is (W₁, b₁, W₂), where a PHM matrix is given as (A, B).
    """

    def times(x, o):
        return x @ sum(torch.kron(A, B) for A, B in zip(*o)) if isinstance(o, tuple) else o @ x

    return (times(gelu(times(z, w[0]) + w[1]), w[2]) + b2).reshape(t, -1)


def reference(ids, sd, weights, tables, first_row, reads, insertion, heads=4, pad=1, eps=1e-5):
    """Run M-IDPG on one text `ids` without padding, with `weights[k]` and `tables[k]` in layer k.

    Returns the hidden states of the words after the last layer `[n,d]`.
    """
    words = [sd["embeddings.word_embeddings.weight"][i] for i in ids]
    h = embed(words, sd, pad, eps)
    for k in range(L):
        h = layer(h, sd, k, heads, eps)
    z = h[0]  # M(x): `<s>`
    prompt = generate(z, weights[0], tables[0])
    h = embed([*words[:first_row], *prompt, *words[first_row:]], sd, pad, eps)
    for k in range(L):
        h = layer(h, sd, k, heads, eps)
        if k < L - 1:  # after each layer but the last
            p = generate(h[0] if reads == "previous" else z, weights[k + 1], tables[k + 1])
            h = torch.stack(
                [
                    (r + p[i - first_row] if insertion == "add" else p[i - first_row])
                    if first_row <= i < first_row + t
                    else r
                    for i, r in enumerate(h)
                ]
            )
    return torch.cat([h[:first_row], h[first_row + t :]])


CASES = [
    (share, reads, kind, 0, "add")
    for share in "SML"
    for reads in ("previous", "layer0")
    for kind in ("phm", "dnn")
] + [
    ("M", "previous", "phm", 1, "add"),
    ("M", "previous", "phm", 0, "replace"),
    ("L", "layer0", "dnn", 1, "replace"),
]


@pytest.mark.parametrize("share,reads,kind,position,insertion", CASES)
def test_states_and_gradients_match_a_slow_reference(share, reads, kind, position, insertion):
    """The batch is padded, in double precision."""
    bb = backbone(dtype=torch.float64)
    model = model_of(
        bb,
        parameter_sharing=share,
        generator_input=reads,
        kind=kind,
        position=position,
        insertion=insertion,
    ).double()
    sd = {k.removeprefix("roberta."): v for k, v in bb.model.state_dict().items()}
    gens = generators(model)
    assert len(gens) == L
    weights = [
        tuple((o.A, o.B) if kind == "phm" else o.weight for o in (g.down, g.up)) for g in gens
    ]
    weights = [(w[0], g.down.bias, w[1]) for w, g in zip(weights, gens)]
    tables = [g.b2[k if share == "M" else 0] for k, g in enumerate(gens)]
    texts = [[0, *torch.randint(5, 8000, (n,)).tolist(), 2] for n in (6, 3)]  # `<s>` … `</s>`
    batch = collate([dict(input_ids=o, token_type_ids=[0] * len(o)) for o in texts], 1)
    ctx = model.compute_context(batch)
    probe = torch.randn(d, dtype=torch.float64)
    actual_sum = 0.0
    expected_sum = 0.0
    for i, ids in enumerate(texts):
        want = reference(
            ids,
            sd,
            weights,
            tables,
            1 if position == 0 else ids.index(2),
            reads,
            insertion,
            eps=bb.config.layer_norm_eps,
        )
        got = ctx.h[i][ctx.word_mask[i] == 1]
        same(got, want, 1e-9)
        actual_sum = actual_sum + (got @ probe).tanh().sum()
        expected_sum = expected_sum + (want @ probe).tanh().sum()
    params = [*model.sources.parameters()]
    for a, b in zip(
        torch.autograd.grad(actual_sum, params), torch.autograd.grad(expected_sum, params)
    ):
        same(a, b, 1e-8)
        assert b.any()


def test_the_reference_without_a_prompt_matches_hugging_face():
    """The reference itself is checked."""
    bb = backbone(dtype=torch.float64)
    sd = {k.removeprefix("roberta."): v for k, v in bb.model.state_dict().items()}
    ids = one(batch_of(bb), 0)["input_ids"]
    h = embed(
        [sd["embeddings.word_embeddings.weight"][i] for i in ids[0]],
        sd,
        1,
        bb.config.layer_norm_eps,
    )
    for k in range(L):
        h = layer(h, sd, k, 4, bb.config.layer_norm_eps)
    same(h, bb.base(input_ids=ids).last_hidden_state[0], 1e-9)


# --- insertion


@pytest.mark.parametrize("position", [0, 1, 4, None])
@pytest.mark.parametrize("insertion", ["add", "replace", "insert"])
def test_a_step_changes_only_the_prompt_positions(insertion, position):
    bb = backbone()
    model = model_of(bb, insertion=insertion, position=position)
    batch = batch_of(bb)
    plan = model.plan
    for k in range(1, L):
        ctx = run_layers(bb, batch, plan, stop=k)
        ctx.layer = k
        h, (first, n), u = ctx.h, ctx.prompt_span, read_previous_layer(ctx)
        p = generators(model)[k](u, k)
        plan[k].apply(ctx)
        assert n == t
        for i in range(len(h)):
            a = int(first[i])
            row = torch.arange(len(ctx.h[i]))
            if insertion == "insert":
                inside = (row >= a) & (row < a + t)
                same(ctx.h[i][inside], p[i])
                assert torch.equal(ctx.h[i][~inside], h[i])
            else:
                inside = (row >= a) & (row < a + t)
                same(ctx.h[i][inside], p[i] + (h[i][inside] if insertion == "add" else 0))
                assert torch.equal(ctx.h[i][~inside], h[i][~inside])
            if position == 4:
                assert (
                    a == int(batch["attention_mask"][i].sum()) + 1
                )  # after the separator in front of it
            elif position == 0:
                assert a == 1


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("insertion", INSERTIONS)
def test_number_of_positions(insertion, family):
    if not supports(family, insertion):
        return
    bb = backbone(family)
    batch = batch_of(bb)
    T = batch["input_ids"].shape[1]
    model = model_of(bb, insertion=insertion)
    assert [*model.plan] == (
        [0, 1, 2] if insertion == "kv" else [INPUT, 1, 2]
    )  # nothing after the last layer
    ctx = model.compute_context(batch)
    assert ctx.h.shape[1] == T + dict(add=t, replace=t, insert=t * L, kv=0)[insertion]
    assert torch.equal(
        ctx.word_mask.sum(1), batch["attention_mask"].sum(1)
    ) and ctx.tracked_positions["cls"].max() == (
        0 if family != "gpt2" or insertion == "kv" else ctx.h.shape[1] - T
    )


def test_keys_and_values_are_the_generators_halves():
    """The generated vector is the key of width `d`, then the value of width `d`."""
    bb = backbone()
    batch = batch_of(bb)
    model = model_of(bb, insertion="kv", generator_input="layer0")
    ctx = run_layers(bb, batch, stop=0)
    p = model.sources[1](ctx)
    assert p.shape == (len(batch["input_ids"]), t, 2 * d) and type(model.plan[1]) is KeyValue
    h = run_layers(bb, batch, model.plan, stop=1).h
    kv = model.plan[1].apply(ctx)
    same(kv.k.transpose(1, 2).flatten(2), p[..., :d])
    same(kv.v.transpose(1, 2).flatten(2), p[..., d:])
    assert (h - run_layers(bb, batch, stop=1).h)[batch["attention_mask"] == 1].abs().max() > 1e-3


def test_the_first_prompt_is_lost_with_replace_and_not_with_add():
    bb = backbone()
    batch = batch_of(bb)
    for insertion in ("add", "replace"):
        model = model_of(bb, insertion=insertion, generator_input="layer0")
        states = []
        for sign in (1, -1):
            with torch.no_grad():
                generators(model)[0].b2[0] *= sign
            ctx = run_layers(bb, batch, model.plan, stop=1)
            ctx.layer = 1
            model.plan[1].apply(ctx)
            states.append(ctx.h[:, 1 : 1 + t])
        assert torch.equal(*states) == (insertion == "replace")


# --- parameter sharing and generator input


def test_layers_share_generators_and_biases():
    bb = backbone()
    z = torch.randn(4, d)
    for share, one_generator, tables in (("S", True, 1), ("M", True, L), ("L", False, 1)):
        model = model_of(bb, parameter_sharing=share, generator_input="layer0")
        gens = generators(model)
        assert (len({*gens}) == 1) == one_generator and all(len(g.b2) == tables for g in gens)
        outputs = [
            s.generator(z, s.layer) for s in [getattr(s, "source", s) for s in model.sources]
        ]
        if share == "S":
            assert torch.equal(outputs[0], outputs[2])
        if share == "M":
            # only the biases differ
            same(
                outputs[2] - outputs[0],
                (gens[0].b2[2] - gens[0].b2[0]).view(1, t, d).expand_as(outputs[0]),
            )
        if share == "L":
            difference = outputs[2] - outputs[0]
            assert (difference - difference[0]).abs().max() > 1e-3  # not only by a constant


def test_a_bias_changes_only_the_states_above_its_layer():
    bb = backbone()
    batch = batch_of(bb)
    model = model_of(bb)
    g = generators(model)[0]
    for k in range(L):
        before = [run_layers(bb, batch, model.plan, stop=j).h for j in range(L + 1)]
        with torch.no_grad():
            g.b2[k] += 1
        after = [run_layers(bb, batch, model.plan, stop=j).h for j in range(L + 1)]
        for j in range(1, L + 1):
            assert torch.equal(before[j], after[j]) == (j <= k)


def test_layer0_reads_one_vector_with_one_dropout_mask():
    bb = backbone()
    batch = batch_of(bb)
    model = model_of(bb, parameter_sharing="S", generator_input="layer0", dropout=0.5).train()
    bb.model.eval()
    generators(model)[0].eval()  # turn its dropout off, so that only the dropout on z remains
    seen = []
    plan = model.plan
    for k, s in plan.items():
        plan[k] = replace(
            s, source=(lambda f: lambda ctx: seen.append(f(ctx)) or seen[-1])(s.source)
        )
    run_layers(bb, batch, plan)
    run_layers(bb, batch, plan)
    assert (
        torch.equal(seen[0], seen[1])
        and torch.equal(seen[1], seen[2])
        and not torch.equal(seen[0], seen[L])
    )
    assert not torch.equal(
        seen[0], generators(model)[0](sentence_vector(run_layers(bb, batch, stop=0)))
    )  # dropout changes the vector


def test_previous_layer_is_read_without_dropout():
    bb = backbone()
    batch = batch_of(bb)
    model = model_of(bb, parameter_sharing="S", dropout=0.5).train()
    bb.model.eval()
    g = generators(model)[0].eval()
    ctx = run_layers(bb, batch, stop=1)
    assert torch.equal(model.sources[1](ctx), g(ctx.state_at("cls")))
    a = model.sources[0](ctx)
    b = model.sources[0](run_layers(bb, batch, stop=0))
    assert (a - b).abs().max() > 1e-3  # the sentence vector has dropout


@pytest.mark.parametrize("family", FAMILY)
def test_previous_reads_the_default_pooling_position(family):
    bb = backbone(family)
    batch = batch_of(bb)
    for k in range(L):
        ctx = run_layers(bb, batch, stop=k)
        end = batch["attention_mask"].sum(1) - 1
        assert torch.equal(
            read_previous_layer(ctx),
            ctx.h[torch.arange(len(end)), end] if family == "gpt2" else ctx.h[:, 0],
        )


def test_a_static_vector_for_all_layers_takes_one_pass():
    """M-IDPG-PHM-GloVe has such a vector."""
    bb = backbone()
    batch = batch_of(bb)
    vectors = torch.randn(len(batch["input_ids"]), 12)
    calls = []
    model = model_of(
        bb, generator_input="layer0", encoder=lambda ctx: calls.append(1) or vectors, d_in=12
    )
    n = []
    hook = bb.layers[0].register_forward_hook(lambda *a: n.append(1))
    model(batch)
    hook.remove()
    assert len(n) == 1 and len(calls) == 1 and "sentence" not in batch


# --- every family


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("insertion", INSERTIONS)
def test_padding_and_neighbours_change_nothing(insertion, family):
    bb = backbone(family)
    if not supports(family, insertion):
        with pytest.raises(ValueError, match="deberta"):
            model_of(bb, insertion=insertion)
        return
    model = model_of(
        bb, insertion=insertion, position=0 if family == "gpt2" else 4 if insertion != "kv" else 0
    )
    batch = batch_of(bb, n=5)
    with torch.no_grad():
        together = model(batch)
        order = torch.randperm(5)
        same(torch.cat([model(one(batch, i)) for i in range(5)]), together, 2e-5)
        same(model({k: v[order] for k, v in text_of(batch).items()}), together[order], 2e-5)
    assert (together[0] - together[1]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("parameter_sharing", "SML")
@pytest.mark.parametrize("insertion", INSERTIONS)
def test_all_parameters_of_the_generators_get_a_gradient(insertion, parameter_sharing, family):
    if not supports(family, insertion):
        return
    bb = backbone(family)
    model = model_of(
        bb,
        insertion=insertion,
        parameter_sharing=parameter_sharing,
        generator_input="previous" if parameter_sharing != "S" else "layer0",
    ).train()
    batch = batch_of(bb)
    model.loss(batch).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.trained_parameters().values())
    assert all(row.any() for g in generators(model) for row in g.b2.grad)  # each layer's bias
    assert all(p.grad is None for p in bb.model.parameters())
    # a shared tensor is listed once
    assert len(model.trained_parameters()) == len(
        {id(p) for p in model.parameters() if p.requires_grad}
    )


@pytest.mark.parametrize("insertion", INSERTIONS)
def test_without_w2_it_is_a_static_prompt_in_every_layer(insertion):
    bb = backbone()
    batch = batch_of(bb)
    model = model_of(bb, insertion=insertion)
    g = generators(model)[0]
    with torch.no_grad():
        [w.zero_() for w in g.up.parameters()]

    def static(k):
        s = SoftPrompt(t, d * (2 if insertion == "kv" else 1))
        s.p.data.copy_(g.b2[k].detach().view_as(s.p))
        return s

    if insertion == "kv":
        plan = {k: KeyValue(static(k)) for k in range(L)}
    else:
        later = dict(add=Add, replace=Replace, insert=lambda source: Insert(source, 1))[insertion]
        plan = prompt_plan(bb, static(0)) | {k: later(static(k)) for k in range(1, L)}
    assert torch.equal(model(batch), PlannedModel(bb, model.head, plan).eval()(batch))


# --- sizes

SIZES = [
    ("M-IDPG-PHM 134K", {}, 137_232),
    ("M-IDPG-DNN 216K", dict(kind="dnn"), 221_200),
    ("M-IDPG-PHM-GloVe 141K", dict(n=4, d_in=300, generator_input="layer0"), 144_704),
    ("M-IDPG-PHM, one A", dict(shared_A=True), 133_136),
    ("GloVe, one A", dict(n=4, d_in=300, generator_input="layer0", shared_A=True), 144_640),
    ("S m=16", dict(parameter_sharing="S"), 19_472),
    ("S m=256", dict(parameter_sharing="S", m=256), 111_872),
    ("M m=256", dict(m=256), 229_632),
    ("M m=256 DNN", dict(m=256, kind="dnn"), 1_696_000),
    ("L m=16", dict(parameter_sharing="L"), 467_328),
    ("L m=256", dict(parameter_sharing="L", m=256), 2_684_928),
    (
        "L m=256, one A each",
        dict(parameter_sharing="L", m=256, shared_A=True),
        2_586_624,
    ),
    ("kv", dict(insertion="kv"), 1040 + 4096 + 16 * 5 * 2048 // 16 + 4096 + 24 * 5 * 2048),
]


@pytest.fixture(scope="module")
def large():
    return load_backbone("roberta-large", weights="meta")


@pytest.mark.parametrize("kw,published", [s[1:] for s in SIZES], ids=[s[0] for s in SIZES])
def test_published_sizes(kw, published, large):
    with torch.device("meta"):
        model = PlannedModel(large, ClassificationHead(1024, 2), multilayer_idpg_plan(large, **kw))
    assert count_parameters(model) == dict(prompt=published, head=2050, backbone=0)
    m = kw.get("m", 16)
    n = kw.get("n", 16)
    t = 5
    g = kw.get("d_in", 1024)
    if (
        kw.get("parameter_sharing", "M") == "M"
        and kw.get("kind") != "dnn"
        and "insertion" not in kw
    ):
        assert (
            published
            == (g * m // n + m)
            + m * t * 1024 // n
            + t * 1024 * 24
            + (1 if kw.get("shared_A") else 2) * n**3
        )  # A.1.2


# --- invalid options


@pytest.mark.parametrize(
    "kw,words",
    [
        (
            dict(parameter_sharing="layerb"),
            ["parameter_sharing must be ", "got 'layerb'", "'S', 'M' or 'L'"],
        ),
        (
            dict(generator_input="input"),
            ["generator_input must be ", "got 'input'", "'previous' or 'layer0'"],
        ),
        (dict(insertion="prepend"), ["insertion must be ", "got 'prepend'", "'insert' or 'kv'"]),
        (dict(m=6), ["n=16", "divide"]),
        (dict(position=7, n=4), ["between 0 and 4", "got 7"]),
        (
            dict(insertion="kv", n=4, position=9),
            ["position=9", "insertion='kv'", "Leave position out"],
        ),
        (dict(insertion="kv", n=4, position=1), ["Leave position out"]),
    ],
)
def test_invalid_options_are_refused(kw, words):
    refused(lambda: multilayer_idpg_plan(backbone(), **kw), *words)


def test_a_prompt_of_another_length_is_refused():
    bb = backbone()
    model = model_of(bb)
    plan = model.plan | {2: Add(SoftPrompt(t + 1, d))}
    words = r"'add' at layer 2: .* must return .*3, 32\), got .*4, 32\)"
    with pytest.raises(ValueError, match=words):
        run_layers(bb, batch_of(bb), plan)
    assert isinstance(generators(model)[0], PromptGenerator)


def test_dropout_and_standardise_reach_the_sources():
    model = model_of(backbone(), dropout=0.3, standardise=True)
    first, *later = [getattr(s, "source", s) for s in model.sources]
    assert (
        first.read.scale.total.shape == (d,)
        and {m.p for m in model.sources.modules() if isinstance(m, torch.nn.Dropout)} == {0.3}
        and {s.read for s in later} == {read_previous_layer}
    )

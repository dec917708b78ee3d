"""Tests of S-IDPG.

The generator is compared with its formula, and the plan with two passes of Hugging Face's models.
M(x) and its caches, prompt tuning as a special case, parameter counts, and invalid arguments.
"""

import pytest
import torch
import torch.nn.functional as F
from small import FAMILY, backbone, batch_of, count_passes, one, refused, same, small_task, text_of
from torch import nn

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.context import INPUT, Context
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.methods.idpg import (
    GeneratedPrompt,
    IDPGPHMConfig,
    PromptGenerator,
    idpg_plan,
)
from idp_tutorial.methods.phm import PHMLinear
from idp_tutorial.methods.prompt_tuning import prompt_plan
from idp_tutorial.methods.sentence_vectors import (
    RunningStandardiser,
    sentence_vector,
)
from idp_tutorial.methods.soft_prompt import SoftPrompt
from idp_tutorial.training.config import TrainingConfig

t = 3
d = 32
KINDS = [dict(kind="dnn"), dict(kind="phm", n=4), dict(kind="phm", n=4, shared_A=True)]


def enlarge_output(g, std=0.3):
    """Return the generator with weights that give a large output."""
    with torch.no_grad():
        [p.normal_(std=std) for p in g.parameters()]
    return g


def generator(kind="phm", n=4, d_in=d, **kw):
    return enlarge_output(PromptGenerator(d_in, d, t, 8, kind, n, **kw))


def model_of(bb, g, position=0, n_out=2, encoder=None, **kw):
    return PlannedModel(
        bb, ClassificationHead(d, n_out, "mean"), idpg_plan(bb, g, position, encoder, **kw)
    ).eval()


def matrix(layer):  # [d_in,d_out], entry by entry
    """W of a PHM layer: W[i·p+k, j·r+l] = Σ_q A[q,i,j]·B[q,k,l]."""
    if not isinstance(layer, PHMLinear):
        return layer.weight.T
    A = layer.A
    B = layer.B
    n, p, _ = B.shape
    rows = []
    for i in range(n):
        for k in range(p):
            rows.append(torch.cat([sum(A[q, i, j] * B[q, k] for q in range(n)) for j in range(n)]))
    return torch.stack(rows)


def by_hand(g, z, layer=0):  # one text: `[d_in]` → `[t,d]`
    u = z @ matrix(g.down) + g.down.bias
    v = 0.5 * u * (1 + torch.erf(u / 2**0.5))
    return (v @ matrix(g.up) + g.b2[layer]).reshape(t, -1)


# --- the generator


@pytest.mark.parametrize("kw", KINDS, ids=str)
def test_generator_matches_its_formula(kw):
    g = generator(**kw, n_output_biases=3).eval()
    z = torch.randn(5, d)
    for k in range(3):
        same(g(z, k), torch.stack([by_hand(g, o, k) for o in z]))
    assert (g.down.A is g.up.A) == bool(kw.get("shared_A")) if kw["kind"] == "phm" else True


@pytest.mark.parametrize(
    "residual,layer_norm,want,extra",
    [
        (None, True, lambda p, z, ln: ln(p), 1),
        ("paper", False, lambda p, z, ln: p + z, 0),
        ("paper", True, lambda p, z, ln: ln(ln(p) + ln(z)), 3),
        ("code", False, lambda p, z, ln: ln(p) + z, 1),
        ("code", True, lambda p, z, ln: ln(ln(p) + z), 2),
    ],
)
def test_residual_and_layer_norm_match_table_7(residual, layer_norm, want, extra):
    g = PromptGenerator(d, d, t, 8, "phm", 4, residual=residual, layer_norm=layer_norm).eval()
    z = torch.randn(5, d)

    def ln(x):
        return (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, unbiased=False, keepdim=True) + 1e-5
        ).sqrt()

    for o, p in zip(z, g(z)):
        same(p, want(by_hand(g, o), o, ln))
    assert (
        sum(p.numel() for p in g.parameters())
        == sum(p.numel() for p in PromptGenerator(d, d, t, 8, "phm", 4).parameters())
        + 2 * d * extra
    )
    g(z).square().mean().backward()  # every parameter gets a gradient, not only the last norm's
    assert all(p.grad is not None for p in g.parameters())


@pytest.mark.parametrize(
    "kind,tables,std",
    [
        ("dnn", 1, (0.02, 0.0, 0.02, 0.0)),
        ("dnn", 24, (0.02, 0.0, 0.02, 0.02)),
        ("phm", 1, (0.05, 0.05, 0.05, 0.02)),
        ("phm", 24, (0.05, 0.05, 0.05, 0.02)),
    ],
)
def test_initialisation_matches_the_authors_code(kind, tables, std):
    g = PromptGenerator(1024, 1024, 5, 256, kind, n_output_biases=tables)
    w = [l.B if kind == "phm" else l.weight for l in (g.down, g.up)]
    for p, s in zip((w[0], g.down.bias, w[1], g.b2), std):
        assert abs(p.std().item() - s) <= 0.12 * s and abs(p.mean().item()) <= 0.2 * s
    if kind == "phm":
        assert all(abs(l.A.std().item() - 0.05) < 0.004 for l in (g.down, g.up))


def test_dropout_is_applied_after_gelu_and_not_to_the_prompt():
    g = generator(dropout=0.5)
    z = torch.randn(64, d)
    p = g(z)
    q = g(z)
    assert (p - q).abs().max() > 1e-2 and (p != 0).all()
    g.eval()
    assert torch.equal(g(z), g(z))
    g = generator("dnn", dropout=0.5).train()
    with torch.no_grad():
        g.up.weight.copy_(torch.eye(8).repeat(t * d // 8, 1))
        g.b2.zero_()
        v = F.gelu(g.down(z))
    p = g(z).reshape(64, -1, 8)
    same(p[:, 0], p[:, 5])
    assert 0.35 < (p[:, 0] == 0).float().mean() < 0.65
    saved = p[:, 0] != 0
    same(p[:, 0][saved], 2 * v[saved])


# --- two passes

POSITION_CASES = [
    (f, p, pair)
    for f in ("roberta", "bert")
    for pair in (False, True)
    for p in ((0, 1, 2, 3, 4) if pair else (0, 1, 4))
]


@pytest.mark.parametrize("family,position,pair", POSITION_CASES)
def test_logits_match_two_passes_of_hugging_face(family, position, pair):
    bb = backbone(family)
    g = generator()
    model = model_of(bb, g, position)
    batch = batch_of(bb, small_task("entailment" if pair else "sentiment"), 4)
    got = model(batch)
    sep = bb.tokenizer.sep_token_id
    assert batch["attention_mask"].sum(1).min() < batch["attention_mask"].sum(1).max()
    for i in range(4):
        x = one(batch, i)
        ids = x["input_ids"][0].tolist()
        n = len(ids)
        z = bb.base(
            input_ids=x["input_ids"],
            attention_mask=x["attention_mask"],
            token_type_ids=x["token_type_ids"],
        ).last_hidden_state[0, 0]
        p = by_hand(g, z)
        e = bb.word_embeddings(x["input_ids"][0])
        s = bb.word_embeddings.weight[sep][None]
        first = ids.index(sep)
        gap = 2  # both use RoBERTa's tokenizer
        first_row = {0: 1, 1: first, 2: first + gap, 3: n - 1, 4: n}[position]
        new = torch.cat([s, p, s]) if position == 4 else p
        types = torch.zeros(1, n + len(new), dtype=torch.long)
        types[0] = torch.cat(
            [
                x["token_type_ids"][0, :first_row],
                torch.zeros(len(new), dtype=torch.long),
                x["token_type_ids"][0, first_row:],
            ]
        )
        h = bb.base(
            inputs_embeds=torch.cat([e[:first_row], new, e[first_row:]])[None],
            attention_mask=torch.ones_like(types),
            token_type_ids=types,
        ).last_hidden_state[0]
        same(got[i], model.head.net(torch.cat([h[:first_row], h[first_row + len(new) :]]).mean(0)))


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, None])
@pytest.mark.parametrize("family", FAMILY)
def test_padding_and_neighbours_change_nothing(family, position):
    bb = backbone(family)
    batch = batch_of(bb, small_task("entailment"), 5)
    if family == "gpt2" and position:
        return
    model = model_of(bb, generator(), position)
    with torch.no_grad():
        together = model(batch)
        order = torch.randperm(5)
        same(torch.cat([model(one(batch, i)) for i in range(5)]), together)
        same(model({k: v[order] for k, v in text_of(batch).items()}), together[order])
    assert (together[0] - together[1]).abs().max() > 1e-3


def test_a_position_that_a_text_does_not_have_is_refused():
    bb = backbone()
    batch = batch_of(bb)
    for p in (2, 3):
        with pytest.raises(ValueError, match="Use position 0, 1 or 4"):
            model_of(bb, generator(), p)(batch)
    with pytest.raises(ValueError, match="position must be 0 for gpt2, got 4"):
        idpg_plan(backbone("gpt2"), generator(), 4)


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
def test_verbalizer_logits_do_not_depend_on_padding(family):
    bb = backbone(family)
    task = small_task("questions")
    batch = batch_of(bb, task, template="code")
    model = PlannedModel(
        bb, VerbalizerHead(bb, task.word_ids(bb.tokenizer)), idpg_plan(bb, generator())
    ).eval()
    same(
        torch.cat([model(one(batch, i)) for i in range(len(batch["input_ids"]))]),
        model(batch),
        1e-4,
    )


# --- M(x)


@pytest.mark.parametrize("family", FAMILY)
def test_sentence_vector_is_computed_once_and_matches_hugging_face(family):
    bb = backbone(family)
    batch = batch_of(bb)
    model = model_of(bb, generator()).train()
    columns = set(batch)
    assert (
        count_passes(bb, lambda: model(batch)) == 2 and set(batch) == columns
    )  # what a source computes is not put into the batch
    ctx = run_layers(bb, batch, stop=0)
    z = sentence_vector(ctx)
    end = batch["attention_mask"].sum(1) - 1
    assert count_passes(bb, lambda: sentence_vector(ctx)) == 0  # stored in the context
    assert count_passes(bb, lambda: model({**batch, "sentence": z})) == 1  # read from a cache
    h = bb.base.eval()(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).last_hidden_state
    same(z, h[torch.arange(len(h)), end] if family == "gpt2" else h[:, 0])
    assert not z.requires_grad


def test_cached_sentence_vectors_are_used():
    bb = backbone()
    batch = batch_of(bb)
    model = model_of(bb, generator())
    a = model(batch)
    z = sentence_vector(run_layers(bb, batch, stop=0))
    b = model({**batch, "sentence": z.flip(0)})
    assert (a - b).abs().max() > 1e-3


def test_another_encoder_takes_one_pass():
    bb = backbone()
    batch = batch_of(bb)
    vectors = torch.randn(len(batch["input_ids"]), 12)
    model = model_of(bb, g := generator(n=4, d_in=12), encoder=lambda ctx: vectors)
    assert count_passes(bb, lambda: model(batch)) == 1 and "sentence" not in batch
    for i in (0, 3):
        same(model.sources[0](run_layers(bb, batch, stop=0))[i], by_hand(g, vectors[i]))


def test_an_encoder_with_parameters_is_trained_and_counted():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(d, 12)

        def forward(self, ctx):
            return self.w(ctx.mean_state())

    bb = backbone()
    model = model_of(bb, g := generator(d_in=12), encoder=(e := Words()))
    assert count_parameters(model)["prompt"] == sum(
        p.numel() for p in [*g.parameters(), *e.parameters()]
    )
    model.loss(batch_of(bb)).backward()
    assert e.w.weight.grad.any()


# --- what depends on what


@pytest.mark.parametrize("kw", KINDS, ids=str)
@pytest.mark.parametrize("family", FAMILY)
def test_all_parameters_of_the_generator_get_a_gradient(family, kw):
    bb = backbone(family)
    batch = batch_of(bb)
    model = model_of(bb, generator(**kw)).train()
    model.loss(batch).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.trained_parameters().values())
    assert all(p.grad is None for p in bb.model.parameters())


@pytest.mark.parametrize("position", [0, 1, 4, None])
@pytest.mark.parametrize("family", FAMILY)
def test_without_w2_it_is_prompt_tuning(family, position):
    """Outputs and gradients are bitwise equal, also in training mode.

    Dropout has no effect with W₂ = 0.
    """
    if family == "gpt2" and position:
        return
    bb = (
        backbone(family, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        if family == "roberta"
        else backbone(family)
    )
    batch = batch_of(bb)
    g = generator()
    soft = SoftPrompt(t, d, std=0.5)
    with torch.no_grad():
        [w.zero_() for w in g.up.parameters()]
        g.b2.copy_(soft.p.flatten())
    dynamic = model_of(bb, g, position)
    static = PlannedModel(bb, dynamic.head, prompt_plan(bb, soft, position)).eval()
    if family == "roberta":
        dynamic.train()
        static.train()
    a = dynamic(batch)
    b = static(batch)
    assert (
        torch.equal(a, b) and (a - PlannedModel(bb, dynamic.head).eval()(batch)).abs().max() > 1e-3
    )
    for y in (a, b):
        (y * torch.arange(1.0, 1 + y.numel()).view_as(y)).sum().backward()
    assert soft.p.grad.any() and torch.equal(g.b2.grad[0], soft.p.grad.flatten())


def test_a_float32_generator_on_a_bfloat16_backbone():
    bb = backbone(dtype=torch.bfloat16)
    batch = batch_of(bb)
    g = generator()
    plan = idpg_plan(bb, g)
    h = run_layers(bb, batch, plan).h
    assert h.dtype == torch.bfloat16
    h.float().square().sum().backward()
    assert g.b2.grad.dtype == torch.float32 and g.b2.grad.any()


# --- sizes

SIZES = [
    ("S-IDPG-DNN", dict(kind="dnn"), "roberta-large", 1_578_240),
    ("S-IDPG-PHM, code", {}, "roberta-large", 111_872),
    ("S-IDPG-PHM, paper 105K", dict(shared_A=True), "roberta-large", 107_776),
    ("LPT Table 5: m=d/4", dict(m=320), "gpt2-large", 168_512),
    ("m=256", dict(m=256), "gpt2-large", 137_728),
]


@pytest.mark.parametrize("kw,name,published", [s[1:] for s in SIZES], ids=[s[0] for s in SIZES])
def test_published_sizes(kw, name, published):
    bb = load_backbone(name, weights="meta")
    with torch.device("meta"):
        model = PlannedModel(
            bb,
            ClassificationHead(bb.d, 2),
            idpg_plan(bb, PromptGenerator(bb.d, bb.d, 5, **{"m": 256, **kw})),
        )
    # with its head 113,922: LPT's 114K
    assert count_parameters(model) == dict(prompt=published, head=2 * bb.d + 2, backbone=0)
    m = kw.get("m", 256)
    n = 16
    if kw.get("kind") != "dnn":
        assert (
            published
            == (bb.d * m // n + m)
            + (m * 5 * bb.d // n + 5 * bb.d)
            + (1 if kw.get("shared_A") else 2) * n**3
        )
    else:
        assert published == m * (bb.d + 1) + 5 * bb.d * (m + 1)  # §3.1


# --- invalid arguments


@pytest.mark.parametrize(
    "args,kw,words",
    [
        ((8, 8), dict(kind="mlp"), ["'mlp'", "'phm' or 'dnn'"]),
        ((300, 128), {}, ["n=16", "divide both widths"]),
        (
            (8, 8),
            dict(residual=True, kind="dnn"),
            ["residual must be ", "got True", "'paper' or 'code'"],
        ),
    ],
)
def test_invalid_arguments_are_refused(args, kw, words):
    refused(lambda: PromptGenerator(*args, **kw), *words)


def test_a_generator_of_another_width_is_refused():
    bb = backbone()
    with pytest.raises(ValueError, match="must return"):
        run_layers(bb, batch_of(bb), idpg_plan(bb, PromptGenerator(d, 16, t, 8, n=4)))


def test_generated_prompt_applies_the_generator_to_the_vector_that_it_reads():
    g = generator(n_output_biases=2).eval()
    bb = backbone()
    ctx: Context = run_layers(bb, batch_of(bb), stop=1)
    for k in (0, 1):
        assert torch.equal(GeneratedPrompt(g, Context.mean_state, k)(ctx), g(ctx.mean_state(), k))
    assert not torch.equal(g(ctx.mean_state(), 0), g(ctx.mean_state(), 1))


# --- standardisation


def test_standardise_option_standardises_the_generator_input():
    bb = backbone("roberta")
    batch = batch_of(bb)
    ctx = run_layers(bb, batch, stop=0)

    def source(**kw):
        return idpg_plan(bb, PromptGenerator(d, d, t, 8, "dnn"), **kw)[INPUT].source

    plain = source()
    ready = source(standardise=True)
    assert not any(isinstance(m, RunningStandardiser) for m in plain.modules())
    seen = []
    hook = ready.generator.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    ready.train()
    ready.read.dropout.eval()
    ready(ctx)
    hook.remove()
    z = sentence_vector(ctx)
    same(seen[0], (z - z.mean(0)) / z.std(0, unbiased=False), 1e-3)


def test_one_rule_gives_the_count_of_the_paper():
    """IDPG §3.2.1: both PHM layers share A; on RoBERTa-large 107,776 parameters, 105K."""
    counts = {}
    for shared in (False, True):
        config = IDPGPHMConfig(prompt_length=5, shared_rule=shared)
        with torch.device("meta"):
            (step,) = config.plan(load_backbone("roberta-large", "meta"), TrainingConfig()).values()
        counts[shared] = sum(p.numel() for p in step.source.parameters())
    assert counts == {False: 111_872, True: 107_776}

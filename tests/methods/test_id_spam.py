"""ID-SPAM's generator is compared with its equations in loops, on every family.

Padding, word order, layers, gradients, the paper's open choices, parameter counts.
"""

import math
from dataclasses import replace

import pytest
import torch
from small import FAMILY, backbone, batch_of, one, refused, same, small_task

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.methods.id_spam import AttentionPromptGenerator, IDSPAMConfig
from idp_tutorial.methods.lpt import lpt_plan
from idp_tutorial.methods.sentence_vectors import MeanPooling, token_vectors
from idp_tutorial.methods.token_attention import TokenAttention
from idp_tutorial.training.config import TrainingConfig

T = 3
C = 7


def generator(seed=3, **kw):  # large weights, so that the attention is far from uniform
    torch.manual_seed(seed)
    gen = AttentionPromptGenerator(32, T, C, **kw).eval()
    with torch.no_grad():
        [
            p.mul_(10 if n[:6] in ("pool.q", "pool.k") and gen.attention_input == "words" else 3)
            for n, p in gen.named_parameters()
        ]
    return gen


def model_with(bb, gen, layer=1, head="classification"):
    h = (
        ClassificationHead(bb.d, 2, bb.default_pooling)
        if head == "classification"
        else VerbalizerHead(bb, small_task().word_ids(bb.tokenizer))
    )
    return PlannedModel(bb, h, lpt_plan(bb, gen, layer)).eval()


def context_at(bb, batch, layer=0):
    return run_layers(bb, batch, stop=layer)


# --- the equations, in loops over scalars


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def times(W, x):
    return [dot(w, x) for w in W]


def by_the_paper(gen, E):
    """Compute Eq. 1 and 2 for the token vectors of one text, as lists of numbers.

    Attention of all queries to all keys, mean of the outputs, down, ReLU, up, and optionally ReLU.
    """
    n = len(E)
    W = {k: v.double().tolist() for k, v in gen.state_dict().items()}
    if "pool.q.weight" in W:
        Q, K, V = [[times(W[f"pool.{o}.weight"], e) for e in E] for o in "qkv"]
        out = []
        for q in Q:
            s = [math.exp(dot(q, k) / math.sqrt(len(k))) for k in K]
            out.append([sum(s[j] * V[j][i] for j in range(n)) / sum(s) for i in range(len(V[0]))])
    else:
        out = E
    A = [sum(o[i] for o in out) / n for i in range(len(out[0]))]
    hidden = [
        max(0.0, x + b) for x, b in zip(times(W["down.weight"], A), W.get("down.bias", [0] * C))
    ]
    p = [x + b for x, b in zip(times(W["up.weight"], hidden), W.get("up.bias", [0] * T * 32))]
    if gen.prompt_relu:
        p = [max(0.0, x) for x in p]
    return torch.tensor(p).reshape(T, 32)


def hugging_face_embeddings(bb, x, reads):
    """Return the word vectors, or the input of the first layer in Hugging Face's forward."""
    if reads == "words":
        return bb.base.get_input_embeddings().weight[x["input_ids"][0]]
    return bb.base(
        input_ids=x["input_ids"], attention_mask=x["attention_mask"], output_hidden_states=True
    ).hidden_states[0][0]


KINDS = [
    dict(),
    dict(attention_input="embeddings"),
    dict(pool="mean"),
    dict(pool="mean", attention_input="embeddings"),
    dict(prompt_relu=True),
    dict(bias=True),
    dict(bias=True, prompt_relu=True, attention_input="embeddings"),
]


@pytest.mark.parametrize(
    "kw", KINDS, ids=[" ".join(f"{k}={v}" for k, v in o.items()) or "default" for o in KINDS]
)
@pytest.mark.parametrize("family", FAMILY)
def test_generator_matches_the_papers_equations(bbs, family, kw):
    bb = bbs(family)
    batch = batch_of(bb, n=4)
    gen = generator(**kw)
    with torch.no_grad():
        got = gen(context_at(bb, batch, 1))
        for i in (0, 2):
            same(
                got[i],
                by_the_paper(
                    gen,
                    hugging_face_embeddings(bb, one(batch, i), kw.get("attention_input", "words"))
                    .double()
                    .tolist(),
                ).float(),
                1e-4,
            )
    assert (got[0] - got[2]).abs().max() > 1e-2


def test_attention_weights_of_the_test_generator_are_not_uniform(bbs):
    """Uniform attention could not be distinguished from the mean."""
    bb = bbs("roberta")
    batch = batch_of(bb)
    w = generator().token_weights(context_at(bb, batch)).detach()
    n = batch["attention_mask"].sum(1)
    same(w.sum(1), torch.ones(len(n)))
    assert (w[batch["attention_mask"] == 0] == 0).all() and (w.max(1).values * n).min() > 1.2
    same(
        generator(pool="mean").token_weights(context_at(bb, batch)),
        batch["attention_mask"] / n[:, None],
    )


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2"])
def test_prompt_enters_before_layer_m(bbs, family, layer):
    """The reference uses Hugging Face's layers, one text at a time."""
    bb = bbs(family)
    batch = batch_of(bb, n=3)
    gen = generator()
    ctx = run_layers(bb, batch, lpt_plan(bb, gen, layer))
    with torch.no_grad():
        for i in range(3):
            x = one(batch, i)
            h = bb.base(
                input_ids=x["input_ids"],
                attention_mask=x["attention_mask"],
                output_hidden_states=True,
            ).hidden_states[layer]
            h = torch.cat([gen(context_at(bb, x))[:1], h], 1)
            n = h.shape[1]
            causal = (
                torch.full((n, n), float("-inf")).triu(1)[None, None] if family == "gpt2" else None
            )
            for l in (bb.base.h if family == "gpt2" else bb.base.encoder.layer)[layer:]:
                h = l(h, attention_mask=causal)
                h = h[0] if isinstance(h, tuple) else h
            same(ctx.h[i : i + 1, :n], bb.base.ln_f(h) if family == "gpt2" else h, 1e-4)


# --- padding, word order and layer


@pytest.mark.parametrize("head", ["classification", "verbalizer"])
@pytest.mark.parametrize("kw", KINDS[:4], ids=["words", "embeddings", "mean", "mean embeddings"])
@pytest.mark.parametrize("family", FAMILY)
def test_padding_and_neighbours_change_nothing(bbs, family, kw, head):
    bb = bbs(family)
    model = model_with(bb, generator(**kw), head=head)
    batch = batch_of(bb, template="code" if head == "verbalizer" else None)
    with torch.no_grad():
        together = model(batch)
        order = torch.randperm(6)
        same(torch.cat([model(one(batch, i)) for i in range(6)]), together)
        same(model({k: v[order] for k, v in batch.items()}), together[order])
        longer = {
            k: torch.nn.functional.pad(v, (0, 9)) if v.dim() == 2 else v for k, v in batch.items()
        }
        longer["input_ids"][:, -9:] = 77
        same(model(longer), together)
    assert (
        batch["attention_mask"].sum(1).unique().numel() > 1
        and (together[0] - together[1]).abs().max() > 1e-3
    )


@pytest.mark.parametrize("pool", ["attention", "mean"])
def test_without_the_mask_neighbours_change_the_prompt(bbs, pool):
    bb = bbs("roberta")
    batch = batch_of(bb)
    i = int(batch["attention_mask"].sum(1).argmin())

    def prompt_difference(masked):
        gen = generator(pool=pool, mask_padding=masked)
        return (gen(context_at(bb, batch))[i] - gen(context_at(bb, one(batch, i)))[0]).abs().max()

    assert prompt_difference(True) < 1e-5 and prompt_difference(False) > 1e-2


@pytest.mark.parametrize("pool", ["attention", "mean"])
@pytest.mark.parametrize("family", FAMILY)
def test_words_are_a_bag_and_embeddings_are_not(bbs, family, pool):
    """Swapping words changes the prompt only if the embeddings contain the order.

    DeBERTa has its positions in the attention, so its embeddings are a bag too. GPT-2 adds its
    positions without a LayerNorm, so the mean of its embeddings is one.
    """
    bb = bbs(family)
    x = one(batch_of(bb), 0)
    y = {k: v.clone() for k, v in x.items()}
    y["input_ids"][0, 1:-1] = y["input_ids"][0, 1:-1].flip(0)

    def prompt_difference(reads):
        gen = generator(attention_input=reads, pool=pool)
        return (gen(context_at(bb, x)) - gen(context_at(bb, y))).abs().max()

    assert prompt_difference("words") < 1e-4 and (prompt_difference("embeddings") > 1e-3) == (
        family in ("roberta", "bert") or (family, pool) == ("gpt2", "attention")
    )


@pytest.mark.parametrize("reads", ["words", "embeddings"])
@pytest.mark.parametrize("family", FAMILY)
def test_the_prompt_does_not_depend_on_the_layer(bbs, family, reads):
    bb = bbs(family)
    batch = batch_of(bb)
    gen = generator(attention_input=reads)
    want = gen(context_at(bb, batch))
    for m in (1, 2):
        same(gen(context_at(bb, batch, m)), want)
    states = context_at(bb, batch, 1).h
    resumed = dict(batch, hidden_states=states, start_layer=torch.ones(len(states)))
    same(
        run_layers(bb, resumed, lpt_plan(bb, gen, 2)).h,
        run_layers(bb, batch, lpt_plan(bb, gen, 2)).h,
    )


def test_attention_without_queries_is_the_mean(bbs):
    bb = bbs("bert")
    batch = batch_of(bb)
    E = token_vectors(context_at(bb, batch))
    keep = batch["attention_mask"]
    pool = TokenAttention(32)
    torch.nn.init.zeros_(pool.q.weight)
    torch.nn.init.eye_(pool.v.weight)
    same(pool(E, keep), MeanPooling()(E, keep))
    same(MeanPooling()(E, keep)[0], E[0, : keep[0].sum()].mean(0))


def test_second_relu_and_biases(bbs):
    bb = bbs("gpt2")
    ctx = context_at(bb, batch_of(bb))
    free = generator()(ctx)
    positive = generator(prompt_relu=True)(ctx)
    same(positive, free.relu())
    assert free.min() < -0.1
    gen = generator(bias=True)
    torch.nn.init.zeros_(gen.up.weight)
    same(gen(ctx), gen.up.bias.view(T, 32).expand(6, -1, -1))
    assert not [n for n, _ in generator().named_parameters() if "bias" in n] and [
        n for n, _ in gen.named_parameters() if "bias" in n
    ] == ["down.bias", "up.bias"]


# --- training


@pytest.mark.parametrize("pool", ["attention", "mean"])
@pytest.mark.parametrize("reads", ["words", "embeddings"])
@pytest.mark.parametrize("family", FAMILY)
def test_gradients_reach_the_generator_and_nothing_else(bbs, family, reads, pool):
    bb = bbs(family)
    model = model_with(bb, generator(attention_input=reads, pool=pool, bias=True), 2).train()
    batch = batch_of(bb)
    model.zero_grad()
    model.loss(batch).backward()
    assert not [
        n for n, p in model.trained_parameters().items() if p.grad is None or not p.grad.any()
    ] and all(p.grad is None for p in bb.model.parameters())
    assert len(model.trained_parameters()) == (
        9 if pool == "attention" else 6
    )  # with the head's two


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_layers_below_the_prompt_have_no_gradient_and_no_dropout(bbs, layer):
    bb = bbs("roberta")
    gen = generator(dropout=0.0)
    model = model_with(bb, gen, layer).train()
    seen = []
    model.plan = {
        layer: replace(model.plan[layer], source=lambda ctx: (seen.append(ctx.h), gen(ctx))[1])
    }
    a, b = [model.compute_context(batch_of(bb)) for _ in range(2)]
    assert (
        not seen[0].requires_grad
        and torch.equal(*seen)
        and a.h.requires_grad
        and (a.h - b.h).abs().max() > 1e-3
    )
    model.eval()


def test_dropout_is_applied_to_the_prompt(bbs):
    bb = bbs("roberta")
    gen = generator(dropout=0.5, bias=True)
    ctx = context_at(bb, batch_of(bb))
    assert (gen(ctx) != 0).all() and 0.3 < (gen.train()(ctx) == 0).float().mean() < 0.7


@pytest.mark.parametrize("pool", ["attention", "mean"])
def test_generator_can_fit_any_prompt_for_each_text(bbs, pool):
    """Six texts have six random target prompts.

    The loss of a static prompt would be at least the variance between the texts.
    """
    bb = bbs("bert")
    ctx = context_at(bb, batch_of(bb))
    gen = AttentionPromptGenerator(32, T, 32, pool, dropout=0.0)
    want = torch.randn(6, T, 32)
    opt = torch.optim.Adam(gen.parameters(), 1e-2)
    for _ in range(150):
        loss = (gen(ctx) - want).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert loss < 0.1 * want.var(0, correction=0).mean()


# --- parameter counts: Tables 12 and 13

PUBLISHED = [
    ("roberta-base", 192, 1, 2_064_384),
    ("roberta-base", 64, 5, 2_064_384),
    ("roberta-large", 192, 1, 3_538_944),
    ("roberta-large", 32, 11, 3_538_944),
    ("gpt2", 192, 1, 2_064_384),
    # the last prints 5.1M; 384·d would be 5.4M
    ("gpt2-medium", 128, 2, 3_538_944),
    ("gpt2-xl", 192, 1, 8_294_400),
    ("gpt2-large", 64, 1, 5_079_040),
]


@pytest.mark.parametrize(
    "name,c,t,n", PUBLISHED, ids=[f"{o[0]} c={o[1]} t={o[2]}" for o in PUBLISHED]
)
def test_published_sizes(name, c, t, n):
    bb = load_backbone(name, weights="meta")
    model = PlannedModel(
        bb, ClassificationHead(bb.d, 2), lpt_plan(bb, AttentionPromptGenerator(bb.d, t, c))
    )
    assert count_parameters(model) == dict(prompt=n, head=2 * bb.d + 2, backbone=0)


def test_published_sizes_of_models_without_a_backbone():
    """Gemma-2B and FLAN-T5-xl have width 2048; the ablation has only the bottleneck."""

    def size(*args, **kw):
        return sum(p.numel() for p in AttentionPromptGenerator(*args, **kw).parameters())

    assert size(2048, 1, 192) == 13_369_344
    assert (
        size(1024, 10, 64, pool="mean") == 11 * 64 * 1024
        and size(1024, 10, 64, bias=True) == size(1024, 10, 64) + 64 + 10 * 1024
    )


# --- invalid arguments


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(pool="max"), ["pool must be ", "got 'max'", "'attention'", "'mean'"]),
    ],
)
def test_invalid_arguments_are_refused(kw, words):
    refused(lambda: AttentionPromptGenerator(32, **kw), *words)


def test_an_unknown_attention_input_is_refused(bbs):
    bb = bbs("roberta")
    ctx = context_at(bb, batch_of(bb))
    with pytest.raises(
        ValueError, match="attention_input must be 'words' or 'embeddings', got 'states'"
    ):
        token_vectors(ctx, "states")


@pytest.mark.parametrize("layer", [-1, 3, 9])
def test_a_layer_out_of_range_is_refused(bbs, layer):
    with pytest.raises(ValueError, match="between 0 and 2"):
        model_with(bbs("roberta"), generator(), layer)


@pytest.mark.parametrize("reads", ["words", "embeddings"])
def test_token_weights_use_the_attention_input(bbs, reads):
    bb = bbs("roberta")
    batch = batch_of(bb)
    gen = generator(attention_input=reads)
    ctx = context_at(bb, batch)
    same(
        gen.token_weights(ctx),
        gen.pool.token_weights(token_vectors(ctx, reads), batch["attention_mask"]),
        0,
    )


def test_biases_are_an_option():
    """ID-SPAM's text has biases, and its Eq. 2 and counts have none: m + t·d parameters."""
    counts = []
    for bias in (False, True):
        config = IDSPAMConfig(prompt_length=5, bottleneck=8, bias=bias)
        bb = backbone("roberta")
        (step,) = config.plan(bb, TrainingConfig()).values()
        counts.append(sum(p.numel() for p in step.source.parameters()))
    assert counts[1] - counts[0] == 8 + 5 * bb.d

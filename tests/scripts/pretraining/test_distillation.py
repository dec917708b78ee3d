"""Distillation: initial embeddings, aligned tokens, and a loss that a perfect map makes zero."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.families.family import wrap_hf_model
from results.pretraining.config import PretrainConfig
from results.pretraining.corpus import train_tokenizer
from results.pretraining.distillation import (
    DistillationLoss,
    encode_aligned_streams,
    project_teacher_embeddings,
)
from results.pretraining.pretrain import pretrain


@pytest.fixture(scope="module")
def lines():
    return [
        r["sentence1"] for t in ("sentiment", "questions") for r in make_rows(t, "train", n=300)
    ]


@pytest.fixture(scope="module")
def tok(lines):
    return train_tokenizer(lines, 500)


@pytest.fixture(scope="module")
def teacher():
    """Return a small BERT with random weights and the tokenizer of MiniLM."""
    tokenizer = load_backbone("minilm").tokenizer
    cfg = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=96,
    )
    torch.manual_seed(0)
    model = BertForMaskedLM._from_config(cfg, attn_implementation="eager")
    return wrap_hf_model(model.eval(), tokenizer, "small-bert")


@pytest.fixture(scope="module")
def arrays(lines, tok, teacher):
    return encode_aligned_streams([*lines, "naïve café — ok", " "], tok, teacher.tokenizer)


def test_initial_embeddings_are_principal_components_of_the_teachers(tok):
    teacher = load_backbone("tiny")
    d = teacher.d
    E = project_teacher_embeddings(tok, teacher, 32)
    assert (
        E.shape == (len(tok), 32)
        and E.isfinite().all()
        and E.std().item() == pytest.approx(0.15, rel=1e-4)
    )
    assert E.mean(0).abs().max() < 1e-4 and not E.requires_grad
    C = E.T @ E
    off_diagonal = C - C.diag().diag()
    # principal components, the largest first
    assert (
        off_diagonal.abs().max() < 1e-3 * C.diag().max()
        and (C.diag()[:-1] >= C.diag()[1:] - 1e-3).all()
    )
    both = [
        i
        for i in range(5, len(tok))
        if len(teacher.tokenizer(tok.decode([i]).strip(), add_special_tokens=False).input_ids) == 1
    ][:100]
    T = teacher.word_embeddings.weight[
        [
            teacher.tokenizer(tok.decode([i]).strip(), add_special_tokens=False).input_ids[0]
            for i in both
        ]
    ]
    full = project_teacher_embeddings(tok, teacher, d)[
        both
    ]  # distances survive where no component is dropped
    a = torch.pdist(full)
    b = torch.pdist(T)
    assert torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.999
    with pytest.raises(ValueError, match=f"d={d + 1}.*{d} dimensions"):
        project_teacher_embeddings(tok, teacher, d + 1)


def test_each_token_is_aligned_with_the_pieces_that_share_its_characters(arrays, tok, teacher):
    S, T, a, b = (arrays[k] for k in ("stream", "teacher", "start", "stop"))
    # the empty document ' ' is not in the streams
    assert (
        len(S) == len(a) == len(b) and (b > a).all() and b[-1] == len(T) and (np.diff(a) >= 0).all()
    )
    assert (tok.eos_token_id == S).sum() == (teacher.tokenizer.sep_token_id == T).sum() == 601
    words = teacher.tokenizer.convert_ids_to_tokens(T.tolist())
    n_spelled_the_same = 0
    for i in range(len(S)):
        token = tok.decode([S[i]]).strip()
        pieces = "".join(w.removeprefix("##") for w in words[a[i] : b[i]])
        if S[i] == tok.eos_token_id:
            assert pieces == "[SEP]"
        else:
            n_spelled_the_same += token in pieces or pieces in token
    assert n_spelled_the_same > 0.99 * (len(S) - 601)


@pytest.fixture(scope="module")
def dist(teacher, arrays):
    return DistillationLoss(teacher, arrays, d=32, n_layers=3, dtype=torch.float32)


@pytest.mark.parametrize("causal,dtype", [(False, torch.bfloat16), (True, torch.float32)])
def test_targets_are_means_of_the_teachers_states(causal, dtype, teacher, arrays):
    dist = DistillationLoss(teacher, arrays, 32, 3, causal=causal, dtype=dtype)
    rng = np.random.default_rng(0)
    positions = rng.integers(0, len(arrays["stream"]) - 24, 4)[:, None] + np.arange(24)
    targets = dist.targets(positions)
    bert = dist.unregistered_teacher[0]
    assert bert.dtype == dtype and teacher.model.dtype == torch.float32  # a copy
    for w, row in enumerate(positions):
        lo = arrays["start"][row[0]]
        hi = arrays["stop"][row[-1]]
        hs = bert(
            torch.tensor([[101, *arrays["teacher"][lo:hi].tolist(), 102]]),
            output_hidden_states=True,
        ).hidden_states
        for k, layer in enumerate((2, 4, 6)):
            h = hs[layer][0].float()
            want = torch.stack(
                [h[1 + arrays["start"][p] - lo : 1 + arrays["stop"][p] - lo].mean(0) for p in row]
            )
            want[-1 if causal else 0] = h[1:-1].mean(0)
            err = (targets[k, w] - want).square().mean(-1).sqrt()
            assert (
                err.max() < 0.05 * want.std()
            )  # bfloat16; the state of a neighbouring token differs ten times as much
    differences = targets[:, :, 1:] - targets[:, :, :-1]
    assert differences.square().mean().sqrt() > 0.5 * targets.std()


def test_the_loss_of_a_constant_is_one_and_of_a_perfect_map_zero(dist, arrays):
    positions = np.arange(24)[None] + 24 * np.arange(8)[:, None]
    for f in dist.projections:
        torch.nn.init.zeros_(f.weight)
        torch.nn.init.zeros_(f.bias)
    assert dist([torch.zeros(8, 24, 32)] * 4, positions).item() == pytest.approx(1, abs=0.3)
    for f in dist.projections:
        torch.nn.init.eye_(f.weight)
    wide = torch.nn.Linear(48, 48)
    torch.nn.init.eye_(wide.weight)
    torch.nn.init.zeros_(wide.bias)
    projections = dist.projections
    dist.projections = torch.nn.ModuleList([wide] * 3)
    t = (dist.targets(positions) - dist.target_mean) / dist.target_std
    assert dist([None, *t], positions).item() < 1e-10 and dist.student_layers == [1, 2, 3]
    dist.projections = projections


def test_the_distillation_loss_falls_and_the_teacher_stays_frozen(tok, arrays, teacher):
    dist = DistillationLoss(teacher, arrays, 32, 3, dtype=torch.float32)
    before = [p.clone() for p in teacher.model.parameters()]
    cfg = PretrainConfig(
        d=32,
        n_layers=3,
        steps=40,
        tokens_per_step=512,
        lr=5e-3,
        warmup=4,
        held_out_tokens=1000,
        dtype="float32",
    )
    _, log = pretrain(
        arrays["stream"],
        tok,
        cfg,
        initial_embeddings=project_teacher_embeddings(tok, teacher, 32),
        distillation_loss=dist,
        eval_every=10,
    )
    # forty steps; real runs have thousands
    assert log[-1]["held_out_distil"] < 0.95 * log[0]["held_out_distil"]
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.model.parameters()))
    assert not any(p.requires_grad for p in teacher.model.parameters())

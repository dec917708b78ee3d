"""Adapters, Compacters and LoRA: sharing, initial values and dropout."""

import math

import pytest
import torch
from small import backbone
from torch import nn

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.methods.adapters import add_adapters, add_compacters, add_lora
from idp_tutorial.methods.phm import PHMLinear


def test_who_shares_a_rule():
    bb = backbone()

    def rules(**kw):
        with add_compacters(bb, 8, **kw):
            return [m.A for m in bb.model.modules() if isinstance(m, PHMLinear)]

    n_head = rules()
    model = rules(share_A_across="model")
    assert (
        len(n_head) == len(model) == 12
        and len({id(a) for a in n_head}) == 6
        and all(a is b for a, b in zip(n_head[::2], n_head[1::2]))
        and len({id(a) for a in model}) == 1
    )


def test_inits():
    torch.manual_seed(0)
    bb = load_backbone("roberta-base", weights="random", num_hidden_layers=2, vocab_size=100)
    with add_adapters(bb):
        for m in bb.model.modules():
            if type(m).__name__ == "Adapter":
                for l in (m.down, m.up):
                    assert (
                        l.weight.std().item() == pytest.approx(0.02, rel=0.05) and not l.bias.any()
                    )
    with add_compacters(bb, share_A_across="model", init="compacter"):
        phm = next(m for m in bb.model.modules() if isinstance(m, PHMLinear))
        # Glorot with gain √2
        assert (
            phm.A.std() < 2e-4
            and phm.s.abs().max() <= math.sqrt(2) * math.sqrt(6 / (192 + 1))
            and not phm.bias.any()
        )
    with add_compacters(bb):
        assert next(
            m for m in bb.model.modules() if isinstance(m, PHMLinear)
        ).s.std().item() == pytest.approx(0.05, rel=0.15)
    with add_lora(bb):
        assert not bb.layers[0].attention.self.query.lora_B["default"].weight.any()
        assert bb.layers[0].attention.self.query.scaling == {"default": 2.0}
    with add_lora(bb, 4, 32):
        assert bb.layers[0].attention.self.query.scaling == {"default": 8.0}


def test_layer_norms_of_the_changed_layers():
    bb = backbone()
    for make in (add_adapters, add_compacters):
        with make(bb, 8, first_layer=1, train_layer_norms=True):
            assert [
                {p.requires_grad for n, p in l.named_parameters() if "LayerNorm" in n}
                for l in bb.layers
            ] == [{False}, {True}, {True}]


def adapters(bb):
    return [m for m in bb.model.modules() if type(m).__name__ == "Adapter"]


def test_second_bias_of_a_compacter():
    bb = backbone()
    with add_compacters(bb, 8):
        assert torch.cat([m.up.bias for m in adapters(bb)]).std().item() == pytest.approx(
            0.02, rel=0.2
        )


def test_compacters_and_lora_drop_where_told():
    bb = backbone()
    with add_compacters(bb, 8, dropout=0.5):
        assert {(m.inner_dropout.p, m.dropout.p) for m in adapters(bb)} == {(0.5, 0.5)}
    with add_lora(bb, dropout=0.5):
        assert {
            m.p
            for n, m in bb.model.named_modules()
            if "lora_dropout" in n and isinstance(m, nn.Dropout)
        } == {0.5}

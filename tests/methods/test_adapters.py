"""Adapters, Compacters and LoRA: sharing, initial values and dropout."""

import pytest
import torch
from small import backbone
from torch import nn

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.methods.adapters import add_adapters, add_compacters, add_lora
from idp_tutorial.methods.phm import PHMLinear


def test_the_two_matrices_of_an_adapter_share_a_rule():
    bb = backbone()
    with add_compacters(bb, 8):
        rules = [m.A for m in bb.model.modules() if isinstance(m, PHMLinear)]
    assert len(rules) == 12 and len({id(a) for a in rules}) == 6
    assert all(a is b for a, b in zip(rules[::2], rules[1::2]))


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
    with add_compacters(bb):
        assert next(
            m for m in bb.model.modules() if isinstance(m, PHMLinear)
        ).s.std().item() == pytest.approx(0.05, rel=0.15)
    with add_lora(bb):
        assert not bb.layers[0].attention.self.query.lora_B["default"].weight.any()
        assert bb.layers[0].attention.self.query.scaling == {"default": 2.0}
    with add_lora(bb, 4, 32):
        assert bb.layers[0].attention.self.query.scaling == {"default": 8.0}


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

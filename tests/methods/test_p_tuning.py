"""P-tuning against `peft`'s prompt encoder with the same weights; what is kept of it.

Every family; sizes.
"""

import pytest
import torch
from peft import PromptEncoderConfig
from peft.tuners.p_tuning import PromptEncoder
from small import FAMILY, backbone, batch_of, one, refused, same

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.planned_model import PlannedModel, count_parameters
from idp_tutorial.methods.p_tuning import ReparameterizedPrompt
from idp_tutorial.methods.prompt_tuning import prompt_plan

NET = ("mlp", "lstm")


@pytest.mark.parametrize("net", NET)
def test_prompt_is_that_of_peft(net):
    peft_prompt = PromptEncoder(
        PromptEncoderConfig(
            peft_type="P_TUNING",
            task_type="SEQ_CLS",
            num_virtual_tokens=6,
            token_dim=32,
            num_transformer_submodules=1,
            num_attention_heads=4,
            num_layers=3,
            encoder_reparameterization_type=net.upper(),
            encoder_hidden_size=12,
            encoder_num_layers=2,
        )
    )
    ours = ReparameterizedPrompt(6, 32, 12, net)
    ours.load_state_dict(
        {
            (
                "table"
                if k == "embedding.weight"
                else k.replace("lstm_head", "lstm").replace("mlp_head", "mlp")
            ): v
            for k, v in peft_prompt.state_dict().items()
        }
    )
    same(ours.compute_prompt(), peft_prompt(torch.arange(6)[None])[0])
    assert ours.compute_prompt().std(0).max() > 1e-3


@pytest.mark.parametrize("net", NET)
@pytest.mark.parametrize("family", FAMILY)
def test_static_padding_gradients_and_baking(family, net):
    bb = backbone(family)
    source = ReparameterizedPrompt(4, 32, 8, net)
    with torch.no_grad():
        [p.mul_(3) for p in source.parameters()]
    head = ClassificationHead(32, 2, bb.default_pooling)
    model = PlannedModel(bb, head, prompt_plan(bb, source)).eval()
    batch = batch_of(bb)
    out = model(batch)
    with torch.no_grad():
        same(torch.cat([model(one(batch, i)) for i in range(6)]), out)
    soft = source.to_soft_prompt()
    static_model = PlannedModel(bb, head, prompt_plan(bb, soft)).eval()
    same(static_model(batch), out)
    assert count_parameters(static_model)["prompt"] == 4 * 32 and soft.p.requires_grad
    with torch.no_grad():
        source.table.add_(1.0)
    assert (model(batch) - out).abs().max() > 1e-4
    same(static_model(batch), out)  # a copy
    model.loss(batch).backward()
    assert not [
        n for n, p in model.trained_parameters().items() if p.grad is None or not p.grad.any()
    ] and all(p.grad is None for p in bb.model.parameters())
    p = source(type("", (), dict(h=torch.zeros(3, 9, 32))))
    assert torch.equal(p[0], p[2]) and p.shape == (3, 4, 32)


def test_sizes():
    d = 1024
    h = 128
    t = 10
    bb = load_backbone("roberta-large", weights="meta")
    mlp = t * d + d * h + h + h * h + h + h * d + d
    lstm = (
        t * d
        + sum(2 * (4 * h * (i + h) + 8 * h) for i in (d, 2 * h))
        + 4 * h * h
        + 2 * h
        + 2 * h * d
        + d
    )
    for net, n in (("mlp", mlp), ("lstm", lstm)):
        assert count_parameters(
            PlannedModel(
                bb, ClassificationHead(d, 2), prompt_plan(bb, ReparameterizedPrompt(t, d, h, net))
            )
        ) == dict(prompt=n, head=2050, backbone=0)


@pytest.mark.parametrize(
    "kw,words",
    [
        (dict(t=2, d=8, network="gru"), ["network must be ", "got 'gru'", "'mlp' or 'lstm'"]),
    ],
)
def test_what_cannot_be_built(kw, words):
    refused(lambda: ReparameterizedPrompt(**kw), *words)

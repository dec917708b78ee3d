"""AdamW in float32 for a model in half precision, and its schedule."""

import pytest
import torch

from idp_tutorial.reproduction.pretraining.language_modelling import create_language_model
from idp_tutorial.reproduction.pretraining.master_weights import MasterWeightOptimizer
from idp_tutorial.reproduction.pretraining.pretrain import PretrainConfig


def test_the_optimizer_is_adamw_in_float32():
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    twin = torch.nn.Linear(8, 8)
    twin.load_state_dict(net.state_dict())
    cfg = PretrainConfig(lr=1e-2, warmup=2, steps=10, dtype="float32")
    m = MasterWeightOptimizer([net], cfg)
    opt = torch.optim.AdamW(
        [dict(params=[twin.weight], weight_decay=0.01), dict(params=[twin.bias], weight_decay=0.0)],
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    for s in range(4):
        x = torch.randn(4, 8)
        for o in opt.param_groups:
            o["lr"] = 1e-2 * min((s + 1) / 2, 1.0, (10 - s) / 6)
        for n, step in (
            (net, m.step),
            (
                twin,
                lambda: (
                    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0),
                    opt.step(),
                    opt.zero_grad(),
                ),
            ),
        ):
            n(x).square().sum().backward()
            step()
    torch.testing.assert_close(net.weight, twin.weight)
    torch.testing.assert_close(net.bias, twin.bias)


def test_master_weights_take_steps_that_half_precision_would_round_away():
    net = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.ones_(net.weight)
    m = MasterWeightOptimizer([net], PretrainConfig(lr=1e-4, warmup=1, steps=100))
    for _ in range(60):
        net(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum().backward()
        m.step()
    # 60 steps of 1e-4; one alone rounds away
    assert (
        net.weight.dtype == torch.bfloat16
        and m.master_parameters[0].dtype == torch.float32
        and (m.master_parameters[0] < 0.996).all()
    )
    assert (net.weight < 1).all()


def test_the_learning_rate_warms_up_and_decays():
    cfg = PretrainConfig(lr=3e-3, warmup=4, steps=12)
    m = MasterWeightOptimizer([create_language_model(20, 32, 1)], cfg)
    lrs = []
    for _ in range(12):
        lrs.append(m.optimizer.param_groups[0]["lr"])
        m.optimizer.step()
        m.lr_scheduler.step()
    assert lrs == pytest.approx([cfg.lr * min((s + 1) / 4, 1, (12 - s) / 7.2) for s in range(12)])
    assert [g["weight_decay"] for g in m.optimizer.param_groups] == [0.01, 0.0]

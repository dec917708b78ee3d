"""Probes: linear models on pooled representations, and the head that starts from one."""

from dataclasses import replace

import pytest
import torch
from small import (
    backbone,
    config,
    model_of,
    small_task,
)

from idp_tutorial.assembly.probe import (
    _expand_to_all_classes,
    fit_best_probe,
    fit_linear_model,
    initialise_head_from_probe,
    pool_all_layers,
)
from idp_tutorial.runs.experiment import Experiment
from idp_tutorial.training.evaluation import predict_logits
from idp_tutorial.training.examples import encode_rows
from idp_tutorial.utils.checks import UserError


def test_a_head_is_initialised_from_a_probe(small_folder):
    task = small_task(train=60, validation=24, test=24)
    cfg = config(
        method="lpt",
        steps=1,
        eval_every=1,
        lr=1e-9,
        head_init="probe",
        backbone=str(small_folder),
    )
    model = model_of("head-only", backbone())
    probe = initialise_head_from_probe(model, task, cfg)
    assert (probe["layer"], probe["pooling"]) == (model.backbone.n_layers, "mean")
    _, log = Experiment(replace(cfg, method="head-only"), task).fit()
    random_cfg = replace(cfg, method="head-only", head_init="random")
    _, random_log = Experiment(random_cfg, task).fit()
    assert log.losses[0] < random_log.losses[0]
    with pytest.raises(ValueError, match="needs a linear head"):
        initialise_head_from_probe(
            model_of("lpt", backbone(), two_layer_head=True),
            task,
            replace(cfg, two_layer_head=True),
        )


def test_the_model_of_a_probe_says_what_the_regression_says(cfg):
    """`W` and `b` are for states as they are; padding changes nothing."""
    task = small_task(train=60, validation=24, test=24)
    c = cfg(method="probe")
    model, log = Experiment(c, task).fit()
    head = model.head
    chosen = log.probe
    assert (head.layer, head.pooling) == (chosen["layer"], chosen["pooling"]) and chosen[
        "converged"
    ]
    template = c.template if head.pooling == "mask" else None
    examples = encode_rows(task, task.splits["test"], model.backbone, c.max_len, template)
    X = pool_all_layers(model.backbone, examples, (head.pooling,))[:, head.layer, 0].float()
    torch.testing.assert_close(
        predict_logits(model, examples),
        X @ head.net.weight.T.detach() + head.net.bias.detach(),
        atol=2e-2,
        rtol=2e-2,
    )  # the read-outs were kept in float16
    assert {t["pooling"] for t in chosen["candidates"]} == {"mean", "cls", "last", "mask"}


def test_a_class_without_a_training_text_is_never_the_answer():
    W, b = _expand_to_all_classes(torch.ones(2, 3), torch.zeros(2), [0, 2], 3)
    assert ((torch.randn(50, 3) @ W.T + b).argmax(1) != 1).all()
    X = torch.randn(30, 4)
    y = torch.arange(30) % 2 * 2
    W, b, _ = fit_linear_model(X, y, 1.0, 3)
    assert W.shape == (3, 4) and ((X @ W.T + b).argmax(1) != 1).all()


def test_a_probe_can_be_kept_to_one_layer(cfg):
    task = small_task(train=40, validation=16, test=16)
    bb = backbone()

    def is_last_mean(layer, name):
        return (layer, name) == (bb.n_layers, "mean")

    _, _, chosen = fit_best_probe(bb, task, cfg(), accept_layer_and_pooling=is_last_mean)
    assert (chosen["layer"], chosen["pooling"]) == (bb.n_layers, "mean") and len(
        chosen["candidates"]
    ) == 5


def test_a_probe_of_two_classes_of_three():
    """The third has no training text and is never the answer; the others are told apart."""
    y = [0] * 10 + [2] * 10
    X = torch.tensor([[5.0 - c, 1.0] for c in y]) + 0.01 * torch.randn(
        20, 2, generator=torch.Generator().manual_seed(0)
    )
    W, b, _ = fit_linear_model(X, y, 1.0, 3)
    assert (X @ W.T + b).argmax(1).tolist() == y
    with pytest.raises(ValueError, match="one class"):
        fit_linear_model(X, [1] * 20, 1.0, 3)


def test_a_probe_of_a_label_of_no_row_is_constant():
    X = torch.randn(40, 4)
    y = torch.stack([X[:, 0] > 0, torch.zeros(40), torch.ones(40)], 1).float()
    W, b, converged = fit_linear_model(X, y, 1.0, 3)
    assert W.shape == (3, 4) and converged
    predicted = X @ W.T + b > 0
    assert (predicted[:, 0] == (X[:, 0] > 0)).float().mean() > 0.9
    assert not predicted[:, 1].any() and predicted[:, 2].all()


def test_damaged_cached_representations_are_computed_again(tmp_path):
    bb = backbone()
    task = small_task(train=12)
    examples = encode_rows(task, task.splits["train"], bb, 32)
    want = pool_all_layers(bb, examples, folder=tmp_path)
    part = max((p for p in tmp_path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 64
    part.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged"):
        assert torch.equal(pool_all_layers(bb, examples, folder=tmp_path), want)


def test_a_task_without_a_probe_is_refused(cfg):
    """There is no probe at the mask token without a template."""
    task = replace(small_task(train=12), templates={})
    with pytest.raises(UserError, match="no probe fits task 'sentiment'"):
        fit_best_probe(
            backbone(), task, cfg(), accept_layer_and_pooling=lambda layer, name: name == "mask"
        )

"""Compare results on a GPU with those on the CPU; the tests are skipped without a GPU.

They cover every method, caches, resuming, half precision, saved models and several tasks.
"""

import pytest
import torch
from small import (
    Killed,
    backbone,
    batch_of,
    config,
    kill_at,
    model_of,
    numbers,
    small_task,
    text_of,
)

from idp_tutorial.assembly.build import build_model
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.phm import PHMLinear
from idp_tutorial.reproduction.analysis.layer_choice import choose_prompt_layer
from idp_tutorial.runs.experiment import run_experiment
from idp_tutorial.saving.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.serving.multitask import MultiTaskModel, TaskModel
from idp_tutorial.training.evaluation import predict
from idp_tutorial.training.fit import fit
from results.depth.information import probe_layers, states_by_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU")
HEADS = ("classification", "verbalizer")


def on_gpu(batch):
    return {k: v.cuda() for k, v in batch.items()}


def loss_and_gradients(model, batch):
    """Return the loss, and the gradients of the trained parameters on the CPU."""
    loss = model.loss(batch)
    parameters = model.trained_parameters()
    if not parameters:
        return loss.item(), {}
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return loss.item(), {
        name: gradient.cpu() for name, gradient in zip(parameters, gradients, strict=True)
    }


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ["roberta", "bert", "gpt2", "deberta"])
@pytest.mark.parametrize("method", METHODS)
def test_loss_and_gradients_equal_those_on_the_cpu(method, family, head):
    if (method, head) == ("efl", "verbalizer"):
        pytest.skip("EFL has an entailment head")
    bb = backbone(family)
    try:
        model = model_of(method, bb, head=head)
    except ValueError as e:
        pytest.skip(str(e))
    batch = batch_of(bb, template="code" if head == "verbalizer" else None)
    cpu_loss, cpu_gradients = loss_and_gradients(model, batch)
    loss, gradients = loss_and_gradients(model.cuda(), on_gpu(text_of(batch)))
    assert abs(loss - cpu_loss) < 1e-4 * max(1, abs(cpu_loss))
    for name, gradient in cpu_gradients.items():
        tolerance = 1e-4 * max(1, gradient.abs().max().item())
        torch.testing.assert_close(gradients[name], gradient, atol=tolerance, rtol=1e-3)


def train(cfg, task=None, **kw):
    """Return the log of `fit`, and the model."""
    task = task or small_task()
    model = build_model(cfg, backbone(), task)
    return fit(model, task, cfg, **kw), model


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method):
    log, model = train(config(method=method, device="auto", lr=1e-3, standardise=True))
    assert next(model.parameters()).is_cuda
    assert len(log.losses) == 4
    assert log.peak_memory_mb > 0
    assert log.ms_per_step > 0


@pytest.mark.parametrize("cache", ["hidden", "sentence", "both"])
@pytest.mark.parametrize("method", ["lpt-npg", "s-idpg-phm", "m-idpg-dnn"])
def test_caches_change_no_loss(method, cache, tmp_path):
    options = dict(method=method, device="auto", prompt_dropout=0.0, pooling="cls")
    uncached = train(config(**options))[0]
    cached = train(config(**options, cache=cache, cache_dir=str(tmp_path)))[0]
    torch.testing.assert_close(
        torch.tensor(cached.losses), torch.tensor(uncached.losses), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "method", ["lpt-npg", "m-idpg-phm", "p-tuning-v2", "id-spam", "fine-tuning"]
)
def test_half_precision_gives_nearly_the_same_first_loss(method, precision):
    options = dict(method=method, device="auto", lr=1e-3, prompt_dropout=0.0)
    float32_log, _ = train(config(**options, precision="no"))
    half_log, _ = train(config(**options, precision=precision))
    float32_loss = float32_log.losses[0]
    assert abs(float32_loss - half_log.losses[0]) < 0.1 * max(1, float32_loss)


def test_a_killed_run_resumes(tmp_path):
    cfg = config(device="auto", steps=7, eval_every=3)
    uninterrupted = train(cfg)[0]
    model = build_model(cfg, backbone(), small_task())
    kill_at(model, 6)
    with pytest.raises(Killed):
        fit(model, small_task(), cfg, checkpoint_dir=tmp_path, save_every=2)
    torch.rand(3, device="cuda")
    resumed = train(cfg, checkpoint_dir=tmp_path, save_every=2)[0]
    assert numbers(resumed)[1:] == numbers(uninterrupted)[1:]
    # the order of the terms of a sum varies on a GPU
    torch.testing.assert_close(
        torch.tensor(resumed.losses),
        torch.tensor(uninterrupted.losses),
        atol=1e-5,
        rtol=1e-5,
    )


def test_a_model_saved_on_the_gpu_predicts_the_same_on_the_cpu(small_folder, tmp_path):
    from idp_tutorial.backbones.load import load_backbone

    task = small_task()
    cfg = config(backbone=str(small_folder), device="auto")
    model = build_model(cfg, load_backbone(small_folder), task)
    fit(model, task, cfg)
    rows = task.splits["test"][:5]
    save_pretrained(model, tmp_path, task, cfg)
    expected = predict(model, task, cfg, rows)
    predictions = predict(*from_pretrained(tmp_path), rows)
    for a, b in zip(predictions, expected, strict=True):
        assert a["probabilities"] == pytest.approx(b["probabilities"], abs=1e-4)


def test_several_tasks_in_one_batch_give_the_logits_of_the_cpu():
    bb = backbone()
    tasks = {n: small_task(n) for n in ("sentiment", "questions")}
    task_models = {
        n: TaskModel(model_of(m, bb, t), t, config(method=m))
        for (n, t), m in zip(tasks.items(), ("lpt-npg", "p-tuning-v2"))
    }
    rows = [dict(r, task=n) for n, t in tasks.items() for r in t.splits["test"][:4]]
    model = MultiTaskModel(task_models)
    examples = model.encode(rows)
    cpu_logits = model.compute_outputs(examples)
    for member in task_models.values():
        member.model.cuda()
    logits = model.compute_outputs(examples)
    for a, b in zip(logits, cpu_logits, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-4, rtol=1e-4)
    assert model.predict(rows)


def test_the_chosen_layer_is_the_same_as_on_the_cpu():
    bb = backbone()
    task = small_task(train=64)
    expected = choose_prompt_layer(bb, task)
    bb.model.cuda()
    choice = choose_prompt_layer(bb, task)
    assert choice["layer"] == expected["layer"]
    expected_bits = [row["bits"] for row in expected["rows"]]
    assert [row["bits"] for row in choice["rows"]] == pytest.approx(expected_bits, abs=0.05)


def test_probes_train_on_the_device_of_the_model():
    """They are initialised as on the CPU, and do not change the caller's random state."""
    task = small_task(train=64)
    model = model_of("lpt-npg", backbone(), task)
    options = dict(max_examples=24, depth=1, width=16, steps=6)
    expected = probe_layers(model, task, **options)
    model.cuda()
    torch.manual_seed(1)
    random_numbers = torch.rand(3, device="cuda")
    torch.manual_seed(1)
    probes = probe_layers(model, task, **options)
    assert torch.equal(torch.rand(3, device="cuda"), random_numbers)
    expected_bits = [probe["bits"] for probe in expected]
    assert [probe["bits"] for probe in probes] == pytest.approx(expected_bits, abs=1e-2)
    rows = task.encode(task.splits["test"][:5], model.backbone.tokenizer, 60)
    assert all(h.is_cuda for states in states_by_layer(model, rows) for h in states)


def test_a_phm_layer_equals_its_weight_matrix():
    phm = PHMLinear(32, 64, 4).cuda()
    x = torch.randn(6, 32, device="cuda")
    torch.testing.assert_close(phm(x), x @ phm.weight + phm.bias, atol=1e-5, rtol=1e-4)


def test_a_record_contains_device_and_memory(small_folder):
    cfg = config(backbone=str(small_folder), device="auto", lr=1e-2)
    record = run_experiment(cfg, small_task())
    assert record["device"] == "auto"
    assert record["peak_memory_mb"] > 0


@pytest.mark.slow
def test_compiled_layers_give_the_same_losses():
    eager, compiled = [
        train(config(device="auto", prompt_dropout=0.0, compile=c))[0].losses for c in (False, True)
    ]
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), atol=1e-3, rtol=1e-3)

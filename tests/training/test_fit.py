"""The training loop: seeds, frozen weights, best checkpoint, accumulation, schedule, divergence.

Also regression, precision, compilation and several processes.
"""

import contextlib
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from consistency import single_step_plan
from small import (
    EACH_METHOD,
    Killed,
    backbone,
    batch_of,
    config,
    kill_at,
    model_of,
    refused,
    small_task,
    topic_task,
)
from small_models import (
    SMALL_CONFIGS,
    attention_implementations,
    random_batch,
    random_prompt,
    small_backbone,
)
from torch import nn

from idp_tutorial.assembly.build import build_model, load_config_backbone
from idp_tutorial.core.heads import ClassificationHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, trained_state
from idp_tutorial.core.steps import Insert, KeyValue
from idp_tutorial.data.task import scale_labels
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.saving.prompt_files import from_pretrained, save_pretrained
from idp_tutorial.training.distributed import compile_trained_layers
from idp_tutorial.training.evaluation import evaluate, predict_logits
from idp_tutorial.training.fit import fit


class StaticPrompt(nn.Module):
    """A static prompt without dropout."""

    def __init__(self, t=4, d=32):
        super().__init__()
        self.p = nn.Parameter(torch.randn(t, d))

    def forward(self, ctx):
        return self.p.expand(len(ctx.h), -1, -1)


def model_without_dropout(std=0.2, n_out=2, layer=2):
    """A model whose results depend on the data only."""
    torch.manual_seed(0)
    bb = backbone(std=std)
    for m in bb.model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    for l in bb.layers:
        l.attention.self.dropout.p = 0.0
    return PlannedModel(
        bb, ClassificationHead(bb.d, n_out, "mean"), {layer: Insert(StaticPrompt())}
    )


def tensors(model):
    return {n: p.detach().clone() for n, p in model.trained_parameters().items()}


@pytest.fixture
def adamw(monkeypatch):
    """Record learning rate, weight decay, gradient norm and parameters of every optimizer step."""
    steps = []

    class Recorder(torch.optim.AdamW):
        def step(self, *args, **kwargs):
            params = [p for g in self.param_groups for p in g["params"]]
            norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
            steps.append(
                dict(
                    lr=self.param_groups[0]["lr"],
                    decay=self.param_groups[0]["weight_decay"],
                    norm=norm.item(),
                    params=params,
                )
            )
            return super().step(*args, **kwargs)

    monkeypatch.setattr(torch.optim, "AdamW", Recorder)
    return steps


# --- seeds and frozen weights


@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_run_depends_on_its_seed_only(method):
    task = small_task()

    def train(seed):
        cfg = config(method=method, seed=seed, steps=3, lr=1e-3)
        bb = backbone()
        model = build_model(cfg, bb, task)
        torch.rand(seed + 3)
        log = fit(model, task, cfg)
        return log.losses, log.history, tensors(model)

    (l1, h1, w1), (l2, h2, w2), (l3, _, w3) = train(0), train(0), train(1)
    assert l1 == l2 and h1 == h2 and all(torch.equal(w1[n], w2[n]) for n in w1)
    assert l1 != l3 and any(not torch.equal(w1[n], w3[n]) for n in w1)


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("fine-tuning", "efl")])
def test_frozen_weights_do_not_change(method, adamw):
    task = small_task()
    bb = backbone()
    cfg = config(method=method, steps=3, lr=0.1)
    model = build_model(cfg, bb, task)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    trained = model.trained_parameters()
    fit(model, task, cfg)
    after = model.state_dict()
    changed = {n for n in after if not torch.equal(after[n], before[n])}
    ids = {id(p) for p in trained.values()}  # a generator that layers share has several names
    # all trained tensors change, and no others
    assert changed == {n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in ids}
    assert {id(p) for s in adamw for p in s["params"]} == {id(p) for p in trained.values()}


def test_the_seed_determines_the_order_of_the_examples():
    def order(seed):
        model = model_without_dropout()
        batches = []
        original_loss = model.head.loss

        def loss(ctx, label):
            batches.append(ctx.input_ids.sum(1).tolist())
            return original_loss(ctx, label)

        model.head.loss = loss
        fit(model, small_task(), config(steps=2, seed=seed))
        return batches

    assert order(0) == order(0) != order(1)


def test_evaluate_disables_dropout():
    bb = backbone()
    task = small_task()
    model = model_of("lpt", bb, task)
    examples = task.encode(task.splits["test"], bb.tokenizer, 60)
    outputs = []
    model.head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    for _ in range(2):
        model.train()
        evaluate(model, examples, task)
    assert torch.equal(*outputs)


# --- the best checkpoint


def script_evaluations(monkeypatch, evaluations, model):
    """Let a run have the given (score, loss) pairs; return the tensors of each evaluation."""
    evaluated = []

    def validate(run):
        evaluated.append(tensors(model))
        return *evaluations[len(evaluated) - 1], [f"outputs {len(evaluated) - 1}"]

    monkeypatch.setattr("idp_tutorial.training.fit.TrainingRun.validate", validate)
    return evaluated


@pytest.mark.parametrize(
    "scores,losses,best",
    [
        ([50, 60, 60, 40], [0.5, 0.4, 0.6, 0.1], 1),
        ([70, 60, 60, 40], [0.9, 0.2, 0.2, 0.2], 0),
        ([10, 20, 30, 40], [0.1, 0.2, 0.3, 0.4], 3),
        ([5, 5, 5, 5], [0.6, 0.4, 0.1, 0.2], 2),
        ([5, 5, 5, 5], [0.6, 0.1, 0.1, 0.2], 1),
        ([5, 5, 5, 5], [None, None, None, None], 0),  # generated texts have no loss
    ],
)
def test_the_best_tensors_are_restored_and_a_tie_is_broken_by_the_loss(
    scores, losses, best, monkeypatch
):
    model = model_without_dropout()
    evaluated = script_evaluations(monkeypatch, list(zip(scores, losses, strict=True)), model)
    log = fit(model, small_task(), config(steps=7, eval_every=2, lr=0.05))
    # the last step is always evaluated
    assert log.history == list(zip([2, 4, 6, 7], scores)) and log.validation == max(scores)
    assert (log.validation_losses, log.validation_loss) == (losses, losses[best])
    assert log.validation_outputs == [f"outputs {best}"]
    for n, p in tensors(model).items():
        assert torch.equal(p, evaluated[best][n])
    assert not torch.equal(evaluated[0]["sources.0.p"], evaluated[3]["sources.0.p"])


@pytest.mark.parametrize(
    "losses,steps",
    [([0.5, 0.6, 0.7, 0.1], 3), ([0.5, 0.4, 0.3, 0.2], 4), ([0.5, 0.4, 0.4, 0.4], 4)],
)
def test_patience_watches_the_loss_where_scores_are_equal(losses, steps, monkeypatch):
    model = model_without_dropout()
    script_evaluations(monkeypatch, [(100.0, loss) for loss in losses], model)
    log = fit(model, small_task(), config(steps=4, eval_every=1, patience=2))
    assert log.steps == steps


@pytest.mark.parametrize("task_name", ["sentiment", "questions", "similarity", "topics"])
def test_the_validation_loss_is_that_of_the_outputs_of_the_score(task_name, monkeypatch):
    task = topic_task() if task_name == "topics" else small_task(task_name)
    cfg = config(steps=2, eval_every=2, lr=1e-3, task=task_name)
    model = build_model(cfg, backbone(), task)
    batches = []
    original_forward = model.forward

    def forward(batch, return_loss=False):
        batches.extend([] if return_loss else [len(batch["input_ids"])])
        return original_forward(batch, return_loss)

    model.forward = forward
    log = fit(model, task, cfg)
    assert sum(batches) == len(task.splits["validation"])  # one pass
    batch = scale_labels(batch_of(model.backbone, task, n=24, split="validation"), task)
    with torch.no_grad():
        expected = model.eval().loss(batch).item()
    assert log.validation_loss == pytest.approx(expected, rel=1e-5)


# --- accumulation, clipping, schedule


@pytest.mark.parametrize(
    "schedule,learning_rates",
    [("linear", [0, 0.5, 1, 0.75, 0.5, 0.25]), ("constant", [0, 0.5, 1, 1, 1, 1])],
)
def test_the_learning_rate_follows_the_schedule(schedule, learning_rates, adamw):
    cfg = config(steps=6, lr=1.0, warmup=0.34, schedule=schedule, clip=1e-9)
    fit(model_without_dropout(), small_task(), cfg)
    assert [step["lr"] for step in adamw] == learning_rates


def test_two_accumulated_batches_equal_one_large_batch():
    task = small_task(train=32)

    def train(batch_size, accumulate):
        model = model_without_dropout()
        log = fit(
            model, task, config(steps=4, lr=1e-3, batch_size=batch_size, accumulate=accumulate)
        )
        return tensors(model), log.losses

    (a, losses), (b, accumulated_losses) = train(32, 1), train(16, 2)
    for n in a:
        torch.testing.assert_close(a[n], b[n], atol=1e-5, rtol=0)
    # the loss of a step is the mean over its batches
    assert losses == pytest.approx(accumulated_losses, abs=1e-4)


@pytest.mark.parametrize("n", [32, 48, 80])
def test_steps_that_contain_the_end_of_an_epoch_are_complete(n, adamw):
    model = model_without_dropout()
    # an epoch has 3 or 5 batches, so a step of two contains its end
    fit(model, small_task(train=n), config(steps=7, lr=1e-3, batch_size=16, accumulate=2))
    assert len(adamw) == 7


def test_the_gradient_of_a_step_is_the_mean_over_its_batches(adamw):
    task = small_task(train=32)
    for size, n in ((32, 1), (16, 2), (8, 4)):
        fit(
            model_without_dropout(),
            task,
            config(steps=1, lr=1e-3, batch_size=size, accumulate=n, clip=1e9),
        )
    norms = [s["norm"] for s in adamw]
    assert norms[0] > 1e-3 and norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_weight_decay_is_that_of_the_config(adamw):
    fit(model_without_dropout(), small_task(), config(steps=1, weight_decay=0.3))
    assert [s["decay"] for s in adamw] == [0.3]


def test_gradients_are_clipped(adamw):
    model = model_without_dropout()
    task = small_task()
    fit(model, task, config(steps=2, clip=1e9))
    largest_norm = max(s["norm"] for s in adamw)
    adamw.clear()
    fit(model_without_dropout(), task, config(steps=2, clip=largest_norm / 100))
    assert [s["norm"] for s in adamw] == pytest.approx([largest_norm / 100] * 2, rel=1e-3)


@pytest.mark.parametrize(
    "options,message",
    [
        (
            dict(clip=0.0),
            "clip must be a positive number, got 0.0 (the largest gradient norm, such as 1; "
            "float('inf'): no limit).",
        ),
        (
            dict(warmup=6.0),
            "warmup must be below 1, got 6.0 (a fraction of the steps, such as .06).",
        ),
        (
            dict(warmup=-1.0),
            "warmup must be at least 0, got -1.0 (a fraction of the steps, such as .06).",
        ),
    ],
)
def test_invalid_clip_and_warmup_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config(**options)


def test_the_learning_rate_warms_up_and_decays_linearly(adamw):
    fit(
        model_without_dropout(), small_task(), config(steps=20, warmup=0.25, lr=0.02, eval_every=20)
    )
    expected = [0.02 * (i / 5 if i < 5 else (20 - i) / 15) for i in range(20)]
    assert [s["lr"] for s in adamw] == pytest.approx(expected)


# --- divergence


@pytest.mark.parametrize("first_nan,steps", [(1, 3), (12, 15), (13, 13)])
def test_a_loss_that_is_not_finite_ends_the_run(first_nan, steps, monkeypatch):
    model = model_without_dropout()
    calls = []
    original_loss = model.head.loss

    def loss(ctx, label):
        calls.append(1)
        return original_loss(ctx, label) * (float("nan") if len(calls) >= first_nan else 1.0)

    monkeypatch.setattr(model.head, "loss", loss)
    with pytest.raises(
        FloatingPointError,
        match=r"loss is nan at step \d+ \(method 'lpt-npg', learning rate 0.01, "
        r"precision 'no'\).*A lower lr usually fixes it",
    ):
        fit(model, small_task(), config(steps=steps, eval_every=100))


def test_outputs_that_are_not_finite_are_refused():
    model = model_without_dropout()
    # the loss is finite, but the step makes the weights nan
    hook = model.head.net.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(FloatingPointError, match="lower"):
        fit(model, small_task(), config(steps=1))
    hook.remove()
    for name in ("sentiment", "similarity"):
        model = model_without_dropout(n_out=2 if name == "sentiment" else 1)
        model.head.net.weight.data.fill_(float("nan"))
        task = small_task(name)
        with pytest.raises(FloatingPointError, match="lower"):
            evaluate(model, task.encode(task.splits["test"], model.backbone.tokenizer, 60), task)


# --- precision, devices, output


def test_precision_may_change_between_runs_of_a_process():
    losses = {}
    for precision in ("no", "bf16", "no"):
        model = model_without_dropout()
        log = fit(model, small_task(), config(steps=3, lr=1e-3, precision=precision))
        assert all(map(math.isfinite, log.losses)) and all(
            p.dtype == torch.float32 for p in model.trained_parameters().values()
        )
        losses.setdefault(precision, []).append(log.losses)
    assert losses["no"][0] == losses["no"][1] != losses["bf16"][0] and losses["bf16"][
        0
    ] == pytest.approx(losses["no"][0], rel=0.05)


def record_modes(model):
    """Return a list that gets (training mode, autocast) of every forward pass."""
    modes = []
    compute_context = model.compute_context

    def compute_context_and_record(batch):
        modes.append((model.training, torch.is_autocast_enabled("cpu")))
        return compute_context(batch)

    model.compute_context = compute_context_and_record
    return modes


@pytest.mark.grid
@pytest.mark.parametrize("compile", [False, True])
def test_evaluations_run_without_autocast(compile, small_folder, tmp_path, monkeypatch):
    """The trained model predicts the same as a model that only gets its weights."""
    original_compile = nn.Module.compile

    def compile_eagerly(module, **kwargs):
        return original_compile(module, **kwargs, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", compile_eagerly)
    task = small_task()
    cfg = config(lr=1e-3, precision="bf16", compile=compile, backbone=str(small_folder))
    model, other = [build_model(cfg, load_config_backbone(cfg), task) for _ in range(2)]
    modes = record_modes(model)
    log = fit(model, task, cfg)
    assert {*modes} == {(True, True), (False, False)}
    with torch.no_grad():
        for n, t in trained_state(other).items():
            t.copy_(trained_state(model)[n])
    examples, validation = [
        task.encode(task.splits[s], model.backbone.tokenizer, 60) for s in ("test", "validation")
    ]
    expected = predict_logits(model, examples)
    assert torch.equal(expected, predict_logits(other, examples))
    assert log.validation == evaluate(other, validation, task)[0]["accuracy"]
    save_pretrained(model, tmp_path, task, cfg)
    loaded, _, _ = from_pretrained(tmp_path, str(small_folder))
    assert torch.equal(expected, predict_logits(loaded, examples))


def test_the_precision_of_a_run_does_not_affect_later_runs():
    """It does not, even if the first run was killed."""
    task = small_task()

    def losses_after(*earlier_runs):
        model = model_without_dropout()
        start = tensors(model)
        for precision, kill in earlier_runs:
            attributes = {*vars(model)}
            if kill:
                kill_at(model, 2)
            with pytest.raises(Killed) if kill else contextlib.nullcontext():
                fit(model, task, config(lr=1e-3, precision=precision))
            if kill:
                del model.forward
            assert {*vars(model)} == attributes and model.forward.__func__ is PlannedModel.forward
            with torch.no_grad():
                for n, p in model.trained_parameters().items():
                    p.copy_(start[n])
        modes = record_modes(model)
        log = fit(model, task, config(lr=1e-3))
        assert not any(autocast for _, autocast in modes)
        return log.losses

    expected = losses_after()
    assert losses_after(("bf16", False)) == losses_after(("bf16", True)) == expected
    model = model_without_dropout()
    fit(model, task, config(lr=1e-3))
    modes = record_modes(model)
    fit(model, task, config(lr=1e-3, precision="bf16"))
    assert {*modes} == {(True, True), (False, False)}


def test_an_unknown_device_or_precision_is_refused():
    for options, words in (
        (dict(device="gpu"), ["device must be ", "got 'gpu'", "'auto' or 'cpu'"]),
        (dict(precision="half"), ["precision must be ", "got 'half'", "bf16"]),
    ):
        refused(lambda: fit(model_without_dropout(), small_task(), config(**options)), *words)


def test_no_progress_bar_without_a_terminal(capfd):
    fit(model_without_dropout(), small_task(), config())
    assert capfd.readouterr() == ("", "")


# --- regression, order, memory


def test_a_regression_is_trained_on_0_to_1_and_predicts_0_to_5(monkeypatch):
    task = small_task("similarity")
    model = model_without_dropout(n_out=1)
    labels = []
    original_loss = model.head.loss

    def loss(ctx, label):
        labels.append(label)
        return original_loss(ctx, label)

    monkeypatch.setattr(model.head, "loss", loss)
    log = fit(model, task, config(lr=1e-3))
    y = torch.cat(labels)
    assert (
        y.dtype == torch.float32
        and 0 <= y.min() < 0.2
        and 0.8 < y.max() <= 1
        and len(log.losses) == 4
    )
    nn.init.zeros_(model.head.net.weight)
    nn.init.constant_(model.head.net.bias, 0.5)
    scores, predictions = evaluate(
        model, task.encode(task.splits["test"], model.backbone.tokenizer, 60), task
    )
    assert (
        predictions == [2.5] * 24 and scores["pearson+spearman"] == 0
    )  # a constant has no correlation
    batch = batch_of(model.backbone, task)
    assert torch.equal(scale_labels(batch, task)["label"] * 5, batch["label"])
    out = model.head.loss(model.compute_context(batch), torch.zeros(6))
    torch.testing.assert_close(out, torch.tensor(0.25))


def test_predictions_are_in_the_order_of_the_examples():
    bb = backbone()
    task = small_task("questions", test=20)
    model = model_of("lpt-npg", bb, task)
    for p in model.head.parameters():
        torch.nn.init.normal_(p, std=2.0)  # so that predictions differ
    examples = task.encode(task.splits["test"], bb.tokenizer, 60)
    assert len({len(e["input_ids"]) for e in examples}) > 5
    scores, pred = evaluate(model, examples, task, batch_size=3)
    assert pred == [evaluate(model, [e], task)[1][0] for e in examples] and len({*pred}) > 1
    assert scores["accuracy"] == pytest.approx(
        100 * sum(p == e["label"] for p, e in zip(pred, examples)) / 20
    )
    assert evaluate(model, examples, task, batch_size=20)[1] == pred and not model.training


def test_memory_is_smaller_for_a_later_prompt():
    mb = [
        fit(
            model_without_dropout(layer=layer), small_task(), config(steps=2, batch_size=32)
        ).peak_memory_mb
        for layer in (0, 1, 2)
    ]
    assert mb[0] > mb[1] > mb[2] > 0


def test_a_zero_shot_model_is_evaluated_without_training():
    bb = backbone()
    task = small_task()
    model = model_of("head-only", bb, task, "verbalizer")
    cfg = config(method="head-only", head="verbalizer")
    log = fit(model, task, cfg)
    assert (
        log.steps == 0
        and log.losses == []
        and log.validation
        == evaluate(
            model, task.encode(task.splits["validation"], bb.tokenizer, 60, cfg.template), task
        )[0]["accuracy"]
    )


# --- several processes

SCRIPT = """
import hashlib, sys, torch
from small import backbone, config, model_of, small_task
from test_fit import record_modes
from idp_tutorial.training.fit import fit
torch.set_num_threads(1)
model = model_of('lpt-npg', backbone(), small_task(), jolt=0)
modes = record_modes(model)
uses_autocast = sys.argv[1] == 'bf16'
log = fit(model, small_task(), config(steps=3, lr=1e-3, batch_size=8, precision=sys.argv[1]))
assert {*modes} == {(True, uses_autocast), (False, False)}, modes
assert '_original_forward' not in vars(model)
trained = b''.join(p.detach().numpy().tobytes() for p in model.trained_parameters().values())
print('RESULT', log.losses[0], hashlib.sha256(trained).hexdigest())
"""


def test_trained_layers_are_compiled_during_a_run(monkeypatch):
    compiled = []

    def record_compile(module, **kwargs):
        compiled.append(module)
        module._compiled_call_impl = module._call_impl

    monkeypatch.setattr(nn.Module, "compile", record_compile)

    def run(layer, **options):
        compiled.clear()
        model = model_without_dropout(layer=layer)
        fit(model, small_task(), config(method="lpt", **options))
        return model.backbone.layers

    for layer in (0, 2):
        layers = run(layer, compile=True)
        assert compiled == list(layers[layer:])
        assert all(l._compiled_call_impl is None for l in layers)
    run(0)
    assert not compiled


FAST_FAMILIES = ("bert", "llama")  # the others take a minute together


@pytest.mark.grid
@pytest.mark.parametrize(
    "name",
    [n if n in FAST_FAMILIES else pytest.param(n, marks=pytest.mark.slow) for n in SMALL_CONFIGS],
)
def test_compiled_layers_compute_the_same(name):
    """Compare hidden states and gradients, for inserted prompts and for key-value prompts."""
    bb = small_backbone(name, attention_implementations(name)[0])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def step(step_class):
        p = random_prompt(bb, step_class, 1)
        plan = single_step_plan(bb, step_class, 1, lambda ctx: p)
        h = run_layers(bb, random_batch(), plan).state_at("last")
        (h * torch.linspace(-1, 1, bb.d)).sum().backward()
        return h.detach(), p.grad

    for step_class in (Insert, *[KeyValue] * bb.supports_kv_prompt):
        expected = step(step_class)
        with compile_trained_layers(
            SimpleNamespace(backbone=bb, first_trained_layer=0), backend="eager"
        ):
            actual = step(step_class)
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] >= bb.n_layers


@pytest.mark.slow
def test_a_compiled_run_is_the_same_run():
    a, b = [
        fit(model_without_dropout(), small_task(), config(method="lpt", steps=6, compile=c))
        for c in (False, True)
    ]
    assert a.losses == pytest.approx(b.losses, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_two_processes_train_one_model(precision, tmp_path):
    (tmp_path / "two.py").write_text(SCRIPT)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (tests.parent, tests, tests / "training")))
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, tmp_path / "two.py", precision],
            stdout=subprocess.PIPE,
            text=True,
            env={**env, "RANK": r, "LOCAL_RANK": r},
        )
        for r in "01"
    ]
    a, b = [p.communicate(timeout=120)[0].split()[-2:] for p in processes]
    # same loss and weights; test_distributed.py compares with one process
    assert a == b and a

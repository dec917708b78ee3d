"""Prompts for a Hugging Face model object: outputs, prompts by name, training loops and graphs."""

import copy
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from prompt_models import CLASSES, FIVE, LABELS, model_object, prompt_model, state_of, tokens
from small import backbone, batch_of, model_of, same, small_task
from torch import nn
from transformers import Trainer, TrainingArguments
from two_processes import print_stacks_if_stuck, run_two_processes

import idp_tutorial
from idp_tutorial import METHODS, PromptModel, get_prompt_model
from idp_tutorial.core.generation import generate_ids
from idp_tutorial.core.planned_model import restore_state
from idp_tutorial.estimator import PromptClassifier
from idp_tutorial.huggingface.files import prompt_tensors
from idp_tutorial.methods.id_spam import IDSPAMConfig
from idp_tutorial.utils.checks import UserError

ROOT = Path(__file__).resolve().parents[2]


# ---- outputs


@pytest.mark.parametrize("method", FIVE)
@pytest.mark.parametrize("class_name", CLASSES)
def test_logits_are_those_of_the_package(class_name, method):
    family = CLASSES[class_name]
    bb = backbone(family)
    task = small_task("questions")
    expected = model_of(method, bb, task)
    model = get_prompt_model(
        model_object(class_name),
        method,
        num_labels=len(task.labels),
        head="classification",
        prompt_length=4,
        **({"bottleneck": 8} if "bottleneck" in METHODS[method].options else {}),
    )
    before = state_of(model.base_model)
    restore_state(prompt_tensors(model.planned_model), prompt_tensors(expected))
    batch = batch_of(bb, task)
    output = model(
        batch["input_ids"],
        batch["attention_mask"],
        batch["token_type_ids"],
        labels=batch["label"],
    )
    same(output.logits, expected(batch), atol=1e-6)
    same(output.loss, expected.loss(batch), atol=1e-6)
    output.loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    assert sum(p.numel() for p in trained) == model.get_nb_trainable_parameters()[0]
    assert all(torch.equal(t, before[name]) for name, t in state_of(model.base_model).items())


@pytest.mark.parametrize("class_name", ["AutoModel", "AutoModelForCausalLM"])
def test_padding_on_the_left_and_boolean_masks(class_name):
    model = prompt_model("id-spam", class_name, num_labels=3)
    right = tokens(causal="Causal" in class_name)
    n_padding = (right["attention_mask"] == 0).sum(1, keepdim=True)
    assert n_padding.any()
    T = right["input_ids"].shape[1]
    index = (torch.arange(T) - n_padding) % T
    left_padded = {name: x.gather(1, index) for name, x in right.items()}
    expected = model(**right).logits
    same(model(**left_padded).logits, expected, atol=1e-6)
    same(
        model(**{**left_padded, "attention_mask": left_padded["attention_mask"].bool()}).logits,
        expected,
    )
    alone = right["input_ids"][:1, : int(right["attention_mask"][0].sum())]
    same(model(input_ids=alone).logits, expected[:1])
    as_tuple = model(**right, labels=LABELS, return_dict=False)
    assert len(as_tuple) == 2 and torch.equal(as_tuple[1], expected)


def test_left_padding_moves_the_logits_of_a_language_model():
    model = prompt_model("lpt-npg", "AutoModelForCausalLM")
    right = tokens(2, causal=True)
    left_padded = {name: torch.cat([0 * x[:, :3], x], 1) for name, x in right.items()}
    same(model(**left_padded).logits[:, 3:], model(**right).logits)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda m, t: m(t), r"call model\(\*\*tokenizer\("),
        (lambda m, t: m(t["input_ids"][0]), r"\[B,T\].*of shape"),
        (
            lambda m, t: m(inputs_embeds=torch.zeros(1, 2, 32)),
            "from input_ids alone: leave inputs_embeds out",
        ),
        (lambda m, t: m(**t, output_attentions=True), "leave output_attentions out"),
        (lambda m, t: m(t["input_ids"], t["attention_mask"][:, None]), "shape"),
        (
            lambda m, t: m(t["input_ids"][:, :3], torch.tensor([[1, 0, 1]] * 6)),
            "between two tokens",
        ),
        (lambda m, t: m(t["input_ids"][:0]), r"not empty, .*shape \(0, "),
        (lambda m, t: m(t["input_ids"][:, :0]), r"not empty, .*shape \(6, 0\)"),
        (lambda m, t: m(t["input_ids"].float()), r"must be int64 or int32"),
        (
            lambda m, t: m(t["input_ids"], 0 * t["attention_mask"]),
            "it is 0 between two tokens or everywhere",
        ),
        (
            lambda m, t: m(**t, token_type_ids=t["input_ids"][:, 1:]),
            "token_type_ids must have the shape",
        ),
        (lambda m, t: m(**t, labels=LABELS + 1), "indices from 0 to 2, or -100 .*got 3"),
        (lambda m, t: m(**t, labels=LABELS - 1), "indices from 0 to 2, or -100 .*got -1"),
        (
            lambda m, t: m(**t, labels=LABELS[:5]),
            r"labels must be 6 class indices, .*int64 \(5,\)",
        ),
        (lambda m, t: m(**t, labels=LABELS.float()), r"6 class indices, .*float32 \(6,\)"),
        (lambda m, t: m.bfloat16()(**t), r"the prompt is in torch\.bfloat16, .*base_model alone"),
        (lambda m, t: m.generate(**t), "AutoModelForCausalLM"),
        (lambda m, t: m.delete_prompt("default"), "is active"),
        (lambda m, t: m.set_prompt("other"), "unknown prompt 'other'"),
        (lambda m, t: m.add_prompt("default", "lpt", num_labels=2), "not in use"),
        (lambda m, t: m.add_prompt("a.b", "lpt", num_labels=2), "must be a word"),
    ],
)
def test_calls_that_cannot_work_say_why(call, message):
    with pytest.raises(UserError, match=message):
        call(prompt_model(num_labels=3), tokens())


def test_labels_are_integers_of_any_size():
    model = prompt_model(num_labels=3)
    batch = tokens()
    expected = model(**batch, labels=LABELS).loss
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(model(**batch, labels=LABELS.to(dtype)).loss, expected)
    generator = prompt_model("prompt-tuning", "AutoModelForCausalLM")
    batch = tokens(2, causal=True)
    expected = generator(**batch, labels=batch["input_ids"]).loss
    assert torch.equal(generator(**batch, labels=batch["input_ids"].int()).loss, expected)
    with pytest.raises(UserError, match="labels must have the shape .* of input_ids"):
        generator(**batch, labels=batch["input_ids"][:, 1:])


def test_labels_of_a_wrong_shape_or_value_are_not_trained_on():
    regression = prompt_model(num_labels=1)
    with pytest.raises(
        UserError, match="labels must be .* a number for each output of a regression"
    ):
        regression(**tokens(), labels=torch.ones(1))  # would be broadcast
    tokenizer = backbone("bert").tokenizer
    model = get_prompt_model(
        model_object("AutoModelForMaskedLM"),
        "lpt",
        label_words=small_task().label_words,
        tokenizer=tokenizer,
    )
    batch = dict(input_ids=torch.full((2, 3), tokenizer.mask_token_id))
    with pytest.raises(UserError, match="indices from 0 to 1, got -1"):
        model(**batch, labels=torch.tensor([0, -1]))  # would be the last class


def test_models_that_cannot_be_used_say_why():
    with pytest.raises(UserError, match="Hugging Face model"):
        get_prompt_model(nn.Linear(2, 2), "lpt", num_labels=2)
    with pytest.raises(UserError, match=r"dtype=torch\.float32"):
        get_prompt_model(model_object().half(), "lpt", num_labels=2)
    images = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    with pytest.raises(UserError, match="is a 'vit' model, which is not supported"):
        get_prompt_model(transformers.ViTModel(images), "lpt", num_labels=2)
    model = model_object()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="set_attn_implementation"):
        get_prompt_model(model, "lpt", num_labels=2)
    with pytest.raises(UserError, match="backbone must be a text, got RobertaModel"):
        PromptClassifier("lpt", backbone=model).fit(["a", "b"] * 5, [0, 1] * 5)


def test_regression_and_several_labels():
    model = prompt_model(num_labels=1)
    targets = torch.rand(6)
    output = model(**tokens(), labels=targets)
    same(output.loss, (output.logits[:, 0] - targets).square().mean())
    same(model(**tokens(), labels=targets, num_items_in_batch=12).loss, output.loss / 2)
    model = prompt_model(num_labels=3)
    targets = torch.randint(2, (6, 3)).float()
    output = model(**tokens(), labels=targets)
    same(output.loss, nn.functional.binary_cross_entropy_with_logits(output.logits, targets))


# ---- prompts by name


def test_prompts_are_switched_by_name(capsys):
    model = prompt_model("lpt-npg", num_labels=3)
    first = model(**tokens()).logits
    model.add_prompt("topic", IDSPAMConfig(prompt_length=2), num_labels=5)
    assert torch.equal(model(**tokens()).logits, first)
    model.set_prompt("topic")
    assert model(**tokens()).logits.shape == (6, 5) and model.config.num_labels == 5
    assert model.active_prompt == "topic"
    assert model.prompt_config["topic"] == IDSPAMConfig(prompt_length=2)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all(name.startswith("prompts.topic.") for name in trained)
    model.print_trainable_parameters()
    assert capsys.readouterr().out.startswith("trainable params: ")
    model.set_prompt("default")
    model.delete_prompt("topic")
    assert torch.equal(model(**tokens()).logits, first) and list(model.prompts) == ["default"]
    copied = copy.deepcopy(model)
    assert torch.equal(copied(**tokens()).logits, first)
    with torch.no_grad():
        copied.prompts["default"]["head"].net.bias.add_(1)
    assert torch.equal(model(**tokens()).logits, first)
    assert not torch.equal(copied(**tokens()).logits, first)


def test_a_disabled_prompt_leaves_the_model_itself():
    base = model_object("AutoModelForSequenceClassification", num_labels=3)
    expected = base(**tokens(), labels=LABELS)
    model = get_prompt_model(base, "lpt", prompt_length=3)
    with model.disable_prompt():
        output = model(**tokens(), labels=LABELS)
    assert torch.equal(output.logits, expected.logits) and torch.equal(output.loss, expected.loss)
    assert not torch.allclose(model(**tokens()).logits, expected.logits)


# ---- language models


@pytest.mark.parametrize("method", FIVE)
def test_generation_is_that_of_the_package(method):
    model = prompt_model(method, "AutoModelForCausalLM")
    bb = backbone("gpt2")
    texts = [bb.tokenizer(s).input_ids for s in ("The soup was", "In the evening she")]
    model.planned_model.backbone.tokenizer = bb.tokenizer
    expected = generate_ids(model.planned_model, texts, 4)
    assert min(map(len, expected)) == 4  # no end token
    T = max(map(len, texts))
    for is_left in (True, False):
        padded = [[0] * (T - len(x)) + x if is_left else x + [0] * (T - len(x)) for x in texts]
        mask = [
            [0] * (T - len(x)) + [1] * len(x) if is_left else [1] * len(x) + [0] * (T - len(x))
            for x in texts
        ]
        output = model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            token_type_ids=torch.zeros(2, T),
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
        )
        assert output[:, T:].tolist() == expected


def test_a_generated_prompt_does_not_depend_on_the_answer():
    model = prompt_model("id-spam", "AutoModelForCausalLM", jolt=1.0)
    ids = torch.randint(5, 900, (2, 9))
    labels = ids.clone()
    labels[:, :4] = -100
    other = ids.clone()
    other[:, 6:] = 7
    same(model(ids, labels=labels).logits[:, :6], model(other, labels=labels).logits[:, :6])
    # the prompt of an input with its answer is that of the input alone, which generation has
    same(model(ids, labels=labels).logits[:, :4], model(ids[:, :4]).logits)
    assert not torch.allclose(model(ids).logits[:, :6], model(other).logits[:, :6])
    with pytest.raises(UserError, match="tokens before the first label"):
        model(ids, labels=ids)
    with pytest.raises(UserError, match="needs labels"):
        model.train()(ids)
    static = prompt_model("prompt-tuning", "AutoModelForCausalLM")
    assert static.train()(ids, labels=ids).loss.requires_grad


# ---- training loops


def examples(n=40, seed=0):
    """Return tokenised texts with labels, as `datasets` gives them to a `Trainer`."""
    task = small_task("questions", train=n)
    rows = task.encode(task.splits["train"], backbone().tokenizer, 24)
    return Dataset.from_list([{k: r[k] for k in ("input_ids", "label")} for r in rows])


N_LABELS = len(small_task("questions").labels)


def train(folder, method="lpt-npg", model=None, resume=None, n=40, **arguments):
    """Train a small model with the `Trainer` and return it."""
    torch.manual_seed(0)
    model = model or prompt_model(method, num_labels=N_LABELS, jolt=0.0)
    defaults = dict(
        learning_rate=1e-2,
        max_steps=4,
        per_device_train_batch_size=8,
        save_steps=2,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), **defaults | arguments),
        train_dataset=examples(n),
        eval_dataset=examples(16),
        processing_class=backbone().tokenizer,
        compute_metrics=lambda p: {
            "accuracy": float(np.mean(p.predictions.argmax(-1) == p.label_ids))
        },
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer):
    """Return the logged losses of all steps."""
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_the_trainer_trains_saves_and_resumes(tmp_path):
    trainer = train(tmp_path / "a")
    model = trainer.model
    before = losses(trainer)
    assert before[-1] < before[0]
    metrics = trainer.evaluate()
    prediction = trainer.predict(examples(16))
    assert prediction.predictions.shape == (16, N_LABELS)
    assert metrics["eval_accuracy"] == prediction.metrics["test_accuracy"]
    checkpoint = tmp_path / "a/checkpoint-2"
    n_trained = model.get_nb_trainable_parameters()[0]
    assert (checkpoint / "model.safetensors").stat().st_size < 4 * n_trained + 2000
    resumed = train(tmp_path / "a", resume=str(checkpoint))
    assert losses(resumed) == before
    for name, tensor in resumed.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_the_best_checkpoint_is_loaded(tmp_path):
    trainer = train(
        tmp_path,
        "m-idpg-phm",
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        learning_rate=0.3,  # so that the last checkpoint is not the best one
    )
    scores = {
        line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line
    }
    best = min(scores, key=scores.get)
    assert trainer.state.best_model_checkpoint.endswith(f"-{best}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(scores[best], abs=1e-5)


def without_dropout(method, **options):
    """Return a model without dropout, in which equal batches have equal gradients."""
    model = prompt_model(method, num_labels=N_LABELS, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = 0.0
    return model


def test_noise_on_word_embeddings_is_refused_where_it_has_no_effect(tmp_path):
    model = prompt_model(num_labels=N_LABELS)
    with pytest.raises(UserError, match="neftune_noise_alpha gives"):
        train(tmp_path / "a", model=model, neftune_noise_alpha=5.0)
    runs = []
    for alpha in (None, 5.0):
        torch.manual_seed(0)
        model = prompt_model(num_labels=N_LABELS, jolt=0.0, dropout_below_prompt=True)
        trainer = train(tmp_path, model=model, neftune_noise_alpha=alpha, max_steps=2, n=16)
        runs.append(losses(trainer))
    assert runs[0] != runs[1]


@pytest.mark.long
def test_accumulated_gradients_are_those_of_one_batch(tmp_path):
    torch.manual_seed(0)
    model = without_dropout("lpt-npg")
    one = train(tmp_path / "a", model=copy.deepcopy(model), save_strategy="no", max_steps=3)
    four = train(
        tmp_path / "b",
        model=model,
        save_strategy="no",
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
    )
    assert losses(four) == pytest.approx(losses(one), abs=2e-3)
    for name, tensor in one.model.state_dict().items():
        same(four.model.state_dict()[name], tensor, atol=1e-4)


@pytest.mark.long
def test_bfloat16_and_a_frozen_model_in_bfloat16(tmp_path):
    float32 = losses(train(tmp_path, save_strategy="no", max_steps=1))
    autocast = losses(train(tmp_path, save_strategy="no", max_steps=1, bf16=True))
    assert autocast != float32 and autocast == pytest.approx(float32, abs=0.1)
    base = model_object("AutoModelForSequenceClassification", num_labels=N_LABELS).bfloat16()
    model = get_prompt_model(base, "lpt-npg", prompt_length=4)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    trainer = train(tmp_path, model=model, save_strategy="no", max_steps=2)
    assert np.isfinite(losses(trainer)).all() and model.dtype == torch.bfloat16


@pytest.mark.parametrize("family,pooling", [("roberta", "cls"), ("gpt2", "mean")])
@pytest.mark.parametrize("method", ["s-idpg-phm", "p-tuning-v2"])
def test_gradient_checkpointing_computes_layers_again(method, pooling, family):
    base = model_object("AutoModel", family)
    options = dict(bottleneck=8) if "bottleneck" in METHODS[method].options else {}
    model = get_prompt_model(
        base, method, num_labels=3, prompt_length=4, pooling=pooling, **options
    ).train()
    batch = tokens(causal=family == "gpt2")
    calls = []
    for layer in model.backbone.layers:
        # a module of the layer, since the library computes `layer.forward` again and not the hooks
        norm = next(m for m in layer.modules() if isinstance(m, nn.LayerNorm))
        norm.register_forward_hook(lambda *_: calls.append(1))

    def gradients():
        calls.clear()
        model.zero_grad()
        torch.manual_seed(0)
        model(**batch, labels=LABELS).loss.backward()
        return len(calls), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    n_calls, expected = gradients()
    model.gradient_checkpointing_enable()
    n_with_checkpoints, computed = gradients()
    assert n_with_checkpoints > n_calls
    for name, gradient in expected.items():
        same(computed[name], gradient, atol=1e-6)
    model.gradient_checkpointing_disable()
    assert gradients()[0] == n_calls


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_the_trainer_uses_gradient_checkpointing(tmp_path):
    options = dict(save_strategy="no", max_steps=2)
    plain = train(tmp_path, "p-tuning-v2", **options)
    trainer = train(tmp_path, "p-tuning-v2", gradient_checkpointing=True, **options)
    assert trainer.model.planned_model.gradient_checkpointing
    assert losses(trainer) == pytest.approx(losses(plain), abs=1e-5)


def test_accelerate_prepares_and_stores_a_model(tmp_path):
    from accelerate import Accelerator

    model = without_dropout("id-spam")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_state(tmp_path)
    first = prepared(**tokens(), labels=LABELS).loss
    accelerator.backward(first)
    optimizer.step()
    assert prepared(**tokens(), labels=LABELS).loss < first
    accelerator.load_state(tmp_path)
    assert torch.equal(prepared(**tokens(), labels=LABELS).loss, first)
    assert (tmp_path / "model.safetensors").stat().st_size < 100_000


def run_process(folder):
    """Train in one of two processes, and write the losses and sums of all tensors."""
    print_stacks_if_stuck()
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    results = {}
    for method in ("s-idpg-phm",):
        torch.manual_seed(0)
        model = without_dropout(method)
        model.add_prompt("unused", "lpt", num_labels=2)
        trainer = train(
            folder / method, model=model, per_device_train_batch_size=4, ddp_backend="gloo"
        )
        sums = {name: t.double().sum().item() for name, t in trainer.model.state_dict().items()}
        results[method] = dict(losses=losses(trainer), sums=sums)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads have been seen to keep a finished process from ending


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    run_two_processes(__file__, tmp_path)
    a, b = (json.loads((tmp_path / f"{r}.json").read_text()) for r in "01")
    for method, result in a.items():
        assert result["sums"] == b[method]["sums"]
        torch.manual_seed(0)
        model = without_dropout(method)
        model.add_prompt("unused", "lpt", num_labels=2)
        one = train(tmp_path / "one", model=model, save_strategy="no")
        assert result["losses"] == pytest.approx(losses(one), abs=2e-3)
        for name, tensor in one.model.state_dict().items():
            assert result["sums"][name] == pytest.approx(tensor.double().sum().item(), abs=1e-2)


# ---- graphs


@pytest.mark.long
def test_a_compiled_model_computes_the_same():
    model = prompt_model("p-tuning-v2", num_labels=3)
    compiled = torch.compile(model, backend="eager")
    expected = model(**tokens(), labels=LABELS)
    output = compiled(**tokens(), labels=LABELS)
    same(output.logits, expected.logits)
    same(output.loss, expected.loss)
    compiled.train()
    compiled(**tokens(), labels=LABELS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    torch.compiler.reset()


def tiny_prompt_model(folder, method):
    """Return a model on the bundled encoder, and two batches of tokens of different sizes."""
    base = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    model = get_prompt_model(base, method, num_labels=3, prompt_length=4).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["a fine film .", "the soup was cold , and the waiter too .", "what is it ?"]
    batches = [tokenizer(t, padding=True, return_tensors="pt") for t in (texts, texts[::2])]
    return model, [{k: b[k] for k in ("input_ids", "attention_mask")} for b in batches]


def graph_inputs(batch):
    """Return the dynamic shapes of a batch: any number of texts and tokens."""
    B, T = torch.export.Dim("B", min=2), torch.export.Dim("T", min=4, max=200)
    return {name: {0: B, 1: T} for name in batch}


@pytest.fixture(scope="module")
def exported(tiny):
    """Return a model, its exported program, and two batches of tokens of different sizes."""
    model, batches = tiny_prompt_model(tiny, "id-spam")
    shapes = graph_inputs(batches[0])
    with torch.no_grad():
        return model, torch.export.export(model, (), batches[0], dynamic_shapes=shapes), batches


@pytest.mark.long
def test_an_exported_model_computes_the_same(exported):
    model, program, batches = exported
    with torch.no_grad():
        for b in batches:
            same(program.module()(**b).logits, model(**b).logits, atol=1e-6)


HAS_ONNX = all(map(importlib.util.find_spec, ("onnx", "onnxruntime", "onnxscript")))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_ONNX, reason="needs onnx, onnxruntime and onnxscript")
def test_onnx_runtime_computes_the_same(exported, tmp_path):
    import onnxruntime

    model, program, batches = exported
    torch.onnx.export(program, dynamo=True, verbose=False).save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for b in batches:
        logits = session.run(None, {name: x.numpy() for name, x in b.items()})[0]
        same(torch.from_numpy(logits), model(**b).logits.detach(), atol=1e-5)


# ---- the page


@pytest.mark.long
def test_the_script_of_the_page_trains_a_model(tiny, tmp_path, monkeypatch):
    """Run the script with the bundled model, and with fewer steps and examples."""
    page = (ROOT / "docs/huggingface.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"<!-- recipe: trainer -->\n```python\n(.*?)```", page, re.S)
    assert len([line for line in script.splitlines() if line]) <= 15
    for old, new in {
        "FacebookAI/roberta-base": str(tiny),
        "max_steps=150": "max_steps=3, use_cpu=True",
    }.items():
        assert old in script
        script = script.replace(old, new)
    monkeypatch.chdir(tmp_path)
    rows = [
        dict(text=r["sentence1"], label=r["label"]) for r in small_task("questions").splits["test"]
    ]
    for split in ("train", "test"):
        Dataset.from_list(rows).to_csv(f"{split}.csv")
    namespace = {}
    exec(compile(script, "docs/huggingface.md", "exec"), namespace)
    assert namespace["trainer"].state.global_step == 3
    loaded = PromptModel.from_pretrained(namespace["base"], "out/prompts")
    assert loaded.config.num_labels == 6
    _, task, _ = idp_tutorial.from_pretrained("out/prompts")  # as `idp predict` reads it
    assert len(task.labels) == 6


if __name__ == "__main__":
    run_process(Path(sys.argv[1]))

"""Prompts for a Hugging Face model object: outputs, training loops, files and graphs."""

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
from small import backbone, batch_of, config, model_of, same, small_task
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from two_processes import print_stacks_if_stuck, run_two_processes

import idp_tutorial
from idp_tutorial import METHODS, PromptModel, get_prompt_model
from idp_tutorial.backbones.load import find_local_backbone, load_backbone
from idp_tutorial.core.generation import generate_ids
from idp_tutorial.core.prompted_model import restore_state
from idp_tutorial.estimator import PromptClassifier
from idp_tutorial.families.family import resolve_attention
from idp_tutorial.huggingface.files import prompt_tensors
from idp_tutorial.methods.id_spam import AttentionLateConfig
from idp_tutorial.testing.small_models import SMALL_CONFIGS, random_batch
from idp_tutorial.utils.checks import UserError

ROOT = Path(__file__).resolve().parents[1]
FIVE = ("prompt-tuning", "s-idpg-phm", "lpt-npg", "id-spam", "p-tuning-v2")
CLASSES = {  # class → family of the small model
    "AutoModel": "roberta",
    "AutoModelForMaskedLM": "bert",
    "AutoModelForSequenceClassification": "roberta",
    "AutoModelForCausalLM": "gpt2",
}


def model_object(class_name="AutoModel", family=None, **config_options):
    """Return a small model of a class, whose base has the weights of `small.backbone`."""
    bb = backbone(family or CLASSES[class_name])
    model_config = copy.deepcopy(bb.config)
    model_config.update(dict(pad_token_id=bb.tokenizer.pad_token_id or 0, **config_options))
    model = getattr(transformers, class_name).from_config(
        model_config, attn_implementation=resolve_attention(model_config, "sdpa")
    )
    model.load_state_dict(bb.model.state_dict(), strict=False)
    base = getattr(model, model.base_model_prefix, model)
    base.load_state_dict(bb.base.state_dict(), strict=False)
    return model.eval()


def prompt_model(method="lpt-npg", class_name="AutoModel", jolt=0.1, **options):
    """Return a model in eval mode, whose prompts are moved away from zero."""
    options = dict(prompt_length=4) | options
    if "bottleneck" in METHODS[method].options:
        options = dict(bottleneck=8) | options
    model = get_prompt_model(model_object(class_name), method, **options)
    with torch.no_grad():
        for p in model.prompts["default"]["sources"].parameters():
            p.add_(jolt * torch.randn_like(p))
    return model


def tokens(n=6, causal=False):
    """Return a batch of tokens as a tokenizer does, padded on the right."""
    batch = batch_of(backbone("gpt2" if causal else "roberta"), n=n)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def state_of(model):
    """Return copies of all tensors of a module."""
    return {name: t.clone() for name, t in nn.Module.state_dict(model).items()}


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
    restore_state(prompt_tensors(model.prompted_model), prompt_tensors(expected))
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


WITH_CLASSIFIER = [name for name in SMALL_CONFIGS if not name.startswith("t5")]


@pytest.mark.parametrize("name", WITH_CLASSIFIER)
def test_a_classifier_without_a_prompt_is_the_model_itself(name):
    config_class, sizes = SMALL_CONFIGS[name]
    model_config = getattr(transformers, config_class)(**sizes | dict(num_labels=3, pad_token_id=1))
    base = transformers.AutoModelForSequenceClassification.from_config(
        model_config, attn_implementation=resolve_attention(model_config, "sdpa")
    ).eval()
    batch = random_batch()
    batch = {k: batch[k] for k in ("input_ids", "attention_mask")}
    expected = base(**batch, labels=torch.tensor([0, 1, 2]))
    before = state_of(base)
    model = get_prompt_model(base, "head-only")
    output = model(**batch, labels=torch.tensor([0, 1, 2]))
    same(output.logits, expected.logits)
    same(output.loss, expected.loss)
    output.loss.backward()
    with torch.no_grad():
        for p in model.prompts.parameters():
            assert p.requires_grad and p.grad is not None
            p.sub_(p.grad)
    assert all(torch.equal(t, before[n]) for n, t in state_of(base).items())
    prompted = get_prompt_model(base, "prompt-tuning", prompt_length=3, init_std=1.0)
    assert not torch.allclose(prompted(**batch).logits, expected.logits)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_a_language_model_without_a_prompt_is_the_model_itself(name):
    config_class, sizes = SMALL_CONFIGS[name]
    model_config = getattr(transformers, config_class)(**sizes)
    base = transformers.AutoModelForCausalLM.from_config(
        model_config, attn_implementation=resolve_attention(model_config, "sdpa")
    ).eval()
    batch = random_batch()
    batch = {k: batch[k] for k in ("input_ids", "attention_mask")}
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    expected = base(**batch, labels=labels)
    model = get_prompt_model(base, "head-only")
    output = model(**batch, labels=labels, num_items_in_batch=None)
    words = batch["attention_mask"].bool()
    same(output.logits[words], expected.logits[words])
    same(output.loss, expected.loss)
    same(model(**batch, labels=labels, num_items_in_batch=40).loss, output.loss * 19 / 40)


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
        (lambda m, t: m(t), r"call model\(\*\*tokens\)"),
        (lambda m, t: m(t["input_ids"][0]), r"\[B,T\], got shape"),
        (lambda m, t: m(inputs_embeds=torch.zeros(1, 2, 32)), "needs input_ids"),
        (lambda m, t: m(**t, output_attentions=True), "no such argument"),
        (lambda m, t: m(t["input_ids"], t["attention_mask"][:, None]), "shape"),
        (
            lambda m, t: m(t["input_ids"][:, :3], torch.tensor([[1, 0, 1]] * 6)),
            "between two tokens",
        ),
        (lambda m, t: m(t["input_ids"][:0]), r"shape \(0, .*at least one text"),
        (lambda m, t: m(t["input_ids"][:, :0]), r"shape \(6, 0\), .*at least one text"),
        (lambda m, t: m(t["input_ids"].float()), r"token ids in torch\.int64 .*got torch\.float32"),
        (lambda m, t: m(t["input_ids"], 0 * t["attention_mask"]), "0 for all tokens of a text"),
        (
            lambda m, t: m(**t, token_type_ids=t["input_ids"][:, 1:]),
            "token_type_ids must have the shape",
        ),
        (lambda m, t: m(**t, labels=LABELS + 1), "indices from 0 to 2, or -100 .*got 3"),
        (lambda m, t: m(**t, labels=LABELS - 1), "indices from 0 to 2, or -100 .*got -1"),
        (lambda m, t: m(**t, labels=LABELS[:5]), r"6 texts needs 6 class indices, .*shape \(5,\)"),
        (lambda m, t: m(**t, labels=LABELS.float()), "class indices are integers"),
        (lambda m, t: m(**t, labels=[0, 1, 2, 0, 1, 2]), "labels must be a tensor, got a list"),
        (lambda m, t: m.bfloat16()(**t), r"the prompt is in torch\.bfloat16, .*base_model only"),
        (lambda m, t: m.generate(**t), "AutoModelForCausalLM"),
        (lambda m, t: m.delete_prompt("default"), "is active"),
        (lambda m, t: m.set_prompt("other"), "unknown prompt 'other'"),
        (lambda m, t: m.add_prompt("default", "lpt", num_labels=2), "not in use"),
        (lambda m, t: m.add_prompt("a.b", "lpt", num_labels=2), "must be a word"),
        (lambda m, t: m.activation_checkpointing_enable({"use_reentrant": True}), "use_reentrant"),
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
    with pytest.raises(UserError, match="a regression of 6 texts needs 6 numbers, got labels"):
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


def test_ids_at_the_padding_do_not_change_the_logits():
    """A decoder's own classifier finds the last token by the id of the padding."""
    sizes = SMALL_CONFIGS["llama"][1]
    base = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes))
    model = get_prompt_model(base.eval(), "lpt-npg", prompt_length=4)
    batch = random_batch()
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model(**batch).logits
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 9)
    assert torch.equal(model(**batch).logits, expected)


@pytest.mark.parametrize(
    "class_name,method,options,message",
    [
        ("AutoModel", "lpt-npg", {}, "num_labels is needed"),
        ("AutoModel", "lpt-npg", dict(num_labels=3, head="keep"), "has no classifier"),
        ("AutoModel", "lpt-npg", dict(num_labels=0), "num_labels must be at least 1"),
        ("AutoModel", "lpt-npg", dict(num_labels=2, id2label={0: "a"}), "id2label must name"),
        ("AutoModel", "lpt-npg", dict(num_labels=2, lr=1), "unknown option of get_prompt_model"),
        ("AutoModel", "lpt-ngp", dict(num_labels=2), "did you mean 'lpt-npg'"),
        ("AutoModel", "lora", dict(num_labels=2), "LoRA from peft"),
        ("AutoModel", "lpt", dict(task_type="CAUSAL_LM"), "AutoModelForCausalLM"),
        ("AutoModel", "lpt", dict(label_words=["a", "b"]), "give tokenizer="),
        ("AutoModel", "prompt-tuning", dict(num_labels=2, position=2), "give tokenizer="),
        ("AutoModel", "lpt", dict(num_labels=2, pooling="mask"), "a template adds to the text"),
    ],
)
def test_combinations_that_cannot_work_say_why(class_name, method, options, message):
    with pytest.raises(UserError, match=message):
        get_prompt_model(model_object(class_name), method, **options)


def test_models_that_cannot_be_used_say_why():
    with pytest.raises(UserError, match="Hugging Face model"):
        get_prompt_model(nn.Linear(2, 2), "lpt", num_labels=2)
    with pytest.raises(UserError, match=r"dtype=torch\.float32"):
        get_prompt_model(model_object().half(), "lpt", num_labels=2)
    images = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    with pytest.raises(UserError, match="is a 'vit' model, which the layer loop does not support"):
        get_prompt_model(transformers.ViTModel(images), "lpt", num_labels=2)
    model = model_object()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="set_attn_implementation"):
        get_prompt_model(model, "lpt", num_labels=2)
    with pytest.raises(UserError, match="get_prompt_model"):
        PromptClassifier("lpt", backbone=model).fit(["a", "b"] * 5, [0, 1] * 5)


# ---- heads


def test_a_trained_classifier_is_kept_or_its_replacement_is_announced(recwarn):
    base = model_object("AutoModelForSequenceClassification", num_labels=3)
    model = get_prompt_model(base, "lpt", num_labels=3)
    assert model.settings["default"].head == "keep" and not recwarn.list
    same(
        model.prompts["default"]["head"].model.classifier.dense.weight, base.classifier.dense.weight
    )
    with pytest.warns(UserWarning, match="a new head is trained"):
        model = get_prompt_model(base, "lpt", num_labels=5)
    assert model(**tokens()).logits.shape == (6, 5) and model.config.num_labels == 5
    get_prompt_model(base, "lpt", num_labels=5, head="classification")
    assert base.config.num_labels == 3 and len(recwarn.list) == 0
    with pytest.raises(UserError, match="has 3 labels"):
        get_prompt_model(base, "lpt", num_labels=5, head="keep")


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


@pytest.mark.parametrize("class_name", ["AutoModelForMaskedLM", "AutoModelForCausalLM"])
def test_label_words_are_those_of_the_package(class_name):
    bb = backbone(CLASSES[class_name])
    task = small_task()
    expected = model_of("lpt-npg", bb, task, head="verbalizer")
    model = get_prompt_model(
        model_object(class_name),
        "lpt-npg",
        label_words=task.label_words,
        tokenizer=bb.tokenizer,
        prompt_length=4,
        bottleneck=8,
    )
    assert model.get_nb_trainable_parameters()[0] == sum(
        p.numel() for p in expected.sources.parameters()
    )
    restore_state(prompt_tensors(model.prompted_model), prompt_tensors(expected))
    batch = batch_of(bb, task, template="code")
    output = model(batch["input_ids"], batch["attention_mask"], labels=batch["label"])
    same(output.logits, expected(batch))
    same(output.loss, expected.loss(batch))
    if not bb.causal:
        with pytest.raises(UserError, match="one <mask> in each text"):
            model(**tokens())


# ---- prompts by name


def test_prompts_are_switched_by_name(capsys):
    model = prompt_model("lpt-npg", num_labels=3)
    first = model(**tokens()).logits
    model.add_prompt("topic", AttentionLateConfig(prompt_length=2), num_labels=5)
    assert torch.equal(model(**tokens()).logits, first)
    model.set_prompt("topic")
    assert model(**tokens()).logits.shape == (6, 5) and model.config.num_labels == 5
    assert model.active_prompt == "topic"
    assert model.prompt_config["topic"] == AttentionLateConfig(prompt_length=2)
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
    model.prompted_model.backbone.tokenizer = bb.tokenizer
    expected = generate_ids(model.prompted_model, texts, 4)
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
    with pytest.raises(UserError, match="first token"):
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


@pytest.mark.parametrize("method", ["s-idpg-phm", "m-idpg-phm", "p-tuning-v2"])
def test_the_best_checkpoint_is_loaded(tmp_path, method):
    trainer = train(
        tmp_path,
        method,
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


def test_bfloat16_and_a_frozen_model_in_bfloat16(tmp_path):
    float32 = losses(train(tmp_path, save_strategy="no", max_steps=2))
    autocast = losses(train(tmp_path, save_strategy="no", max_steps=2, bf16=True))
    assert autocast != float32 and autocast == pytest.approx(float32, abs=0.1)
    base = model_object("AutoModelForSequenceClassification", num_labels=N_LABELS).bfloat16()
    model = get_prompt_model(base, "lpt-npg", prompt_length=4)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    trainer = train(tmp_path, model=model, save_strategy="no", max_steps=2)
    assert np.isfinite(losses(trainer)).all() and model.dtype == torch.bfloat16


CAN_CHECKPOINT = hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache")
needs_checkpointing = pytest.mark.skipif(not CAN_CHECKPOINT, reason="needs a newer transformers")


@needs_checkpointing
@pytest.mark.parametrize("family", ["roberta", "gpt2"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("method", FIVE)
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
    assert not any("_can_checkpoint_with_cache" in vars(layer) for layer in model.backbone.layers)


@needs_checkpointing
def test_the_trainer_uses_gradient_checkpointing(tmp_path):
    options = dict(save_strategy="no", max_steps=2)
    plain = train(tmp_path, "p-tuning-v2", **options)
    trainer = train(tmp_path, "p-tuning-v2", gradient_checkpointing=True, **options)
    assert any(layer.gradient_checkpointing for layer in trainer.model.backbone.layers)
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


@pytest.mark.parametrize("method", ["lpt-npg", "p-tuning-v2"])
def test_a_compiled_model_computes_the_same(method):
    model = prompt_model(method, num_labels=3)
    compiled = torch.compile(model, backend="eager")
    expected = model(**tokens(), labels=LABELS)
    output = compiled(**tokens(), labels=LABELS)
    same(output.logits, expected.logits)
    same(output.loss, expected.loss)
    compiled.train()
    compiled(**tokens(), labels=LABELS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    torch.compiler.reset()


@pytest.fixture(scope="module")
def tiny():
    return find_local_backbone("tiny")


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


@pytest.mark.parametrize("method", ["id-spam"])
def test_an_exported_model_computes_the_same(tiny, method):
    model, (batch, other) = tiny_prompt_model(tiny, method)
    with torch.no_grad():
        exported = torch.export.export(model, (), batch, dynamic_shapes=graph_inputs(batch))
        for b in (batch, other):
            same(exported.module()(**b).logits, model(**b).logits, atol=1e-6)


HAS_ONNX = all(map(importlib.util.find_spec, ("onnx", "onnxruntime", "onnxscript")))


@pytest.mark.skipif(not HAS_ONNX, reason="needs onnx, onnxruntime and onnxscript")
@pytest.mark.parametrize("method", ["lpt-npg"])
def test_onnx_runtime_computes_the_same(tiny, method, tmp_path):
    import onnxruntime

    model, (batch, other) = tiny_prompt_model(tiny, method)
    program = torch.onnx.export(
        model, (), kwargs=batch, dynamic_shapes=graph_inputs(batch), dynamo=True, verbose=False
    )
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for b in (batch, other):
        logits = session.run(None, {name: x.numpy() for name, x in b.items()})[0]
        same(torch.from_numpy(logits), model(**b).logits.detach(), atol=1e-5)


# ---- files


def reload(model, folder, class_name, **options):
    """Save the prompts of a model and load them on a new model object."""
    model.save_pretrained(folder)
    return PromptModel.from_pretrained(model_object(class_name, **options), folder)


@pytest.mark.parametrize("method", FIVE)
@pytest.mark.parametrize(
    "class_name,options",
    [
        ("AutoModel", dict(num_labels=3, pooling="cls", two_layer_head=True)),
        ("AutoModelForSequenceClassification", {}),
        ("AutoModelForCausalLM", {}),
    ],
)
def test_saved_prompts_give_the_same_outputs(tmp_path, method, class_name, options):
    model = prompt_model(method, class_name, **options)
    batch = tokens(causal="Causal" in class_name)
    loaded = reload(model, tmp_path, class_name)
    same(loaded(**batch).logits, model(**batch).logits)
    assert not loaded.training and loaded.get_nb_trainable_parameters()[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.json", "prompts.safetensors"]
    trained = sum(p.numel() for p in model.prompts.parameters())
    assert (tmp_path / "prompts.safetensors").stat().st_size < 4 * trained + 12_000


def test_several_prompts_are_saved_in_subfolders(tmp_path):
    model = prompt_model("lpt-npg", num_labels=3)
    model.add_prompt("topic", "id-spam", id2label={0: "water", 1: "fire"})
    model.save_pretrained(tmp_path)
    loaded = PromptModel.from_pretrained(model_object(), tmp_path, is_trainable=True)
    assert loaded.get_nb_trainable_parameters()[0] > 0
    loaded.load_prompt(tmp_path / "topic", "topic")
    for name in ("default", "topic"):
        model.set_prompt(name)
        loaded.set_prompt(name)
        assert torch.equal(loaded(**tokens()).logits, model(**tokens()).logits)
    assert loaded.config.id2label == {0: "water", 1: "fire"}


def test_prompts_of_another_model_or_format_are_refused(tmp_path):
    model = prompt_model("lpt-npg", num_labels=3)
    model.save_pretrained(tmp_path)
    other = model_object()
    with torch.no_grad():
        other.encoder.layer[0].output.dense.bias[0] += 1
    with pytest.raises(UserError, match="belong to another model"):
        PromptModel.from_pretrained(other, tmp_path)
    with pytest.raises(UserError, match=r"PromptModel\.from_pretrained"):
        idp_tutorial.from_pretrained(tmp_path)
    # the class of the model does not matter, nor does the dtype
    masked_lm = model_object("AutoModelForMaskedLM", "roberta").bfloat16()
    loaded = PromptModel.from_pretrained(masked_lm, tmp_path)
    same(loaded(**tokens()).logits, model(**tokens()).logits, atol=0.3)


def test_a_classifier_with_its_tokenizer_is_a_model_of_the_package(tiny, tmp_path):
    base = transformers.AutoModelForSequenceClassification.from_pretrained(tiny, dtype="float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    names = {0: "no", 1: "yes", 2: "perhaps"}
    model = get_prompt_model(
        base, "s-idpg-phm", id2label=names, head="classification", tokenizer=tokenizer
    )
    model.save_pretrained(tmp_path)
    package_model, task, cfg = idp_tutorial.from_pretrained(tmp_path)
    assert (task.labels, cfg.method) == (("no", "yes", "perhaps"), "s-idpg-phm")
    texts = ["a fine film .", "the soup was cold ."]
    outputs = idp_tutorial.predict(package_model, task, cfg, [dict(sentence1=t) for t in texts])
    probabilities = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(1)
    same(torch.tensor([[*o["probabilities"].values()] for o in outputs]), probabilities, atol=1e-4)


def test_a_model_of_the_package_is_loaded_on_a_model_object(tiny, tmp_path):
    bb = load_backbone("tiny")
    cfg = config(method="lpt-npg", backbone="tiny")
    task = small_task("questions")
    trained = idp_tutorial.build_model(cfg, bb, task)
    idp_tutorial.save_pretrained(trained, tmp_path, task, cfg)
    base = transformers.AutoModel.from_pretrained(tiny, dtype=torch.float32)
    model = PromptModel.from_pretrained(base, tmp_path)
    batch = batch_of(bb, task)
    same(model(batch["input_ids"], batch["attention_mask"]).logits, trained.eval()(batch))
    assert model.config.id2label == dict(enumerate(task.labels))
    cfg = config(method="bitfit", backbone="tiny")
    idp_tutorial.save_pretrained(idp_tutorial.build_model(cfg, bb, task), tmp_path, task, cfg)
    with pytest.raises(UserError, match="leaves the model as it is"):
        PromptModel.from_pretrained(base, tmp_path)
    assert not any(p.requires_grad for p in base.parameters())


# ---- the page


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


@pytest.mark.parametrize(
    "class_name,options,message",
    [
        (
            "AutoModel",
            dict(head="classification", label_words=("a", "b")),
            "label_words belong to head='verbalizer', but head='classification'",
        ),
        (
            "AutoModel",
            dict(num_labels=2, loss_vocab="labels"),
            "loss_vocab has no effect with head",
        ),
        (
            "AutoModelForSequenceClassification",
            dict(pooling="mean"),
            "pooling has no effect with head='keep'",
        ),
        (
            "AutoModelForSequenceClassification",
            dict(two_layer_head=True),
            "two_layer_head has no effect with head='keep'",
        ),
        *(
            (
                "AutoModelForCausalLM",
                dict(task_type="CAUSAL_LM", **{name: value}),
                f"{name} has no effect with task_type='CAUSAL_LM'",
            )
            for name, value in dict(
                num_labels=3, head="classification", id2label={0: "a"}, pooling="mean"
            ).items()
        ),
    ],
)
def test_an_option_without_an_effect_is_refused(class_name, options, message):
    family = "gpt2" if class_name == "AutoModelForCausalLM" else None
    with pytest.raises(UserError, match=message):
        get_prompt_model(model_object(class_name, family), "lpt-npg", **options)


def test_the_pooling_of_a_generator_has_an_effect_on_a_language_model():
    model = model_object("AutoModelForCausalLM", "gpt2")
    get_prompt_model(model, "s-idpg-phm", task_type="CAUSAL_LM", pooling="mean", head="keep")


if __name__ == "__main__":
    run_process(Path(sys.argv[1]))

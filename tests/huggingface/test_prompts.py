"""Heads and settings of a prompt: the classifier, the language-model head, label words, options."""

import pytest
import torch
import transformers
from prompt_models import CLASSES, model_object, state_of, tokens
from small import backbone, batch_of, model_of, same, small_task
from small_models import SMALL_CONFIGS, random_batch

from idp_tutorial import get_prompt_model
from idp_tutorial.core.planned_model import restore_state
from idp_tutorial.families.family import resolve_attention
from idp_tutorial.huggingface.files import prompt_tensors
from idp_tutorial.utils.checks import UserError

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


def test_a_trained_classifier_is_kept_or_its_replacement_is_announced(recwarn):
    base = model_object("AutoModelForSequenceClassification", num_labels=3)
    model = get_prompt_model(base, "lpt", num_labels=3)
    assert model.settings["default"].head == "keep" and not recwarn.list
    same(
        model.prompts["default"]["head"].model.classifier.dense.weight, base.classifier.dense.weight
    )
    with pytest.warns(UserWarning, match="replaces the classifier"):
        model = get_prompt_model(base, "lpt", num_labels=5)
    assert model(**tokens()).logits.shape == (6, 5) and model.config.num_labels == 5
    get_prompt_model(base, "lpt", num_labels=5, head="classification")
    assert base.config.num_labels == 3 and len(recwarn.list) == 0
    with pytest.raises(UserError, match="has 3 labels"):
        get_prompt_model(base, "lpt", num_labels=5, head="keep")


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
    restore_state(prompt_tensors(model.planned_model), prompt_tensors(expected))
    batch = batch_of(bb, task, template="code")
    output = model(batch["input_ids"], batch["attention_mask"], labels=batch["label"])
    same(output.logits, expected(batch))
    same(output.loss, expected.loss(batch))
    if not bb.causal:
        with pytest.raises(UserError, match="one <mask> in each text"):
            model(**tokens())


# ---- which options go together, and which have an effect


@pytest.mark.parametrize(
    "class_name,method,options,message",
    [
        ("AutoModel", "lpt-npg", {}, "give num_labels"),
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


@pytest.mark.parametrize(
    "class_name,options,message",
    [
        (
            "AutoModel",
            dict(head="classification", label_words=("a", "b")),
            "label_words has no effect with head='classification'",
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

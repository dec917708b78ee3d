"""Uses of a Hugging Face model that work with prompts too, and those that are refused by name."""

import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from prompt_models import LABELS, model_object, prompt_model, tokens
from small import backbone, in_threads, same
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, pipeline

from idp_tutorial import get_prompt_model
from idp_tutorial.utils.checks import UserError


def trainer_of(model, tmp_path, **options):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
    return Trainer(model, args)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_labels_that_the_trainer_smooths_are_shifted_as_for_the_model_itself(smoothing, tmp_path):
    plain = model_object("AutoModelForCausalLM")
    batch = tokens(causal=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    batch["labels"] = labels
    losses = []
    for model in (plain, get_prompt_model(plain, "head-only")):
        trainer = trainer_of(model.eval(), tmp_path, label_smoothing_factor=smoothing)
        losses.append(trainer.compute_loss(model, dict(batch)))
    same(*losses)


def test_smoothed_labels_of_classes_are_not_shifted(tmp_path):
    model = prompt_model(class_name="AutoModelForCausalLM", num_labels=3).eval()
    batch = dict(tokens(causal=True), labels=LABELS)
    loss = trainer_of(model, tmp_path, label_smoothing_factor=0.3).compute_loss(model, batch)
    logits = model(**tokens(causal=True)).logits
    same(loss, nn.functional.cross_entropy(logits, LABELS, label_smoothing=0.3))
    assert model._get_name() == "PromptModel"


def test_a_generated_prompt_says_that_the_trainer_withholds_labels(tmp_path):
    model = prompt_model("lpt-npg", "AutoModelForCausalLM").train()
    batch = dict(tokens(causal=True), labels=tokens(causal=True)["input_ids"])
    trainer = trainer_of(model, tmp_path, label_smoothing_factor=0.3)
    with pytest.raises(UserError, match="leave label_smoothing_factor"):
        trainer.compute_loss(model, batch)


@pytest.mark.parametrize("head", ["TokenClassification", "QuestionAnswering", "MultipleChoice"])
def test_models_with_other_heads_are_refused_by_name(head):
    model = model_object(f"AutoModelFor{head}", "roberta")
    with pytest.raises(UserError, match=f"the head of RobertaFor{head}: .*AutoModelForSequence"):
        get_prompt_model(model, "lpt-npg", num_labels=2)


def test_a_masked_language_model_says_what_works():
    with pytest.raises(UserError, match=r"BertForMaskedLM has no classifier.*or label_words="):
        get_prompt_model(model_object("AutoModelForMaskedLM"), "lpt-npg")


def test_a_model_of_peft_is_merged_first():
    config = LoraConfig(target_modules=["query"], r=2)
    with pytest.raises(UserError, match=r"`merge_and_unload\(\)`"):
        get_prompt_model(get_peft_model(model_object(), config), "lpt-npg", num_labels=2)


def test_weights_on_disk_are_refused(tmp_path):
    model = model_object()
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(
        tmp_path / "model", device_map={"": "disk"}, offload_folder=tmp_path / "offload"
    )
    with pytest.raises(UserError, match="weights of this RobertaModel are not in memory"):
        get_prompt_model(loaded, "lpt-npg", num_labels=2)


def test_a_prompt_may_have_no_name_of_an_attribute():
    model = get_prompt_model(model_object(), "head-only", num_labels=2)
    names = [name for name in dir(model.prompts) if name.isidentifier()]
    assert {"items", "keys", "update", "train", "training", "type"} <= {*names}
    for name in {*names} - {"default"}:
        with pytest.raises(UserError, match=f"'{name}' is an attribute of torch.nn.ModuleDict"):
            model.add_prompt(name, "head-only", num_labels=2)


def test_word_vectors_keep_their_number():
    model = get_prompt_model(model_object(), "head-only", num_labels=2)
    size = len(model.get_input_embeddings().weight)
    assert model.resize_token_embeddings(size) is model.get_input_embeddings()
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    with pytest.raises(UserError, match=f"has {size} word vectors, not {size + 2}"):
        model.resize_token_embeddings(size + 2)


def test_pipelines_take_a_model_without_an_error(caplog):
    logging.getLogger("transformers").propagate = True
    tokenizer = backbone("roberta").tokenizer
    model = prompt_model(num_labels=2).eval()
    with caplog.at_level(logging.ERROR, "transformers"):
        classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
        (answer,) = classify(["a fine film"])
        decoder = backbone("gpt2").tokenizer
        language_model = prompt_model("prompt-tuning", "AutoModelForCausalLM").eval()
        write = pipeline("text-generation", model=language_model, tokenizer=decoder)
        (text,) = write("a fine film", max_new_tokens=2, do_sample=False)
    assert answer["label"] in ("LABEL_0", "LABEL_1") and text["generated_text"].startswith("a fine")
    assert [record.message for record in caplog.records] == []


def test_an_assistant_model_is_refused():
    model = prompt_model("prompt-tuning", "AutoModelForCausalLM").eval()
    assistant = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(UserError, match="leave assistant_model out"):
        model.generate(tokens(causal=True)["input_ids"], assistant_model=assistant)


# ---- threads


def two_prompts(class_name="AutoModel", **options):
    """Return a model with two different prompts, and what each returns for each of 12 texts."""
    model = prompt_model("prompt-tuning", class_name, jolt=1.0, **options).eval()
    model.add_prompt("b", "prompt-tuning", prompt_length=2, **options)
    torch.nn.init.normal_(model.prompts["b"]["sources"][0].p)
    texts = [
        {k: v[i : i + 1] for k, v in tokens(causal="LM" in class_name).items()}
        for i in [*range(6)] * 2
    ]
    return model.eval(), texts


def test_each_thread_uses_its_own_prompt():
    model, texts = two_prompts(num_labels=3)
    expected = {}
    with torch.no_grad():
        for name in ("default", "b"):
            model.set_prompt(name)
            expected[name] = [model(**text).logits for text in texts]
        with model.disable_prompt():
            expected["none"] = [model(**text).last_hidden_state for text in texts]

    @torch.no_grad()
    def work(name):
        if name == "none":
            results = []
            for text in texts:
                with model.disable_prompt():
                    results.append(model(**text).last_hidden_state)
            return results
        return [model(**text, prompt_name=name).logits for text in texts]

    names = ["default", "b", "default", "b", "none"]
    for name, results in zip(names, in_threads(work, names)):
        same(torch.cat(results, 1), torch.cat(expected[name], 1))
    assert (expected["default"][0] - expected["b"][0]).abs().max() > 0.01
    assert not model._n_disabled


def test_generation_takes_a_prompt_by_name():
    model, texts = two_prompts("AutoModelForCausalLM")
    options = dict(max_new_tokens=4, do_sample=False)
    expected = {}
    for name in ("default", "b"):
        model.set_prompt(name)
        expected[name] = model.generate(**texts[0], **options).tolist()
    results = in_threads(
        lambda name: model.generate(**texts[0], prompt_name=name, **options).tolist(), [*expected]
    )
    assert results == [*expected.values()]


def test_only_the_active_prompt_is_trained():
    model, texts = two_prompts(num_labels=3)
    model.train()
    with pytest.raises(UserError, match="prompt_name='b' was given in training mode"):
        model(**texts[0], prompt_name="b")
    assert model(**texts[0], prompt_name="default").logits.requires_grad
    with pytest.raises(UserError, match="unknown prompt 'c'"):
        model.eval()(**texts[0], prompt_name="c")

"""Files of prompts for a Hugging Face model: saved, loaded, and exchanged with the package."""

import pytest
import torch
import transformers
from prompt_models import FIVE, model_object, prompt_model, tokens
from small import batch_of, config, same, small_task

import idp_tutorial
from idp_tutorial import PromptModel, get_prompt_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.saving.descriptions import read_prompts, write_prompts
from idp_tutorial.utils.checks import UserError


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
    with pytest.raises(UserError, match="belong to another backbone"):
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


def test_a_prompt_of_an_earlier_version_is_loaded_with_a_warning(tmp_path):
    model = prompt_model("lpt-npg", num_labels=3)
    model.save_pretrained(tmp_path)
    description, tensors = read_prompts(tmp_path)
    digests = dict(float32="a" * 64, bfloat16="b" * 64)
    description["prompt_model"]["base"]["digests"] = digests
    write_prompts(tmp_path, tensors, description)
    with pytest.warns(UserWarning, match="saved by an earlier version"):
        loaded = PromptModel.from_pretrained(model_object(), tmp_path)
    same(loaded(**tokens()).logits, model(**tokens()).logits)


def test_a_prompt_fits_its_model_with_another_dropout(tmp_path):
    model = prompt_model("lpt-npg", num_labels=3)
    model.save_pretrained(tmp_path)
    other = model_object()
    other.config.hidden_dropout_prob = 0.4
    assert PromptModel.from_pretrained(other, tmp_path)
    other.config.layer_norm_eps = 0.1
    with pytest.raises(UserError, match="belong to another backbone"):
        PromptModel.from_pretrained(other, tmp_path)

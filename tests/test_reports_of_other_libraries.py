"""What public bug reports of peft and setfit describe, tried with this project.

Each test names the issues on GitHub (`peft #114` is huggingface/peft/issues/114).
"""

import numpy as np
import pytest
import torch
import transformers
from small import backbone
from small_models import SMALL_CONFIGS, random_batch
from torch import nn

import idp_tutorial
from idp_tutorial import PromptClassifier, PromptModel, get_prompt_model
from idp_tutorial.families.family import resolve_attention
from idp_tutorial.utils.checks import UserError

TEXTS = [f"the {a} {b}" for a in ("red", "blue", "old", "new") for b in ("door", "cup", "tree")]


def small_model(name, class_name="AutoModelForCausalLM", **config_options):
    """Return a small model of a family, in eval mode."""
    config_class, sizes = SMALL_CONFIGS[name]
    config = getattr(transformers, config_class)(**sizes | config_options)
    torch.manual_seed(0)
    attention = resolve_attention(config, "sdpa")
    return getattr(transformers, class_name).from_config(config, attn_implementation=attention)


def classifier(num_labels, seed=0):
    """Return a small encoder with a classifier, whose encoder does not depend on the labels."""
    bb = backbone("bert")
    config = transformers.BertConfig(**bb.config.to_diff_dict() | dict(num_labels=num_labels))
    torch.manual_seed(seed)
    model = transformers.BertForSequenceClassification._from_config(
        config, attn_implementation="sdpa"
    )
    model.bert.load_state_dict(bb.base.state_dict(), strict=False)
    return model.eval()


def words(n=3):
    """Return a batch of tokens with padding."""
    batch = random_batch()
    return {name: batch[name][:n] for name in ("input_ids", "attention_mask")}


def fit(labels, texts=TEXTS, folder=None, **options):
    """Return a small estimator after two training steps."""
    defaults = dict(backbone="tiny", steps=2, evaluations=1, lr=None, device="cpu", max_len=16)
    return PromptClassifier("lpt-npg", bottleneck=4, prompt_length=2, **defaults | options).fit(
        texts, labels
    )


# ---- models of transformers


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_keys_of_a_prompt_have_the_heads_of_grouped_query_attention(name):
    """See peft #2449 and peft #2821."""
    base = small_model(name)
    assert base.config.num_key_value_heads < base.config.num_attention_heads
    model = get_prompt_model(base, "p-tuning-v2", prompt_length=3)
    batch = words()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    model(**batch, labels=labels).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and p.grad.any() for p in trained)
    generated = model.generate(**batch, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert generated.shape == (3, batch["input_ids"].shape[1] + 2)


def test_a_model_in_bfloat16_generates_while_it_is_trained():
    """See peft #1515."""
    model = get_prompt_model(small_model("llama").bfloat16(), "p-tuning-v2", prompt_length=3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 50.0)
    ids = words(1)["input_ids"]
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.train()
    before = model.generate(ids, **options)
    target = torch.full_like(ids, 7)
    for _ in range(20):
        optimizer.zero_grad()
        model(ids, labels=target).loss.backward()
        optimizer.step()
    assert model.training
    assert not torch.equal(model.generate(ids, **options), before)  # the prompt is in use


def test_a_wrapped_model_is_refused_with_the_way_out(tmp_path):
    """See peft #114 and peft #2115."""
    with pytest.raises(UserError, match="got DataParallel: pass its `.module`"):
        get_prompt_model(nn.DataParallel(classifier(3)), "lpt")
    model = get_prompt_model(classifier(3), "lpt", prompt_length=3)
    model.save_pretrained(tmp_path)
    for call in (
        lambda: get_prompt_model(model, "lpt"),
        lambda: PromptModel.from_pretrained(model, tmp_path),
    ):
        with pytest.raises(UserError, match=r"got PromptModel: .*`load_prompt` of a PromptModel"):
            call()


def test_a_saved_classifier_is_loaded_or_its_number_of_labels_named(tmp_path):
    """See peft #554 and peft #577."""
    model = get_prompt_model(classifier(3), "p-tuning", prompt_length=3)
    model.save_pretrained(tmp_path)
    # the classifier of a new model object has other random weights
    loaded = PromptModel.from_pretrained(classifier(3, seed=1), tmp_path)
    assert torch.equal(loaded(**words()).logits, model.eval()(**words()).logits)
    with pytest.raises(UserError, match="load it with the class of training and num_labels=3"):
        PromptModel.from_pretrained(classifier(2), tmp_path)
    with pytest.raises(UserError, match="load it with the class of training"):
        PromptModel.from_pretrained(classifier(3).base_model, tmp_path)


def test_p_tuning_is_loaded_with_its_network_and_trained_on(tmp_path):
    """See peft #1247 and peft #1607."""
    model = get_prompt_model(classifier(3), "p-tuning", prompt_length=3).eval()
    model.save_pretrained(tmp_path)
    loaded = PromptModel.from_pretrained(classifier(3), tmp_path, is_trainable=True)
    state = model.state_dict()
    assert any(".mlp." in name for name in state)
    assert all(torch.equal(t, state[name]) for name, t in loaded.state_dict().items())
    assert loaded.get_nb_trainable_parameters() == model.get_nb_trainable_parameters()
    same_loss = [m(**words(), labels=torch.tensor([0, 1, 2])).loss for m in (model, loaded)]
    assert same_loss[0] == same_loss[1]
    same_loss[1].backward()
    assert all(p.grad is not None for p in loaded.parameters() if p.requires_grad)


# ---- classes and scores


def test_columns_of_probabilities_are_in_the_order_of_the_classes():
    """See setfit #228 and setfit #462."""
    labels = ["negative", "zeta", "alpha"] * 4  # not in the order of the alphabet
    clf = fit(labels)
    probabilities = clf.predict_proba(TEXTS)
    assert [*clf.classes_] == sorted({*labels}) and probabilities.shape == (12, 3)
    predicted = clf.predict(TEXTS)
    assert (clf.classes_[probabilities.argmax(1)] == predicted).all()
    assert clf.score(TEXTS, labels) == np.mean(predicted == labels)  # of labels that are texts


def test_a_seed_gives_the_same_model_also_after_another_fit():
    """See setfit #381 and setfit #432."""
    labels = ["a", "b"] * 6
    first = fit(labels, seed=1).predict_proba(TEXTS)
    other = fit(labels[::-1], seed=2).predict_proba(TEXTS)
    assert (fit(labels, seed=1).predict_proba(TEXTS) == first).all()
    assert not np.allclose(other, first)


def test_a_hundred_classes_of_unequal_size(tmp_path):
    """See setfit #145."""
    labels = [f"class {i}" for i in range(100) for _ in range(2 + i % 3)]
    texts = [f"text {i} of {name}" for i, name in enumerate(labels)]
    clf = fit(labels, texts, class_weight="balanced")
    clf.save_pretrained(tmp_path)
    probabilities = idp_tutorial.PromptClassifier.from_pretrained(tmp_path).predict_proba(texts[:3])
    assert probabilities.shape == (3, 100) and probabilities.sum(1) == pytest.approx(1)

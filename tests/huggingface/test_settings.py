"""Options of a prompt for a Hugging Face model: which go together, and which have an effect."""

import pytest
from prompt_models import model_object

from idp_tutorial import get_prompt_model
from idp_tutorial.utils.checks import UserError


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

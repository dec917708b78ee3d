"""Small Hugging Face models with prompts, and batches of tokens for them."""

import copy

import torch
import transformers
from small import backbone, batch_of
from torch import nn

from idp_tutorial import METHODS, get_prompt_model
from idp_tutorial.families.family import resolve_attention

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

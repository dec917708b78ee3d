"""Heads of a `PromptModel`, and the model of prompts and head that its settings describe.

Two of the heads read all words: the trainable copy of a classifier, and the frozen language-model
head. The other two are those of the package's own models.
"""

from copy import copy, deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from idp_tutorial.assembly.build import resolve_pooling
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context, to_float32
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.core.steps import PromptSource
from idp_tutorial.huggingface.settings import PromptSettings
from idp_tutorial.methods.method_registry import ALL_METHODS, METHOD_KINDS
from idp_tutorial.utils.checks import UserError

__all__ = ["build_prompted_model"]

_REFUSED_KINDS = ("weights", "all weights", "entailment", "control")


def _word_states(ctx: Context) -> Tensor:  # `[B,T,d]`
    """Return the hidden states of the words, in their order and without prompts.

    States at the padding are arbitrary.
    """
    words = ctx.word_mask
    if "answer_start" in ctx.batch:  # the tokens of the answer come after all others
        index = torch.arange(ctx.h.shape[1], device=ctx.h.device)
        words = words + ctx.attention_mask * (index > ctx.tracked_positions["last"][:, None])
    order = (1 - words).argsort(dim=1, stable=True)[:, : ctx.input_ids.shape[1]]
    return ctx.h.gather(1, order[..., None].expand(-1, -1, ctx.h.shape[2]))


def _copy_as_buffers(module: nn.Module) -> nn.Module:
    """Return a float32 copy of a module, whose parameters are buffers: saved, but not trained."""
    copied = deepcopy(module).float()
    for part in copied.modules():
        for name, parameter in [*part._parameters.items()]:
            del part._parameters[name]
            part.register_buffer(name, None if parameter is None else parameter.detach())
    return copied


class _FinalStates(nn.Module):
    """Stand-in for the base of a model: it returns the hidden states that it gets."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        pooler = getattr(base, "pooler", None)
        # saved with the head: `transformers` initialises a pooler that the checkpoint of the model
        # does not have, with other random weights each time it loads the model
        self.pooler = None if pooler is None else _copy_as_buffers(pooler)

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        """Return the states as the output of a base model, with its frozen pooler's if any."""
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=inputs_embeds, pooler_output=pooled
        )


class _OwnClassifier(nn.Module):
    """Trainable copy of the classifier of a Hugging Face model, on the prompted hidden states.

    It is the model's own forward pass, in which the base returns the states of the layer loop.
    """

    pooling: ClassVar[str] = "all"

    def __init__(self, bb: Backbone, config: Any) -> None:
        super().__init__()
        model = bb.model
        self.model = copy(model)
        self.model._modules = {
            name: _FinalStates(module) if module is bb.base else deepcopy(module).float()
            for name, module in model._modules.items()
        }
        self.model.config = config
        self.model.requires_grad_(True)

    def forward(self, ctx: Context) -> Tensor:
        """Return the logits `[B,C]`."""
        mask = ctx.batch["attention_mask"]
        ids = ctx.input_ids
        pad_id = self.model.config.pad_token_id
        if pad_id is not None:  # a decoder's classifier finds the last token by the padding's id
            ids = ids.masked_fill(mask == 0, pad_id)
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            inputs_embeds=to_float32(_word_states(ctx)),
            return_dict=True,
        ).logits


class _LanguageModelHead(nn.Module):
    """Frozen language-model head of a decoder at every word."""

    pooling: ClassVar[str] = "all"

    def __init__(self, bb: Backbone) -> None:
        super().__init__()
        self.lm_logits = bb.lm_logits

    def forward(self, ctx: Context) -> Tensor:
        """Return the logits of the token after each word `[B,T,V]`."""
        return self.lm_logits(to_float32(_word_states(ctx)))


def _build_head(settings: PromptSettings, bb: Backbone, config: Any) -> nn.Module:
    cfg = settings.cfg
    if settings.task_type == "CAUSAL_LM":
        return _LanguageModelHead(bb)
    if settings.head == "keep":
        return _OwnClassifier(bb, config)
    if settings.head == "verbalizer":
        return VerbalizerHead(bb, list(settings.label_token_ids), cfg.loss_vocab)
    pooling = resolve_pooling(cfg, bb)
    return ClassificationHead(bb.d, settings.num_labels, pooling, cfg.two_layer_head)


def build_prompted_model(
    bb: Backbone,  # the model
    settings: PromptSettings,  # of the prompt
    config: Any,  # config of the model, with the classes of the prompt
) -> PromptedModel:
    """Build the prompts of a method and a head on a model.

    Raises: `UserError` for a method that a model object cannot have.
    """
    cfg = settings.cfg
    kind = ALL_METHODS[cfg.method].kind
    if kind in _REFUSED_KINDS:
        raise UserError(
            f"method {cfg.method!r} trains {METHOD_KINDS[kind]}, but a PromptModel leaves the "
            "model as it is: use a method with prompts, or LoRA from peft, or idp train."
        )
    if cfg.get("position") in (2, 3, 4) and bb.tokenizer is None:
        raise UserError(
            f"position={cfg.get('position')} is found by separator tokens: give tokenizer=."
        )
    if settings.head == "classification" and cfg.pooling == "mask":
        raise UserError(
            "pooling='mask' reads a mask token that a template adds to the text, and a model gets "
            "tokens only: use label_words=, or another pooling."
        )
    plan = cfg.method_config.plan(bb, cfg)
    head = _build_head(settings, bb, config)
    prompted = PromptedModel(bb, head, plan, cfg.dropout_below_prompt)
    if any(type(s).prepare is not PromptSource.prepare for s in prompted.prompt_sources()):
        raise UserError(
            f"method {cfg.method!r} reads the texts themselves, and a model gets tokens only: use "
            "another method, or idp train."
        )
    return prompted

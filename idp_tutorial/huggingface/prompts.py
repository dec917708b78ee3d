"""What a prompt on a Hugging Face model is: its settings, its head, and the model of both.

The settings are made of the arguments of `get_prompt_model` and of the model itself, whose classes
and language-model head decide what is not given.

Two of the heads read all words: the trainable copy of a classifier, and the frozen language-model
head. The other two are those of the package's own models.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from idp_tutorial.assembly.build import resolve_pooling
from idp_tutorial.assembly.config import RunConfig, find_unused_options
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context, to_float32
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.core.steps import PromptSource
from idp_tutorial.data.task import Task
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.method_registry import ALL_METHODS, METHOD_KINDS, MethodConfig
from idp_tutorial.utils.checks import Range, UserError, check_choice, check_int, check_name

HEADS = {
    "keep": "the model's own classifier",
    "classification": "a new one",
    "verbalizer": "label words at a mask token",
}
TASK_TYPES = {"SEQ_CLS": "classes or a number for each text", "CAUSAL_LM": "text generation"}
_HEAD_OPTIONS = ("pooling", "two_layer_head", "loss_vocab", "dropout_below_prompt")


@dataclass(frozen=True)
class PromptSettings:
    """Everything from which a prompt and its head are built on a model."""

    cfg: RunConfig  # the method and its options, and those of the head
    task_type: str  # a key of `TASK_TYPES`
    head: str  # a key of `HEADS`; 'keep' for the language-model head of a 'CAUSAL_LM' model
    labels: tuple[str, ...] = ()  # names of the classes; empty for a regression and for generation
    label_token_ids: tuple[int, ...] = ()  # of the verbalizer

    @property
    def num_labels(self) -> int:
        """Number of outputs of the head: the classes, or 1 for a regression."""
        return len(self.labels) or 1

    @property
    def task(self) -> Task:
        """The task in the package's own terms, without examples."""
        if self.task_type == "CAUSAL_LM":
            return Task("own", is_generation=True, metric="exact_match")
        if not self.labels:
            return Task("own", metric="pearson+spearman", label_range=(0.0, 1.0))
        return Task("own", labels=self.labels)


def _make_config(method: str | MethodConfig, backbone: str, options: dict[str, Any]) -> RunConfig:
    """Return the config of a method, which is given by its name or as a config object."""
    own_options: dict[str, Any] = {}
    if isinstance(method, MethodConfig):
        own_options = vars(method)
        names = [name for name, row in METHODS.items() if row.config_class is type(method)]
        if not names:
            raise UserError(
                f"{type(method).__name__} belongs to no method: register it with "
                "idp_tutorial.register, or give the name of a method."
            )
        method = names[0]
    row = METHODS[check_name(method, METHODS, "method")]
    for option in options:
        known = [*_HEAD_OPTIONS, *row.options]
        check_name(option, known, f"option of get_prompt_model({method!r})")
    return RunConfig(method, backbone=backbone, **{**own_options, **options})


def _class_names(
    config: Any, num_labels: int | None, id2label: Mapping[int, str] | None
) -> tuple[str, ...]:
    """Return the names of the classes, those of the model's config by default; () for numbers."""
    if num_labels is None:
        num_labels = len(id2label) if id2label else config.num_labels
    Range(1).check(check_int(num_labels, "num_labels"), "num_labels")
    if id2label is None and num_labels == config.num_labels:
        id2label = config.id2label
    if id2label is None:
        id2label = {i: f"LABEL_{i}" for i in range(num_labels)}
    if sorted(id2label) != list(range(num_labels)):
        raise UserError(
            f"id2label must name the {num_labels} classes 0 to {num_labels - 1}, got {id2label}."
        )
    return tuple(id2label[i] for i in range(num_labels)) if num_labels > 1 else ()


def _has_own_classifier(model: Any) -> bool:
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    return is_classifier and not model.config.is_encoder_decoder


def _choose_head(model: Any, num_labels: int | None, head: str | None) -> str:
    """Return the head of a classifier, and say so if it replaces the model's own."""
    if head is not None:
        check_choice(head, HEADS, "head")
    has_own = _has_own_classifier(model)
    fits = has_own and num_labels in (None, model.config.num_labels)
    if head == "keep" and not fits:
        reason = f"has {model.config.num_labels} labels" if has_own else "has no classifier"
        raise UserError(
            f"head='keep' needs a model with a classifier of num_labels={num_labels} labels, but "
            f"this {type(model).__name__} {reason}: leave head out for a new one."
        )
    if head is None and has_own and not fits:
        warnings.warn(
            f"num_labels={num_labels} replaces the classifier ({model.config.num_labels} labels) "
            f"of this {type(model).__name__} by a new one: give head='classification' to confirm.",
            stacklevel=2,
        )
    return head or ("keep" if fits else "classification")


def _unused_head_options(cfg: RunConfig, head: str) -> list[str]:
    """Return the options of a head that a head, or a generator with M(x), does not use."""
    if head == "classification":
        return ["loss_vocab", "label_words"]
    unused = ["two_layer_head"]
    if "sentence_pooling" not in METHODS[cfg.method].options:
        unused.append("pooling")
    return unused if head == "verbalizer" else [*unused, "loss_vocab", "label_words"]


def _refuse_unused_options(setting: str, unused: Iterable[str], options: Mapping[str, Any]) -> None:
    """Raise `UserError` for an option that is given and has no effect."""
    for name in unused:
        if options.get(name) is not None:
            raise UserError(f"{name} has no effect with {setting}: leave it out.")


def find_label_token_ids(
    task: Task,  # with label words
    bb: Backbone,  # the model
) -> tuple[int, ...]:  # one id for each class
    """Return the tokens of the label words.

    Raises: `UserError` if the model has no tokenizer.
    """
    if bb.tokenizer is None:
        raise UserError("label words need the tokenizer of the model: give tokenizer=.")
    return tuple(task.word_ids(bb.tokenizer))


def make_prompt_settings(
    bb: Backbone,  # the model
    method: str | MethodConfig,  # this and the other arguments as for `get_prompt_model`
    num_labels: int | None = None,  # number of classes, 1 for a regression
    task_type: str | None = None,  # a key of `TASK_TYPES`
    head: str | None = None,  # a key of `HEADS`
    id2label: Mapping[int, str] | None = None,  # names of the classes
    label_words: Sequence[str] = (),  # one word for each class
    **options: Any,  # options of the method and of the head
) -> PromptSettings:
    """Return the settings of a prompt from the arguments of `get_prompt_model`.

    Raises: `UserError` for arguments that cannot be combined.
    """
    model = bb.model
    cfg = _make_config(method, bb.name, options)
    for message in find_unused_options([cfg], bb).values():
        raise UserError(message)
    given = dict(options, num_labels=num_labels, id2label=id2label, label_words=label_words or None)
    if head != "keep":
        given["head"] = head
    if label_words:
        num_labels = num_labels or len(label_words)
        head = head or "verbalizer"
    if task_type is None:
        is_language_model = bb.causal and bb.has_lm_head and num_labels is None and not id2label
        task_type = "CAUSAL_LM" if is_language_model else "SEQ_CLS"
    check_choice(task_type, TASK_TYPES, "task_type")
    if task_type == "CAUSAL_LM":
        if not (bb.causal and bb.has_lm_head):
            raise UserError(
                f"task_type='CAUSAL_LM' needs a decoder with its language-model head, got "
                f"{type(model).__name__}: load it with AutoModelForCausalLM."
            )
        unused = ["num_labels", "head", "id2label", *_unused_head_options(cfg, "keep")]
        _refuse_unused_options("task_type='CAUSAL_LM'", unused, given)
        return PromptSettings(cfg, task_type, "keep")
    if num_labels is None and id2label is None and not _has_own_classifier(model):
        raise UserError(
            f"this {type(model).__name__} has no classifier: give num_labels, 1 for a regression, "
            "or label_words= to predict words at a mask token."
        )
    labels = _class_names(model.config, num_labels, id2label)
    head = _choose_head(model, len(labels) or 1, head)
    _refuse_unused_options(f"head={head!r}", _unused_head_options(cfg, head), given)
    if head != "verbalizer":
        return PromptSettings(cfg, task_type, head, labels)
    task = Task("own", labels=labels, label_words=tuple(label_words))
    cfg = cfg.with_options(head="verbalizer")
    return PromptSettings(cfg, task_type, head, labels, find_label_token_ids(task, bb))


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
        mask = ctx.text_mask
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


def build_planned_model(
    bb: Backbone,  # the model
    settings: PromptSettings,  # of the prompt
    config: Any,  # config of the model, with the classes of the prompt
) -> PlannedModel:
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
    prompted = PlannedModel(bb, head, plan, cfg.dropout_below_prompt)
    if any(type(s).prepare is not PromptSource.prepare for s in prompted.prompt_sources()):
        raise UserError(
            f"method {cfg.method!r} reads the texts themselves, and a model gets tokens only: use "
            "another method, or idp train."
        )
    return prompted

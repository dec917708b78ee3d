"""Prompts for a Hugging Face model object, as a module for anybody's training loop.

`get_prompt_model(model, "id-spam", num_labels=7, prompt_length=10)` returns a `PromptModel`: the
frozen model with trained prompts and a head. Its `forward` takes the tokens of a tokenizer and
returns a `ModelOutput`, so that `transformers.Trainer`, `accelerate` and plain PyTorch train it as
they train any model. Names and habits are those of `peft.PeftModel` where the meaning is the same.

The model object is not changed, except that its parameters are frozen. `state_dict` has the prompts
and heads only: a checkpoint of the `Trainer` is as small as they are.
"""

import hashlib
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context, to_float32
from idp_tutorial.core.dtypes import DTYPES
from idp_tutorial.core.generation import build_decoder
from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.prompted_model import PromptedModel, restore_state
from idp_tutorial.core.steps import PromptSource
from idp_tutorial.data.task import Task
from idp_tutorial.families.family import wrap_hf_model
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.method_registry import ALL_METHODS, METHOD_KINDS, MethodConfig
from idp_tutorial.saving.descriptions import (
    PROMPT_MODEL_FORMAT,
    PROMPTS_FILE,
    SAVE_FORMAT,
    check_prompt_sizes,
    describe_backbone,
    describe_run,
    have_same_shapes,
    load_saved_backbone,
    parse_saved_run,
    remember_local_backbone,
)
from idp_tutorial.saving.hub import (
    SavedPrompts,
    push_to_hub,
    read_saved_prompts,
    write_readable_description,
)
from idp_tutorial.utils.checks import UserError, check_at_least, check_choice, check_int, check_name
from idp_tutorial.utils.records import collect_versions
from idp_tutorial.utils.tensor_files import save_tensors

__all__ = ["HEADS", "TASK_TYPES", "PromptSettings", "PromptModel", "get_prompt_model"]

HEADS = {
    "keep": "the model's own classifier",
    "classification": "a new one",
    "verbalizer": "label words at a mask token",
}
TASK_TYPES = {"SEQ_CLS": "classes or a number for each text", "CAUSAL_LM": "text generation"}
_HEAD_OPTIONS = ("pooling", "two_layer_head", "loss_vocab", "dropout_below_prompt")
_REFUSED_KINDS = ("weights", "all weights", "entailment", "control")
# arguments of a Hugging Face model that change nothing, or nothing while they are false
_HARMLESS_ARGUMENTS = ("return_dict", "use_cache")


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


# ---- heads that read all words


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
        return self.model(
            input_ids=ctx.input_ids,
            attention_mask=ctx.batch["attention_mask"],
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
    pooling = bb.default_pooling if cfg.pooling == "cls" else cfg.pooling
    return ClassificationHead(bb.d, settings.num_labels, pooling, cfg.two_layer_head)


# ---- what the arguments of a prompt mean


def _find_method(method: str | MethodConfig) -> tuple[str, dict[str, Any]]:
    """Return the name of a method and the options that its config object has."""
    if not isinstance(method, MethodConfig):
        return check_name(method, METHODS, "method"), {}
    for name, row in METHODS.items():
        if row.config_class is type(method):
            return name, dict(vars(method))
    raise UserError(
        f"{type(method).__name__} belongs to no method: register it with "
        "idp_tutorial.register, or give the name of a method."
    )


def _make_config(method: str | MethodConfig, backbone: str, options: dict[str, Any]) -> RunConfig:
    name, own_options = _find_method(method)
    row = METHODS[name]
    for option in options:
        check_name(option, [*_HEAD_OPTIONS, *row.options], f"option of get_prompt_model({name!r})")
    return RunConfig(name, backbone=backbone, **{**own_options, **options})


def _class_names(
    config: Any, num_labels: int | None, id2label: Mapping[int, str] | None
) -> tuple[str, ...]:
    """Return the names of the classes, those of the model's config by default; () for numbers."""
    if num_labels is None:
        num_labels = len(id2label) if id2label else config.num_labels
    check_at_least(check_int(num_labels, "num_labels"), 1, "num_labels")
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
            f"num_labels={num_labels}, but the classifier of this {type(model).__name__} has "
            f"{model.config.num_labels} labels, so a new head is trained instead. Use "
            "head='classification' to choose this without a warning.",
            stacklevel=2,
        )
    return head or ("keep" if fits else "classification")


def _unused_head_options(cfg: RunConfig, head: str) -> list[str]:
    """Return the options of a head that a head, or a generator with M(x), does not use."""
    if head == "classification":
        return ["loss_vocab"]
    unused = ["two_layer_head"]
    if "sentence_pooling" not in METHODS[cfg.method].options:
        unused.append("pooling")
    return unused if head == "verbalizer" else [*unused, "loss_vocab"]


def _refuse_unused_options(setting: str, unused: Iterable[str], options: Mapping[str, Any]) -> None:
    """Raise `UserError` for an option that is given and has no effect."""
    for name in unused:
        if options.get(name) is not None:
            raise UserError(f"{name} has no effect with {setting}: leave it out.")


def _make_settings(
    bb: Backbone,
    method: str | MethodConfig,
    num_labels: int | None = None,
    task_type: str | None = None,
    head: str | None = None,
    id2label: Mapping[int, str] | None = None,
    label_words: Sequence[str] = (),
    **options: Any,
) -> PromptSettings:
    """Return the settings of a prompt; the arguments are those of `get_prompt_model`."""
    model = bb.model
    cfg = _make_config(method, bb.name, options)
    if label_words and head not in (None, "verbalizer"):
        raise UserError(
            f"label_words belong to head='verbalizer', but head={head!r}: give one of them."
        )
    class_options = dict(
        num_labels=num_labels,
        head=None if head == "keep" else head,
        id2label=id2label,
        label_words=label_words or None,
    )
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
        _refuse_unused_options("task_type='CAUSAL_LM'", class_options, class_options)
        _refuse_unused_options("task_type='CAUSAL_LM'", _unused_head_options(cfg, "keep"), options)
        return PromptSettings(cfg, task_type, "keep")
    if num_labels is None and id2label is None and not _has_own_classifier(model):
        raise UserError(
            f"num_labels is needed, because this {type(model).__name__} has no classifier: give "
            "the number of classes, or 1 for a regression."
        )
    labels = _class_names(model.config, num_labels, id2label)
    head = _choose_head(model, len(labels) or 1, head)
    _refuse_unused_options(f"head={head!r}", _unused_head_options(cfg, head), options)
    if head != "verbalizer":
        return PromptSettings(cfg, task_type, head, labels)
    task = Task("own", labels=labels, label_words=tuple(label_words))
    cfg = cfg.with_options(head="verbalizer")
    return PromptSettings(cfg, task_type, head, labels, _label_token_ids(task, bb))


def _label_token_ids(task: Task, bb: Backbone) -> tuple[int, ...]:
    if bb.tokenizer is None:
        raise UserError("label words need the tokenizer of the model: give tokenizer=.")
    return tuple(task.word_ids(bb.tokenizer))


def _check_model(model: Any) -> None:
    """Raise `UserError` for what is not a model that the layer loop can run."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        hint = ""
        if isinstance(model, PromptModel):
            hint = " Add a prompt to it with add_prompt or load_prompt, or give its base_model."
        elif isinstance(getattr(model, "module", None), PreTrainedModel):
            hint = " Give its module, and wrap the result."
        raise UserError(
            f"model must be a Hugging Face model, such as AutoModel.from_pretrained(...), got "
            f"{type(model).__name__}.{hint}"
        )
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise UserError(
            f"this model has attn_implementation={attention!r}, but the prompts need 'sdpa' or "
            "'eager': call model.set_attn_implementation('sdpa') first."
        )
    dtype = model.get_input_embeddings().weight.dtype
    if dtype not in DTYPES.values():
        raise UserError(
            f"this model has weights in {dtype}, in which small gradients are lost: load it with "
            "dtype=torch.float32 or dtype=torch.bfloat16."
        )


# ---- tokens in, loss out


def _shifted_index(T: int, shift: Tensor) -> Tensor:  # `[B,T]`
    """Return the index that moves the elements of each row `shift` `[B,1]` places to the left."""
    index = torch.arange(T, device=shift.device) + shift
    return torch.where(index < T, index, index - T)  # ONNX has no remainder by a dynamic size


def _make_batch(
    input_ids: Any, attention_mask: Tensor | None, token_type_ids: Tensor | None
) -> tuple[dict[str, Tensor], Tensor]:
    """Return a batch that is padded on the right, and where each token was before `[B,T]`.

    Raises: `UserError` for what is not a batch of tokens.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else None
        given = f"shape {shape}" if shape else f"a {type(input_ids).__name__}"
        raise UserError(
            f"input_ids must be a tensor of token ids [B,T], got {given}: call "
            "model(**tokens) with tokens = tokenizer(texts, padding=True, return_tensors='pt')."
        )
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise UserError(
            f"attention_mask must have the shape {tuple(input_ids.shape)} of input_ids, got "
            f"{tuple(attention_mask.shape)}."
        )
    attention_mask = (attention_mask != 0).long()
    start = attention_mask.argmax(1, keepdim=True)  # of the text, behind padding on the left
    index = _shifted_index(input_ids.shape[1], start)
    attention_mask = attention_mask.gather(1, index)
    if not torch.compiler.is_compiling() and bool((attention_mask.diff(dim=1) > 0).any()):
        raise UserError(
            "attention_mask must be 1 for all tokens of a text and 0 for the padding before or "
            "behind it, but it has a 0 between two tokens."
        )
    batch = dict(input_ids=input_ids.gather(1, index), attention_mask=attention_mask)
    if token_type_ids is None:
        return {**batch, "token_type_ids": torch.zeros_like(input_ids)}, index
    return {**batch, "token_type_ids": token_type_ids.gather(1, index)}, index


def _find_mask_position(bb: Backbone, batch: dict[str, Tensor]) -> Tensor:  # `[B]`
    """Return where a verbalizer reads: at the mask token, or at a decoder's last token."""
    if bb.causal:
        return batch["attention_mask"].sum(1) - 1
    is_mask = batch["input_ids"] == bb.tokenizer.mask_token_id
    if not torch.compiler.is_compiling() and not bool(is_mask.any(1).all()):
        raise UserError(
            f"label_words need one {bb.tokenizer.mask_token} in each text: write it into the "
            f"texts, such as 'a fine film . It was {bb.tokenizer.mask_token} .'"
        )
    return is_mask.int().argmax(1)


def _classification_loss(
    logits: Tensor, labels: Tensor, problem_type: str | None, n_items: Any
) -> Tensor:
    """Return the loss of Hugging Face's classifiers, as a mean over `n_items` or the batch."""
    reduction = "mean" if n_items is None else "sum"
    if problem_type is None:
        is_float = labels.is_floating_point()
        problem_type = "multi_label_classification" if is_float else "single_label_classification"
        problem_type = "regression" if logits.shape[1] == 1 else problem_type
    if problem_type == "regression":
        loss = F.mse_loss(logits.flatten(), labels.flatten().to(logits.dtype), reduction=reduction)
    elif problem_type == "multi_label_classification":
        loss = F.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction=reduction
        )
    else:
        loss = F.cross_entropy(logits, labels.flatten(), reduction=reduction)
    return loss if n_items is None else loss / n_items


def _refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `UserError` for an argument of `forward` that would have no effect."""
    for name, value in arguments.items():
        if value is None or value is False or name in _HARMLESS_ARGUMENTS:
            continue
        reason = "has no such argument"
        if name == "inputs_embeds":
            reason = "computes prompts from token ids, so it needs input_ids"
        raise UserError(f"{name} was given, but a PromptModel {reason}: leave {name} out.")


# ---- files


def _base_digests(bb: Backbone) -> dict[str, str]:
    """Return the SHA-256 digests of the weights that the layers use, by dtype.

    They are the same for every class of a model: heads and poolers are left out. A head that uses
    the pooler has a copy.
    """
    hashes = {name: hashlib.sha256() for name in DTYPES}
    for name, tensor in sorted(bb.base.state_dict().items()):
        if "pooler." in name or name.startswith("decoder."):
            continue
        for dtype, digest in hashes.items():
            value = tensor.detach().cpu().to(DTYPES[dtype]).contiguous()
            digest.update(f"{name} {tuple(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy())
    return {dtype: digest.hexdigest() for dtype, digest in hashes.items()}


def _dtype_name(bb: Backbone) -> str:
    return str(bb.word_embeddings.weight.dtype).removeprefix("torch.")


def _check_same_base(saved: Mapping[str, Any], bb: Backbone, folder: Path | str) -> None:
    """Raise `UserError` unless prompts were trained on the weights of this model."""
    digests = _base_digests(bb)
    for dtype in (_dtype_name(bb), saved["dtype"]):
        if dtype in digests and saved["digests"].get(dtype) == digests[dtype]:
            return
    raise UserError(
        f"the prompts of {folder} belong to another model: the weights of {bb.name!r} differ. Load "
        "the model they were trained on."
    )


def _describe_named_backbone(bb: Backbone) -> dict[str, Any] | None:
    """Describe the model as `idp predict` loads it by name; None if it cannot."""
    if bb.tokenizer is None or bb.causal:  # a decoder's texts are encoded in another way
        return None
    try:
        named = load_backbone(bb.name, dtype=_dtype_name(bb))
    except UserError:
        return None
    return describe_backbone(named, bb.name) if _base_digests(named) == _base_digests(bb) else None


def _prompt_tensors(prompted: PromptedModel) -> dict[str, Tensor]:
    """Return the tensors of a prompt and its head, each once, whether they are trained or not."""
    persistent = prompted.state_dict().keys()
    tensors = {**dict(prompted.named_parameters()), **dict(prompted.named_buffers())}
    return {n: x for n, x in tensors.items() if n in persistent and not n.startswith("lm.")}


def _read_settings(saved_prompts: SavedPrompts, bb: Backbone) -> PromptSettings:
    """Return the settings of a saved prompt, of this module or of `idp train`."""
    folder, _, description, tensors = saved_prompts
    task, cfg = parse_saved_run(description, folder, description["version"])
    check_prompt_sizes(cfg, tensors, folder)
    saved = description.get("prompt_model")
    if saved is None:
        named = load_saved_backbone(
            description["backbone"], cfg.backbone, None, f"the prompts of {folder}"
        )
        _check_same_base(dict(digests=_base_digests(named), dtype=_dtype_name(named)), bb, folder)
        task_type = "CAUSAL_LM" if task.is_generation else "SEQ_CLS"
        is_verbalizer = cfg.head == "verbalizer" and task_type == "SEQ_CLS"
        token_ids = _label_token_ids(task, bb) if is_verbalizer else ()
        head = "keep" if task.is_generation else cfg.head
        return PromptSettings(cfg, task_type, head, task.labels, token_ids)
    _check_same_base(saved["base"], bb, folder)
    task_type = check_choice(saved["task_type"], TASK_TYPES, "task_type")
    head = check_choice(saved["head"], HEADS, "head")
    token_ids = tuple(saved["label_token_ids"])
    n_tokens = bb.word_embeddings.weight.shape[0]
    n_expected = len(task.labels) if head == "verbalizer" else 0
    is_decoder = task_type == "CAUSAL_LM"
    fits = len(token_ids) == n_expected and all(i < n_tokens for i in token_ids)
    if not fits or is_decoder != task.is_generation or (is_decoder and head != "keep"):
        raise UserError(
            f"{folder} has task_type={task_type!r}, head={head!r} and {len(token_ids)} "
            "label_token_ids, which do not belong to its task or this model: save it again."
        )
    return PromptSettings(cfg, task_type, head, task.labels, token_ids)


def _forget_frozen(model: nn.Module, incompatible_keys: Any) -> None:
    """Remove from the missing keys of a state dict the frozen tensors, which it never has."""
    unsaved = nn.Module.state_dict(model).keys() - model.state_dict().keys()
    missing = incompatible_keys.missing_keys
    missing[:] = [k for k in missing if not any(k == n or k.endswith(f".{n}") for n in unsaved)]


class PromptModel(nn.Module):
    """A frozen Hugging Face model with prompts and heads, of which one prompt is active.

    `model(**tokens)` returns a `ModelOutput` as the model's own class does. The prompts are
    parameters of this module and the model is not changed. `state_dict` leaves the frozen model
    out. A prompt is added, chosen and saved by its name, as the adapters of `peft.PeftModel` are.
    """

    main_input_name: ClassVar[str] = "input_ids"
    accepts_loss_kwargs: ClassVar[bool] = True  # `Trainer` gives `num_items_in_batch`

    def __init__(
        self,
        model: Any,  # a Hugging Face model, which is frozen
        method: str | MethodConfig | PromptSettings,  # as for `get_prompt_model`
        prompt_name: str = "default",  # name of the first prompt
        tokenizer: Any = None,  # tokenizer of the model, for `label_words` and `position`
        **options: Any,  # further arguments of `get_prompt_model`
    ) -> None:
        super().__init__()
        _check_model(model)
        mode = model.training
        name = model.config._name_or_path or model.config.model_type
        self.base_model = model
        self.backbone = wrap_hf_model(model, tokenizer, name)
        self.settings: dict[str, PromptSettings] = {}
        # sources and heads; `_prompted` joins them with the model, and is not a submodule, so that
        # the model has its parameters once
        self.prompts = nn.ModuleDict()
        self._prompted: dict[str, PromptedModel] = {}
        self._configs: dict[str, Any] = {}
        self._is_disabled = False
        self.add_prompt(prompt_name, method, **options)
        self.active_prompt = prompt_name
        self.set_prompt(prompt_name)
        self.register_load_state_dict_post_hook(_forget_frozen)
        self.train(mode)

    # ---- prompts by name

    def add_prompt(
        self,
        prompt_name: str,  # name of the new prompt
        method: str | MethodConfig | PromptSettings,  # as for `get_prompt_model`
        **options: Any,  # further arguments of `get_prompt_model`
    ) -> None:
        """Add a prompt with a head of its own; `set_prompt` makes it the active one.

        Raises: `UserError` if the name is used already, or for options that cannot be combined.
        """
        if prompt_name in self.settings or not prompt_name.isidentifier():
            raise UserError(
                f"prompt_name must be a word that is not in use, got {prompt_name!r}; there are "
                f"{', '.join(self.settings) or 'no prompts'}."
            )
        bb = self.backbone
        settings = method
        if not isinstance(settings, PromptSettings):
            settings = _make_settings(bb, settings, **options)
        config = deepcopy(bb.config)
        if settings.task_type == "SEQ_CLS":
            config.num_labels = settings.num_labels
            if settings.labels:
                config.id2label = dict(enumerate(settings.labels))
                config.label2id = {label: i for i, label in enumerate(settings.labels)}
        prompted = _build_prompted_model(bb, settings, config)
        self.prompts[prompt_name] = nn.ModuleDict(
            dict(sources=prompted.sources, head=prompted.head)
        ).to(self.device)
        self.prompts[prompt_name].requires_grad_(False)
        self.settings[prompt_name] = settings
        self._configs[prompt_name] = config
        self._prompted[prompt_name] = prompted

    def set_prompt(
        self,
        prompt_name: str,  # name of the prompt to use
        is_trainable: bool = True,  # train its parameters; False: freeze them
    ) -> None:
        """Make a prompt the active one, and freeze the others."""
        self.active_prompt = check_name(prompt_name, self.settings, "prompt")
        for name, prompt in self.prompts.items():
            prompt.requires_grad_(is_trainable and name == prompt_name)
        self.train(self.training)

    def delete_prompt(
        self,
        prompt_name: str,  # name of a prompt that is not active
    ) -> None:
        """Delete a prompt and its head."""
        check_name(prompt_name, self.settings, "prompt")
        if prompt_name == self.active_prompt:
            raise UserError(
                f"prompt {prompt_name!r} is active: call set_prompt with another one first."
            )
        for prompts in (self.prompts, self.settings, self._configs, self._prompted):
            del prompts[prompt_name]

    @contextmanager
    def disable_prompt(self) -> Iterator[None]:
        """Use the model as it was, with its own head and output, for a `with` block."""
        was_disabled = self._is_disabled
        self._is_disabled = True
        try:
            yield
        finally:
            self._is_disabled = was_disabled

    @property
    def prompt_config(self) -> dict[str, MethodConfig]:
        """Config of the method of each prompt, as `peft_config` is in peft."""
        return {name: settings.cfg.method_config for name, settings in self.settings.items()}

    @property
    def prompted_model(self) -> PromptedModel:
        """The active prompt, the model and the head, as the package's own functions take it."""
        return self._prompted[self.active_prompt]

    # ---- what Hugging Face's libraries ask of a model

    @property
    def config(self) -> Any:
        """Config of the model, with the classes of the active prompt."""
        return self._configs[self.active_prompt]

    @property
    def generation_config(self) -> Any:
        """Defaults of `generate`, which are those of the model."""
        return getattr(self.base_model, "generation_config", None)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.backbone.word_embeddings.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the frozen weights; prompts and heads are float32."""
        return self.backbone.word_embeddings.weight.dtype

    @property
    def loss_type(self) -> str:
        """Name of the loss, from which the `Trainer` knows whether it shifts the labels."""
        is_causal = self.settings[self.active_prompt].task_type == "CAUSAL_LM"
        return "ForCausalLM" if is_causal else "ForSequenceClassification"

    def get_base_model(self) -> Any:
        """Return the frozen model."""
        return self.base_model

    def get_input_embeddings(self) -> nn.Module:
        """Return the word embeddings of the model."""
        return self.backbone.word_embeddings

    def can_generate(self) -> bool:
        """Return whether the active prompt is one of a decoder that generates text."""
        return self.settings[self.active_prompt].task_type == "CAUSAL_LM"

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return the number of trainable parameters, and of all parameters."""
        sizes = [(p.numel(), p.requires_grad) for p in self.parameters()]
        return sum(n for n, is_trained in sizes if is_trained), sum(n for n, _ in sizes)

    def print_trainable_parameters(self) -> None:
        """Print the number of trainable parameters, as peft does."""
        trainable, total = self.get_nb_trainable_parameters()
        print(
            f"trainable params: {trainable:,d} || all params: {total:,d} || "
            f"trainable%: {100 * trainable / total:.4f}"
        )

    def train(self, mode: bool = True) -> "PromptModel":
        """Set training mode; layers below the active prompt stay in eval mode."""
        super().train(mode)
        self.prompted_model.train(mode)
        return self

    def activation_checkpointing_enable(
        self,
        # arguments of `torch.utils.checkpoint.checkpoint`
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        **options: Any,  # further arguments of the model's own method, such as `every_n_layers`
    ) -> None:
        """Compute the activations of the trained layers again in the backward pass."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        arguments = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        layers: Any = self.backbone.layers
        if not hasattr(GradientCheckpointingLayer, "_can_checkpoint_with_cache"):
            raise UserError("gradient checkpointing needs a newer version of transformers.")
        if arguments["use_reentrant"] or not isinstance(layers[0], GradientCheckpointingLayer):
            raise UserError(
                "gradient checkpointing needs use_reentrant=False, and a model whose layers "
                f"support it; got {arguments} and {type(layers[0]).__name__}."
            )
        model = self.base_model
        if hasattr(model, "activation_checkpointing_enable"):
            model.activation_checkpointing_enable(arguments, **options)
        else:  # an older version of transformers
            model.gradient_checkpointing_enable(arguments, **options)
        # gradients start at the prompt, not at the words
        model.disable_input_require_grads()
        for layer in layers:  # a prompt's keys and values are read only, so they can be read twice
            layer._can_checkpoint_with_cache = True

    def activation_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        model = self.base_model
        name = "activation_checkpointing_disable"
        getattr(model, name, model.gradient_checkpointing_disable)()
        for layer in self.backbone.layers:  # the class's own value holds again
            vars(layer).pop("_can_checkpoint_with_cache", None)

    def gradient_checkpointing_enable(
        self,
        # arguments of `torch.utils.checkpoint.checkpoint`
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        **options: Any,  # as for `activation_checkpointing_enable`
    ) -> None:
        """Call `activation_checkpointing_enable`, under its older name."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Call `activation_checkpointing_disable`, under its older name."""
        self.activation_checkpointing_disable()

    # ---- forward pass

    def forward(
        self,
        input_ids: Tensor | None = None,  # tokens `[B,T]`
        attention_mask: Tensor | None = None,  # 1 or True: token, 0 or False: padding `[B,T]`
        token_type_ids: Tensor | None = None,  # `[B,T]`; None: all 0
        # class indices or numbers `[B]`, `[B,C]` of several labels; for a language model tokens
        # `[B,T]`, with -100 where none is to be predicted
        labels: Tensor | None = None,
        num_items_in_batch: Any = None,  # divisor of the loss; None: that of this batch
        **kwargs: Any,  # `return_dict`; what has no effect is refused
    ) -> Any:
        """Return a `ModelOutput` with the logits, and with the loss if labels are given."""
        if getattr(self, "_is_replica", False):
            raise UserError(
                "torch.nn.DataParallel cannot copy a PromptModel: use one process for each GPU "
                "(torchrun or accelerate launch), or one GPU (CUDA_VISIBLE_DEVICES=0)."
            )
        if self._is_disabled:
            tokens = dict(attention_mask=attention_mask, token_type_ids=token_type_ids)
            given = {k: v for k, v in dict(tokens, labels=labels).items() if v is not None}
            return self.base_model(input_ids=input_ids, **given, **kwargs)
        _refuse_arguments(kwargs)
        if self.can_generate():
            output = self._predict_tokens(
                input_ids, attention_mask, token_type_ids, labels, num_items_in_batch
            )
        else:
            batch, _ = _make_batch(input_ids, attention_mask, token_type_ids)
            output = self._classify(batch, labels, num_items_in_batch)
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    def _classify(self, batch: dict[str, Tensor], labels: Tensor | None, n_items: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        head = self.prompted_model.head
        if isinstance(head, VerbalizerHead):
            batch["mask_position"] = _find_mask_position(self.backbone, batch)
        ctx = self.prompted_model.compute_context(batch)
        logits = head(ctx)
        loss = None
        if labels is not None and isinstance(head, VerbalizerHead):
            loss = head.loss(ctx, labels)  # over the vocabulary of `loss_vocab`
            loss = loss if n_items is None else loss * len(labels) / n_items
        elif labels is not None:
            loss = _classification_loss(logits, labels, self.config.problem_type, n_items)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def _predict_tokens(
        self,
        input_ids: Any,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        labels: Tensor | None,
        n_items: Any,
    ) -> Any:
        from transformers.loss.loss_utils import ForCausalLMLoss
        from transformers.modeling_outputs import CausalLMOutputWithPast

        batch, index = _make_batch(input_ids, attention_mask, token_type_ids)
        method = self.settings[self.active_prompt].cfg.method
        if METHODS[method].kind not in ("static", "head"):
            self._mark_answers(batch, None if labels is None else labels.gather(1, index))
        logits = self.prompted_model(batch)
        T = index.shape[1]
        back = _shifted_index(T, T - index[:, :1])  # to where the tokens were
        logits = logits.gather(1, back[..., None].expand(-1, -1, logits.shape[2]))
        loss = None
        if labels is not None:
            loss = ForCausalLMLoss(logits, labels, logits.shape[2], n_items)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _mark_answers(self, batch: dict[str, Tensor], labels: Tensor | None) -> None:
        """Mark the tokens to be predicted, on which a generated prompt must not depend."""
        if labels is None:
            if self.training:
                raise UserError(
                    "this prompt is generated from the input, so training needs labels, with -100 "
                    "for the tokens of the input: give labels=."
                )
            return
        is_target = labels != -100
        start = is_target.int().argmax(1)
        start = torch.where(is_target.any(1), start, batch["attention_mask"].sum(1))
        if not torch.compiler.is_compiling() and bool((start == 0).any()):
            raise UserError(
                "this prompt is generated from the input, but in some texts the first token is "
                "already to be predicted: set labels to -100 for the tokens of the input, or use "
                "a static prompt, such as 'prompt-tuning'."
            )
        batch["answer_start"] = start

    @torch.no_grad()
    def generate(
        self,
        # tokens `[B,T]`, padded on either side; in the result the padding is on the left
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,  # `[B,T]`
        **kwargs: Any,  # arguments of the model's own `generate`
    ) -> Any:
        """Generate text with a decoder, as the model's own `generate` does.

        Raises: `UserError` for a model that does not generate text.
        """
        if not self.can_generate():
            raise UserError(
                "generate needs a prompt of a decoder that generates text: load the model with "
                "AutoModelForCausalLM, and leave num_labels out."
            )
        if self._is_disabled:
            return self.base_model.generate(input_ids, attention_mask=attention_mask, **kwargs)
        kwargs.pop("token_type_ids", None)
        batch, _ = _make_batch(input_ids, attention_mask, None)
        mask = batch["attention_mask"]
        # `generate` needs the padding on the left
        index = _shifted_index(mask.shape[1], mask.sum(1, keepdim=True))
        decoder = build_decoder(self.prompted_model)
        decoder.generation_config = self.generation_config
        return decoder.generate(
            batch["input_ids"].gather(1, index), attention_mask=mask.gather(1, index), **kwargs
        )

    # ---- state and files

    # torch declares overloads, which this signature covers
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the tensors of the prompts and heads, each once, without the frozen model.

        `load_state_dict` misses no frozen tensor. The arguments are those of `torch.nn.Module`.
        """
        prefix = kwargs.get("prefix", "")
        names = dict(self.named_parameters()).keys() | dict(self.named_buffers()).keys()
        saved = {prefix + name for name in names if name.startswith("prompts.")}
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        for name in [n for n in state if n.startswith(prefix) and n not in saved]:
            del state[name]
        return state

    def save_pretrained(
        self,
        save_directory: Path | str,  # created if missing
        selected_prompts: Sequence[str] | None = None,  # names of prompts; None: all
        is_main_process: bool = True,  # False: another process writes
        **kwargs: Any,  # arguments of a model's own `save_pretrained`, which are not used
    ) -> None:
        """Save prompts and heads: 'default' in the folder, others in subfolders of their name.

        A classifier of a named encoder with its tokenizer is a model of `idp predict`, too.
        """
        if not is_main_process:
            return
        for name in self.settings if selected_prompts is None else selected_prompts:
            check_name(name, self.settings, "prompt")
            folder = Path(save_directory)
            self._save_prompt(name, folder if name == "default" else folder / name)

    def _save_prompt(self, name: str, folder: Path) -> None:
        settings = self.settings[name]
        bb = self.backbone
        named = _describe_named_backbone(bb) if settings.head == "classification" else None
        description = dict(
            format=SAVE_FORMAT if named else PROMPT_MODEL_FORMAT,
            version=collect_versions()["idp_tutorial"],
            **describe_run(settings.task, settings.cfg),
            backbone=named or dict(name=bb.config.model_type, local=False),
            glove=None,
            digests=None,
            formula=[],
            prompt_model=dict(
                task_type=settings.task_type,
                head=settings.head,
                label_token_ids=settings.label_token_ids,
                base=dict(dtype=_dtype_name(bb), digests=_base_digests(bb)),
            ),
        )
        tensors = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in _prompt_tensors(self._prompted[name]).items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / PROMPTS_FILE, tensors, description)
        if named:
            remember_local_backbone(named, bb.name)
        write_readable_description(folder, description)

    def push_to_hub(
        self,
        repo_id: str,  # repository on the Hugging Face Hub, such as 'me/tickets'
        prompt_name: str | None = None,  # name of the prompt; None: the active one
        # further arguments of `saving.hub.push_to_hub`, such as `token` and `private`
        **hub_options: Any,
    ) -> str:  # address of the commit
        """Send a prompt and its head, without the model, to a repository on the Hub."""
        name = self.active_prompt if prompt_name is None else prompt_name
        check_name(name, self.settings, "prompt")
        with tempfile.TemporaryDirectory() as folder:
            self._save_prompt(name, Path(folder))
            return push_to_hub(folder, repo_id, **hub_options)

    def load_prompt(
        self,
        folder: Path | str,  # folder of `save_pretrained` or `idp train`, or a hub repository
        prompt_name: str,  # name of the new prompt
        is_trainable: bool = False,  # False: its parameters are frozen
        **hub_options: Any,  # `revision` and `token` of the repository
    ) -> None:
        """Load a saved prompt and its head under a name; `set_prompt` makes it the active one.

        Raises: `UserError` if it is damaged, or was trained on another model.
        """
        saved = read_saved_prompts(folder, **hub_options, allow_prompt_model=True)
        settings = _read_settings(saved, self.backbone)
        self.add_prompt(prompt_name, settings)
        self._restore(prompt_name, saved.tensors, folder)
        self.prompts[prompt_name].requires_grad_(is_trainable and prompt_name == self.active_prompt)

    def _restore(self, name: str, saved: dict[str, Tensor], folder: Path | str) -> None:
        tensors = _prompt_tensors(self._prompted[name])
        if not have_same_shapes(tensors, saved):
            if self.settings[name].head == "keep":
                n_saved = len(self.settings[name].task.labels) or 1
                raise UserError(
                    f"{folder} has a trained copy of a classifier for num_labels={n_saved}, which "
                    "does not fit the classifier of this model: load the model with this number."
                )
            raise UserError(
                f"the tensors of {folder} do not fit the model that its config describes: save it "
                "again with this version."
            )
        restore_state(tensors, saved)

    @classmethod
    def from_pretrained(
        cls,
        model: Any,  # the Hugging Face model that the prompts were trained on
        folder: Path | str,  # folder of `save_pretrained` or `idp train`, or a hub repository
        prompt_name: str = "default",  # name that the prompt gets
        is_trainable: bool = False,  # False: its parameters are frozen
        tokenizer: Any = None,  # tokenizer of the model
        **hub_options: Any,  # `revision` and `token` of the repository
    ) -> "PromptModel":  # in eval mode
        """Put a saved prompt and its head on a model.

        Raises: `UserError` if it is damaged, or was trained on another model.
        """
        _check_model(model)
        saved = read_saved_prompts(folder, **hub_options, allow_prompt_model=True)
        bb = wrap_hf_model(model, tokenizer, model.config._name_or_path)
        loaded = cls(model, _read_settings(saved, bb), prompt_name, tokenizer)
        loaded._restore(prompt_name, saved.tensors, folder)
        loaded.set_prompt(prompt_name, is_trainable)
        return loaded.eval()


def _build_prompted_model(bb: Backbone, settings: PromptSettings, config: Any) -> PromptedModel:
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
    plan = cfg.method_config.plan(bb, cfg)
    head = _build_head(settings, bb, config)
    prompted = PromptedModel(bb, head, plan, cfg.dropout_below_prompt)
    if any(type(s).prepare is not PromptSource.prepare for s in prompted.prompt_sources()):
        raise UserError(
            f"method {cfg.method!r} reads the texts themselves, and a model gets tokens only: use "
            "another method, or idp train."
        )
    return prompted


def get_prompt_model(
    model: Any,  # a Hugging Face model of a supported family, which is frozen
    method: str | MethodConfig = "lpt-npg",  # name of a method, or its config object
    *,
    # number of classes, 1 for a regression; None: of the model's own classifier, or none for a
    # decoder that generates text
    num_labels: int | None = None,
    # 'keep': a trainable copy of the model's own classifier; 'classification': a new one;
    # 'verbalizer': `label_words`; None: the model's own if it has `num_labels` outputs
    head: Literal["keep", "classification", "verbalizer"] | None = None,
    task_type: Literal["SEQ_CLS", "CAUSAL_LM"] | None = None,  # None: by the model and `num_labels`
    id2label: Mapping[int, str] | None = None,  # names of the classes; None: those of the model
    label_words: Sequence[str] = (),  # one word for each class, predicted at a mask token
    tokenizer: Any = None,  # of the model, for `label_words`, `position` and `idp predict`
    prompt_name: str = "default",  # name of the prompt
    # options of the method, such as `prompt_length`, and `pooling`, `two_layer_head`, `loss_vocab`
    # and `dropout_below_prompt`
    **options: Any,
) -> PromptModel:
    """Return a model with trainable prompts and a head around a frozen Hugging Face model.

    It works in `transformers.Trainer` as it is. Raises: `UserError` for a method, head and model
    that cannot be combined.
    """
    return PromptModel(
        model,
        method,
        prompt_name,
        tokenizer,
        num_labels=num_labels,
        head=head,
        task_type=task_type,
        id2label=id2label,
        label_words=label_words,
        **options,
    )

"""Prompts for a Hugging Face model object, as a module for anybody's training loop.

`get_prompt_model(model, "id-spam", num_labels=7, prompt_length=10)` returns a `PromptModel`: the
frozen model with trained prompts and a head. Its `forward` takes the tokens of a tokenizer and
returns a `ModelOutput`, so that `transformers.Trainer`, `accelerate` and plain PyTorch train it as
they train any model. Names and conventions are those of `peft.PeftModel` where they mean the same.

The model object is not changed, except that its parameters are frozen. `state_dict` has the prompts
and heads only: a checkpoint of the `Trainer` is as small as they are.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.dtypes import DTYPES
from idp_tutorial.core.generation import build_decoder
from idp_tutorial.core.heads import VerbalizerHead
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.families.family import get_family, wrap_hf_model
from idp_tutorial.huggingface.files import read_prompt_settings, restore_prompt, save_prompt
from idp_tutorial.huggingface.prompts import (
    PromptSettings,
    build_planned_model,
    make_prompt_settings,
)
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.method_registry import MethodConfig
from idp_tutorial.saving.hub import push_to_hub, read_saved_prompts
from idp_tutorial.utils.batch import Batch
from idp_tutorial.utils.checks import UserError, check_name

# arguments of a Hugging Face model that change nothing, or nothing while they are false
_HARMLESS_ARGUMENTS = ("return_dict", "use_cache")

# heads of whole models that a `PromptModel` cannot have
_OTHER_HEADS = re.compile(
    "For(TokenClassification|QuestionAnswering|MultipleChoice|NextSentencePrediction)"
)

# ids of the models whose prompts are disabled in this thread or task
_disabled: ContextVar[frozenset[int]] = ContextVar("disabled", default=frozenset())


def _refuse_model(model: Any) -> None:
    """Raise `UserError` for a model whose head or weights a `PromptModel` cannot use."""
    class_name = type(model).__name__
    if _OTHER_HEADS.search(class_name):
        raise UserError(
            f"prompts do not have the head of {class_name}: load the model with AutoModel, "
            "AutoModelForSequenceClassification, AutoModelForMaskedLM or AutoModelForCausalLM."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(
            f"some weights of this {class_name} are not in memory: load it on one device, such as "
            "device_map={'': 0}, with dtype=torch.bfloat16 if it is large."
        )


def _announce_to_pipelines() -> None:
    """Tell `transformers.pipeline` that it may use a `PromptModel`, as it does for peft's models.

    It logs an error for the name of a class that it does not know.
    """
    from transformers.pipelines import base

    known = getattr(base, "SUPPORTED_PEFT_TASKS", {})
    for task in ("text-classification", "sentiment-analysis", "text-generation"):
        if "PromptModel" not in known.get(task, ["PromptModel"]):
            known[task].append("PromptModel")


def _wrap_model(model: Any, tokenizer: Any) -> Backbone:
    """Return a Hugging Face model as the layer loop takes it.

    Raises: `UserError` for what is not a model that the layer loop can run.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"model must be a Hugging Face model, got {type(model).__name__}: pass its `.module` "
            "or `merge_and_unload()`, or call `add_prompt` or `load_prompt` of a PromptModel."
        )
    _refuse_model(model)
    name = model.config._name_or_path or model.config.model_type
    get_family(model.config, name)
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
    return wrap_hf_model(model, tokenizer, name)


# ---- tokens in, loss out


def _shifted_index(T: int, shift: Tensor) -> Tensor:  # `[B,T]`
    """Return the index that moves the elements of each row `shift` `[B,1]` places to the left."""
    index = torch.arange(T, device=shift.device) + shift
    return torch.where(index < T, index, index - T)  # ONNX has no remainder by a dynamic size


def _check_shape(name: str, tensor: Tensor, input_ids: Tensor) -> None:
    """Raise `UserError` for a tensor that does not have a value for each token."""
    if tensor.shape != input_ids.shape:
        raise UserError(
            f"{name} must have the shape {tuple(input_ids.shape)} of input_ids, got "
            f"{tuple(tensor.shape)}."
        )


def _check_token_ids(input_ids: Any) -> None:
    """Raise `UserError` for what is not a batch of token ids."""
    shape = tuple(getattr(input_ids, "shape", ()))
    is_empty = not torch.compiler.is_compiling() and 0 in shape
    if len(shape) != 2 or is_empty or input_ids.dtype not in (torch.int64, torch.int32):
        raise UserError(
            f"input_ids must be int64 or int32 [B,T], not empty, got a {type(input_ids).__name__} "
            f"of shape {shape}: call model(**tokenizer(texts, padding=True, return_tensors='pt'))."
        )


def _make_batch(
    input_ids: Any, attention_mask: Tensor | None, token_type_ids: Tensor | None
) -> tuple[Batch, Tensor]:
    """Return a batch that is padded on the right, and where each token was before `[B,T]`.

    Raises: `UserError` for what is not a batch of tokens.
    """
    _check_token_ids(input_ids)
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if token_type_ids is None:
        token_type_ids = torch.zeros_like(input_ids)
    _check_shape("attention_mask", attention_mask, input_ids)
    _check_shape("token_type_ids", token_type_ids, input_ids)
    attention_mask = (attention_mask != 0).long()
    start = attention_mask.argmax(1, keepdim=True)  # of the text, after padding on the left
    index = _shifted_index(input_ids.shape[1], start)
    attention_mask = attention_mask.gather(1, index)
    batch = dict(
        input_ids=input_ids.gather(1, index),
        attention_mask=attention_mask,
        token_type_ids=token_type_ids.gather(1, index),
    )
    try:
        return Batch.from_tensors(batch), index
    except UserError:
        raise UserError(
            "attention_mask must be 1 for all tokens of a text, at least one, and 0 for the "
            "padding before or after them, but it is 0 between two tokens or everywhere."
        ) from None


def _find_mask_position(bb: Backbone, batch: Batch) -> Tensor:  # `[B]`
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


def _infer_problem_type(B: int, C: int, labels: Any, problem_type: str | None) -> str:
    """Return the kind of the labels, as Hugging Face's classifiers infer it.

    Raises: `UserError` for labels of another shape than this kind needs.
    """
    if problem_type is None:
        is_float = labels.is_floating_point()
        problem_type = "multi_label_classification" if is_float else "single_label_classification"
        problem_type = "regression" if C == 1 else problem_type
    fits = {
        "single_label_classification": labels.numel() == B,
        "multi_label_classification": labels.shape == (B, C),
        "regression": labels.numel() == B * C,
    }
    if not fits[problem_type]:
        raise UserError(
            f"labels must be {B} class indices, a number for each output of a regression, or "
            f"floats {(B, C)} for several labels, got {labels.dtype} {tuple(labels.shape)}."
        )
    return problem_type


def _class_indices(
    labels: Tensor, n_classes: int, allow_ignored: bool
) -> Tensor:  # `[B]`, in torch.int64
    """Return class indices; raise `UserError` for one that is no class.

    On a GPU an index that is out of range would end the process's use of the device.
    """
    labels = labels.flatten().long()
    is_class = (labels >= 0) & (labels < n_classes)
    if allow_ignored:
        is_class = is_class | (labels == -100)
    if not torch.compiler.is_compiling() and not bool(is_class.all()):
        ignored = ", or -100 for a text without a label" if allow_ignored else ""
        raise UserError(
            f"labels must be class indices from 0 to {n_classes - 1}{ignored}, got "
            f"{int(labels[~is_class][0])}: give num_labels= the number of classes."
        )
    return labels


def _classification_loss(
    logits: Tensor, labels: Tensor, problem_type: str | None, n_items: Any
) -> Tensor:
    """Return the loss of Hugging Face's classifiers, as a mean over `n_items` or the batch."""
    reduction = "mean" if n_items is None else "sum"
    if problem_type == "regression":
        loss = F.mse_loss(logits.flatten(), labels.flatten().to(logits.dtype), reduction=reduction)
    elif problem_type == "multi_label_classification":
        loss = F.binary_cross_entropy_with_logits(
            logits, labels.to(logits.dtype), reduction=reduction
        )
    else:
        loss = F.cross_entropy(logits, labels, reduction=reduction)
    return loss if n_items is None else loss / n_items


def _refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `UserError` for an argument of `forward` that would have no effect."""
    for name, value in arguments.items():
        if value is not None and value is not False and name not in _HARMLESS_ARGUMENTS:
            raise UserError(
                f"{name} was given, but a PromptModel computes prompts and outputs from input_ids "
                f"alone: leave {name} out."
            )


# ---- the module


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
        mode = getattr(model, "training", False)
        self.base_model = model
        self.backbone = _wrap_model(model, tokenizer)
        self.settings: dict[str, PromptSettings] = {}
        # sources and heads; `_prompted` joins them with the model, and is not a submodule, so that
        # the model has its parameters once
        self.prompts = nn.ModuleDict()
        self._prompted: dict[str, PlannedModel] = {}
        self._configs: dict[str, Any] = {}
        self._n_disabled = 0  # open `disable_prompt` blocks, of all threads
        self._recomputes_layers = False
        self.add_prompt(prompt_name, method, **options)
        self.set_prompt(prompt_name)
        self.register_load_state_dict_post_hook(_forget_frozen)
        _announce_to_pipelines()
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
        self._check_new_name(prompt_name)
        bb = self.backbone
        settings = method
        if not isinstance(settings, PromptSettings):
            settings = make_prompt_settings(bb, settings, **options)
        config = deepcopy(bb.config)
        if settings.task_type == "SEQ_CLS":
            config.num_labels = settings.num_labels
            if settings.labels:
                config.id2label = dict(enumerate(settings.labels))
                config.label2id = {label: i for i, label in enumerate(settings.labels)}
        prompted = build_planned_model(bb, settings, config)
        prompted.gradient_checkpointing = self._recomputes_layers
        self.prompts[prompt_name] = nn.ModuleDict(
            dict(sources=prompted.sources, head=prompted.head)
        ).to(self.device)
        self.prompts[prompt_name].requires_grad_(False)
        self.settings[prompt_name] = settings
        self._configs[prompt_name] = config
        self._prompted[prompt_name] = prompted

    def _check_new_name(self, prompt_name: Any) -> None:
        """Raise `UserError` for a name that a new prompt cannot have."""
        if prompt_name in self.settings or not str(prompt_name).isidentifier():
            raise UserError(
                f"prompt_name must be a word that is not in use, got {prompt_name!r}; there are "
                f"{', '.join(self.settings) or 'no prompts'}."
            )
        if hasattr(self.prompts, prompt_name):  # torch stores a module under its name
            raise UserError(
                f"prompt_name={prompt_name!r} is an attribute of torch.nn.ModuleDict, which holds "
                f"the prompts: use another name, such as {prompt_name + '_prompt'!r}."
            )

    def set_prompt(
        self,
        prompt_name: str,  # name of the prompt to use
        is_trainable: bool = True,  # train its parameters; False: freeze them
    ) -> None:
        """Make a prompt the active one of all threads, and freeze the others.

        Threads that use different prompts pass `prompt_name` to `forward` and `generate`.
        """
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
        """Use the model as it was, with its own head and output, for a `with` block.

        Other threads keep their prompts.
        """
        token = _disabled.set(_disabled.get() | {id(self)})
        self._n_disabled += 1
        try:
            yield
        finally:
            self._n_disabled -= 1
            _disabled.reset(token)

    @property
    def _is_disabled(self) -> bool:
        """True in a `disable_prompt` block of this thread; the count spares graphs the look-up."""
        return self._n_disabled > 0 and id(self) in _disabled.get()

    @property
    def prompt_config(self) -> dict[str, MethodConfig]:
        """Config of the method of each prompt, as `peft_config` is in peft."""
        return {name: settings.cfg.method_config for name, settings in self.settings.items()}

    @property
    def planned_model(self) -> PlannedModel:
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
        return self.backbone.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the frozen weights; prompts and heads are float32."""
        return self.backbone.word_embeddings.weight.dtype

    @property
    def loss_type(self) -> str:
        """Name of the loss, from which the `Trainer` knows whether it shifts the labels."""
        return "ForCausalLM" if self.can_generate() else "ForSequenceClassification"

    def _get_name(self) -> str:
        """Return the name by which the `Trainer` knows whether to shift labels that it smooths."""
        name: str = super()._get_name()
        return self.base_model._get_name() if self.can_generate() else name

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,  # tokens of the tokenizer; None: as now
        *args: Any,  # further arguments of a model's own method, which are not used
        **kwargs: Any,
    ) -> nn.Module:
        """Return the word embeddings if they have this size.

        Raises: `UserError` for another size: new word vectors would be random, and frozen.
        """
        embeddings = self.backbone.word_embeddings
        size = embeddings.num_embeddings
        if new_num_tokens not in (None, size):
            raise UserError(
                f"the frozen model has {size} word vectors, not {new_num_tokens}: call its own "
                "resize_token_embeddings, and train the new ones, before get_prompt_model."
            )
        return embeddings

    def get_input_embeddings(self) -> nn.Module:
        """Return the word embeddings of the model."""
        return self.backbone.word_embeddings

    def can_generate(self) -> bool:
        """Return whether the active prompt is one of a decoder that generates text."""
        return self._generates_text(self.active_prompt)

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
        self.planned_model.train(mode)
        return self

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Compute the layers again in the backward pass, which needs less memory and more time.

        The arguments are those of `transformers`, and have no effect: each layer is computed again.
        """
        self._recompute_layers(True)

    def activation_checkpointing_disable(self) -> None:
        """Keep all activations again."""
        self._recompute_layers(False)

    def _recompute_layers(self, recomputes: bool) -> None:
        """Set whether the backward pass computes the layers again, for all prompts."""
        self._recomputes_layers = recomputes
        for prompted in self._prompted.values():
            prompted.gradient_checkpointing = recomputes

    gradient_checkpointing_enable = activation_checkpointing_enable  # their older names
    gradient_checkpointing_disable = activation_checkpointing_disable

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
        # prompt to use in this call, whatever other threads use; None: the active one
        prompt_name: str | None = None,
        **kwargs: Any,  # `return_dict`; what has no effect is refused
    ) -> Any:
        """Return a `ModelOutput` with the logits, and with the loss if labels are given.

        In training mode the prompt must be the active one.
        """
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
        self._refuse_unused_noise()
        name = self._choose_prompt(prompt_name)
        self._check_dtype(name)
        batch, index = _make_batch(input_ids, attention_mask, token_type_ids)
        if self._generates_text(name):
            output = self._predict_tokens(name, batch, index, labels, num_items_in_batch)
        else:
            output = self._classify(name, batch, labels, num_items_in_batch)
        return output.to_tuple() if kwargs.get("return_dict") is False else output

    def _choose_prompt(self, prompt_name: str | None) -> str:
        """Return the prompt of a call; it is read once, since another thread may set it."""
        active = self.active_prompt
        if prompt_name is None:
            return active
        if self.training and prompt_name != active:
            raise UserError(
                f"prompt_name={prompt_name!r} was given in training mode, in which only the active "
                f"prompt {active!r} is trained: call set_prompt({prompt_name!r}), or eval()."
            )
        return check_name(prompt_name, self.settings, "prompt")

    def _generates_text(self, prompt_name: str) -> bool:
        return self.settings[prompt_name].task_type == "CAUSAL_LM"

    def _refuse_unused_noise(self) -> None:
        """Raise `UserError` for noise of the `Trainer` on embeddings that are in eval mode."""
        embeddings = self.backbone.word_embeddings
        has_noise = hasattr(embeddings, "neftune_noise_alpha")  # set by the `Trainer`
        if has_noise and self.training and not embeddings.training:
            raise UserError(
                "neftune_noise_alpha gives word embeddings in eval mode no noise: load the model "
                "again and leave it out, or give get_prompt_model dropout_below_prompt=True."
            )

    def _check_dtype(self, prompt_name: str) -> None:
        """Raise `UserError` for prompts that were cast to a dtype of 16 bits with the model."""
        if torch.is_autocast_enabled(self.device.type):
            return
        for parameter in self.prompts[prompt_name].parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                raise UserError(
                    f"the prompt is in {parameter.dtype}, not in float32: cast base_model alone, "
                    "before prompts are added, and use autocast or bf16=True of the Trainer."
                )

    def _classify(self, prompt_name: str, batch: Batch, labels: Tensor | None, n_items: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutput

        prompted = self._prompted[prompt_name]
        config = self._configs[prompt_name]
        head = prompted.head
        has_words = isinstance(head, VerbalizerHead)
        if has_words:
            batch["mask_position"] = _find_mask_position(self.backbone, batch)
        problem_type = "single_label_classification" if has_words else config.problem_type
        if labels is not None:  # before the pass, for which a GPU need not wait then
            B = batch["input_ids"].shape[0]
            problem_type = _infer_problem_type(B, config.num_labels, labels, problem_type)
            if problem_type == "single_label_classification":
                labels = _class_indices(labels, config.num_labels, allow_ignored=not has_words)
        ctx = prompted.compute_context(batch)
        logits = head(ctx)
        loss = None
        if labels is not None and has_words:
            loss = head.loss(ctx, labels)  # over the vocabulary of `loss_vocab`
            loss = loss if n_items is None else loss * len(labels) / n_items
        elif labels is not None:
            loss = _classification_loss(logits, labels, problem_type, n_items)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def _predict_tokens(
        self,
        prompt_name: str,
        batch: Batch,
        index: Tensor,
        labels: Tensor | None,
        n_items: Any,
    ) -> Any:
        from transformers.loss.loss_utils import ForCausalLMLoss
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if labels is not None:
            _check_shape("labels", labels, batch["input_ids"])
            labels = labels.long()
        method = self.settings[prompt_name].cfg.method
        if METHODS[method].kind not in ("static", "head"):
            batch = self._mark_answers(batch, None if labels is None else labels.gather(1, index))
        logits = self._prompted[prompt_name](batch)
        T = index.shape[1]
        back = _shifted_index(T, T - index[:, :1])  # to where the tokens were
        logits = logits.gather(1, back[..., None].expand(-1, -1, logits.shape[2]))
        loss = None
        if labels is not None:
            loss = ForCausalLMLoss(logits, labels, logits.shape[2], n_items)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _mark_answers(self, batch: Batch, labels: Tensor | None) -> Batch:
        """Mark the tokens to be predicted, on which a generated prompt must not depend."""
        if labels is None:
            if self.training:
                raise UserError(
                    "a prompt generated from the input needs labels= in training, -100 for the "
                    "input: leave label_smoothing_factor and compute_loss_func out."
                )
            return batch
        is_target = labels != -100
        start = is_target.int().argmax(1)
        start = torch.where(is_target.any(1), start, batch["attention_mask"].sum(1))
        starts = None if torch.compiler.is_compiling() else start.tolist()
        if starts and not all(starts):
            raise UserError(
                "a prompt generated from the input needs tokens before the first label: set their "
                "labels to -100, or use a static prompt, such as 'prompt-tuning'."
            )
        return Batch({**batch, "answer_start": start}, batch.lengths, starts)

    @torch.no_grad()
    def generate(
        self,
        # tokens `[B,T]`, padded on either side; in the result the padding is on the left
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,  # `[B,T]`
        prompt_name: str | None = None,  # prompt to use in this call; None: the active one
        **kwargs: Any,  # arguments of the model's own `generate`
    ) -> Any:
        """Generate text with a decoder, as the model's own `generate` does.

        Raises: `UserError` for a model that does not generate text.
        """
        name = self._choose_prompt(prompt_name)
        if not self._generates_text(name):
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
        if kwargs.get("assistant_model") is not None:
            raise UserError(
                "assistant_model was given, but its tokens are checked in a cache that a prompt "
                "does not have: leave assistant_model out."
            )
        decoder = build_decoder(self._prompted[name])
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

        `idp predict` reads a classifier too, if its model is a named encoder with its tokenizer.
        """
        if not is_main_process:
            return
        for name in self.settings if selected_prompts is None else selected_prompts:
            check_name(name, self.settings, "prompt")
            folder = Path(save_directory)
            folder = folder if name == "default" else folder / name
            save_prompt(self._prompted[name], self.settings[name], folder)

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
            save_prompt(self._prompted[name], self.settings[name], Path(folder))
            return push_to_hub(folder, repo_id, **hub_options)

    def load_prompt(
        self,
        folder: Path | str,  # folder of `save_pretrained` or `idp train`, or a hub repository
        prompt_name: str,  # name of the new prompt
        **hub_options: Any,  # `revision` and `token` of the repository
    ) -> None:
        """Load a saved prompt and its head, frozen, under a name; `set_prompt` makes it active.

        Raises: `UserError` if it is damaged, or was trained on another model.
        """
        saved = read_saved_prompts(folder, **hub_options, allow_prompt_model=True)
        settings = read_prompt_settings(saved, self.backbone)
        self.add_prompt(prompt_name, settings)
        restore_prompt(self._prompted[prompt_name], settings, saved)

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
        bb = _wrap_model(model, tokenizer)
        saved = read_saved_prompts(folder, **hub_options, allow_prompt_model=True)
        settings = read_prompt_settings(saved, bb)
        loaded = cls(model, settings, prompt_name, tokenizer)
        restore_prompt(loaded._prompted[prompt_name], settings, saved)
        loaded.set_prompt(prompt_name, is_trainable)
        return loaded.eval()


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

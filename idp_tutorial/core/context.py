"""The state of one pass through a frozen model, which prompt sources and heads read.

The layer loop runs the layers; a step of the plan changes the sequence with `Context.insert`.
Inserting moves positions, so the context tracks them: no code assumes that `<s>` is at position 0.
Batch sizes are `x.shape[0]` and not `len(x)`, which `torch.export` would take for a constant.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from idp_tutorial.core import input_checks
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.prompt_key_values import PromptKeyValues
from idp_tutorial.utils.batch import Batch
from idp_tutorial.utils.checks import UserError

# The layer of a prompt among the word embeddings, before positions and LayerNorm (IDPG). Any other
# layer is the number of layers already applied: 0 is the output of the embedding module.
INPUT = -1


def to_float32(x: Tensor) -> Tensor:
    """Return the tensor in float32, or unchanged if it is float64.

    Sources and heads compute in float32, whatever the dtype of the frozen weights.
    """
    return x if x.dtype == torch.float64 else x.float()


def splice(
    x: Tensor,  # `[B,T,...]`
    new: Tensor,  # `[B,t,...]`
    position: int | Tensor = 0,  # of the first new element: one for all examples, or `[B]`
) -> Tensor:  # `[B,T+t,...]`
    """Insert `new` before the given position of each example."""
    if isinstance(position, int):
        return torch.cat([x[:, :position], new, x[:, position:]], 1)
    words = torch.arange(x.shape[1], device=x.device)
    inserted = torch.arange(new.shape[1], device=x.device)
    start = position[:, None]
    positions = torch.cat([words + new.shape[1] * (words >= start), start + inserted], 1)
    each_example = torch.arange(x.shape[0], device=x.device)[:, None]
    return torch.cat([x, new], 1)[each_example, positions.argsort(1)]


def _cached_states(backbone: Backbone, batch: Batch, layer: int) -> Tensor:
    """Return the cached hidden states; raise `UserError` for a wrong shape or layer."""
    h = batch["hidden_states"].to(backbone.word_embeddings.weight.dtype)
    shape = (*batch["input_ids"].shape, backbone.d)
    if not 0 <= layer <= backbone.n_layers or h.shape != shape:
        raise UserError(
            f"hidden_states must have shape {shape} (no prompts) and start_layer be 0 to "
            f"{backbone.n_layers} for {backbone.name!r}, got {tuple(h.shape)} and {layer}."
        )
    return h


def _embed_words(backbone: Backbone, batch: dict[str, Any]) -> Tensor:
    """Return the word embeddings.

    Raises: UserError for unknown tokens; on a GPU, CUDA reports these itself.
    """
    ids = batch["input_ids"]
    word_embeddings = backbone.word_embeddings
    if torch.compiler.is_compiling():
        return word_embeddings(ids)
    try:
        return word_embeddings(ids)
    except IndexError:
        raise UserError(
            f"input_ids must be 0 to {word_embeddings.num_embeddings - 1}, got {ids.min()} to "
            f"{ids.max()}: use the tokenizer of backbone {backbone.name!r}, without added tokens."
        ) from None


@dataclass
class Context:
    """State of the layer loop: batch, current hidden states and the meaning of each position.

    Prompt sources and heads get it as their only input. `T` is the length of the input text and
    `T'` the current length, with inserted prompts.
    """

    backbone: Backbone
    input_ids: Tensor  # tokens of the text `[B,T]`
    attention_mask: Tensor  # 1 = word or prompt, 0 = padding `[B,T']`
    token_type_ids: Tensor  # `[B,T']`
    text_mask: Tensor  # 1 = word of the input text, 0 = target text or padding `[B,T]`
    word_mask: Tensor  # `text_mask` at the current positions; 0 = prompt too `[B,T']`
    # current positions of 'cls', 'last' and, with a template, 'mask' `[B]`
    tracked_positions: dict[str, Tensor]
    h: Tensor  # hidden states `[B,T',d]`; at `INPUT` word embeddings
    batch: Batch = field(default_factory=lambda: Batch({}))  # all fields that `collate` returns
    layer: int = INPUT  # number of layers already applied
    # first position `[B]` and length of the prompt that was inserted last
    prompt_span: tuple[Tensor, int] | None = None
    # what a source stores in one layer for later ones; its keys are the objects that store it
    memo: dict[object, Any] = field(default_factory=dict)
    recompute: bool = False  # compute each layer again in the backward pass?
    _layer_kwargs: tuple[Any, Any] = (None, None)  # key and result of `layer_kwargs`

    @classmethod
    def from_batch(
        cls,
        backbone: Backbone,
        batch: Mapping[str, Any],  # fields as for `Batch`
    ) -> "Context":
        """Return the context of a batch: at `INPUT`, or at the layer of its cached states.

        A prompt depends on the input, not on the target text after it.

        Raises: UserError for states of a wrong shape, padding that is not on the right, or unknown
        tokens (on a GPU, CUDA reports these itself).
        """
        batch = Batch.from_tensors(batch)
        attention_mask = batch["attention_mask"]
        text_mask = attention_mask
        if "answer_start" in batch:
            index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
            text_mask = attention_mask * (index < batch["answer_start"][:, None])
        tracked = dict(cls=torch.zeros_like(text_mask[:, 0]), last=text_mask.sum(1) - 1)
        if "mask_position" in batch:
            tracked["mask"] = batch["mask_position"]
        layer = INPUT if batch.start_layer is None else batch.start_layer
        if "hidden_states" in batch:
            h = _cached_states(backbone, batch, layer)
        else:
            h = _embed_words(backbone, batch)
        return cls(
            backbone,
            input_ids=batch["input_ids"],
            attention_mask=attention_mask,
            token_type_ids=batch["token_type_ids"],
            text_mask=text_mask,
            word_mask=text_mask,
            tracked_positions=tracked,
            h=h,
            batch=batch,
            layer=layer,
        )

    @property
    def text_batch(self) -> Batch:
        """The batch without the target texts, for a pass that a prompt depends on."""
        return self.batch.without_answers(self.text_mask)

    def insert(
        self,
        p: Tensor,  # prompt `[B,t,d]`
        # 0: before `<s>` (LPT, ID-SPAM); 1: just after it (IDPG's position 0); or one per example
        # `[B]`
        position: int | Tensor = 0,
    ) -> None:
        """Insert prompt vectors as new positions, and move everything that is tracked.

        Raises: UserError for a position outside an example or inside its padding.
        """
        B, t, _ = p.shape
        first = torch.zeros_like(self.attention_mask[:, 0]) + position
        if not isinstance(position, int) or position not in (0, 1):  # each example has a token
            input_checks.check_insertion(first, self.attention_mask)
        zeros = self.attention_mask.new_zeros(B, t)
        self.h = splice(self.h, p, position)
        self.attention_mask = splice(self.attention_mask, zeros + 1, position)
        self.token_type_ids = splice(self.token_type_ids, zeros, position)
        self.word_mask = splice(self.word_mask, zeros, position)
        old = self.tracked_positions
        self.tracked_positions = {k: old[k] + t * (old[k] >= position) for k in old}
        self.prompt_span = first, t

    def layer_kwargs(
        self,
        n_prompt_keys: int = 0,  # keys and values of a prompt that the next layer gets
    ) -> dict[str, Any]:
        """Return the keyword arguments of each type of layer, such as its mask.

        They are computed again only if the sequence or the number of prompt keys has changed.
        """
        key = (self.h.shape[1], n_prompt_keys)
        if self._layer_kwargs[0] != key:
            kwargs = self.backbone.layer_kwargs_by_type(
                self.attention_mask, self.h, n_prompt_keys, self.batch.has_padding
            )
            self._layer_kwargs = key, kwargs
        return self._layer_kwargs[1]

    def run_layer(
        self,
        key_values: PromptKeyValues | None = None,  # of a prompt, or a cache that keeps them
        # function like `run_layer` of the backbone; None: this one
        run: Callable[..., Tensor] | None = None,
    ) -> None:
        """Run the current layer; with `recompute`, the backward pass runs it again.

        Raises: UserError if the layer ignores keys and values that it got.
        """
        layer_kwargs = self.layer_kwargs(key_values.t if key_values else 0)
        run = run or self.backbone.run_layer
        args = (self.layer, self.h, layer_kwargs, key_values)
        if self.recompute and torch.is_grad_enabled():
            self.h = checkpoint(run, *args, use_reentrant=False)
        else:
            self.h = run(*args)
        if key_values:
            input_checks.check_key_values_used(self.backbone, self.layer, key_values.was_used)

    def state_at(self, name: str) -> Tensor:  # `[B,d]`
        """Return the current hidden states at a tracked position: 'cls', 'last' or 'mask'.

        Raises: UserError if the batch has no such position.
        """
        input_checks.check_position_name(name, self.tracked_positions)
        each_example = torch.arange(self.h.shape[0], device=self.h.device)
        return to_float32(self.h[each_example, self.tracked_positions[name]])

    @property
    def summary_position(self) -> str:
        """Name of the tracked position whose hidden state summarises the text.

        It is 'cls' for an encoder. For a decoder it is the last context word: 'mask' with a
        template, 'last' without.
        """
        if self.backbone.causal and "mask" in self.tracked_positions:
            return "mask"
        return self.backbone.default_pooling

    @property
    def float32_states(self) -> Tensor:  # `[B,T',d]`
        """Current hidden states in float32; `h` itself may be bfloat16."""
        return to_float32(self.h)

    def mean_state(self) -> Tensor:  # `[B,d]`
        """Return the mean hidden state of the words, without padding and prompts."""
        h = self.float32_states
        weights = self.word_mask[..., None].to(h.dtype)
        return (h * weights).sum(1) / weights.sum(1)

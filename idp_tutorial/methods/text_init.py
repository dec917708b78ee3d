"""Initialise a static prompt from a text: from its word vectors, or from its keys and values.

`peft` has the first as `prompt_tuning_init='TEXT'`, and the second as the usual initialisation of a
cartridge. A prompt with keys and values from the text of an instruction is, before training, that
instruction in front of every example.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from idp_tutorial.core.backbone import Backbone, in_eval_mode
from idp_tutorial.core.context import Context, to_float32
from idp_tutorial.core.generation import LayerCache
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.prompt_key_values import PromptKeyValues
from idp_tutorial.methods.method_registry import PromptConfig
from idp_tutorial.utils.checks import UserError


@dataclass(frozen=True, kw_only=True)
class TextInitConfig(PromptConfig):
    """Options of a static prompt that can be initialised from a text."""

    kind = "static"

    # initial prompt: 'random', or from a 'text': the word vectors of init_text, or its keys and
    # values
    init: Literal["random", "text"] = "random"
    # text for init='text', without special tokens, repeated or cut to prompt_length tokens
    init_text: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        has_text = bool((self.init_text or "").strip())
        if (self.init == "text") != has_text:
            raise UserError(
                f"init={self.init!r} does not fit init_text={self.init_text!r:.60}: init='text' "
                "needs a text such as 'Is this review positive or negative?', init='random' none."
            )

    def unused_options(self, bb: Backbone | None = None) -> dict[str, str]:
        """Return that a prompt from a text has no random initial values."""
        unused = super().unused_options(bb)
        return {**unused, "init_std": "init='text'"} if self.init == "text" else unused

    def initial_token_ids(
        self,
        bb: Backbone,
    ) -> Tensor | None:  # `[t]`; None: the initial prompt is random
        """Return the tokens from which the prompt is initialised."""
        if self.init == "random":
            return None
        assert self.init_text is not None  # checked above
        return prompt_token_ids(bb, self.init_text, self.prompt_length)


def prompt_token_ids(
    bb: Backbone,
    text: str,
    t: int,  # prompt length
) -> Tensor:  # `[t]`
    """Return the first `t` tokens of a text, which is repeated if it has fewer, as peft does.

    Raises: `UserError` for a text without tokens, or a backbone without a tokenizer.
    """
    if bb.tokenizer is None:
        raise UserError(
            f"init='text' needs a tokenizer, but backbone {bb.name!r} has none. Load it with "
            "`load_backbone`, or use init='random'."
        )
    ids = bb.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UserError(f"init_text={text!r} has no tokens. Give a text with at least one word.")
    return torch.tensor((ids * t)[:t], device=bb.device)


@torch.no_grad()
def text_word_vectors(
    bb: Backbone,
    ids: Tensor,  # tokens `[t]`
) -> Tensor:  # `[t,d_embedding]`
    """Return the word vectors of tokens in float32."""
    return to_float32(bb.word_embeddings(ids)).clone()


@torch.no_grad()
def text_keys_values(
    bb: Backbone,
    ids: Tensor,  # tokens `[t]`
) -> list[Tensor]:  # for each layer: keys, then values `[t,d_kv_prompt]`
    """Return the keys and values that the frozen layers compute from a text, in float32.

    Raises: `UserError` if the layers take no prompt keys and values.
    """
    if not bb.supports_kv_prompt:
        raise UserError(
            f"init='text' needs keys and values, but the attention of a {bb.family} backbone "
            "takes none from a prompt. Use init='random', or another backbone."
        )
    ids = ids[None]
    batch = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids)
    )
    recorded = []

    def run_and_record(ctx: Context, kv: PromptKeyValues | None) -> None:
        """Run a layer and record its keys and values."""
        layer_cache = LayerCache()
        ctx.run_layer(layer_cache)
        assert layer_cache.stored is not None  # `supports_kv_prompt`
        k, v = layer_cache.stored.k, layer_cache.stored.v
        heads = [x.transpose(1, 2).flatten(2)[0] for x in (k, v)]
        recorded.append(to_float32(torch.cat(heads, 1)))

    with in_eval_mode(bb):
        run_layers(bb, batch, run=run_and_record)
    return recorded

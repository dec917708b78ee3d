"""Cartridge: keys and values of every layer as parameters, initialised from a text.

The parameters are those of `peft`'s `CartridgeEncoder`, and the steps of P-tuning v2 give them to
the layers. So it differs from P-tuning v2 in three respects: the first token is frozen, since a
language model uses it as an attention sink; there is no dropout; and the initial values are keys
and values of a text (`init='text'`), or else drawn with standard deviation 1, as `peft` does.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context
from idp_tutorial.core.steps import PromptSource
from idp_tutorial.methods.method_registry import Plan, register
from idp_tutorial.methods.p_tuning_v2 import deep_prompt_plan
from idp_tutorial.methods.text_init import TextInitConfig, text_keys_values
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.utils.checks import Range, UserError, require_packages


class CartridgeKeyValues(PromptSource):
    """Keys and values of all layers, of which the first token is frozen (peft's cartridge).

    [K; V] of a layer = P, with P = [P_frozen `[1,2d]`; P_trained `[t-1,2d]`].
    """

    def __init__(
        self,
        bb: Backbone,
        t: int,  # prompt length, with the frozen token; at least 2
        initial: list[Tensor] | None = None,  # for each layer `[t,d_kv_prompt]`; None: random
    ) -> None:
        super().__init__()
        require_packages("peft")
        from peft import CartridgeConfig, CartridgeEncoder

        Range(2, hint="the first token is frozen").check(t, "cartridge: prompt length t")
        config = CartridgeConfig(
            num_virtual_tokens=t, num_layers=bb.n_layers, token_dim=bb.d_kv_prompt // 2
        )
        self.encoder = CartridgeEncoder(config)
        if initial is not None:
            self.encoder.load_prompt_embeddings(torch.cat(initial, 1))
        # a buffer is saved with the trained parameters; peft has a parameter without a gradient
        frozen = self.encoder.frozen_embedding.data
        del self.encoder.frozen_embedding
        self.encoder.register_buffer("frozen_embedding", frozen)
        self.n_layers = bb.n_layers

    def forward(
        self,
        ctx: Context,  # its layer and batch size are used
    ) -> Tensor:  # `[B,t,d_kv_prompt]`: keys, then values
        """Return the keys and values of the current layer once for each example."""
        p = self.encoder.weight.chunk(self.n_layers, 1)[ctx.layer]
        return p.expand(ctx.h.shape[0], -1, -1)


@register(
    "cartridge", reference="peft 0.21; Eyuboglu et al. 2025", learning_rates=(1e-2, 3e-2, 1e-1)
)
@dataclass(frozen=True, kw_only=True)
class CartridgePromptConfig(TextInitConfig):
    """Options of a cartridge."""

    insertion_point = "keys"

    def plan(self, bb: Backbone, cfg: TrainingConfig) -> Plan:
        """Build the plan of P-tuning v2 with one source for all layers.

        Raises: `UserError` if the layers take no prompt keys and values.
        """
        ids = self.initial_token_ids(bb)
        initial = None if ids is None else text_keys_values(bb, ids)
        source = CartridgeKeyValues(bb, self.prompt_length, initial)
        if not bb.supports_kv_prompt:
            raise UserError(
                f"'cartridge' needs layers that take prompt keys and values, but the attention of "
                f"a {bb.family} backbone takes none. Use 'p-tuning-v2' with insertion='replace'."
            )
        steps = deep_prompt_plan(bb, self.prompt_length, "kv")
        return {layer: replace(step, source=source) for layer, step in steps.items()}

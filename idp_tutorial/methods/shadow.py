"""Shadow: a small network beside the frozen model corrects the hidden states of every layer.

Its state `s` begins as the output of a small model of the backbone's kind on the same words. Before
each layer it corrects the hidden states, and after the layer it is updated. The corrections depend
on the text, as the prompts of IDPG do, but no position is added.

The layers are `peft`'s `ShadowLayer`, which are run by the layer loop of this package.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context, to_float32
from idp_tutorial.core.steps import PromptSource, Step
from idp_tutorial.methods.method_registry import BottleneckWidth, Plan, WeightsConfig, register
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.utils.checks import require_packages
from idp_tutorial.utils.options import Probability

_ADAPTER = "default"  # name of peft's only adapter


def _build_initial_network(bb: Backbone) -> nn.Module:
    """Return a model of one layer, of the backbone's kind, with random weights.

    It gets the word vectors of the backbone, so it needs no table of words, and no pooler.
    """
    config = deepcopy(bb.base.config)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    network = type(bb.base)(config)
    network.set_input_embeddings(None)
    if getattr(network, "pooler", None) is not None:
        network.pooler = None
    return network.float()


class ShadowNetwork(PromptSource):
    """Small network that runs beside the backbone and corrects its hidden states (peft's shadow).

    s⁰ = f(words); before layer l: h ← h + α W_up Dropout(W_down (h − s)); after it:
    s ← (1 − g) s + g T(h), with g = σ(G(h)) (peft, `ShadowLayer`, Eq. 2 to 7).
    """

    def __init__(
        self,
        bb: Backbone,
        rank: int = 8,  # width of the bottlenecks
        dropout: float = 0.2,  # dropout on the difference h − s
    ) -> None:
        super().__init__()
        require_packages("peft")
        from peft import ShadowConfig
        from peft.tuners.shadow.layers import ShadowLayer

        config = ShadowConfig(r=rank, shadow_dropout=dropout, shadow_alpha=0.1)
        self.initial = _build_initial_network(bb)
        self.layers = nn.ModuleList(
            ShadowLayer(nn.Identity(), _ADAPTER, config, bb.d) for _ in range(bb.n_layers)
        )
        # no layer follows the last update; peft has it, and counts its parameters as trainable
        self.layers[-1].shadow_update_transform = nn.ModuleDict()
        self.layers[-1].shadow_update_gate = nn.ModuleDict()

    def forward(
        self,
        ctx: Context,  # context before a layer; those of all lower layers came before
    ) -> Tensor:  # `[B,T,d]`
        """Return the corrected hidden states of all positions."""
        h = ctx.float32_states
        layers: list[Any] = list(self.layers)
        if ctx.layer == 0:
            words = to_float32(ctx.backbone.word_embeddings(ctx.input_ids))
            state = self.initial(
                inputs_embeds=words, attention_mask=ctx.attention_mask
            ).last_hidden_state
        else:
            state = layers[ctx.layer - 1].shadow_update(h, ctx.memo[self], _ADAPTER)
        ctx.memo[self] = state
        return layers[ctx.layer].shadow_inject(h, state, _ADAPTER)


@dataclass(frozen=True)
class CorrectStates(Step):
    """Put the source's vectors in place of all hidden states."""

    name = "correct"

    def apply(self, ctx: Context) -> None:
        """Replace the hidden states of all positions."""
        ctx.h = self.compute_prompt(ctx)


@register("shadow", reference="peft 0.21, ShadowPEFT", learning_rates=(3e-4, 1e-3, 3e-3))
@dataclass(frozen=True, kw_only=True)
class ShadowNetworkConfig(WeightsConfig):
    """Options of the shadow network."""

    insertion_point = "states"

    bottleneck: BottleneckWidth = 8  # width of the shadow network's bottlenecks
    # dropout on the difference of hidden states and shadow state
    prompt_dropout: Probability = 0.2

    def plan(self, bb: Backbone, cfg: TrainingConfig) -> Plan:
        """Build the plan: a correction of the hidden states before every layer."""
        step = CorrectStates(ShadowNetwork(bb, self.bottleneck, self.prompt_dropout))
        return dict.fromkeys(range(bb.n_layers), step)

"""A static prompt with the network of NPG: the control of equal size for a generated prompt.

NPG trains a network that reads one hidden state, and LPT's static prompt only its vectors. So the
two differ in what they read *and* in how many parameters they train. `lpt-npg-constant` has NPG's
network, parameters and number of vectors, and reads the same vector for every text: its prompt is
static. It is trained as the prompts of `factorial.py layers` are:

    python results/why/constant_input.py constant-input --data FOLDER --task trec --steps 600
"""

from dataclasses import dataclass

import factorial  # the script beside this one
import torch
from torch import Tensor

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import Context
from idp_tutorial.methods.lpt import NPGConfig, lpt_plan
from idp_tutorial.methods.method_registry import Plan, register
from idp_tutorial.methods.npg import NaivePromptGenerator
from idp_tutorial.training.config import TrainingConfig

NAME = "lpt-npg-constant"


class ConstantInputGenerator(NaivePromptGenerator):
    """Prompt source with NPG's network, whose input is the same random vector for every text.

    p = Dropout(W₂ ReLU(W₁ c + b₁) + b₂), with a fixed c drawn from N(0, 1), the scale of a
    standardised state.
    """

    constant: Tensor

    def __init__(self, d: int, t: int, m: int, dropout: float) -> None:
        super().__init__(d, t, m, dropout)
        self.register_buffer("constant", torch.randn(d))

    def forward(self, ctx: Context) -> Tensor:  # `[B,t,d]`
        """Write the same prompt for every text, before dropout."""
        n_texts = len(ctx.state_at(ctx.summary_position))
        p = self.up(self.down(self.constant.expand(n_texts, -1)).relu())
        return self.dropout(p).unflatten(-1, (-1, self.d))


@register(NAME, reference="a control of this project", learning_rates=(1.5e-3, 5e-3, 1.5e-2))
@dataclass(frozen=True, kw_only=True)
class ConstantInputConfig(NPGConfig):
    """Options of the control: those of NPG, without an input to standardise."""

    kind = "static"

    def plan(self, bb: Backbone, cfg: TrainingConfig) -> Plan:
        """Build the plan: a static prompt, written by NPG's network, between two layers."""
        source = ConstantInputGenerator(
            bb.d, self.prompt_length, self.bottleneck, self.prompt_dropout
        )
        return lpt_plan(bb, source, self.layer)


# at the level of the module, since the processes of a pool import it
factorial.FACTORIALS["constant-input"] = factorial.FACTORIALS["layers"] | dict(
    methods=(NAME,),
    learning_rates=factorial.FACTORIALS["layers"]["learning_rates"]["lpt-npg"],
    prompt_lengths={NAME: 5},
    layers={NAME: (29, 24)},
    fine_tuning=False,
)

if __name__ == "__main__":
    factorial.main()

"""The options of a probe of hidden states, which `results.depth.information` reads."""

from dataclasses import dataclass
from typing import Annotated

from idp_tutorial.utils.checks import Range, UserError
from idp_tutorial.utils.options import check_options

_Count = Annotated[int, Range(1, hint="it is an option of the probe")]


@dataclass(frozen=True)
class ProbeConfig:
    """Size and training settings of a probe; they are part of each measurement."""

    # number of transformer layers (the authors: 6); 0: a linear probe
    depth: Annotated[int, Range(0, hint="0 is a linear probe")] = 1
    width: _Count = 128  # width of these layers (the authors: 1024); a multiple of `heads`
    heads: _Count = 4  # number of attention heads
    steps: _Count = 400  # number of training steps
    lr: Annotated[float, Range(0, is_low_excluded=True)] = 3e-3  # learning rate
    batch_size: _Count = 64  # examples in a training step
    evaluations: _Count = 10  # number of evaluations on validation; the best one is selected
    seed: int = 0  # seed of the initialisation and of the batches

    def __post_init__(self) -> None:
        check_options(self)
        if self.width % self.heads:
            raise UserError(
                f"width must be a multiple of heads, got width={self.width} and heads={self.heads}."
            )

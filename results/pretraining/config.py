"""The options of a pretraining run."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from idp_tutorial.utils.checks import Range, UserError
from idp_tutorial.utils.options import check_options
from idp_tutorial.utils.schemas import Rule

AllowEmpty = Rule("a text", lambda value: True)  # an empty text has a meaning of its own


@dataclass(frozen=True)
class PretrainConfig:
    """Options that determine the result of a pretraining run."""

    option_group: ClassVar[str] = "this command"

    # 'roberta' predicts masked tokens, 'gpt2' the next token
    family: Literal["roberta", "gpt2"] = "roberta"
    d: Annotated[int, Range(32, 2**14)] = 192  # width of the hidden states, a multiple of 32
    n_layers: Annotated[int, Range(1, 1000)] = 8  # number of transformer layers
    vocab_size: Annotated[int, Range(261, 2**16)] = 8192  # tokens of the tokenizer
    steps: Annotated[int, Range(1, 10**9)] = 6_000  # optimizer steps
    tokens_per_step: Annotated[int, Range(32, 2**24)] = 2048  # tokens in a batch
    # peak learning rate of AdamW
    lr: Annotated[float, Range(0, 1e40, "a learning rate, such as 1.5e-3", True)] = 1.5e-3
    warmup: Annotated[int, Range(1, 10**9)] = 300  # steps until the peak learning rate
    # fraction of the steps, at the end, in which it decays to zero
    decay_fraction: Annotated[float, Range(0, 1, "a fraction of the steps")] = 0.6
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0  # seed of initialisation, batches and masks
    # tokens at the end of the text that are not trained on
    held_out_tokens: Annotated[int, Range(0, 2**40)] = 200_000
    # dtype of the forward and the backward pass, and of the teacher
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # weight of the distillation loss on the teacher's hidden states
    distillation_weight: Annotated[
        float, Range(0, 10**6, "the weight of the distillation loss")
    ] = 3.0
    # folder of a finished run, or of weights, of the same shape: training starts from them
    init_from: Annotated[str, AllowEmpty] = ""

    def __post_init__(self) -> None:
        check_options(self)
        if self.d % 32:
            raise UserError(f"d must be a multiple of 32, such as 192, got {self.d}.")

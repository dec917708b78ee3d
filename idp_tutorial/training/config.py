"""`TrainingConfig`: the options of every run, whatever its method.

Most differences between published prompt methods are smaller than the effect of another schedule
or another prompt length. These options are therefore in the record of a run, next to its score.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from idp_tutorial.core.dtypes import INT4_HINT
from idp_tutorial.core.heads import HeadConfig
from idp_tutorial.data.metrics import METRICS
from idp_tutorial.data.task import TaskConfig
from idp_tutorial.utils.checks import Range, check_choice, check_name
from idp_tutorial.utils.options import check_options

_Config = TypeVar("_Config", bound="TrainingConfig")
_Count = Annotated[int, Range(1, 10**9)]
_Size = Annotated[int, Range(1, 10**6)]
_LearningRate = Annotated[
    float, Range(0, 1e40, "a learning rate, such as 1e-3; None uses the default", True)
]


class _ClassWeights:
    """Check of weights of classes: 'balanced', or a positive number for each class."""

    def check(self, value: Any, name: str) -> None:
        """Check a mapping of class weights, or `balanced`."""
        if isinstance(value, dict):
            for label, weight in value.items():
                Range(0, 1e40, is_low_excluded=True).check(weight, f"{name}[{label!r}]")
        else:
            hint = "or a weight for each class, such as {'rare': 5}"
            check_choice(value, (None, "balanced"), name, hint)


class _MetricName:
    """Check of a metric: a name of `METRICS`, or several joined by `+`."""

    def check(self, value: Any, name: str) -> None:
        """Check the name of a metric; whether it fits the task is checked with the task."""
        for part in str(value).split("+"):
            check_name(part, [*METRICS, "log_loss", "exact_match"], name)


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """Options that adapt a run to its machine."""

    option_group: ClassVar[str] = "this machine"

    # autocast in training; scores are computed in float32
    precision: Literal["no", "bf16", "fp16"] = "no"
    # dtype of frozen weights: 'float32', 'bfloat16', or 'int8', the linear layers in a quarter of
    # the memory; trained weights and the loss are float32
    dtype: Annotated[Literal["float32", "bfloat16", "int8"], INT4_HINT] = "float32"
    # compile the trained layers with torch.compile, which takes a minute: for long runs on a GPU
    compile: bool = False
    # compute the layers again in the backward pass instead of keeping their activations: less
    # memory, more time, the same results
    gradient_checkpointing: bool = False
    # a GPU if there is one, or the CPU
    device: Annotated[Literal["auto", "cpu"], "to choose a GPU, set CUDA_VISIBLE_DEVICES"] = "auto"
    # states of frozen layers that are computed once and kept on disk
    cache: Literal["none", "sentence", "hidden", "both"] = "none"
    # dtype of cached hidden states; 'float16' halves their size, and rounds
    cache_dtype: Literal["float32", "float16"] = "float32"
    cache_dir: str | None = None  # folder of caches; None: $IDP_CACHE, or ~/.cache/idp_tutorial


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TaskConfig, HeadConfig, MachineConfig):
    """Options of training, and those of the task, the head and the machine."""

    option_group: ClassVar[str] = "training"

    seed: Annotated[int, Range(0, 2**32 - 1)] = 0  # of initialisation, example order and dropout
    lr: _LearningRate | None = None  # peak learning rate of AdamW; None: the method's default
    head_lr: _LearningRate | None = None  # learning rate of the classification head (default: lr)
    steps: _Count = 300  # number of optimizer steps
    # passes over the training examples, instead of steps; the number of evaluations stays the same
    epochs: Annotated[float, Range(1e-6, 10**6)] | None = None
    batch_size: _Size = 32  # examples in a batch of one process
    # batches in a step: a step has batch_size * accumulate * processes examples
    accumulate: _Size = 1
    # fraction of the steps in which the learning rate rises
    warmup: Annotated[
        float, Range(0, 1, "a fraction of the steps, such as .06", is_high_excluded=True)
    ] = 0.06
    schedule: Literal["linear", "constant"] = "linear"  # learning rate after the warm-up
    weight_decay: Annotated[float, Range(0, 10**6)] = 0.01  # weight decay of AdamW
    no_decay_on_bias_and_norm: bool = False  # no weight decay on biases and LayerNorm (LPT)
    # decay rate of squared gradients in AdamW (IDPG, ID-SPAM: .98)
    beta2: Annotated[float, Range(0, 1, "such as .999", False, True)] = 0.999
    # epsilon of AdamW (IDPG, ID-SPAM: 1e-6)
    eps: Annotated[float, Range(0, 1e40, "such as 1e-8", True)] = 1e-8
    # largest gradient norm; larger gradients are scaled down; inf: never
    clip: Annotated[
        float,
        Range(0, math.inf, "the largest gradient norm, such as 1; float('inf'): no limit", True),
    ] = 1.0
    dropout_below_prompt: bool = False  # dropout below the first prompt, as in the papers
    # class weights in the loss: 'balanced', so that rare classes count as much as common ones, or
    # a weight for each class: {"rare": 5} (default: 1)
    class_weight: Annotated[str | dict, _ClassWeights()] | None = field(default=None, hash=False)
    # folder of an earlier run whose trained prompts initialise this one (default: no such run)
    init_from: str | None = None
    eval_every: _Count = 50  # steps between evaluations (commands: `evaluations`)
    # metric that selects checkpoints and learning rates, and is reported: accuracy,
    # balanced_accuracy, f1, macro_f1, mcc, log_loss (reported negated, as neg_log_loss), micro_f1,
    # subset_accuracy, pearson, spearman, or a mean such as accuracy+macro_f1 (default: the task's)
    metric: Annotated[str, _MetricName()] | None = None
    # stop after this number of evaluations without improvement on the validation split: a higher
    # score, or an equal score and a lower loss
    patience: Annotated[int, Range(1, 10**9, "None never stops early")] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.metric == "log_loss":
            object.__setattr__(self, "metric", "neg_log_loss")

    @property
    def run_name(self) -> str:
        """The name of the run in messages and progress bars."""
        return "model"

    def to_dict(self) -> dict[str, Any]:
        """Return all options by name."""
        return asdict(self)

    def resolve_epochs(
        self: _Config,
        n_examples: int,  # number of examples in the training split
        n_processes: int = 1,  # number of processes that train together
    ) -> _Config:
        """Return the config with `epochs` converted to `steps`, unchanged without `epochs`."""
        if self.epochs is None:
            return self
        examples_per_step = self.batch_size * self.accumulate * n_processes
        steps = max(1, round(self.epochs * n_examples / examples_per_step))
        eval_every = max(1, round(self.eval_every * steps / self.steps))
        return replace(self, steps=steps, eval_every=eval_every)

"""The registry `METHODS`: what a method is, its options, and facts such as its learning rates.

A method is a config class with its options and its plan, registered with facts about it:

    @register("lpt-npg", reference="LPT, §5.1", learning_rates=(1.5e-3, 5e-3, 1.5e-2))
    @dataclass(frozen=True, kw_only=True)
    class NPGConfig(LatePromptConfig):  # prompt_length, layer; 'middle', 'generated'
        bottleneck: BottleneckWidth = 128  # width of the generator's bottleneck

        def plan(self, bb, cfg):
            source = NaivePromptGenerator(bb.d, self.prompt_length, self.bottleneck)
            return lpt_plan(bb, source, self.layer)

Nothing else has to be edited: checks, commands, help, records and saved models read the fields of
the class and the row in `METHODS`.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.steps import Plan
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.utils.checks import Range, UserError, check_choice
from idp_tutorial.utils.options import Option, check_options, declared_options

INSERTION_POINTS = {  # where prompt vectors enter → description
    "nowhere": "no prompt vectors",
    "input": "among the word vectors, or in front of them",
    "layers": "in every layer",
    "keys": "as keys and values of every layer",
    "middle": "after `layer` layers",
    "states": "no prompt vectors: a network corrects the hidden states of every layer",
    "weights": "no prompt vectors: every layer changes",
    "upper weights": "no prompt vectors: the layers above `layer` change",
}
METHOD_KINDS = {  # what is trained → description
    "head": "the head alone",
    "static": "vectors that are the same for every example",
    "generated": "vectors that depend on the example",
    "second pass": "vectors that depend on M(x), which needs a second pass through the model",
    "weights": "a small change of the model",
    "all weights": "the whole model",
    "entailment": "the whole model, on pairs of a text and a label description",
    "control": "no prompt: the method answers a question about the task",
}

PromptPosition = Annotated[int, Range(-(10**4), 10**4)]
LayerNumber = Annotated[int, Range(-(10**4), 10**4)]
BottleneckWidth = Annotated[int, Range(1, 10**6)]
StandardDeviation = Annotated[
    float, Range(0, 1e40, "a standard deviation, such as .02", is_low_excluded=True)
]


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """The options of a method, and the plan that they give."""

    option_group: ClassVar[str] = "the method"
    # a subclass defines both
    insertion_point: ClassVar[str]  # where the prompt vectors enter: a key of `INSERTION_POINTS`
    kind: ClassVar[str]  # what is trained: a key of `METHOD_KINDS`

    def __post_init__(self) -> None:
        check_options(self)

    def plan(
        self,
        bb: Backbone,  # frozen backbone; a method that changes its weights does so here
        cfg: TrainingConfig,  # the options of the run that all methods share
    ) -> Plan:
        """Build the plan of the method: which source enters at which layer."""
        return {}

    def unused_options(
        self,
        bb: Backbone | None = None,  # None: what holds for every backbone
    ) -> dict[str, str]:  # option: what takes its effect away, such as "init='text'"
        """Return the options that have no effect beside the other values of this config.

        They may be options of the method or of all runs.
        """
        if self.insertion_point in ("input", "layers"):
            return {"dropout_below_prompt": "a prompt among the words, below all layers"}
        return {}


@dataclass(frozen=True, kw_only=True)
class PromptConfig(MethodConfig):
    """Options of a method with prompt vectors."""

    prompt_length: Annotated[int, Range(1, 10**5)] = 10  # number of prompt vectors (t)


@dataclass(frozen=True, kw_only=True)
class InputPromptConfig(PromptConfig):
    """Options of a method whose prompt enters among the word vectors."""

    insertion_point = "input"
    kind = "static"

    # position of the prompt among the words: IDPG's insertion positions 0-4
    position: PromptPosition = 0


@dataclass(frozen=True, kw_only=True)
class LatePromptConfig(PromptConfig):
    """Options of a method whose prompt enters between two layers."""

    insertion_point = "middle"
    kind = "generated"

    # layers below the prompt (default: half of them)
    layer: LayerNumber | None = None


class WeightsConfig(MethodConfig):
    """Options of a method that changes the backbone, and has no prompt vectors."""

    insertion_point = "weights"
    kind = "weights"


@dataclass(frozen=True)
class Method:
    """Entry of `METHODS`: the config class of a method, and facts about the method."""

    config_class: type[MethodConfig]
    reference: str  # paper, section and equation that define the method
    # three learning rates that a comparison tries; the middle one is the default; () if none is
    # used
    learning_rates: tuple[float, ...]
    # tensors of the backbone itself are trained, which must be float32; LoRA and adapters add some
    trains_backbone: bool = False
    # options of `TrainingConfig` that have no effect on the method
    unused_options: tuple[str, ...] = ()
    # states of frozen layers that can be cached whatever the options are, such as ("hidden",)
    cacheable_states: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice(self.insertion_point, INSERTION_POINTS, "insertion point")
        check_choice(self.kind, METHOD_KINDS, "kind of method")
        for learning_rate in self.learning_rates:
            Range(0, 1e40, "learning rates, such as 1e-3", True).check(
                learning_rate, "learning_rates"
            )

    @property
    def insertion_point(self) -> str:
        """The place where prompt vectors enter: a key of `INSERTION_POINTS`."""
        return self.config_class.insertion_point

    @property
    def kind(self) -> str:
        """The kind of what is trained: a key of `METHOD_KINDS`."""
        return self.config_class.kind

    @property
    def options(self) -> Mapping[str, Option]:
        """The options of the method itself, which are the fields of its config class."""
        return declared_options(self.config_class)

    @property
    def default_learning_rate(self) -> float | None:
        """The learning rate of a run for which none was chosen; None if the method has none."""
        rates = self.learning_rates
        return rates[len(rates) // 2] if rates else None

    @property
    def trains_upper_layers_only(self) -> bool:
        """True if nothing below `layer` is trained, which makes a step cheaper."""
        return self.insertion_point in ("middle", "upper weights")


METHODS: dict[str, Method] = {}  # filled by `register`; `methods.all_methods` imports all of them
CONTROL_METHODS: dict[str, Method] = {}  # the methods of kind 'control'
# iterates over the methods, then over the controls
ALL_METHODS: Mapping[str, Method] = ChainMap(CONTROL_METHODS, METHODS)

_ConfigClass = TypeVar("_ConfigClass", bound=type[MethodConfig])


def register(
    name: str,  # name of the method
    **facts: Any,  # the other fields of `Method`
) -> Callable[[_ConfigClass], _ConfigClass]:
    """Decorate the config class of a method, so that it becomes a row of `METHODS`."""

    def add_row(config_class: _ConfigClass) -> _ConfigClass:
        """Add the row of a config class."""
        row = Method(config_class, **facts)
        (CONTROL_METHODS if row.kind == "control" else METHODS)[name] = row
        return config_class

    return add_row


def require_equal_widths(
    bb: Backbone,
    cfg: TrainingConfig,  # its name is in the message
) -> None:
    """Check that word vectors and hidden states of a backbone have the same width.

    Raises: `UserError` if not.
    """
    if bb.d_embedding != bb.d:
        raise UserError(
            f"{cfg.run_name!r} needs word vectors and hidden states of equal width, not "
            f"{bb.d_embedding} and {bb.d} as in {bb.name!r}: use a larger model of the family."
        )

"""`RunConfig`: everything that can change the result of a run, and `RunOptions` of several runs.

A run has one input, a frozen dataclass that is stored in its record next to the score. Two equal
configs give equal results on one machine. The options of all runs are fields of the config; the
options that only some methods have are in `method_config`, an object of the method's own class.
The constructor takes both by name, and refuses what the method does not have:

    RunConfig("lpt-npg", task="questions", steps=100, bottleneck=64)

`None` stands for the default of the method, such as its learning rate.

Every option that is given must have an effect. A run refuses an option that its method does not
have when its config is built. In a comparison each option goes to the methods that have it. Two
kinds of methods have `layer`: a late prompt enters there, and AdapterDrop has no adapters below it.
In one comparison both would move together, and AdapterDrop at layer 2 is not the baseline of LPT's
tables, which leaves out the lower half of the layers. So in a comparison with late prompts
AdapterDrop keeps its default.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from idp_tutorial.assembly import controls  # noqa: F401 (it registers the controls)
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.heads import HeadConfig
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods import all_methods  # noqa: F401 (it registers the methods)
from idp_tutorial.methods.method_registry import ALL_METHODS, CONTROL_METHODS, MethodConfig
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.utils.checks import UserError, check_name
from idp_tutorial.utils.options import Option, check_option_name, declared_options

_Options = TypeVar("_Options", bound="RunOptions")


@dataclass(frozen=True, kw_only=True)
class RunOptions(TrainingConfig):
    """Options of several runs, before the method of each is chosen."""

    option_group: ClassVar[str] = "the model"

    backbone: str = "tiny"  # 'tiny', 'minilm', 'smollm2', a folder, or a name on the hub
    # options of methods that were given; a method gets those which it has
    method_options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __init__(
        self,
        *,
        backbone: str = "tiny",
        method_options: Mapping[str, Any] | None = None,
        **options: Any,  # the other fields, and more options of methods
    ) -> None:
        given = {name: options.pop(name) for name in [*options] if name not in general_options()}
        object.__setattr__(self, "backbone", backbone)
        object.__setattr__(self, "method_options", {**(method_options or {}), **given})
        super().__init__(**options)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.method_options:
            if name not in all_method_options():
                check_option_name(name, [*general_options(), *all_method_options()])

    def with_method(
        self,
        method: str,  # key of `ALL_METHODS`
        **changes: Any,  # options that the run has instead
    ) -> "RunConfig":
        """Return the config of one run; options that the method does not have are left out."""
        general = {name: getattr(self, name) for name in general_options()}
        options = {**general, "method_options": self.method_options, **changes}
        return RunConfig(method, **options)

    def with_options(
        self: _Options,
        **changes: Any,  # options of all runs, and of methods
    ) -> _Options:
        """Return a copy with other options; those of methods go to the methods that have them."""
        general = {n: changes.pop(n) for n in [*changes] if n in general_options()}
        return replace(self, **general, method_options={**self.method_options, **changes})

    def get(
        self,
        name: str,  # option of a method
        default: Any = None,  # value if it was not given
    ) -> Any:
        """Return the value of an option that only some methods have."""
        return self.method_options.get(name, default)

    def to_dict(self) -> dict[str, Any]:
        """Return all options by name."""
        general = {name: getattr(self, name) for name in general_options()}
        return {**general, **self.method_options}


@dataclass(frozen=True)
class RunConfig(RunOptions):
    """Settings of a run: everything that can change its result."""

    method: str = "prompt-tuning"  # key of `ALL_METHODS`
    # not compared, since `method_config` has the values that are used
    method_options: Mapping[str, Any] = field(default_factory=dict, compare=False, kw_only=True)
    # the method's own options, built from `method_options`
    method_config: MethodConfig = field(init=False)

    def __init__(self, method: str = "prompt-tuning", **options: Any) -> None:
        object.__setattr__(self, "method", method)
        super().__init__(**options)
        own_options = ALL_METHODS[method].options
        known = {*general_options(), *own_options, "method_options"}
        if name := next((name for name in options if name not in known), None):
            raise UserError(
                f"method {method!r} has no option {name!r} (its own: "
                f"{', '.join(own_options) or 'none'}): leave it out, or use a method that has it, "
                f"such as {', '.join(methods_with_option(name)[:4])}."
            )

    def __post_init__(self) -> None:
        row = ALL_METHODS[check_name(self.method, ALL_METHODS, "method")]
        if shared := row.options.keys() & general_options().keys():
            raise UserError(
                f"method {self.method!r} has an option {min(shared)!r}, a name that an option of "
                "all runs has: rename the field of its config class."
            )
        given = {n: v for n, v in self.method_options.items() if n in row.options}
        own_values = {n: v for n, v in given.items() if v is not None}  # None: the default
        object.__setattr__(self, "method_config", row.config_class(**own_values))
        super().__post_init__()

    @property
    def run_name(self) -> str:
        """The name of the method, for messages and progress bars."""
        return self.method

    def get(
        self,
        name: str,  # option of a method
        default: Any = None,  # value if the method has no such option
    ) -> Any:
        """Return the value of an option that only some methods have."""
        return getattr(self.method_config, name, default)

    def to_dict(self) -> dict[str, Any]:
        """Return all options by name, which `RunConfig(**...)` accepts."""
        general = {name: getattr(self, name) for name in general_options()}
        return {"method": self.method, **general, **vars(self.method_config)}


def general_options() -> dict[str, Option]:  # name: option
    """Return the options that every run has."""
    options = dict(declared_options(RunOptions))
    del options["method_options"]
    return options


def all_method_options() -> list[str]:
    """Return the names of the options that only some methods have."""
    return list(dict.fromkeys(name for row in ALL_METHODS.values() for name in row.options))


def _shared_option(name: str) -> Option:
    """Return an option of several methods, whose help says which methods have it."""
    users = methods_with_option(name)
    declared = [ALL_METHODS[method].options[name] for method in users]
    methods_by_default: dict[Any, list[str]] = {}
    choices: dict[Any, None] = {}
    for method, option in zip(users, declared):
        methods_by_default.setdefault(option.default, []).append(method)
        choices |= dict.fromkeys(option.choices)
    default = declared[0].default
    note = f"; {', '.join(users)}"
    if len(methods_by_default) > 1:
        default = None
        parts = [f"{value} {', '.join(names)}" for value, names in methods_by_default.items()]
        note = f" (default: {'; '.join(parts)})"
    return replace(
        declared[0], default=default, help=declared[0].help + note, choices=tuple(choices)
    )


def describe_all_options() -> dict[str, Option]:  # name: option
    """Return the options of all runs and of all methods, as the commands have them."""
    return {**general_options(), **{name: _shared_option(name) for name in all_method_options()}}


def methods_with_option(
    name: str,  # option of a method
    methods: Collection[str] | None = None,  # names of methods to select from; None: all
) -> list[str]:
    """Return the names of the methods that have an option."""
    return [
        method
        for method, row in ALL_METHODS.items()
        if name in row.options and (methods is None or method in methods)
    ]


def recorded_option(record: Mapping[str, Any], name: str) -> Any:
    """Return an option of a recorded run; where the record has none, the default."""
    value = record.get(name)
    if value is not None:
        return value
    option = {**general_options(), **ALL_METHODS[record["method"]].options}.get(name)
    return option.default if option else None


def config_for_method(
    options: RunOptions,  # options of a comparison
    method: str,  # name of the method
    methods: Collection[str],  # names of all methods of the comparison, `method` among them
    **changes: Any,  # options that the run has instead
) -> RunConfig:
    """Return the config of one method of a comparison.

    In a comparison with late prompts `layer` moves the prompts, and AdapterDrop keeps its default.
    """
    has_late_prompt = any(ALL_METHODS[name].insertion_point == "middle" for name in methods)
    if has_late_prompt and ALL_METHODS[method].insertion_point == "upper weights":
        changes["layer"] = None
    return options.with_method(method, **changes)


def _has_cacheable_state(cfg: RunConfig, states: Collection[str]) -> bool:
    """Return whether one of the kinds of states, 'hidden' and 'sentence', can be cached."""
    row = ALL_METHODS[cfg.method]
    cacheable = set(row.cacheable_states)
    if row.trains_upper_layers_only and cfg.get("layer") != 0:
        cacheable.add("hidden")
    if row.kind == "second pass" and cfg.get("sentence_pooling") != "noisy":
        cacheable.add("sentence")
    return bool(cacheable & set(states))


def _options_without_head(
    methods: Collection[str], options: RunOptions
) -> dict[str, str]:  # option: the reason why the head of the runs does not use it
    task = TASKS.get(options.task)
    of_head = {*declared_options(HeadConfig), "head_lr", "tune_head_first"} - {"template"}
    if task and task.is_generation:
        reason = f"task {options.task!r} is a generation task and has no classification head"
        unused = dict.fromkeys(of_head, reason)
    elif options.head == "verbalizer":
        reason = "a verbalizer predicts at its mask token and has no classification head"
        unused = dict.fromkeys(of_head - {"head", "loss_vocab"}, reason)
    else:
        unused = {"loss_vocab": "it needs head='verbalizer'"}
        if options.pooling != "mask":
            unused["template"] = "it needs head='verbalizer', or pooling='mask'"
    if methods_with_option("sentence_pooling", methods):  # M(x) of a generator depends on it too
        unused.pop("pooling", None)
    return unused


def _unused_general_options(cfg: RunConfig) -> dict[str, str]:  # option: what takes its effect
    """Return options of all runs that have no effect beside other values of a config."""
    unused = {}
    if cfg.cache not in ("hidden", "both"):
        unused["cache_dtype"] = f"cache={cfg.cache!r}"
    if not cfg.weight_decay:
        unused["no_decay_on_bias_and_norm"] = "weight_decay=0"
    if cfg.init_from:
        unused |= dict.fromkeys(("init", "init_text", "init_std"), "init_from")
    return unused


def find_unused_options(
    configs: Collection[RunConfig],  # of the methods that are trained with the same options
    bb: Backbone | None = None,  # their backbone; None: what holds for every backbone
) -> dict[str, str]:  # name: message that names the option and what takes its effect away
    """Return the options that were given, and that other options leave without effect.

    An option that has an effect on one of the methods is used.
    """
    reasons: dict[str, str] = {}
    used: set[str] = set()
    for cfg in configs:
        unused = {**_unused_general_options(cfg), **cfg.method_config.unused_options(bb)}
        declared = {**general_options(), **ALL_METHODS[cfg.method].options}
        for name, option in declared.items():
            value = cfg.to_dict()[name]
            if value == option.default:
                continue
            if name in unused:
                reasons[name] = (
                    f"{name}={value!r} has no effect with {unused[name]}: leave one of them out."
                )
            else:
                used.add(name)
    return {name: reason for name, reason in reasons.items() if name not in used}


def refuse_control(method: str) -> None:
    """Refuse to save a control.

    Raises: `UserError` if `method` is a control, which has no prompt.
    """
    if method in CONTROL_METHODS:
        raise UserError(
            f"{method!r} is a control and has no prompt to save: score it with "
            f"`idp compare --methods {method}`, or in Python with `run_experiment`."
        )


# options of commands that are not fields of a config: the option that must have an effect too
_COMMAND_OPTIONS = {
    "tune": "lr",
    "learning_rates": "lr",
    "tune_head_first": "head_lr",
    "save_every": "patience",
}


def _uses_option(cfg: RunConfig, name: str) -> bool:
    """Return whether an option of runs, of methods or of commands has an effect on a method."""
    row = ALL_METHODS[cfg.method]
    if name == "cache":
        states = {"both": ("hidden", "sentence")}.get(cfg.cache, (cfg.cache,))
        return _has_cacheable_state(cfg, states)
    if name in all_method_options():
        return name in row.options
    return _COMMAND_OPTIONS.get(name, name) not in row.unused_options


def refuse_unread_options(
    methods: Collection[str],  # names of the methods that are going to be trained
    options: RunOptions,  # their options
    allowed_methods: Mapping[str, Any] = ALL_METHODS,  # the methods that the command accepts
    # options that are not fields of a config, such as `learning_rates`, `tune` and `save_every`
    **command_options: Any,
) -> None:
    """Refuse an option that was given and that none of the methods uses.

    Raises: `UserError` for such an option, or an unknown method.
    """
    for method in methods:
        check_name(method, allowed_methods, "method")
    if not options.stratified and options.shots is None:
        raise UserError("stratified=False needs shots: give some, such as shots=100.")
    if options.head_lr and command_options.get("tune_head_first"):
        raise UserError(
            f"head_lr={options.head_lr:g} and tune_head_first=True exclude each other: leave one "
            "of them out."
        )
    configs = [config_for_method(options, m, methods) for m in methods]
    for message in find_unused_options(configs).values():
        raise UserError(message)
    without_head = _options_without_head(methods, options)
    defaults = {name: option.default for name, option in general_options().items()}
    given = {n: v for n, v in options.method_options.items() if v is not None}
    given |= {n: v for n, v in command_options.items() if v}
    given |= {n: getattr(options, n) for n, v in defaults.items() if getattr(options, n) != v}
    for name, value in given.items():
        if not any(_uses_option(cfg, name) for cfg in configs):
            raise UserError(
                f"option {name}={value!r} has no effect on {', '.join(methods)}: leave it out, or "
                "use a method that has it."
            )
        if name in without_head:
            raise UserError(f"{name}={value!r} has no effect: {without_head[name]}. Leave it out.")

"""`RunConfig`: everything that can change the result of a run, and `RunOptions` of several runs.

A run has one input, a frozen dataclass that is stored in its record next to the score. Two equal
configs give equal results on one machine. The options of all runs are fields of the config; the
options that only some methods have are in `method_config`, an object of the method's own class.
The constructor takes both by name, and refuses what the method does not have:

    RunConfig("lpt-npg", task="questions", steps=100, bottleneck=64)

`None` stands for the default of the method, such as its learning rate.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from idp_tutorial.assembly import controls  # noqa: F401 (it registers the controls)
from idp_tutorial.methods import registry  # noqa: F401 (it registers the methods)
from idp_tutorial.methods.method import ALL_METHODS, MethodConfig
from idp_tutorial.training.config import TrainingConfig
from idp_tutorial.utils.checks import UserError, check_name
from idp_tutorial.utils.options import Option, check_option_name, declared_options, find_option

__all__ = [
    "RunOptions",
    "RunConfig",
    "general_options",
    "all_method_options",
    "describe_all_options",
    "methods_with_option",
    "recorded_option",
]


_Options = TypeVar("_Options", bound="RunOptions")


@dataclass(frozen=True, init=False)
class RunOptions(TrainingConfig):
    """Options of several runs, before the method of each is chosen."""

    option_group: ClassVar[str] = "the model"

    backbone: str = "tiny"  # 'tiny', 'minilm', a folder, or a name on the Hugging Face hub
    # options of methods that were given; a method gets those which it has
    method_options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __init__(self, **options: Any) -> None:
        given = dict(options.pop("method_options", {}))
        general = general_options()
        for name in options.keys() - general.keys():
            check_option_name(name, [*general, *all_method_options()])
            given[name] = options.pop(name)
        self._set_fields(options, given)

    def _set_fields(self, options: Mapping[str, Any], method_options: Mapping[str, Any]) -> None:
        for name, option in general_options().items():
            object.__setattr__(self, name, options.get(name, option.default))
        object.__setattr__(self, "method_options", method_options)
        self.__post_init__()

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
        general = {n: value for n, value in changes.items() if n in general_options()}
        method_options = {n: value for n, value in changes.items() if n not in general}
        for name in method_options:
            check_option_name(name, all_method_options())
        return replace(self, **general, method_options={**self.method_options, **method_options})

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


@dataclass(frozen=True, init=False)
class RunConfig(RunOptions):
    """Settings of a run: everything that can change its result."""

    method: str = "prompt-tuning"  # key of `ALL_METHODS`
    method_config: MethodConfig = field(default_factory=MethodConfig)  # the method's own options

    def __init__(self, method: str = "prompt-tuning", **options: Any) -> None:
        own_options = ALL_METHODS[check_name(method, ALL_METHODS, "method")].options
        options.pop("method_config", None)  # built again from `method_options`
        method_options = dict(options.pop("method_options", {}))
        for name in options.keys() - general_options().keys():
            if name not in own_options:
                _refuse_option(method, name, own_options)
            method_options[name] = options.pop(name)
        # None stands for the method's default
        own_values = {
            name: value
            for name, value in method_options.items()
            if name in own_options and value is not None
        }
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "method_config", ALL_METHODS[method].config_class(**own_values))
        self._set_fields(options, method_options)

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
    names: dict[str, None] = {}
    for row in ALL_METHODS.values():
        names |= dict.fromkeys(row.options)
    return list(names)


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


def _refuse_option(method: str, name: str, own_options: Mapping[str, Option]) -> None:
    """Refuse an option that a method does not have."""
    known = [*own_options, *general_options()]
    users = methods_with_option(name)
    if not users:
        option = find_option(name, [*known, *all_method_options()])
        if option is None or option in known:
            check_option_name(name, known, f"option of {method!r}")
        # 'num_virtual_tokens' of a method without a prompt is reported as 'prompt_length'
        name = str(option)
        users = methods_with_option(name)
    more = " …" if len(users) > 4 else ""
    raise UserError(
        f"method {method!r} has no option {name!r}: leave it out, or use a method that has it "
        f"({', '.join(users[:4])}{more}). Its options are {', '.join(own_options) or 'none'}."
    )


def recorded_option(record: Mapping[str, Any], name: str) -> Any:
    """Return an option of a recorded run; where the record has none, the default."""
    value = record.get(name)
    if value is not None:
        return value
    option = {**general_options(), **ALL_METHODS[record["method"]].options}.get(name)
    return option.default if option else None

"""Check that every option that was given has an effect on one of the methods of a comparison.

A run refuses an option that its method does not have when its config is built. In a comparison
each option goes to the methods that have it. Two kinds of methods have `layer`: a late prompt
enters there, and AdapterDrop has no adapters below it. In one comparison both would move together,
and AdapterDrop at layer 2 is not the baseline of LPT's tables, which leaves out the lower half of
the layers. So in a comparison with late prompts AdapterDrop keeps its default.
"""

from collections.abc import Collection, Mapping
from typing import Any

from idp_tutorial.assembly.config import RunConfig, RunOptions, general_options, methods_with_option
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.method import ALL_METHODS, CONTROL_METHODS
from idp_tutorial.utils.checks import UserError, check_name
from idp_tutorial.utils.options import check_option_name

__all__ = ["config_for_method", "refuse_control", "refuse_unread_options"]


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


def _check_cache(configs: Collection[RunConfig], cache: str) -> None:
    requested = {"none": (), "both": ("hidden", "sentence")}.get(cache, (cache,))
    if requested and not any(_has_cacheable_state(cfg, requested) for cfg in configs):
        raise UserError(
            f"cache={cache!r} has no effect on {', '.join(cfg.method for cfg in configs)}: leave "
            "cache out. 'hidden' needs a late prompt with layer > 0 or method 'head-only', and "
            "'sentence' needs a generator that runs the backbone twice, with sentence_pooling "
            "other than 'noisy'."
        )


_HEAD_OPTIONS = ("two_layer_head", "head_init", "head_lr", "tune_head_first")


def _refuse_unused_head_option(
    name: str, value: Any, methods: Collection[str], options: RunOptions
) -> None:
    """Refuse an option that the head of this run does not use."""
    option = f"{name}={value!r}"
    has_verbalizer = options.head == "verbalizer"
    # M(x) of a generator depends on `pooling` too
    is_unused_pooling = name == "pooling" and not methods_with_option("sentence_pooling", methods)
    if any(task.is_generation for task in TASKS.values() if task.name == options.task):
        if is_unused_pooling or name in (*_HEAD_OPTIONS, "head", "loss_vocab"):
            raise UserError(
                f"{option} has no effect: task {options.task!r} is answered with generated text, "
                "which needs no classification head. Leave it out."
            )
    elif has_verbalizer and name in _HEAD_OPTIONS:
        raise UserError(
            f"{option} has no effect on a verbalizer, which has no classification head: leave it "
            "out, or use head='classification'."
        )
    elif has_verbalizer and is_unused_pooling:
        raise UserError(
            f"{option} has no effect on a verbalizer, which predicts at its mask token: leave it "
            "out, or use head='classification'."
        )
    elif not has_verbalizer and name == "loss_vocab":
        raise UserError(
            f"{option} has an effect on a verbalizer only: leave it out, or use head='verbalizer'."
        )
    elif not has_verbalizer and name == "template" and options.pooling != "mask":
        raise UserError(
            f"{option} has an effect on a head at the mask token only: leave it out, or use "
            "head='verbalizer', or a trained head with pooling='mask'."
        )


def refuse_control(method: str) -> None:
    """Refuse to save a control.

    Raises: `UserError` if `method` is a control, which has no prompt.
    """
    if method in CONTROL_METHODS:
        raise UserError(
            f"{method!r} is a control and has no prompt to save: score it with `run_experiment` or "
            f"`compare_methods`."
        )


# options of commands that are not fields of a config: the option that must have an effect too
_COMMAND_OPTIONS = {
    "tune": "lr",
    "learning_rates": "lr",
    "tune_head_first": "head_lr",
    "save_every": "patience",
}


def _refuse_option_without_users(
    name: str, value: Any, methods: Collection[str], users: list[str]
) -> None:
    if any(method in users for method in methods):
        return
    more = " …" if len(users) > 4 else ""
    raise UserError(
        f"option {name}={value!r} has no effect on {', '.join(methods)}: leave it out, or use a "
        f"method that has it ({', '.join(users[:4])}{more})."
    )


def refuse_unread_options(
    methods: Collection[str],  # names of the methods that are going to be trained
    options: RunOptions,  # their options
    allowed_methods: Mapping[str, Any] = ALL_METHODS,  # the methods that the command accepts
    # options that are not fields of a config, such as `learning_rates`, `tune` and `save_every`
    **command_options: Any,
) -> None:
    """Refuse an option that was given and that none of the methods uses.

    Raises: `UserError` for such an option, an unknown method, or an unknown option name.
    """
    general = general_options()
    for name in command_options:
        check_option_name(name, [*_COMMAND_OPTIONS, *general])
    for method in methods:
        check_name(method, allowed_methods, "method")
    if not options.stratified and options.shots is None:
        raise UserError(
            "stratified=False needs shots: without it all training examples are used, and none are "
            "sampled. Give shots, such as shots=100, or leave stratified out."
        )
    if options.head_lr and command_options.get("tune_head_first"):
        raise UserError(
            f"head_lr={options.head_lr:g} and tune_head_first=True exclude each other: "
            "tune_head_first searches the learning rate of the head. Leave one of them out."
        )
    _check_cache([config_for_method(options, m, methods) for m in methods], options.cache)
    for name, value in options.method_options.items():
        if value is not None:
            _refuse_option_without_users(name, value, methods, methods_with_option(name))
    given = {name: value for name, value in command_options.items() if value}
    for name, option in general.items():
        if getattr(options, name) != option.default:
            given[name] = getattr(options, name)
    for name, value in given.items():
        field = _COMMAND_OPTIONS.get(name, name)
        users = [m for m, row in ALL_METHODS.items() if field not in row.unused_options]
        _refuse_option_without_users(name, value, methods, users)
        _refuse_unused_head_option(name, value, methods, options)

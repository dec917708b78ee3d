"""Check that every option that was given is used by one of the chosen methods.

Two kinds of methods use `layer`. A late prompt enters there, and AdapterDrop has no adapters
below it. Alone, each of them uses the given value. In one comparison both would move together,
and AdapterDrop at layer 2 is not the baseline of LPT's tables, which leaves out the lower half
of the layers. So in a comparison with late prompts AdapterDrop keeps its default.
"""

from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any

from idp_tutorial.assembly.controls import ALL_METHODS, CONTROL_METHODS
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.utils.checks import UserError, check_name
from idp_tutorial.utils.config import RunConfig

__all__ = [
    "METHOD_OPTIONS",
    "TRAINING_OPTIONS",
    "layer_for_method",
    "refuse_control",
    "check_option_names",
    "refuse_unread_options",
]


def layer_for_method(
    method: str,  # name of the method
    methods: Collection[str],  # names of all methods of the comparison, `method` among them
    layer: int | None,  # the layer that was given for the comparison
) -> int | None:  # layer for `method`; None: its default
    """Return the layer that one method of a comparison uses.

    In a comparison with late prompts `layer` moves the prompts, and AdapterDrop keeps its default.
    """
    has_late_prompt = any(ALL_METHODS[name].insertion_point == "middle" for name in methods)
    is_adapterdrop = ALL_METHODS[method].insertion_point == "upper weights"
    return None if has_late_prompt and is_adapterdrop else layer


def _uses_prompt_dropout(name: str) -> bool:
    others = ("adapter", "adapterdrop", "compacter", "side-network", "p-tuning-v2")
    is_generated = ALL_METHODS[name].kind in ("generated", "second pass")
    return name in others or (is_generated and name != "smop")


def _uses_second_pass_options(name: str) -> bool:
    return ALL_METHODS[name].kind == "second pass" or name == "m-idpg-phm-glove"


def _is_glove_method(name: str) -> bool:
    return name == "m-idpg-phm-glove"


def _is_m_idpg(name: str) -> bool:
    return name in ("m-idpg-dnn", "m-idpg-phm")


def _is_id_spam(name: str) -> bool:
    return name in ("id-spam", "id-spam-mean")


def _is_trained(name: str) -> bool:
    return ALL_METHODS[name].kind != "control"


def _has_own_head(name: str) -> bool:
    return ALL_METHODS[name].kind in ("control", "entailment")


# option → whether the method of this name uses it
METHOD_OPTIONS: dict[str, Callable[[str], bool]] = {
    "prompt_length": lambda name: (
        ALL_METHODS[name].insertion_point in ("input", "layers", "keys", "middle")
        and "prompt_length" not in ALL_METHODS[name].defaults
    ),
    "layer": lambda name: ALL_METHODS[name].insertion_point in ("middle", "upper weights"),
    "bottleneck": lambda name: (
        name == "side-network" or "bottleneck" in getattr(ALL_METHODS[name], "defaults", {})
    ),
    "position": lambda name: ALL_METHODS[name].insertion_point in ("input", "layers"),
    "prompt_dropout": _uses_prompt_dropout,
    "standardise": lambda name: _uses_second_pass_options(name) or name == "lpt-npg",
    "glove": _is_glove_method,
    "glove_noise": _is_glove_method,
    "sentence_pooling": lambda name: (
        ALL_METHODS[name].kind == "second pass" or name == "side-network"
    ),
    "sentence_dropout": _uses_second_pass_options,
    "generator_dropout": _uses_second_pass_options,
    "init_std": lambda name: name in ("prompt-tuning", "prompt-tuning-134", "p-tuning-v2", "lpt"),
    "exclude_last_token": lambda name: name in ("lpt-appg", "lpt-mppg"),
    "generator": lambda name: name in ("s-idpg-dnn", "s-idpg-phm"),
    "parameter_sharing": _is_m_idpg,
    "generator_input": _is_m_idpg,
    "insertion": lambda name: _is_m_idpg(name) or name == "p-tuning-v2",
    "prompt_relu": _is_id_spam,
    "attention_input": _is_id_spam,
}
# the same for options of the head and of training
TRAINING_OPTIONS: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("two_layer_head", "head_init"), lambda name: not _has_own_head(name)),
    **dict.fromkeys(
        ("learning_rates", "tune", "lr"), lambda name: bool(ALL_METHODS[name].learning_rates)
    ),
    "weight_decay": lambda name: name == "side-network" or _is_trained(name),
    **dict.fromkeys(
        (
            "epochs",
            "schedule",
            "beta2",
            "eps",
            "no_decay_on_bias_and_norm",
            "warmup",
            "head_lr",
            "patience",
            "accumulate",
            "precision",
            "compile",
            "class_weight",
            "dropout_below_prompt",
            "clip",
            "save_every",
            "tune_head_first",
        ),
        _is_trained,
    ),
}


def _cacheable_states(name: str, methods: Collection[str], cfg: RunConfig) -> set[str]:
    """Return the kinds of states, 'hidden' and 'sentence', that can be cached for a method."""
    if name in ("probe", "side-network"):
        return {"hidden", "sentence"}
    cacheable = set()
    row = ALL_METHODS[name]
    has_frozen_layers_below = (
        row.insertion_point in ("middle", "upper weights")
        and layer_for_method(name, methods, cfg.layer) != 0
    )
    if has_frozen_layers_below or name == "head-only":
        cacheable.add("hidden")
    if row.kind == "second pass" and cfg.sentence_pooling != "noisy":
        cacheable.add("sentence")
    return cacheable


def _check_cache(methods: Collection[str], cfg: RunConfig) -> None:
    requested = {"none": set(), "both": {"hidden", "sentence"}}.get(cfg.cache, {cfg.cache})
    if requested and not any(requested & _cacheable_states(m, methods, cfg) for m in methods):
        raise UserError(
            f"cache={cfg.cache!r} has no effect on {', '.join(methods)}: leave cache out. 'hidden' "
            "needs a late prompt with layer > 0 or method 'head-only', and 'sentence' needs a "
            "generator that runs the backbone twice, with sentence_pooling other than 'noisy'."
        )


_HEAD_OPTIONS = ("two_layer_head", "head_init", "head_lr", "tune_head_first")


def _refuse_unused_head_option(
    name: str, value: Any, methods: Collection[str], cfg: RunConfig
) -> None:
    """Refuse an option that the head of this run does not use."""
    option = f"{name}={value!r}"
    has_verbalizer = cfg.head == "verbalizer"
    # M(x) of a generator depends on `pooling` too
    is_unused_pooling = name == "pooling" and not any(
        METHOD_OPTIONS["sentence_pooling"](method) for method in methods
    )
    if any(task.is_generation for task in TASKS.values() if task.name == cfg.task):
        if is_unused_pooling or name in (*_HEAD_OPTIONS, "head", "loss_vocab"):
            raise UserError(
                f"{option} has no effect: task {cfg.task!r} is answered with generated text, which "
                "needs no classification head. Leave it out."
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
    elif not has_verbalizer and name in ("template", "loss_vocab"):
        raise UserError(
            f"{option} has an effect on a verbalizer only: leave it out, or use head='verbalizer'."
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


def check_option_names(names: Collection[str]) -> None:
    """Check that options exist.

    Raises: `UserError` for an unknown option.
    """
    known = {
        *METHOD_OPTIONS,
        *TRAINING_OPTIONS,
        *("evaluations", "split_seeds", "learning_rates", "tune_head_first"),
        *(field.name for field in fields(RunConfig)),
    }
    for name in names:
        check_name(name, sorted(known), "option")


def _changed_options(
    cfg: RunConfig, default_prompt_length: int, training_options: dict[str, Any]
) -> dict[str, Any]:
    """Return the options that differ from their defaults, in the order of the tables."""
    defaults = {field.name: field.default for field in fields(RunConfig)}
    defaults["prompt_length"] = default_prompt_length
    given = {**vars(cfg), **{name: value or None for name, value in training_options.items()}}
    names = (*METHOD_OPTIONS, *TRAINING_OPTIONS, "head", "template", "loss_vocab", "pooling")
    return {name: given[name] for name in names if given.get(name) != defaults.get(name)}


def refuse_unread_options(
    methods: Collection[str],  # names of the methods that are going to be trained
    cfg: RunConfig,  # the options of a command
    # default value of `prompt_length` in the command
    default_prompt_length: int = RunConfig.prompt_length,
    allowed_methods: Collection[str] = ALL_METHODS,  # names of methods that the command accepts
    # options that are not fields of a config, such as `learning_rates`, `tune` and `save_every`
    **training_options: Any,
) -> None:
    """Refuse an option that was given and that none of the methods uses.

    Raises: `UserError` for such an option, an unknown method, or an unknown option name.
    """
    check_option_names(training_options)
    for method in methods:
        check_name(method, allowed_methods, "method")
    if not cfg.stratified and cfg.shots is None:
        raise UserError(
            "stratified=False needs shots: without it all training examples are used, and none are "
            "sampled. Give shots, such as shots=100, or leave stratified out."
        )
    if cfg.head_lr and training_options.get("tune_head_first"):
        raise UserError(
            f"head_lr={cfg.head_lr:g} and tune_head_first=True exclude each other: tune_head_first "
            "searches the learning rate of the head. Leave one of them out."
        )
    _check_cache(methods, cfg)
    users = METHOD_OPTIONS | TRAINING_OPTIONS
    for name, value in _changed_options(cfg, default_prompt_length, training_options).items():
        if name in users and not any(users[name](method) for method in methods):
            alternatives = [method for method in ALL_METHODS if users[name](method)]
            more = " …" if len(alternatives) > 4 else ""
            raise UserError(
                f"option {name}={value!r} has no effect on {', '.join(methods)}: leave it out, or "
                f"use a method that has it ({', '.join(alternatives[:4])}{more})."
            )
        _refuse_unused_head_option(name, value, methods, cfg)

"""All methods of the three papers and their baselines, in the order of the tables.

A method is registered where its config class is defined, beside its prompt source. This module
imports all of them, so that `METHODS` is complete. All methods share the head, the training loop
and the selection of checkpoints. The two extremes train only the head, or all weights.
"""

from idp_tutorial.methods import (  # noqa: F401 (each registers its methods)
    adapters,
    cartridge,
    efl,
    glove,
    id_spam,
    idpg,
    idpg_multilayer,
    lpt,
    p_tuning,
    p_tuning_v2,
    prompt_tuning,
    shadow,
    smop_dept,
)
from idp_tutorial.methods.method_registry import METHODS, MethodConfig, register


@register(
    "head-only",
    reference="this implementation: the head alone",
    learning_rates=(1e-2, 3e-2, 1e-1),
    cacheable_states=("hidden",),
)
class HeadOnlyConfig(MethodConfig):
    """Training of the head alone, which has no options and an empty plan."""

    insertion_point = "nowhere"
    kind = "head"


_TABLE_ORDER = (  # the order in which tables list the methods; others follow
    *("head-only", "prompt-tuning", "prompt-tuning-134", "p-tuning", "p-tuning-v2", "cartridge"),
    *("s-idpg-dnn", "s-idpg-phm", "m-idpg-dnn", "m-idpg-phm", "m-idpg-phm-glove"),
    *("lpt", "lpt-npg", "lpt-mppg", "lpt-appg", "id-spam", "id-spam-mean", "smop", "dept"),
    *("bitfit", "lora", "lora-all", "adapter", "adapterdrop", "compacter", "shadow"),
    *("efl", "fine-tuning"),
)
_rows = {name: METHODS.pop(name) for name in (*_TABLE_ORDER, *METHODS) if name in METHODS}
METHODS.update(_rows)


def late_prompt_methods() -> list[str]:
    """Return the names of the methods whose prompt enters between two layers."""
    return [name for name, m in METHODS.items() if m.insertion_point == "middle"]


def methods_with_head(
    head: str,  # 'classification' or 'verbalizer'
) -> list[str]:
    """Return the names of the methods that can be used with a head (EFL: classification)."""
    return [name for name, m in METHODS.items() if head != "verbalizer" or m.kind != "entailment"]

"""Instance-dependent soft prompts for frozen language models: IDPG, LPT and ID-SPAM, step by step.

The package contains the methods (`methods`), the models they are built on (`model`), data sets
(`data`), training (`training`), experiments (`experiments`), analyses (`analysis`), cost models
(`efficiency`), the pretraining of small backbones (`pretraining`) and the commands (`commands`).
`PromptClassifier` and `PromptRegressor` are scikit-learn estimators.
"""

from typing import Any

__version__ = "0.2.0"
__all__ = ["PromptClassifier", "PromptRegressor"]


def __getattr__(name: str) -> Any:
    """Import the estimators on first use, so that importing the package is fast."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from idp_tutorial import estimator

    return getattr(estimator, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

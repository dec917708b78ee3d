"""The defaults of a comparison, for `idp compare` and for `compare` in Python.

The command reads them without importing PyTorch, so that `--help` answers at once.
"""

DEFAULT_METHODS = ("majority", "words", "probe", "prompt-tuning", "lpt-npg", "id-spam", "lora")
DEFAULT_OPTIONS = dict(steps=240, prompt_length=5)  # of runs
DEFAULT_EVALUATIONS = 4  # of each run, on the validation split
_MINUTES_PER_SEED = 5.0


def default_minutes(
    steps: int,
    epochs: float | None,
    n_seeds: int,  # of all few-shot samples
) -> float:  # 0: no limit
    """Return the time for all runs: 5 minutes a seed, and no limit for other steps or epochs."""
    has_default_length = steps == DEFAULT_OPTIONS["steps"] and epochs is None
    return _MINUTES_PER_SEED * n_seeds if has_default_length else 0

"""Options of a pretraining run."""

import pytest
from small import refused

from results.pretraining.config import PretrainConfig


@pytest.mark.parametrize(
    "options",
    [
        dict(steps=0),
        dict(steps=-5),
        dict(n_layers=-1),
        dict(lr=0),
        dict(lr=float("nan")),
        dict(d=33),
        dict(tokens_per_step=0),
        dict(seed=-1),
        dict(distillation_weight=float("nan")),
        dict(family="t5"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options):
    (name,) = options
    refused(lambda: PretrainConfig(**options), name)

"""Options of training, without a method."""

from idp_tutorial.assembly.config import (
    RunConfig,
)
from idp_tutorial.training.config import TrainingConfig


def test_options_of_training_need_no_method():
    cfg = TrainingConfig(steps=6, epochs=2, batch_size=4, eval_every=3)
    assert cfg.resolve_epochs(10).steps == 5 and cfg.run_name == "model"
    assert RunConfig("lpt").run_name == "lpt"

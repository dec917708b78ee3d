"""Every method refuses padding on the left, with every representation that its head can pool."""

import pytest
import torch
from small import backbone, batch_of, config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.methods.method_registry import ALL_METHODS
from idp_tutorial.utils.checks import UserError

POOLINGS = {"roberta": ("cls", "mean", "last", "mask"), "gpt2": ("mean", "last", "mask")}


def pad_on_the_left(batch):
    """Return the batch with the padding of each example moved to its left."""
    n_padding = batch["attention_mask"].shape[1] - batch["attention_mask"].sum(1)
    moved = {}
    for name, value in batch.items():
        if value.dim() == 2:
            rows = zip(value, n_padding.tolist(), strict=True)
            moved[name] = torch.stack([row.roll(n) for row, n in rows])
        else:
            moved[name] = value + n_padding if name == "mask_position" else value
    return moved


@pytest.mark.parametrize("family", POOLINGS)
# the control on words has ids of its own words, and reads no position
@pytest.mark.parametrize("method", [name for name in ALL_METHODS if name != "words"])
def test_padding_on_the_left_is_refused(method, family):
    task = small_task()
    for pooling in POOLINGS[family]:
        model = build_model(config(method=method, pooling=pooling), backbone(family), task).eval()
        batch = batch_of(model.backbone, task, template="code" if pooling == "mask" else None)
        assert batch["attention_mask"].min() == 0
        with pytest.raises(UserError, match="pad on the right"):
            model(pad_on_the_left(batch))

"""Weights of the classes in the loss, for labels of unequal frequency."""

import torch

from idp_tutorial.assembly.config import RunConfig
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.task import Task
from idp_tutorial.methods.efl import EntailmentModel
from idp_tutorial.utils.checks import UserError, check_name

__all__ = ["set_class_weights"]


def set_class_weights(model: PromptedModel, task: Task, cfg: RunConfig) -> None:
    """Set the weight of each class in the loss: inverse frequency for 'balanced', or by name."""
    class_weight = cfg.class_weight
    if not task.labels:
        raise UserError(
            f"class_weight={class_weight!r} needs classes, but task {task.name!r} has none: "
            "leave it out."
        )
    if isinstance(model, EntailmentModel):
        raise UserError(
            f"class_weight={class_weight!r} needs a classification head, but method "
            f"{cfg.method!r} scores pairs: leave it out."
        )
    if task.multi_label:
        raise UserError(
            f"class_weight={class_weight!r} needs one class for each row, but rows of task "
            f"{task.name!r} may have several labels: leave it out."
        )
    if isinstance(class_weight, dict):
        for name in class_weight:
            check_name(name, task.labels, "class in class_weight")
        weights = [float(class_weight.get(name, 1)) for name in task.labels]
        model.head.class_weights = torch.tensor(weights)
    elif rows := task.splits.get("train"):  # a loaded model has no examples, and needs no loss
        labels = torch.tensor([row["label"] for row in rows])
        counts = torch.bincount(labels, minlength=len(task.labels))
        model.head.class_weights = len(rows) / (len(counts) * counts.clamp(min=1).float())

"""Class weights: how much each class counts in the loss of a classification head.

`class_weight='balanced'` weights a class by the inverse of its frequency in the training split, so
that rare classes count as much as common ones. `core.heads.prediction_loss` applies the weights.
"""

import torch

from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.task import Task
from idp_tutorial.methods.efl import EntailmentModel
from idp_tutorial.utils.checks import UserError, check_name

__all__ = ["set_class_weights"]


def set_class_weights(
    model: PromptedModel,  # model with a classification head
    task: Task,  # task with classes; its training split gives their frequencies
    class_weight: str | dict[str, float],  # 'balanced', or weights by name; 1 for other classes
) -> None:
    """Set the weight of each class in the loss: 'balanced' (inverse frequency), or by name."""
    if not task.labels:
        raise UserError(
            f"class_weight={class_weight!r} needs classes, but task {task.name!r} has none: "
            "leave it out."
        )
    if isinstance(model, EntailmentModel):
        raise UserError(
            f"class_weight={class_weight!r} needs a classification head, but method 'efl' scores "
            "pairs: leave it out."
        )
    if task.multi_label:
        raise UserError(
            f"class_weight={class_weight!r} needs one class for each row, but rows of task "
            f"{task.name!r} may have several labels: leave it out."
        )
    if isinstance(class_weight, dict):
        for name in class_weight:
            check_name(name, task.labels, "class in class_weight")
        model.head.class_weights = torch.tensor(
            [float(class_weight.get(name, 1)) for name in task.labels]
        )
    elif rows := task.splits.get("train"):  # a loaded model has no examples, and needs no loss
        labels = torch.tensor([row["label"] for row in rows])
        counts = torch.bincount(labels, minlength=len(task.labels))
        model.head.class_weights = len(rows) / (len(counts) * counts.clamp(min=1).float())

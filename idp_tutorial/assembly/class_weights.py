"""Weights of the classes in the loss, for labels of unequal frequency."""

import torch
from torch import Tensor

from idp_tutorial.data.task import Task
from idp_tutorial.utils.checks import UserError, check_name


def compute_class_weights(
    class_weight: str | dict,  # 'balanced', or weights by class; those left out have weight 1
    task: Task,  # its training split has the frequencies for 'balanced'
) -> Tensor | None:  # a weight for each class `[C]`; None: 'balanced', without training rows
    """Return the weight of each class in the loss.

    A balanced weight is inverse to the class's frequency: N / (C n_c), for n_c of N rows in C
    classes. Raises: `UserError` for a task without classes or with several labels a row, and for
    an unknown class.
    """
    if not task.labels or task.multi_label:
        raise UserError(
            f"class_weight={class_weight!r} needs one class for each row, which task "
            f"{task.name!r} does not have: leave it out."
        )
    if isinstance(class_weight, dict):
        for name in class_weight:
            check_name(name, task.labels, "class in class_weight")
        return torch.tensor([float(class_weight.get(name, 1)) for name in task.labels])
    rows = task.splits.get("train")
    if not rows:  # a loaded model has no examples, and needs no loss
        return None
    labels = torch.tensor([row["label"] for row in rows])
    counts = torch.bincount(labels, minlength=len(task.labels))
    return len(rows) / (len(counts) * counts.clamp(min=1).float())

"""Maps from the classes of one task to those of another, for a model that was trained on one.

A model of QQP predicts *duplicate*, and MRPC needs *equivalent*. The indices of the classes do
not help: class 0 of RTE is *entailment*, class 0 of MRPC is *not equivalent*. The map follows
from the tasks if the two have the same set of label words, or the same set of label names. In
every other case the user gives the map.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from idp_tutorial.core.plan import Context
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.task import Task
from idp_tutorial.utils.checks import UserError

__all__ = ["LabelMapHead", "make_label_map", "changes_class_indices", "apply_label_map"]


def _describe_output_kind(task: Task) -> str:
    if task.labels:
        return f"{len(task.labels)} classes"
    return "a text" if task.is_generation else "a number"


def _describe_labels(task: Task) -> str:
    """Return the label names, each with its label word if the task has label words."""
    with_words = [f"{name}: {word}" for name, word in zip(task.labels, task.label_words)]
    return ", ".join(with_words or task.labels)


def _validate_label_map(source: Task, target: Task, label_map: dict) -> tuple[int, ...]:
    """Return the class indices of a user's map, which must use every label of both tasks."""
    problems = (  # the tasks are named, because they may have labels of the same name
        (f"{source.name!r} has no label", set(label_map) - set(source.labels)),
        (f"no key is the label of {source.name!r}:", set(source.labels) - set(label_map)),
        (f"{target.name!r} has no label", set(label_map.values()) - set(target.labels)),
        (
            f"no value is the label of {target.name!r}:",
            set(target.labels) - set(label_map.values()),
        ),
    )
    for problem, labels in problems:
        if labels:
            raise UserError(
                f"label map {label_map}: {problem} {sorted(map(str, labels))[0]!r}. Each of "
                f"{', '.join(source.labels)} must be a key, and each of "
                f"{', '.join(target.labels)} must be a value."
            )
    return tuple(target.labels.index(label_map[label]) for label in source.labels)


def _infer_label_map(source: Task, target: Task) -> tuple[int, ...]:
    """Return the map that equal label words or equal label names define."""
    class_maps = set()
    for names, target_names in (
        (source.label_words, target.label_words),
        (source.labels, target.labels),
    ):
        if names and set(names) == set(target_names):
            class_maps.add(tuple(target_names.index(name) for name in names))
    if len(class_maps) == 1:
        return class_maps.pop()
    problem = "do not correspond"
    if class_maps:
        problem = "have two maps, one by their names and another by their words"
    raise UserError(
        f"the labels of {source.name!r} ({_describe_labels(source)}) and {target.name!r} "
        f"({_describe_labels(target)}) {problem}. Give a label map, such as "
        f"{{{source.labels[0]!r}: {target.labels[0]!r}, …}}."
    )


def make_label_map(
    source: Task,  # the task that a model was trained on
    target: Task,  # the task that the model is to answer
    explicit_map: dict | None = None,  # source label → target label; None: inferred from the tasks
) -> tuple[int, ...] | None:  # for every class of `source`, a class index of `target`
    """Return the target class of each source class, or None for two regression tasks."""
    if not (source.labels and target.labels):
        if source.is_regression and target.is_regression and not explicit_map:
            return None
        also = ", and a label map was given" if explicit_map else ""
        raise UserError(
            f"a label map needs two tasks with classes, but {source.name!r} predicts "
            f"{_describe_output_kind(source)} and {target.name!r} {_describe_output_kind(target)}"
            f"{also}. Two regression tasks need no map."
        )
    if explicit_map is not None:
        return _validate_label_map(source, target, explicit_map)
    return _infer_label_map(source, target)


class LabelMapHead(nn.Module):
    """A head whose outputs are the classes of another task.

    The probability of a class is the sum over all classes of the wrapped head that mean it.
    """

    def __init__(
        self,
        head: nn.Module,  # head of the task that the model was trained on
        class_map: tuple[int, ...],  # from `make_label_map`
    ):
        super().__init__()
        self.head: Any = head
        self.pooling = head.pooling
        self.source_classes = []
        for target in range(max(class_map) + 1):
            self.source_classes.append([i for i, c in enumerate(class_map) if c == target])

    def forward(self, ctx: Context) -> Tensor:  # `[B,C]`, C classes of the other task
        """Return logits over the classes of the other task."""
        logits = self.head(ctx)
        return torch.stack([logits[:, classes].logsumexp(1) for classes in self.source_classes], 1)

    def loss(
        self, ctx: Context, label: Tensor
    ) -> Tensor:  # classes of the other task `[B]`; scalar
        """Return the loss of the wrapped head, or cross-entropy if the map merges classes."""
        if all(len(classes) == 1 for classes in self.source_classes):
            to_source = [classes[0] for classes in self.source_classes]
            return self.head.loss(ctx, torch.tensor(to_source, device=label.device)[label])
        return F.cross_entropy(self(ctx), label)


def changes_class_indices(class_map: tuple[int, ...] | None) -> bool:
    """Return whether a label map changes the index of any class."""
    return class_map is not None and class_map != tuple(range(len(class_map)))


def apply_label_map(
    model: PromptedModel,
    class_map: tuple[int, ...] | None,  # from `make_label_map`
) -> PromptedModel:  # `model`, changed in place
    """Replace the head of a trained model by one that answers with the classes of another task."""
    if class_map is None or not changes_class_indices(class_map):
        return model
    if type(model) is not PromptedModel:
        raise UserError(
            f"{type(model).__name__} has no head whose classes could be renamed. Choose a task "
            "with the same labels in the same order."
        )
    model.head = LabelMapHead(model.head, class_map)
    return model

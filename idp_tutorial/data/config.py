"""`TaskConfig`: the options that choose a task, its data and its examples."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from idp_tutorial.utils.options import Range

__all__ = ["TaskConfig"]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Options that choose a task, its data and its examples."""

    option_group: ClassVar[str] = "a known task"

    task: str = "sentiment"  # key of `TASKS`
    data: str | None = None  # folder of tasks: DATA/TASK/{train,validation,test}.jsonl
    shots: int | None = None  # few-shot: number of training examples (default: all)
    # seed of the few-shot sample and of the held-out split
    split_seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    # few-shot samples keep the proportions of the labels (LPT); False: sample at random (IDPG)
    stratified: bool = True
    max_len: Annotated[int, Range(1, 10**6)] = 128  # tokens of an example; longer ones are cut

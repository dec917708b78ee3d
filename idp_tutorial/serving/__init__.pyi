from .multitask import MultiTaskModel as MultiTaskModel
from .multitask import TaskModel as TaskModel

from .multitask import MultiTaskModel as MultiTaskModel
from .multitask import TaskModel as TaskModel
from .multitask import load_multitask_model as load_multitask_model
from .multitask import save_multitask_model as save_multitask_model

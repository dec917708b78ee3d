from .encoding import collate as collate
from .few_shot import split_few_shot as split_few_shot
from .metrics import compute_metric as compute_metric
from .task import Task as Task
from .tasks import TASKS as TASKS
from .tasks import load_task as load_task
from .user_data import (
    load_table_task as load_table_task,
)
from .user_data import (
    register_table_task as register_table_task,
)

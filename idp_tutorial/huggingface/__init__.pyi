from .prompt_model import PromptModel as PromptModel
from .prompt_model import get_prompt_model as get_prompt_model
from .settings import HEADS as HEADS
from .settings import TASK_TYPES as TASK_TYPES
from .settings import PromptSettings as PromptSettings

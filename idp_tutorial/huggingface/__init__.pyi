from .prompt_model import PromptModel as PromptModel
from .prompt_model import get_prompt_model as get_prompt_model
from .prompts import HEADS as HEADS
from .prompts import TASK_TYPES as TASK_TYPES
from .prompts import PromptSettings as PromptSettings

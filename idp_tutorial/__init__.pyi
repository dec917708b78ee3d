from .assembly.build import build_model as build_model
from .assembly.config import RunConfig as RunConfig
from .backbones.load import load_backbone as load_backbone
from .core.planned_model import PlannedModel as PlannedModel
from .core.steps import Add as Add
from .core.steps import Insert as Insert
from .core.steps import KeyValue as KeyValue
from .core.steps import Replace as Replace
from .data.tasks import load_task as load_task
from .data.user_data import load_table_task as load_table_task
from .estimator import PromptClassifier as PromptClassifier
from .estimator import PromptRegressor as PromptRegressor
from .huggingface import PromptModel as PromptModel
from .huggingface import get_prompt_model as get_prompt_model
from .methods.all_methods import METHODS as METHODS
from .methods.all_methods import register as register
from .runs.compare import compare as compare
from .runs.experiment import run_experiment as run_experiment
from .saving.prompt_files import (
    from_pretrained as from_pretrained,
)
from .saving.prompt_files import (
    save_pretrained as save_pretrained,
)
from .training.evaluation import generate as generate
from .training.evaluation import predict as predict
from .training.fit import fit as fit

__version__: str

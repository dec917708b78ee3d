from .compare import compare_methods as compare_methods
from .experiment import Experiment as Experiment
from .experiment import run_experiment as run_experiment
from .record import RunStore as RunStore

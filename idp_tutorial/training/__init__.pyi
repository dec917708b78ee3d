from .config import TrainingConfig as TrainingConfig
from .evaluation import evaluate as evaluate
from .evaluation import generate as generate
from .evaluation import predict as predict
from .fit import TrainLog as TrainLog

"""Training and evaluation of models with prompts.

The package encodes texts as examples, caches the states of frozen layers on disk, runs the training
loop on one or several processes with checkpoints, and computes predictions and scores.

Modules:

- `cache`: Caches of the states of frozen layers, computed once and reused in every epoch and run.
- `callbacks`: Callbacks of transformers, and logs of a training run: TensorBoard, Weights & Biases.
- `checkpoint`: Checkpoints of training runs, from which a killed run resumes as if it had not been
  stopped.
- `config`: `TrainingConfig`: the options of every run, whatever its method.
- `distributed`: The parts of a training step: batches, precision, optimizer, compilation, time and
  memory.
- `early_stopping`: The best of several evaluations, and when a run stops early.
- `evaluation`: Predictions and scores of trained models: logits, generated answers and metrics.
- `examples`: Encoding of texts as examples for a model, and their storage in flat arrays.
- `fit`: The training loop of every method: schedule, steps, evaluations and the best checkpoint.
- `state_store`: A store of hidden states in memory-mapped files, written as a whole and looked up
  by example.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

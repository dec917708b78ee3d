"""Training and evaluation of models with prompts.

The package encodes texts as examples, caches the states of frozen layers on disk, runs the training
loop on one or several processes with checkpoints, and computes predictions and scores.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

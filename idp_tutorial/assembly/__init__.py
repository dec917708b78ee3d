"""Join a method, a task and a backbone: configs of runs, models, controls and probes.

Modules:

- `build`: Build the model of a config: a frozen backbone, the plan of a method, and a head.
- `class_weights`: Weights of the classes in the loss, for labels of unequal frequency.
- `config`: `RunConfig`: everything that can change the result of a run, and `RunOptions` of several
  runs.
- `controls`: Controls without a prompt: the majority class, words, a linear probe, and a side
  network.
- `probe`: Fit the best linear model of frozen hidden states, over layers, poolings and
  regularisation.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

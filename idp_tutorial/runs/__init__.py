"""Train one configuration, keep its record, and compare methods.

Modules:

- `compare`: Training of several methods with the same head, steps, seeds and choice of a learning
  rate.
- `conclusions`: Advice from a comparison.
- `defaults`: The defaults of a comparison, for `idp compare` and for `compare` in Python.
- `experiment`: Train, score and save one config: the one pipeline of commands, comparisons and
  estimators.
- `learning_rate_search`: Choose a learning rate on the validation split and store it.
- `logits`: The logits of runs: one file a comparison, with the digest of each run in its record.
- `record`: Records of runs, with everything that is needed to trust a score, and the store that
  finds them.
- `report`: The report of a trained model: scores, tables, pictures and errors on labelled rows.
- `statistics`: Paired differences between two methods on the same examples and seeds, with
  intervals.
- `tables`: Turn records of runs into tables, pictures and files.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Several tasks on one backbone, answered in joint batches.

Modules:

- `limits`: Limits of what a client of `idp serve` may use, and of its batches.
- `multitask`: One frozen backbone with a prompt and a head for each of several tasks, in joint
  batches.
- `server`: The HTTP application of `idp serve`: requests, limits, a queue of texts, and errors.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

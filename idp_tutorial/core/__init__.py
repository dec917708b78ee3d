"""A frozen model, the prompts that enter it, and the loop over its layers.

Begin with `core.steps`, `core.context` and `core.loop`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

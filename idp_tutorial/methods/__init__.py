"""Methods of parameter-efficient training: IDPG, LPT, ID-SPAM and their baselines.

The package contains the prompt sources and plans of the methods, changes of the backbone such as
LoRA and adapters, and the registry `METHODS`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Save and load trained prompts, alone, on the Hugging Face hub, or as a peft adapter."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

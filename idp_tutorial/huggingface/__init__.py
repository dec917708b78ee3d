"""Prompts for a Hugging Face model object, as a module for anybody's training loop.

Modules:

- `files`: Files of a `PromptModel`: write a prompt with its head, and read it for a model.
- `prompt_model`: Prompts for a Hugging Face model object, as a module for anybody's training loop.
- `prompts`: What a prompt on a Hugging Face model is: its settings, its head, and the model of
  both.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Prompts for a Hugging Face model object, as a module for anybody's training loop.

Modules:

- `files`: Files of a `PromptModel`: write a prompt with its head, and read it for a model.
- `heads`: Heads of a `PromptModel`, and the model of prompts and head that its settings describe.
- `prompt_model`: Prompts for a Hugging Face model object, as a module for anybody's training loop.
- `settings`: Settings of a prompt on a Hugging Face model: the method, the task and the head.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Save and load trained prompts, alone, on the Hugging Face hub, or as a peft adapter.

Modules:

- `descriptions`: Descriptions of saved models: their config, their task and the digests of their
  backbone.
- `hub`: Send a saved model to the Hugging Face hub, and load it by its name and revision.
- `model_card`: Write the model card of a saved model from its description and the record of its
  run.
- `peft`: Write trained prompts and LoRA matrices in peft's format.
- `prompt_files`: Save the trained tensors of a model without its backbone, and load them again.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

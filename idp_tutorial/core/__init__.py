"""A frozen model, the prompts that enter it, and the loop over its layers.

Begin with `core.steps`, `core.context` and `core.loop`.

Modules:

- `backbone`: The frozen language model: its parts, its attention masks, and the identity of its
  weights.
- `context`: The state of one pass through a frozen model, which prompt sources and heads read.
- `devices`: The GPU of this machine, whichever library drives it: CUDA, Apple's MPS or Intel's XPU.
- `dtypes`: The dtype of frozen weights: float32, bfloat16, or int8 in linear layers.
- `generation`: Text generation with a prompted decoder: layer caches, and the library's `generate`.
- `heads`: The heads: a trained classifier, the masked language model, and text generation.
- `input_checks`: Checks of a pass, which the context calls: what would give a wrong result, or no
  result.
- `loop`: The layer loop: it runs a frozen model one layer at a time and inserts the prompts of a
  plan.
- `plan_checks`: Checks of a plan: what would give a wrong result, or no result, is refused.
- `planned_model`: A frozen backbone, an insertion plan and a head as one PyTorch module.
- `prompt_key_values`: Caches that give a layer a prompt's keys and values, or the keys and values
  of all positions.
- `random_numbers`: Seed, fork and restore random number generators, one thread at a time.
- `single_position`: A faster pass for heads that need one position of the last layer.
- `steps`: Prompt sources, and the four steps of a plan: where and how their vectors enter a frozen
  model.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

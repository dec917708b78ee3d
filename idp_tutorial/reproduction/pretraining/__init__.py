"""How the bundled backbones were trained.

Modules:

- `corpus`: The pretraining corpus: raw text without held-out text, tokenizer, stream of ids,
  windows.
- `distillation`: Initial word embeddings from a teacher model, and a loss that imitates its layers.
- `language_modelling`: The losses of masked and causal language modelling, and n-gram models as
  baselines.
- `pretrain`: Pretraining of the bundled backbones on raw text: optimizer, loop and checkpoints.
"""

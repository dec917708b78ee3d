"""What the hidden states contain, and which layer suits a prompt.

Modules:

- `layer_choice`: Choose a prompt layer from one pass through the frozen model, before any training.
- `probes`: Linear classifiers on frozen hidden states at every layer: accuracy, and information in
  bits.
"""

"""What the hidden states and the prompts contain.

Modules:

- `information`: Lower bounds on the information about the label in frozen hidden states.
- `layer_choice`: Choose a prompt layer from one pass through the frozen model, before any training.
- `probes`: Linear classifiers on frozen hidden states at every layer: accuracy, and information in
  bits.
- `prompt_swaps`: Give an example the prompt that was generated for another one, and compare the
  predictions.
"""

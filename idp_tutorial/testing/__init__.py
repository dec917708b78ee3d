"""Parity checks and small random models: what a new family needs.

The layer loop must compute what the library's model computes. After `register_family`, three lines
measure it on a small model with random weights, here of ERNIE (CONTRIBUTING.md has its class):

    config = ErnieConfig(vocab_size=60, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
    backbone = wrap_hf_model(build_hf_model(config))
    measure_parity(backbone)

The result is the largest difference in each of seven comparisons, which should be 0. An entry in
`small_models.SMALL_CONFIGS` adds the family to the tests of all families.

Modules:

- `parity`: Seven comparisons that measure how exactly the layer loop computes what the library
  computes.
- `small_models`: Small models of all families with random weights, and prompts of every kind for
  them.
"""

"""Parameters, time and memory of a method.

Modules:

- `cost_model`: A cost model of a training step that counts forward and backward passes through
  layers.
- `parameter_counts`: Exact counts of the trained parameters of each method, and formats of printed
  counts.
- `published_counts`: 120 published parameter counts, of which formulas and modules reproduce 108.
"""

"""Parameters, time and memory of a method.

Modules:

- `cost_model`: A cost model of a training step that counts forward and backward passes through
  layers.
- `end_to_end`: Whole commands beside those of `peft` and Transformers, from start to exit.
- `other_libraries`: Times of training steps beside `peft`, and of predictions beside Transformers.
- `other_scripts`: Train with `peft` and classify with a Transformers pipeline, without this
  package.
- `parameter_counts`: Exact counts of the trained parameters of each method, and formats of printed
  counts.
- `published_counts`: 120 published parameter counts, of which formulas and modules reproduce 108.
- `timing`: Times of functions and of training steps, measured in turns.
"""

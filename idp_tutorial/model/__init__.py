"""Frozen language models and prompts inside them.

The package contains the backbone and its families (`backbone`, `family_*`), the insertion plan and the
layer loop that carries it out (`plan`, `layer_loop`), heads (`heads`), the module that combines the three
(`prompted_model`), text generation (`generation`), and the loading of pretrained models (`pretrained`,
`fetched_backbones`, `sizes`).
"""

"""Pretraining of the bundled backbones on raw text.

The package contains the preparation of the corpus, the losses of language modelling and of
distillation from a teacher, the optimizer, and the resumable training loop.
"""

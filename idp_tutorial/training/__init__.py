"""Training and evaluation of models with prompts.

The package encodes texts as examples, caches the states of frozen layers on disk, runs the training
loop on one or several processes with checkpoints, and computes predictions and scores.
"""

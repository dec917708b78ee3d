"""Analyses of frozen and of prompted models.

Linear probes, mutual information and prompt gradients at every layer, sweeps over the prompt layer
and their summaries, a choice of the prompt layer without training, swaps of generated prompts, and
measurements for figures of the papers.
"""

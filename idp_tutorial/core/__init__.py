"""A frozen model, the prompts that enter it, and the loop over its layers.

Begin with `core.steps`, `core.context` and `core.loop`.
"""

"""A frozen model, the prompts that enter it, and the loop over its layers.

Begin with `core.plan` and `core.loop`.
"""

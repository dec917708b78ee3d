"""Methods of parameter-efficient training: IDPG, LPT, ID-SPAM and their baselines.

The package contains the prompt sources and plans of the methods, changes of the backbone such as
LoRA and adapters, and the registry `METHODS`.
"""

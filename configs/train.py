"""Run the command `idp_train`; `accelerate launch` starts this file in every process.

`python configs/train.py --help` lists the options.
"""

from idp_tutorial.cli.train import idp_train

if __name__ == "__main__":
    idp_train()

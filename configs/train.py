"""Run `idp train`; `accelerate launch` starts this file in every process.

`python configs/train.py --help` lists the options.
"""

import sys

from idp_tutorial.cli.main import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])

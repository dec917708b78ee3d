"What `accelerate launch` starts on every process: the command `idp_train` (see notebook 20, and `python configs/train.py --help`)."
from idp_tutorial.train import idp_train

if __name__=='__main__': idp_train()

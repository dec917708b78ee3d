"What `accelerate launch` starts on every process: the command `idp_train` (`python configs/train.py --help`)."
from idp_tutorial.commands.train import idp_train

if __name__=='__main__': idp_train()

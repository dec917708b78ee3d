from .prompt_files import from_pretrained as from_pretrained
from .prompt_files import save_pretrained as save_pretrained

"""Instance-dependent soft prompts for frozen language models: IDPG, LPT and ID-SPAM, step by step.

What a first experiment needs can be imported from here; each package has more. `__init__.pyi` lists
the names and their modules. They are imported on first use, so that `import idp_tutorial` is fast.
"""

import importlib
import logging
import sys
import warnings

import lazy_loader

__version__ = "0.3.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

logging.getLogger(__name__).addHandler(logging.NullHandler())

if "IPython" in sys.modules:
    with warnings.catch_warnings():
        # in a notebook, the first import of tqdm.auto warns if ipywidgets is missing
        warnings.filterwarnings("ignore", message="IProgress not found")
        importlib.import_module("tqdm.auto")

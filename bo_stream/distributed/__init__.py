"""Beyond one process: statistics from many files, replicas, and training on many processes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

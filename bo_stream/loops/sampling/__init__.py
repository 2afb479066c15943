"""Active sampling with a model, by ``ask`` and ``tell``, and replays of it on known maps."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

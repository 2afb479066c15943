"""Adaptive surveys of prevalence, by ``ask`` and ``tell``, stored in a folder."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Diagnostics: whether a model can be trusted, how stable it is, and how well it predicts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

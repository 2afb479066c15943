"""Bayesian optimization with a streaming model, by ``ask`` and ``tell``."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

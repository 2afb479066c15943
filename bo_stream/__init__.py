"""Streaming Gaussian processes for BoTorch: data add, bases pull back, hypotheses condition."""

from importlib.metadata import version

from bo_stream.models.wiski import WISKI

__version__ = version("bo-stream")

__all__ = ["WISKI", "__version__"]

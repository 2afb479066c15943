"""Streaming Gaussian processes for BoTorch: data add, bases pull back, hypotheses condition."""

import importlib
from importlib.metadata import version
from types import ModuleType
from typing import Any

import lazy_loader

__version__ = version("bo-stream")

# ``bo-stream --help`` would take seconds if it imported torch and BoTorch
_imported, _, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = [*_names, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name, and what BoTorch's ``draw_matheron_paths`` needs to know of models."""
    value = _imported(name)
    if not isinstance(value, ModuleType):
        importlib.import_module("bo_stream.acquisition")
    return value


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return list(__all__)

"""Methods that keep tensors, called under ``torch.inference_mode``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def keeps_tensors(method: Callable[P, T]) -> Callable[P, T]:
    """Run a method outside inference mode, with copies of arguments that were made inside it.

    Autograd refuses tensors that were made under ``torch.inference_mode``. A method that keeps
    tensors, in memory or in a cache, would spoil every later gradient.

    Args:
        method: Keeps tensors that it is given, or that it computes.
    """

    @wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        within, differentiated = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        if not within and not any(map(_is_inference, (*args, *kwargs.values()))):
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.set_grad_enabled(differentiated):
            arguments = [_normal(value) for value in args]
            options = {name: _normal(value) for name, value in kwargs.items()}
            return method(*arguments, **options)  # type: ignore[arg-type]

    return run


def _is_inference(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def _normal(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value

"""Priors of hyperparameters on another device, with the tensors that their modules do not show."""

from __future__ import annotations

from collections.abc import Callable

from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module


def move_priors(module: Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply what moves a module's parameters to its priors' plain tensors, in place.

    A GPyTorch prior is a module and a distribution of torch. ``Module.to`` moves its buffers, but
    not the tensors of the distribution itself (``UniformPrior``) or of the one that it transforms
    (``LogNormalPrior``, ``HalfNormalPrior``), by which it computes.

    Args:
        module: Whose priors are moved.
        fn: As in ``Module._apply``.
    """
    for prior in module.modules():
        if isinstance(prior, Prior):
            _move(prior, fn)


def _move(distribution: Distribution, fn: Callable[[Tensor], Tensor]) -> None:
    parts = vars(distribution)
    for name, part in parts.items():
        if isinstance(part, Tensor):
            parts[name] = fn(part)
        elif isinstance(part, Distribution):
            _move(part, fn)

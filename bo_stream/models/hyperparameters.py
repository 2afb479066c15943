"""A model's kernel, mean and likelihood in float64, apart from the model: what may be tried."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Self

import torch
from gpytorch import Module
from gpytorch.constraints import Interval, Positive
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean
from torch import Tensor
from torch.nn import Parameter


class Hyperparameters(Module):
    """Copies that can be moved without moving the model."""

    covar_module: Kernel
    mean_module: Mean
    likelihood: Likelihood

    def __init__(self, kernel: Kernel, mean: Mean, likelihood: Likelihood) -> None:
        """Copy three modules; what requires gradients there does so here."""
        super().__init__()
        self.covar_module = deepcopy(kernel).double().eval()
        self.mean_module = deepcopy(mean).double().eval()
        self.likelihood = deepcopy(likelihood).double().eval()

    @classmethod
    def shared(cls, kernel: Kernel, mean: Mean, likelihood: Likelihood) -> Self:
        """The modules themselves, in their dtype, to be read."""
        view = cls.__new__(cls)
        Module.__init__(view)
        view.covar_module, view.mean_module, view.likelihood = kernel, mean, likelihood
        return view

    def rounded(self, dtype: torch.dtype) -> Self:
        """These, at values that a dtype can hold."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(parameter.to(dtype))
        return self

    def learned(self, fixed: Iterable[str]) -> list[Parameter]:
        """The parameters but some, by name."""
        names = set(fixed)
        return [p.requires_grad_() for name, p in self.named_parameters() if name not in names]

    @property
    def are_valid(self) -> bool:
        """Whether all are finite, and positive where a constraint says so."""
        named = self.named_parameters_and_constraints()
        return all(_is_valid(p.detach(), constraint) for _, p, constraint in named)

    def constant(self, batch: torch.Size) -> Tensor:
        """The prior mean, ``batch_shape x m``."""
        if not isinstance(self.mean_module, ConstantMean):
            return torch.zeros(batch, dtype=torch.float64, device=self._device)
        value: Tensor = self.mean_module.constant
        return (value.unsqueeze(-1) if batch[-1] == 1 else value).expand(batch)

    @property
    def _device(self) -> torch.device:
        return next(self.covar_module.parameters()).device

    def log_prior(self) -> Tensor:
        """Sum of the log priors of all parameters that have one."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for _, module, prior, closure, _ in self.named_priors():
            total = total + prior.log_prob(closure(module)).sum()
        return total


def _is_valid(parameter: Tensor, constraint: Interval | None) -> bool:
    value = parameter if constraint is None else constraint.transform(parameter)
    positive = not isinstance(constraint, Positive) or bool((value > 0.0).all())
    return positive and bool(value.isfinite().all())

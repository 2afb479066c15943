"""A model's kernel, mean and likelihood in float64, apart from the model: what may be tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from gpytorch import Module
from gpytorch.constraints import Interval, Positive
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.priors import Prior
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module as TorchModule
from torch.nn import Parameter


def move_priors(module: TorchModule, fn: Callable[[Tensor], Tensor]) -> None:
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


def check_outputs_exist(outputs: list[int], of: int, name: str = "idcs") -> None:
    """Check indices of outputs.

    Raises:
        UnsupportedError: An index is out of range or repeated, or there are none.
    """
    if not outputs or len(set(outputs)) != len(outputs) or not all(0 <= i < of for i in outputs):
        raise UnsupportedError(
            f"Expected {name} to hold distinct outputs in 0 to {of - 1}, got {outputs}."
        )


def chosen_outputs(output_indices: list[int] | None, of: int) -> list[int]:
    """Count the outputs that a posterior is asked for from the first; none named: all.

    Raises:
        UnsupportedError: An index is out of range or repeated.
    """
    chosen = [i + of if -of <= i < 0 else i for i in output_indices or range(of)]
    check_outputs_exist(chosen, of, "output_indices")
    return chosen


def as_index(outputs: list[int], of: int) -> slice | list[int]:
    """Index some of ``of`` outputs: all of them by a slice, for a list is uploaded to a device."""
    return slice(None) if outputs == list(range(of)) else outputs


def subset_module(
    module: torch.nn.Module, batch_shape: torch.Size, of: int, outputs: list[int]
) -> torch.nn.Module:
    """Copy a gpytorch module of batch shape ``batch_shape x of`` for some outputs.

    A module that all outputs share is copied as it is.
    """
    copied = deepcopy(module)
    if of == 1:
        return copied
    old = torch.Size((*batch_shape, of))
    new = torch.Size((*batch_shape, *([len(outputs)] if len(outputs) > 1 else [])))
    for part in copied.modules():
        if isinstance(part, Kernel) and part.batch_shape != old:
            continue  # shared by all outputs
        if isinstance(part, InputTransform) or not isinstance(part, Module | Prior | Interval):
            continue  # a transform or a layer of a network: its values are not of outputs
        _subset_tensors(part, old, outputs)
        for name in ("batch_shape", "_batch_shape"):
            if part.__dict__.get(name) == old:
                part.__dict__[name] = new
    return copied


def subset_moments(
    moments: dict[str, Any], batch_shape: torch.Size, of: int, outputs: list[int]
) -> dict[str, Any]:
    """Copy Adam's state for the parameters that :func:`subset_module` leaves."""
    copied = deepcopy(moments)
    old = torch.Size((*batch_shape, of))
    for state in copied["state"].values() if of > 1 else ():
        for name, value in state.items():
            if value.shape[: len(old)] == old:
                state[name] = _pick(value, len(old) - 1, outputs)
    return copied


def _subset_tensors(part: torch.nn.Module, old: torch.Size, outputs: list[int]) -> None:
    for parameter in part._parameters.values():
        if parameter is not None and parameter.shape[: len(old)] == old:
            parameter.data = _pick(parameter.data, len(old) - 1, outputs)
    for store in (part._buffers, part.__dict__):
        for name, value in store.items():
            if name == "active_dims":
                continue  # as many as inputs, not as outputs
            if isinstance(value, Tensor) and value.shape[: len(old)] == old:
                store[name] = _pick(value, len(old) - 1, outputs)


def _pick(value: Tensor, dimension: int, outputs: list[int]) -> Tensor:
    chosen = value.index_select(dimension, torch.tensor(outputs, device=value.device))
    return chosen.squeeze(dimension) if len(outputs) == 1 else chosen


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
        """Share the modules themselves, in their dtype, to be read."""
        view = cls.__new__(cls)
        Module.__init__(view)
        view.covar_module, view.mean_module, view.likelihood = kernel, mean, likelihood
        return view

    def rounded(self, dtype: torch.dtype) -> Self:
        """Round the values to those that a dtype can hold."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(parameter.to(dtype))
        return self

    @torch.no_grad()
    def copy_to(self, model: TorchModule) -> None:
        """Set a model's parameters of the same names to these values."""
        for name, value in self.named_parameters():
            model.get_parameter(name).copy_(value)

    def learned(self, fixed: Iterable[str]) -> list[Parameter]:
        """Return the parameters but some, by name."""
        names = set(fixed)
        return [p.requires_grad_() for name, p in self.named_parameters() if name not in names]

    @property
    def moving(self) -> list[Parameter]:
        """The parameters that require gradients, as those of the model did."""
        return [p for p in self.parameters() if p.requires_grad]

    @property
    def are_valid(self) -> bool:
        """Whether all are finite, and positive where a constraint says so."""
        named = self.named_parameters_and_constraints()
        return all(_is_valid(p.detach(), constraint) for _, p, constraint in named)

    def constant(self, batch: torch.Size) -> Tensor:
        """Return the prior mean, ``batch_shape x m``."""
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

"""What the hyperparameters of a model say before any data: of its process, and of the noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from gpytorch import Module
from gpytorch.constraints import Interval, Positive
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.priors import Prior as HyperPrior
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module as TorchModule
from torch.nn import Parameter

from bo_stream.marginal_likelihood import NoiseGroup, combine
from bo_stream.models.memory import Measured, WhitenedMemory
from bo_stream.models.outcomes.base import Outcomes
from bo_stream.models.outcomes.transform import OutcomeChain
from bo_stream.tensors import State, is_in, state_of
from bo_stream.weights import InformationForm

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP


@dataclass(frozen=True)
class Prior:
    """The hyperparameters as they are now, and the units of the outcomes: a view, no copy.

    All that is computed from it is differentiable in the hyperparameters.

    Attributes:
        kernel: Of batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
        mean_module: Of the same batch shape; a constant, or zero.
        likelihood: Of the outcomes.
        chain: The outcome transform.
        outcomes: Units of what the memory holds.
        batch_shape: Of the data.
        num_outputs: m.
        model: Whose hyperparameters these are, and where numerical events are put on record.
    """

    kernel: Kernel
    mean_module: Mean
    likelihood: Likelihood
    chain: OutcomeChain
    outcomes: Outcomes
    batch_shape: torch.Size
    num_outputs: int
    model: StreamingGP

    def state(self) -> State:
        """Copy all that the prior depends on, to see later whether it has changed."""
        return state_of(self.model)

    def is_in(self, state: State) -> bool:
        """Say whether nothing has changed since."""
        return is_in(self.model, state)

    def copied(self) -> Hyperparameters:
        """Copy the hyperparameters in float64, to move them apart from the model."""
        return Hyperparameters(self.kernel, self.mean_module, self.likelihood)

    def take_over(self, hyper: Hyperparameters) -> None:
        """Set the model's hyperparameters to others, which are rounded to its dtype."""
        hyper.rounded(next(self.kernel.parameters()).dtype).copy_to(self.model)

    @property
    def shape(self) -> torch.Size:
        """``batch_shape x m``."""
        return torch.Size((*self.batch_shape, self.num_outputs))

    def per_output(self, value: Tensor) -> Tensor:
        """Bring ``batch_shape (x m if m > 1)`` to ``batch_shape x m``, float64."""
        value = value.to(torch.float64)
        value = value.unsqueeze(-1) if self.num_outputs == 1 else value
        return value.expand(*self.batch_shape, self.num_outputs)

    @property
    def mean(self) -> Tensor:
        """Prior mean of the process, ``batch_shape x m``."""
        if isinstance(self.mean_module, ConstantMean):
            return self.per_output(self.mean_module.constant)
        return torch.zeros_like(self.outcomes.shift)

    @property
    def scale(self) -> Tensor:
        """Standard deviation by which the outcome transform divides, ``batch_shape x m``."""
        return self.chain.offset_and_scale(self.outcomes.shift)[1]

    @property
    def is_gaussian(self) -> bool:
        """Whether the likelihood is Gaussian with a noise variance to learn."""
        return isinstance(self.likelihood, GaussianLikelihood)

    @property
    def inferred_noise(self) -> Tensor | None:
        """The likelihood's noise variance where it learns one, ``batch_shape x m``."""
        if self.is_gaussian:
            return self.per_output(self.likelihood.noise.squeeze(-1))
        return None

    @property
    def zero_noise(self) -> Tensor:
        """Noise variance of observations that are said to have none, ``batch_shape x m``."""
        return self.outcomes.floor.zero / self.scale.square()

    @property
    def common_noise(self) -> Tensor | None:
        """Noise variance of all observations without a known one, ``batch_shape x m``.

        The inferred one, or that of zeros; None where every observation has a known one.
        """
        inferred = self.inferred_noise
        if inferred is None and self.outcomes.floor.any_zero:
            return self.zero_noise
        return inferred

    def standardized(self, data: Measured) -> tuple[Tensor, Tensor]:
        """Return outcomes and noise variances as the process has them, ``batch x m x n`` each."""
        return self.outcomes.standardized(self.chain, self.common_noise, data)

    def target_map(self) -> Tensor:
        """See :meth:`Outcomes.target_map`."""
        return self.outcomes.target_map(self.chain, self.mean)

    def noise_groups(
        self, memory: WhitenedMemory, truncated: Tensor | float = 0.0
    ) -> list[NoiseGroup]:
        """Return the statistics of observations with inferred and with known noise, at its level.

        Args:
            memory: Of both.
            truncated: Prior variance that the features leave out, added to an inferred noise.
        """
        groups, level = [], self.common_noise
        if level is not None:
            groups.append(NoiseGroup(memory.learned, level + truncated))
        if memory.known is not None:
            groups.append(NoiseGroup(memory.known, self.scale.square().reciprocal()))
        return groups or [NoiseGroup(memory.learned, torch.ones_like(self.scale))]

    def evidence(self, memory: WhitenedMemory) -> InformationForm:
        """Return what the statistics say of the standardised outcomes less the prior mean."""
        return self.evidence_of(self.noise_groups(memory))

    def evidence_of(self, groups: Sequence[NoiseGroup]) -> InformationForm:
        """Return the same from statistics at their noise levels."""
        return combine(groups, self.target_map())


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
        if isinstance(prior, HyperPrior):
            _move(prior, fn)


def _move(distribution: Distribution, fn: Callable[[Tensor], Tensor]) -> None:
    parts = vars(distribution)
    for name, part in parts.items():
        if isinstance(part, Tensor):
            parts[name] = fn(part)
        elif isinstance(part, Distribution):
            _move(part, fn)

"""The prior of a model, and how an inference leads from it and a memory to a posterior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
from botorch.exceptions.errors import UnsupportedError
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

from bo_stream.bases.inducing import Basis, as_read
from bo_stream.marginal_likelihood import NoiseGroup, combine, dense_log_marginal_likelihood
from bo_stream.models.memory import Measured, Memory, Observations, WhitenedMemory
from bo_stream.models.outcomes.base import NoiseAtInputs, OutcomeChain, Outcomes
from bo_stream.models.outcomes.noise import LEAST_NOISE
from bo_stream.observation_space import (
    CentredRows,
    ObservationSpacePrior,
    ObservationSpaceProcess,
)
from bo_stream.process import PosteriorProcess, WeightSpaceProcess
from bo_stream.tensors import State, is_in, read_expected, state_of
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

    def as_read(self) -> Hyperparameters:
        """Return the hyperparameters in float64, to be read at once and without gradients."""
        return as_read(Hyperparameters.shared(self.kernel, self.mean_module, self.likelihood))

    def copied(self) -> Hyperparameters:
        """Copy the hyperparameters in float64, to move them apart from the model."""
        return Hyperparameters(self.kernel, self.mean_module, self.likelihood)

    @torch.no_grad()
    def take_over(self, hyper: Hyperparameters) -> None:
        """Set the model's hyperparameters to others, which are rounded to its dtype."""
        if not next(self.kernel.parameters()).is_cpu:
            read_expected()
        for name, value in hyper.rounded(next(self.kernel.parameters()).dtype).named_parameters():
            self.model.get_parameter(name).copy_(value)

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

    def log_evidence_of_rows(
        self, rows: Measured, covariance: Tensor, weight: Tensor | None = None
    ) -> Tensor:
        """Return the log marginal likelihood of n rows, ``batch_shape x m``. Cost O(n³).

        Args:
            rows: In the memory's units.
            covariance: Of the process at their inputs, ``... x n x n``.
            weight: Their noise variances are divided by it, ``... x n``.
        """
        outcomes, noise = self.standardized(rows)
        return dense_log_marginal_likelihood(
            covariance.expand(*outcomes.shape, outcomes.shape[-1]),
            outcomes - self.mean.unsqueeze(-1),
            noise if weight is None else noise / weight,
        )

    def given_rows(
        self, before: ObservationSpacePrior, rows: Observations, weight: Tensor | None = None
    ) -> ObservationSpaceProcess:
        """Condition a process on n rows, exactly; put a jitter on the model's record. Cost O(n³).

        Args:
            before: The process with these hyperparameters, detached.
            rows: In the memory's units.
            weight: As for :meth:`log_evidence_of_rows`.
        """
        outcomes, noise = self.standardized(rows.told)
        noise = noise if weight is None else noise / weight
        told = CentredRows(rows.X, outcomes - before.mean, noise)
        process, jitter = ObservationSpaceProcess.of(before, told)
        if jitter > 0.0:
            self.model.log_event("jitter on the observations' covariance", len(rows), jitter)
        return process

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
        """Return the evidence, as :meth:`evidence`, from statistics at their noise levels."""
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
        for module in self.modules():
            if isinstance(module, HyperPrior):
                _without_checks(module)

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

    @staticmethod
    def fixed_of(likelihood: Likelihood) -> tuple[str, ...]:
        """Return the names, here, of a likelihood's parameters that require no gradients."""
        named = likelihood.named_parameters(prefix="likelihood")
        return tuple(name for name, p in named if not p.requires_grad)

    def learned(self, fixed: Iterable[str]) -> list[Parameter]:
        """Return the parameters but some, by name; none where none requires gradients.

        The likelihood's require gradients from now on. So that their order stays, those of kernel
        and mean that require none are among them.
        """
        names = set(fixed)
        found = {name: p for name, p in self.named_parameters() if name not in names}
        for name, parameter in found.items():
            if name.startswith("likelihood."):
                parameter.requires_grad_()
        return list(found.values()) if any(p.requires_grad for p in found.values()) else []

    @property
    def moving(self) -> list[Parameter]:
        """The parameters that require gradients, as those of the model did."""
        return [p for p in self.parameters() if p.requires_grad]

    @property
    def are_valid(self) -> bool:
        """Whether all are finite, and positive where a constraint says so."""
        named = self.named_parameters_and_constraints()
        flags = [_is_valid(p.detach(), constraint) for _, p, constraint in named]
        return bool(torch.stack(flags).all())

    def constant(self, batch: torch.Size) -> Tensor:
        """Return the prior mean, ``batch_shape x m``."""
        if not isinstance(self.mean_module, ConstantMean):
            return torch.zeros(batch, dtype=torch.float64, device=self._device)
        value: Tensor = self.mean_module.constant
        return (value.unsqueeze(-1) if batch[-1] == 1 else value).expand(batch)

    @property
    def _device(self) -> torch.device:
        return next(self.covar_module.parameters()).device

    def log_prior(self, likelihood_share: Tensor | float = 1.0) -> Tensor:
        """Sum the log priors of all parameters that have one, those of the likelihood in part."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, module, prior, closure, _ in self.named_priors():
            share = likelihood_share if name.startswith("likelihood.") else 1.0
            total = total + share * prior.log_prob(closure(module)).sum()
        return total


def _is_valid(parameter: Tensor, constraint: Interval | None) -> Tensor:
    value = parameter if constraint is None else constraint.transform(parameter)
    valid = value.isfinite()
    return (valid & (value > 0.0) if isinstance(constraint, Positive) else valid).all()


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


def _without_checks(distribution: Distribution) -> None:
    """Let a distribution take values as they are: to check them the host waits for a device."""
    distribution._validate_args = False
    for part in vars(distribution).values():
        if isinstance(part, Distribution):
            _without_checks(part)


# --- how a memory becomes a posterior process, and what is learned from it: the interface --------


P = TypeVar("P", bound=PosteriorProcess)


@dataclass(frozen=True)
class Solved(Generic[P]):
    """A posterior process at one state of all hyperparameters.

    Attributes:
        state: Of the model.
        process: The posterior.
    """

    state: State
    process: P


KeptProcess = Solved[PosteriorProcess]


class SolvedWeights(Solved[WeightSpaceProcess]):
    """The posterior in the weights of features."""

    def can_take(self, data: Observations, basis: Basis) -> bool:
        """Say whether a batch is small, adds, and meets the basis that was solved in."""
        room = self.process.weights.has_room_for(len(data))
        return room and data.sign > 0.0 and self.process.basis is basis

    def after(self, features: Tensor, outcomes: Tensor, noise: Tensor) -> SolvedWeights:
        """Condition on a batch of standardised outcomes. Cost O(n r²)."""
        centred = outcomes - self.process.prior_mean
        weights = self.process.weights.observe(features, centred, noise)
        return SolvedWeights(self.state, replace(self.process, weights=weights))


M = TypeVar("M", bound=Memory)
C = TypeVar("C")
T = TypeVar("T")

Solve = Callable[[Any, Any, Prior, Tensor | None], tuple[PosteriorProcess, Any]]
"""Maps memory, cache, prior and inputs to a process and the cache that has it."""


class Inference(ABC, Generic[M, C]):
    """A way to a posterior from a memory M, with a cache C of what it derived from it.

    It holds options and no data: memories and caches are values that are given and returned, so
    that a call which raises has changed nothing. A cache knows the state of the hyperparameters
    that it is of. Numerical events and what a user is told once are put on record in the model.

    Most methods take the memory of the observations, its cache if there is one, and a prior, which
    views the hyperparameters; inputs X, ``... x d``, are transformed.
    """

    noise_varies: ClassVar[bool] = False
    """Whether the noise variance depends on the inputs, and is learned where it is not known."""

    on_grid: ClassVar[bool] = False
    """Whether the kernel is interpolated on a grid, so that it is a sum of products over inputs."""

    least_noise: ClassVar[float] = LEAST_NOISE
    """Smallest positive known noise variance that is solved for, in parts of the outcomes'."""

    defers_reads: ClassVar[bool] = False
    """Whether ``observe`` and ``process`` change nothing in place before they have called
    :func:`~bo_stream.tensors.read_expected`: on a device the host then waits for a verb once."""

    restarts: ClassVar[bool] = True
    """Whether a refit may begin anywhere: the objective depends on hyperparameters and data alone,
    not on variational parameters or features that were learned for the present values."""

    @abstractmethod
    def observe(
        self, memory: M, cache: C | None, data: Observations, prior: Prior
    ) -> tuple[M, C | None]:
        """Put a checked batch into memory, or take it out if its sign is negative.

        Return the memory afterwards, and as much of the cache as follows at a small cost.
        Hyperparameters that are learned along with the stream are set last, when nothing can fail.

        Raises:
            InputDataError: What is to be taken out is not in memory.
            UnsupportedError: Nothing can be taken out.
            ValueError: The memory would become too large.
        """

    @abstractmethod
    def process(
        self, memory: M, cache: C | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, C]:
        """Return the posterior as a process that can take X, and the cache that has it."""

    def feature_process(
        self, memory: M, cache: C | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, C]:
        """Return :meth:`process` in the weights of features: the only one, for most models."""
        return self.process(memory, cache, prior, X)

    def check_reach(self, process: PosteriorProcess, X: Tensor | None) -> None:
        """Check that a process which is conditioned on hypothetical observations can take X.

        Raises:
            InputDataError: It cannot; most take any.
        """
        return

    def noise(
        self,
        memory: M,
        cache: C | None,
        prior: Prior,
        X: Tensor | None = None,
        process: PosteriorProcess | None = None,
    ) -> tuple[NoiseAtInputs | None, C | None]:
        """Return the noise variance as it depends on the inputs, or None: for most models.

        It will be asked of X, or instead wherever a posterior ``process`` can be asked.
        """
        return None, cache

    @abstractmethod
    def objective(self, memory: M, cache: C | None, prior: Prior) -> tuple[Tensor, C | None]:
        """Return what a fit maximises alongside the priors of hyperparameters, and the cache.

        Differentiable in the hyperparameters, ``batch_shape x m``.
        """

    def log_marginal_likelihood(
        self, memory: M, cache: C | None, prior: Prior
    ) -> tuple[Tensor, C | None]:
        """Return the log evidence of all observations, or a bound: mostly the objective."""
        return self.objective(memory, cache, prior)

    def refitted(self, memory: M, cache: C | None, prior: Prior) -> tuple[M, C | None]:
        """Return the memory, and a cache, as new hyperparameters want them after a refit."""
        return memory, cache

    @abstractmethod
    def merged(self, memory: M, cache: C | None, other: M, prior: Prior) -> tuple[M, C | None]:
        """Return the memory of both, whose targets are in the same units, and a cache of it.

        Raises:
            ValueError: The memory would become too large.
        """

    @abstractmethod
    def cleared(self, memory: M, prior: Prior) -> M:
        """Return a memory of no observations with the same places."""

    def grown(self, memory: M, prior: Prior, outputs: int) -> M:
        """Return the memory with so many outputs: more ones, that no observation named.

        Raises:
            UnsupportedError: The memory cannot have more.
            ValueError: It would become too large.
        """
        raise UnsupportedError(f"Expected {prior.num_outputs} outputs, got {outputs}.")

    def moved(self, memory: M, cache: C | None, device: torch.device) -> tuple[M, C | None]:
        """Return the memory on another device, and a cache of it, if that is not solved again."""
        return memory.to(device), None


class InferenceOption(Generic[T]):
    """An attribute of a model that is the option of its inference of the same name.

    Args:
        fixed: Whether it stays as the constructor set it.
    """

    def __init__(self, fixed: bool = False) -> None:
        self._fixed = fixed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, model: StreamingGP | None, owner: type) -> T:
        value: T = self if model is None else getattr(model._inference, self._name)  # type: ignore[assignment]
        return value

    def __set__(self, model: StreamingGP, value: T) -> None:
        if self._fixed:
            raise AttributeError(f"{self._name} stays as it was set when the model was built")
        model._inference = replace(model._inference, **{self._name: value})  # type: ignore[type-var]

"""Exact inference from observations that are stored as rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from botorch.exceptions.errors import InputDataError
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.inducing import (
    InducingBasis,
    as_read,
    differentiable_matrix,
    frozen,
    kernel_matrix,
)
from bo_stream.bases.kernels import SquaredExponential, stacked_kernel, stacked_variance
from bo_stream.bases.radial import RadialKernel, RadialSums
from bo_stream.linalg import scaled_prior
from bo_stream.models.inducing.inference import basis_of_independent
from bo_stream.models.inference import Inference, Prior, Solved
from bo_stream.models.memory import Memory, Observations, never_in
from bo_stream.observation_space import ObservationSpacePrior, ObservationSpaceProcess
from bo_stream.process import PosteriorProcess
from bo_stream.tensors import cached_for_autograd, none_set
from bo_stream.weights import target_columns

MOST_AT_ONCE = 64
"""Observations that a solved posterior takes in O(n²) each; of more it is solved again."""

LEAST_WEIGHT = 1e-100
"""Least weight of an observation that is forgotten in part: no noise variance is infinite."""


@dataclass(frozen=True)
class ExactMemory(Memory):
    """All observations as rows.

    Attributes:
        rows: The observations, each to be added.
        weight: How many times each counts, ``batch_shape x n``; 1 unless forgotten in part.
    """

    rows: Observations
    weight: Tensor

    @classmethod
    def empty(cls, X: Tensor, shape: torch.Size, columns: int = 1) -> ExactMemory:
        """Make a memory of no inputs like X, ``... x d``, for outputs ``batch_shape x m``."""
        rows = Observations.none(X, shape, columns)
        return cls(rows, rows.targets[..., 0, :])

    def __len__(self) -> int:
        return self.weight.shape[-1]

    def after(self, data: Observations) -> ExactMemory:
        """Append a batch, or take it out.

        Raises:
            InputDataError: One to be taken out is not among the rows, or counts in part.
        """
        if data.sign > 0.0:
            return self.followed_by(ExactMemory(data, torch.ones_like(data.targets[..., 0, :])))
        taken = self.positions(data)
        if bool((self.weight.gather(-1, taken) != 1.0).any()):  # another like it may count in full
            try:
                taken = self.positions(data, is_whole=True)
            except InputDataError as error:
                raise never_in() from error
        left = self.rows.all_but(taken)
        return ExactMemory(self.rows.at(left), self.weight.gather(-1, left))

    def positions(self, data: Observations, is_whole: bool = False) -> Tensor:
        """Find each row of a batch among the rows; see :meth:`Observations.positions`.

        Args:
            data: The batch.
            is_whole: Whether only among those that count once.

        Raises:
            InputDataError: One is not among them.
        """
        X = self.rows.X.flatten(0, -2)
        width = X.amax(0) - X.amin(0)
        width = torch.where(width > 0.0, width, 1.0)
        return self.rows.positions(data, width, self.weight != 1.0 if is_whole else None)

    def followed_by(self, others: ExactMemory) -> ExactMemory:
        """Append the rows of another memory."""
        rows = Observations.joined((self.rows, others.rows))
        return ExactMemory(rows, torch.cat((self.weight, others.weight), -1))

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        columns = target_columns(self.rows.told.targets)
        return columns.mT @ (columns * self.weight[..., None, :, None])

    def known_sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """See :meth:`Memory.known_sums`."""
        if not self.rows.any_known:
            return None
        noise, known = self.rows.known_group()
        weight = known * self.weight.unsqueeze(-2)
        return (noise * weight).sum(-1), (weight / noise).sum(-1), weight.sum(-1)

    def scale(self, factor: float) -> ExactMemory:
        """Let every observation count ``factor`` times."""
        return replace(self, weight=(self.weight * factor).clamp_min(LEAST_WEIGHT))


@dataclass(frozen=True)
class KernelPrior(ObservationSpacePrior):
    """A Gaussian process prior with any of gpytorch's kernels at fixed hyperparameters.

    Points are their own coordinates and images. The squared-exponential kernel is evaluated by a
    product of its own, in half the time of gpytorch's.

    Attributes:
        kernel: Frozen, in float64.
        mean: Constant prior mean, ``... x m x 1``.
    """

    has_residual: ClassVar[bool] = True

    kernel: Kernel
    mean: Tensor

    def coordinates(self, X: Tensor) -> Tensor:
        """Give all outputs the same inputs."""
        return X.unsqueeze(-3)

    def images(self, coordinates: Tensor) -> Tensor:
        """Return the points themselves."""
        return coordinates

    def covariance(self, coordinates: Tensor, images: Tensor) -> Tensor:
        """Evaluate the kernel: once for all batches of points, if nothing else has a batch."""
        *batch, _, n, _ = coordinates.shape
        together = bool(batch) and images.ndim <= 3 and self.mean.ndim == 2
        points = coordinates.flatten(0, -2).unsqueeze(-3) if together else coordinates
        known, outputs = self._squared_exponential, self.mean.shape[-2]
        moves = torch.is_grad_enabled() and (points.requires_grad or images.requires_grad)
        if known is not None:
            matrix = known.matrix(points, images)
        elif self._radial is not None and not moves:
            matrix = self._radial.values(points, images)
        else:
            matrix = stacked_kernel(self.kernel, points, images, outputs)
        if matrix.shape[-3] != outputs:
            matrix = matrix.expand(*matrix.shape[:-3], outputs, *matrix.shape[-2:])
        return matrix.unflatten(-2, (*batch, n)).movedim(0, -3) if together else matrix

    @cached_property
    def _squared_exponential(self) -> SquaredExponential | None:
        return SquaredExponential.of(self.kernel, self.mean.shape[-2])

    @cached_for_autograd
    def _radial(self) -> RadialKernel | None:
        return RadialKernel.of(self.kernel, self.mean.shape[-2])

    def variance(self, coordinates: Tensor, images: Tensor) -> Tensor:
        """Evaluate the kernel's diagonal."""
        return stacked_variance(self.kernel, coordinates, self.mean.shape[-2])

    def radial(self, images: Tensor) -> RadialSums | None:
        """Return a squared-exponential or Matérn kernel of all inputs."""
        return RadialSums.of(self._radial, images)

    def basis_for(self, X: Tensor, batch: torch.Size) -> InducingBasis:
        """Make every distinct input an inducing point."""
        return basis_of_independent(self.kernel, X.flatten(0, -2).unique(dim=0), batch[-1])


ExactCache = Solved[ObservationSpaceProcess]


@dataclass(frozen=True)
class ExactInference(Inference[ExactMemory, ExactCache]):
    """The exact posterior, in an n x n system (Rasmussen and Williams, 2006, section 2.2).

    An observation that counts w times has its noise variance divided by w.
    """

    def observe(
        self, memory: ExactMemory, cache: ExactCache | None, data: Observations, prior: Prior
    ) -> tuple[ExactMemory, ExactCache | None]:
        """Append rows, and condition the solved posterior on them, or take rows out."""
        after = memory.after(data)
        small = data.sign > 0.0 and len(data) <= MOST_AT_ONCE
        if cache is None or not small or not prior.is_in(cache.state):
            return after, None
        process = cache.process.observe(data.X, *prior.standardized(data))
        return after, Solved(cache.state, process)

    def process(
        self, memory: ExactMemory, cache: ExactCache | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, ExactCache]:
        """Solve in O(n³), unless cached."""
        if cache is None or not prior.is_in(cache.state):
            before = KernelPrior(frozen(prior.kernel), prior.mean.unsqueeze(-1).clone())
            process = prior.given_rows(before, memory.rows, memory.weight.unsqueeze(-2))
            cache = Solved(prior.state(), process)
        return cache.process, cache

    def feature_process(
        self, memory: ExactMemory, cache: ExactCache | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, ExactCache]:
        """Solve in the weights of features at all distinct inputs. Cost O(n³), once."""
        _, cache = self.process(memory, cache, prior, X)
        return cache.process.in_weights, cache

    def objective(
        self, memory: ExactMemory, cache: ExactCache | None, prior: Prior
    ) -> tuple[Tensor, ExactCache | None]:
        """Return the log marginal likelihood, of each observation to the power of its weight.

        ``N(y; f, s)ʷ`` is ``N(y; f, s / w)`` times ``(2 π s / w)^½ (2 π s)^(−w / 2)``. Cost O(n³).
        """
        rows, weight = memory.rows, memory.weight.unsqueeze(-2)
        covariance = differentiable_matrix(prior.kernel, rows.X, rows.X, prior.num_outputs)
        value = prior.log_evidence_of_rows(rows, covariance, weight)
        if not none_set(weight != 1.0):
            logs = (2.0 * math.pi * prior.standardized(rows)[1]).log()
            value = value + 0.5 * ((1.0 - weight) * logs - weight.log()).sum(-1)
        return value, cache

    @torch.no_grad()
    def solved_gram(self, memory: ExactMemory, prior: Prior) -> Tensor:
        """Return what the covariance adds to the identity in the matrix that is solved.

        ``S K S``, S the roots of the observations' precisions, ``batch_shape x m x n x n``.
        """
        X, (_, noise) = memory.rows.X, prior.standardized(memory.rows.told)
        K = kernel_matrix(as_read(prior.kernel), X, X, prior.num_outputs)
        return scaled_prior(K, memory.weight.unsqueeze(-2) / noise)[0]

    def merged(
        self, memory: ExactMemory, cache: ExactCache | None, other: ExactMemory, prior: Prior
    ) -> tuple[ExactMemory, None]:
        """Append the other's rows."""
        return memory.followed_by(other), None

    def cleared(self, memory: ExactMemory, prior: Prior) -> ExactMemory:
        """Drop the rows."""
        return ExactMemory.empty(memory.rows.X, prior.shape, prior.outcomes.columns)

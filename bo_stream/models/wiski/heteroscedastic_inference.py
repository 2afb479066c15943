"""Inference of a process on a grid and of its log noise variance on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

from bo_stream.bases.grid.mesh import Mesh
from bo_stream.models.inference import Inference
from bo_stream.models.memory import Observations
from bo_stream.models.outcomes.noise import NOISE_FLOOR
from bo_stream.models.prior import Prior
from bo_stream.models.wiski.cache import GridCache
from bo_stream.models.wiski.inference import GridInference, grid_of
from bo_stream.models.wiski.log_noise import (
    Entry,
    LearnedNoise,
    expected_exponential,
    learn_first_noise,
    log_squares,
    observed,
    target_marginals,
)
from bo_stream.models.wiski.rows import Memory
from bo_stream.process.process import PosteriorProcess, SelectedProcess

FIRST_ROWS = 20
"""Fewer first observations are not enough to fit a noise model to."""


@dataclass(frozen=True)
class Memories:
    """What is left of the observations, and of their log squared residuals.

    Attributes:
        mean: Of observations, with the noise variances that they entered with.
        noise: Of measured log noise variances.
    """

    mean: Memory
    noise: Memory

    @property
    def grid(self) -> Mesh:
        """The grid of the mean."""
        return self.mean.grid

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        return self.mean.totals

    @property
    def counts(self) -> Tensor:
        """Number of observations, ``... x m``."""
        return self.mean.counts

    def mean_known_noise(self) -> Tensor | None:
        """Return the mean of the noise variances that entered, ``... x m``, or None."""
        return self.mean.mean_known_noise()

    def map_targets(self, matrix: Tensor) -> Memories:
        """Return a copy with the target columns ``[Y, 1] @ matrix``; the noise's stay."""
        return Memories(self.mean.map_targets(matrix), self.noise.scale(1.0))

    def scale(self, factor: float) -> Memories:
        """Let every observation and residual count ``factor`` times."""
        return Memories(self.mean.scale(factor), self.noise.scale(factor))

    def select(self, outputs: list[int]) -> Memories:
        """Return a copy for some of the outputs."""
        return Memories(self.mean.select(outputs), self.noise.select(outputs))

    def to(self, device: torch.device) -> Memories:
        """Return the memory on another device."""
        return Memories(self.mean.to(device), self.noise.to(device))


@dataclass(frozen=True)
class Caches:
    """What was derived from both memories.

    Attributes:
        mean: From that of the observations.
        noise: From that of the log squared residuals.
    """

    mean: GridCache | None = None
    noise: GridCache | None = None


@dataclass(frozen=True)
class LogNormalNoise:
    """A noise variance ``exp(g(x))`` with a Gaussian process g, in transformed units.

    Attributes:
        process: Of g, the log noise variance in the memory's units.
        scale: Standard deviation by which the outcome transform divides, ``batch x m x 1``.
    """

    process: PosteriorProcess
    scale: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the expected variance at inputs, ``... x m x q``; differentiable."""
        points = self.process.at(inputs)
        noise = expected_exponential(self.process.mean_at(points), self.process.variance_at(points))
        squared = self.scale.square()
        return noise.maximum(NOISE_FLOOR * squared) / squared

    def select(self, outputs: list[int]) -> LogNormalNoise:
        """Return that of some of the outputs."""
        chosen = SelectedProcess(self.process, tuple(outputs))
        return LogNormalNoise(chosen, self.scale[..., outputs, :])


@dataclass(frozen=True)
class HeteroscedasticInference(Inference[Memories, Caches]):
    """The posterior of the mean given the noise variances that entered, and that of the log noise.

    Attributes:
        mean: On the grid of the mean.
        log_noise: On that of the log noise variance, whose hyperparameters are those of the model's
            ``noise_model``.
        rounds: How often mean and noise are fitted in turn to the first observations.
        record: Is told what an update puts in, if anyone asks.
    """

    noise_varies: ClassVar[bool] = True
    on_grid: ClassVar[bool] = True
    least_noise: ClassVar[float] = NOISE_FLOOR

    mean: GridInference
    log_noise: GridInference
    rounds: int
    record: Callable[[Entry], None] | None = None

    def part(
        self, memory: Memories, cache: Caches | None
    ) -> tuple[GridInference, Memory, GridCache | None]:
        """Return what is of the mean."""
        return self.mean, memory.mean, None if cache is None else cache.mean

    def with_part(
        self,
        of: tuple[GridInference, Memory, GridCache | None],
        memory: Memories,
        cache: Caches | None,
    ) -> tuple[HeteroscedasticInference, Memories, Caches]:
        """Return inference, memory and cache with another :meth:`part`."""
        inference, own, of_mean = of
        both = replace(cache or Caches(), mean=of_mean)
        return replace(self, mean=inference), replace(memory, mean=own), both

    # --- memory -------------------------------------------------------------------------------

    def observe(
        self, memory: Memories, cache: Caches | None, data: Observations, prior: Prior
    ) -> tuple[Memories, Caches]:
        """Predict observations, then put them and their log squared residuals in.

        Those that are taken out have known noise, of which the noise was not learned.
        """
        cache = cache or Caches()
        if data.sign < 0.0:
            if not bool(data.known.all()):
                raise UnsupportedError(
                    "retract needs Yvar: the noise variances that were learned when the "
                    "observations entered are not kept. Put them in by entry = model.observe(X, "
                    "Y), and take them out by model.withdraw(entry)."
                )
            mean, of_mean = self.mean.observe(memory.mean, cache.mean, data, prior)
            return replace(memory, mean=mean), replace(cache, mean=of_mean)
        entry, cache = self._entry(memory, cache, data, prior)
        if self.record is not None:
            self.record(entry)
        return self.entered(memory, cache, entry, prior)

    def entered(
        self, memory: Memories, cache: Caches | None, entry: Entry, prior: Prior
    ) -> tuple[Memories, Caches]:
        """Put an entry into both memories, or take it out if it is negated."""
        cache = cache or Caches()
        mean, of_mean = self.mean.observe(memory.mean, cache.mean, entry.observations, prior)
        noise, of_noise = memory.noise, cache.noise
        if len(entry.log_squares) > 0:
            noise, of_noise = self.log_noise.observe(
                noise, of_noise, entry.log_squares, noise_prior(prior)
            )
        return Memories(mean, noise), Caches(of_mean, of_noise)

    def _entry(
        self, memory: Memories, cache: Caches, data: Observations, prior: Prior
    ) -> tuple[Entry, Caches]:
        """Find the noise that observations enter with, and what their residuals say of it."""
        flat = data.known.flatten(0, -2)
        if bool((flat != flat[:1]).any()):
            raise UnsupportedError(
                "Expected NaN in the same rows of Yvar in every element of a batch, got others. "
                "Use one model per element."
            )
        rows = (~flat[0]).nonzero().squeeze(-1)
        for part in (memory.mean, memory.noise):  # raises before anything is changed
            part.covering(data.X)
        learned = (data.noise[..., rows],) * 3
        if len(rows) > 0:
            learned, cache = self._learned(memory, cache, data, rows, prior)
        least = NOISE_FLOOR * prior.scale.square().unsqueeze(-1)
        noise = data.noise.index_copy(-1, rows, learned[0].maximum(least))
        measured = observed(data.X[..., rows, :], *learned[1:])
        return Entry(observed(data.X, data.targets, noise), measured), cache

    def _learned(
        self, memory: Memories, cache: Caches, data: Observations, rows: Tensor, prior: Prior
    ) -> tuple[LearnedNoise, Caches]:
        """Learn the noise of some of the rows from a first batch, or predict it."""
        targets, X = data.targets + prior.outcomes.shift.unsqueeze(-1), data.X[..., rows, :]
        is_empty = not bool((memory.counts > 0.0).any())
        if is_empty and self.rounds > 0 and len(rows) >= FIRST_ROWS:
            inputs = data.X.to(next(prior.kernel.parameters()).dtype)
            noise = data.noise.index_fill(-1, rows, torch.nan)
            mean = (prior, self.mean, memory.mean.grid)
            parts = (mean, (noise_prior(prior), self.log_noise, memory.noise.grid))
            return learn_first_noise(parts, inputs, targets, noise, rows, self.rounds), cache
        process, of_noise = self.log_noise.process(memory.noise, cache.noise, noise_prior(prior), X)
        noise = expected_exponential(*process.marginals(X))
        process, of_mean = self.mean.process(memory.mean, cache.mean, prior, X)
        mean_of, variance = target_marginals(process, prior, X)
        measured = log_squares(targets[..., rows] - mean_of, variance, noise)
        return (noise, *measured), Caches(of_mean, of_noise)

    def merged(
        self, memory: Memories, cache: Caches | None, other: Memories, prior: Prior
    ) -> tuple[Memories, None]:
        """Join both memories."""
        mean, _ = self.mean.merged(memory.mean, None, other.mean, prior)
        noise, _ = self.log_noise.merged(memory.noise, None, other.noise, noise_prior(prior))
        return Memories(mean, noise), None

    def cleared(self, memory: Memories, prior: Prior) -> Memories:
        """Drop all observations and residuals."""
        return Memories(
            self.mean.cleared(memory.mean, prior),
            self.log_noise.cleared(memory.noise, noise_prior(prior)),
        )

    # --- the posterior, and learning ----------------------------------------------------------

    def process(
        self,
        memory: Memories,
        cache: Caches | None,
        prior: Prior,
        X: Tensor | None = None,
        in_features: bool = False,
    ) -> tuple[PosteriorProcess, Caches]:
        """Solve for the mean, unless that is kept."""
        cache = cache or Caches()
        process, of_mean = self.mean.process(memory.mean, cache.mean, prior, X, in_features)
        return process, cache if of_mean is cache.mean else replace(cache, mean=of_mean)

    def feature_process(
        self, memory: Memories, cache: Caches | None, prior: Prior, X: Tensor | None = None
    ) -> tuple[PosteriorProcess, Caches]:
        """Solve for the mean in the weights of features."""
        return self.process(memory, cache, prior, X, in_features=True)

    def check_reach(self, process: PosteriorProcess, X: Tensor | None) -> None:
        """Check that inputs are inside the grid of a conditioned process."""
        self.mean.check_reach(process, X)

    def noise(
        self,
        memory: Memories,
        cache: Caches | None,
        prior: Prior,
        X: Tensor | None = None,
        process: PosteriorProcess | None = None,
    ) -> tuple[LogNormalNoise, Caches]:
        """Solve for the log noise variance, unless that is kept."""
        cache = cache or Caches()
        if process is not None:
            X = (grid_of(process) or memory.grid).bounds.to(memory.counts.device)
        log_noise, of_noise = self.log_noise.process(
            memory.noise, cache.noise, noise_prior(prior), X
        )
        cache = cache if of_noise is cache.noise else replace(cache, noise=of_noise)
        return LogNormalNoise(log_noise, prior.scale.unsqueeze(-1).clone()), cache

    def objective(
        self, memory: Memories, cache: Caches | None, prior: Prior
    ) -> tuple[Tensor, Caches]:
        """Return the sum of both log marginal likelihoods."""
        cache = cache or Caches()
        mean, of_mean = self.mean.objective(memory.mean, cache.mean, prior)
        noise, of_noise = self.log_noise.objective(memory.noise, cache.noise, noise_prior(prior))
        return mean + noise, Caches(of_mean, of_noise)

    def log_marginal_likelihood(
        self, memory: Memories, cache: Caches | None, prior: Prior
    ) -> tuple[Tensor, Caches]:
        """Return that of the mean, given the noise variances that entered."""
        cache = cache or Caches()
        value, of_mean = self.mean.log_marginal_likelihood(memory.mean, cache.mean, prior)
        return value, replace(cache, mean=of_mean)

    def refitted(
        self, memory: Memories, cache: Caches | None, prior: Prior
    ) -> tuple[Memories, Caches]:
        """Check both grids against the new kernels."""
        cache = cache or Caches()
        _, of_mean = self.mean.refitted(memory.mean, cache.mean, prior)
        # that its kernel is too rough for its grid the noise model says itself
        self.log_noise.warn_of_coarse_grid(memory.noise, noise_prior(prior))
        return memory, replace(cache, mean=of_mean)


def noise_prior(prior: Prior) -> Prior:
    """Return the hyperparameters of the log noise variance, beside those of the mean."""
    model: Any = prior.model
    found: Prior = model._modules["noise_model"]._prior
    return found

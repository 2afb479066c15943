"""Learn log noise variances from squared residuals, alongside the process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.priors import GammaPrior
from torch import Tensor

from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.kernels import default_kernel
from bo_stream.models.fitting import relearn
from bo_stream.models.inference import Inference, Prior
from bo_stream.models.memory import Memory, Observations
from bo_stream.models.outcomes.base import default_standardize
from bo_stream.models.outcomes.noise import NOISE_FLOOR
from bo_stream.models.wiski.cache import GridCache
from bo_stream.models.wiski.inference import GridInference, Part, grid_of
from bo_stream.models.wiski.memory import WiskiMemory
from bo_stream.models.wiski.resolution import GridResolutionWarning, GridSize
from bo_stream.models.wiski.wiski import WISKI
from bo_stream.process import PosteriorProcess, SelectedProcess, leave_one_out

LOG_SQUARE_MEAN = float(torch.digamma(torch.tensor(0.5, dtype=torch.float64))) + math.log(2.0)
"""Mean of the log of a squared standard normal number, ψ(1/2) + log 2 = −1.27."""

LOG_SQUARE_VARIANCE = 0.5 * math.pi**2
"""Its variance, ψ'(1/2)."""

SMALLEST_SQUARE = 1e-6
"""Least squared residual, in parts of its expectation: the logarithm of 0 is none. One standard
normal square in 1,200 is smaller, so the mean of the log moves by 2e-3.
"""

SMALLEST_SHARE = 1e-3
"""Least share of the noise in a residual's variance that is reckoned with."""


def log_squares(residual: Tensor, variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Compute measurements of the log noise variance and their variances, ``...`` each.

    A residual e of a prediction with the variance v has ``log e² = log(σ² + v) + log χ²``. With s
    the noise expected and ρ = s / (s + v) its share, ``e² ρ`` is to measure σ²: the target is
    ``log e² + log ρ − E log χ²``, unbiased where s is. It moves with log σ² by the share ρ only, so
    it counts as one of the variance ``ψ'(1/2) / ρ²``: where the prediction is uncertain a residual
    says little about the noise.

    Args:
        residual: Outcome less its predicted mean.
        variance: Of the prediction, noise not included.
        noise: Expected noise variance s.
    """
    total = noise + variance.clamp_min(0.0)
    share = (noise / total).clamp_min(SMALLEST_SHARE)
    square = residual.square().maximum(SMALLEST_SQUARE * total)
    return square.log() + share.log() - LOG_SQUARE_MEAN, LOG_SQUARE_VARIANCE / share.square()


def expected_exponential(mean: Tensor, variance: Tensor) -> Tensor:
    """Compute the mean of ``exp(g)`` for a normal g."""
    return (mean + 0.5 * variance).exp()


def given_or(noise: Tensor, given: Tensor | None) -> Tensor:
    """Replace noise variances, ``... x m x n``, by those given, ``... x m x 1``, but for zeros."""
    return noise if given is None else torch.where(given > 0.0, given, noise)


TOLERANCE = 1e-6
"""Part of the kernel's trace left out: little, where the log squares have a variance of five."""


LearnedNoise = tuple[Tensor, Tensor, Tensor]
"""Noise variances in the units of the targets, the measured log variances that teach them, and the
variances of those measurements, ``batch x m x n`` each.
"""


@dataclass(frozen=True)
class Entry:
    """What an update put into memory: with it the update can be undone.

    Attributes:
        observations: For the mean, with the noise variances that they entered with.
        log_squares: For the noise.
    """

    observations: Observations
    log_squares: Observations

    def negated(self) -> Entry:
        """Turn an entry into one that is taken out."""
        return Entry(*(replace(rows, sign=-1.0) for rows in (self.observations, self.log_squares)))


def observed(inputs: Tensor, targets: Tensor, noise: Tensor) -> Observations:
    """Return observations of known noise, to be added; variances are as targets."""
    known = torch.ones_like(targets[..., :1, :], dtype=torch.bool)
    return Observations(inputs.to(torch.float64), targets, noise, known, 1.0)


@torch.no_grad()
def target_marginals(process: PosteriorProcess, prior: Prior, X: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of the targets at transformed inputs, ``batch x m x n`` each.

    In the units of the targets, before a standardisation. Cost O(n r²), some thousand rows at once.
    """
    mean, variance = process.marginals(X)
    offset, scale = (t.unsqueeze(-1) for t in prior.chain.offset_and_scale(prior.outcomes.shift))
    return offset + scale * mean, scale.square() * variance


def noise_kernel(dim: int, batch_shape: torch.Size, box: Tensor) -> Kernel:
    """Build the default kernel: a smooth log variance that varies by a factor of e, or less.

    Lengthscales are of the ``2 x d`` box of the inputs. The prior of the output scale has its mode
    at 1 and density near 0, for noise that is the same everywhere.
    """
    kernel = ScaleKernel(
        default_kernel(dim, batch_shape, box),
        batch_shape=batch_shape,
        outputscale_prior=GammaPrior(2.0, 1.0),
    )
    kernel.outputscale = torch.ones(batch_shape)
    return kernel


def noise_gp(
    X: Tensor,
    log_squares: Tensor,
    variances: Tensor,
    kernel: Kernel,
    bounds: Tensor,
    grid_size: GridSize | None,
) -> WISKI:
    """Build a grid model of measured log variances, each of known noise, ``batch x n x m``.

    Inputs X are transformed, ``batch x n x d``, and their box is ``2 x d``.
    """
    return WISKI(
        X,
        log_squares,
        variances,
        covar_module=kernel,
        outcome_transform=None,
        bounds=bounds,
        grid_size=grid_size,
        tolerance=TOLERANCE,
    )


def centre(model: WISKI, mean: Tensor) -> None:
    """Set the prior mean of a log noise variance, ``batch x m``."""
    model.mean_module.initialize(constant=model._from_per_output(mean).to(model._dtype))


def learn_first_noise(
    parts: tuple[tuple[Prior, GridInference, Mesh], tuple[Prior, GridInference, Mesh]],
    inputs: Tensor,
    targets: Tensor,
    noise: Tensor,
    rows: Tensor,
    rounds: int,
) -> LearnedNoise:
    """Learn the noise of k observations, copies of a mean and a noise model fitted to them in turn.

    The first mean model has one noise level for them. Residuals and noises are those left-one-out,
    so that none is predicted from itself. Cost of two refits a round. Source: Kersting, Plagemann,
    Pfaff and Burgard (2007), most likely heteroscedastic Gaussian process regression, here with
    closed forms for its samples.

    Args:
        parts: Hyperparameters, inference and nodes of the outcomes and of the log noise variance,
            which stay as they are, but for the record of refits that fail.
        inputs: Of all first observations, transformed, ``batch x n x d``.
        targets: ``batch x m x n``.
        noise: Variances, ``batch x m x n``; NaN where unknown.
        rows: Indices of the k observations of unknown noise.
        rounds: At least 1.
    """
    (prior, inference, grid), (noise_prior, _, noise_grid) = parts
    X, Y = inputs[..., rows, :], targets[..., rows]
    standardize = default_standardize(prior.num_outputs, prior.batch_shape)
    for _ in range(rounds):
        draft = WISKI(
            inputs,
            targets.mT.to(inputs),
            noise.mT.to(inputs),
            covar_module=deepcopy(prior.kernel),
            mean_module=deepcopy(prior.mean_module),
            outcome_transform=None if prior.chain.standardize is None else deepcopy(standardize),
            bounds=grid.bounds.to(inputs),
            grid_size=grid.size,
            tolerance=inference.tolerance,
            max_rank=inference.max_rank,
        )
        _fit(draft, prior)
        level = (draft.noise_level() * draft.outcome_scale().square()).detach().unsqueeze(-1)
        present = torch.where(noise[..., rows].isnan(), level, noise[..., rows])
        predicted = target_marginals(draft.process(X.double()), draft.prior, X.double())
        expected, variance = _left_out(Y, *predicted, present)
        measured, variances = log_squares(Y - expected, variance, present)
        learner = noise_gp(
            X,
            measured.mT.to(X),
            variances.mT.to(X),
            deepcopy(noise_prior.kernel),
            noise_grid.bounds.to(X),
            noise_grid.size,
        )
        centre(learner, measured.mean(-1))
        _fit(learner, noise_prior)
        with torch.no_grad():
            moments = learner.process(X.double()).marginals(X.double())
        learned = expected_exponential(*_left_out(measured, *moments, variances))
        noise = noise.index_copy(-1, rows, learned)
    return learned, measured, variances


def _left_out(
    targets: Tensor, mean: Tensor, variance: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    return leave_one_out(targets, mean, variance.clamp_min(0.0), noise, SMALLEST_SHARE)


def _fit(draft: WISKI, prior: Prior) -> None:
    """Fit a draft with hyperparameters of its own; what that took is on the record of the model."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore", GridResolutionWarning)  # of a draft nobody predicts with
        relearn(draft)
    for event in draft.numerical_log:
        prior.model.log_event(f"{event.what}, of a draft")


# --- inference of a process on a grid and of its log noise variance on another -------------------


FIRST_ROWS = 20
"""Fewer first observations are not enough to fit a noise model to."""


@dataclass(frozen=True)
class Memories(Memory):
    """What is left of the observations, and of their log squared residuals.

    Attributes:
        mean: Of observations, with the noise variances that they entered with.
        noise: Of measured log noise variances.
    """

    mean: WiskiMemory
    noise: WiskiMemory

    @property
    def grid(self) -> Mesh:
        """The grid of the mean."""
        return self.mean.grid

    @property
    def totals(self) -> Tensor:
        """``[Y, 1]ᵀ [Y, 1]`` of all observations, ``... x m x 2 x 2``."""
        return self.mean.totals

    def known_sums(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Sum the noise variances that entered; see :meth:`Memory.known_sums`."""
        return self.mean.known_sums()

    def given_noise(self) -> Tensor | None:
        """Return the mean noise variance where all were given, ``... x m x 1``, else 0 or None.

        No residual then says what the noise of further observations is.
        """
        mean, only = self.mean_known_noise(), (self.counts > 0.0) & (self.noise.counts <= 0.0)
        return None if mean is None else torch.where(only, mean, 0.0).unsqueeze(-1)

    def map_targets(self, matrix: Tensor) -> Memories:
        """Return a copy with the target columns ``[Y, 1] @ matrix``; the noise's stay."""
        return Memories(self.mean.map_targets(matrix), self.noise.scale(1.0))


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
        given: The variance at all inputs instead, in the memory's units, ``batch x m x 1``, where
            it is not 0: see :meth:`Memories.given_noise`.
    """

    process: PosteriorProcess
    scale: Tensor
    given: Tensor | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the expected variance at inputs, ``... x m x q``; differentiable."""
        points = self.process.at(inputs)
        noise = expected_exponential(self.process.mean_at(points), self.process.variance_at(points))
        noise, squared = given_or(noise, self.given), self.scale.square()
        return noise.maximum(NOISE_FLOOR * squared) / squared

    def select(self, outputs: list[int]) -> LogNormalNoise:
        """Return the noise of some of the outputs."""
        chosen = SelectedProcess(self.process, tuple(outputs))
        given = None if self.given is None else self.given[..., outputs, :]
        return LogNormalNoise(chosen, self.scale[..., outputs, :], given)


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

    def part(self, memory: Memories, cache: Caches | None) -> Part:
        """Return inference, memory and cache of the mean."""
        return self.mean, memory.mean, None if cache is None else cache.mean

    def with_part(
        self, of: Part, memory: Memories, cache: Caches | None
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
        cache, mean, noise = cache or Caches(), memory.mean, memory.noise
        of_mean, of_noise = cache.mean, cache.noise
        if entry.observations.sign < 0.0:
            mean = mean.scale(1.0)  # a copy: the noise model may refuse what is taken out
        mean, of_mean = self.mean.observe(mean, of_mean, entry.observations, prior)
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
        noise = given_or(expected_exponential(*process.marginals(X)), memory.given_noise())
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
        """Solve for the mean, unless cached."""
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
        """Solve for the log noise variance, unless cached."""
        cache = cache or Caches()
        if process is not None:
            X = (grid_of(process) or memory.grid).bounds.to(memory.counts.device)
        log_noise, of_noise = self.log_noise.process(
            memory.noise, cache.noise, noise_prior(prior), X
        )
        cache = cache if of_noise is cache.noise else replace(cache, noise=of_noise)
        scale = prior.scale.unsqueeze(-1).clone()
        return LogNormalNoise(log_noise, scale, memory.given_noise()), cache

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
        """Return the log evidence of the mean's model, given the noise variances that entered."""
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
    """Return the hyperparameters of the log noise variance, alongside those of the mean."""
    model: Any = prior.model
    found: Prior = model._modules["noise_model"].prior
    return found

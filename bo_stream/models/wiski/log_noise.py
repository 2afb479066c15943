"""Noise of a first batch of observations, for which no model has learned one yet."""

from __future__ import annotations

import math
import warnings
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel, ScaleKernel
from gpytorch.priors import GammaPrior
from torch import Tensor

from bo_stream.bases.grid.mesh import Mesh
from bo_stream.bases.kernels import default_kernel
from bo_stream.models.fitting import relearn
from bo_stream.models.memory import Observations
from bo_stream.models.outcomes.transform import default_standardize
from bo_stream.models.prior import Prior
from bo_stream.models.wiski.inference import GridInference
from bo_stream.models.wiski.resolution import GridResolutionWarning, GridSize
from bo_stream.models.wiski.wiski import WISKI
from bo_stream.process.process import PosteriorProcess, leave_one_out

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
        predicted = target_marginals(draft.process(X.double()), draft._prior, X.double())
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

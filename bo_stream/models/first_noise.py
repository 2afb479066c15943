"""Noise of a first batch of observations, for which no model has learned one yet."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.models.grid_gp import GridGP
from bo_stream.models.log_squares import expected_exponential, leave_one_out, log_squares
from bo_stream.models.refit import relearn
from bo_stream.models.resolution_warning import GridResolutionWarning
from bo_stream.process import PosteriorProcess

_ROWS = 4096

Draft = Callable[[Tensor, Tensor, Tensor], GridGP]
"""A grid model of inputs, targets and noise variances, ``batch x n x (d or m)`` each."""


@dataclass(frozen=True)
class LearnedNoise:
    """Noise variances and the log squared residuals that they were learned from.

    Attributes:
        noise: In the units of the targets, ``batch x m x n``.
        log_squares: Measured log variances, ``batch x m x n``.
        variances: Of those measurements, ``batch x m x n``.
    """

    noise: Tensor
    log_squares: Tensor
    variances: Tensor


def learn_first_noise(
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor,
    rows: Tensor,
    mean_draft: Draft,
    noise_draft: Draft,
    rounds: int,
) -> LearnedNoise:
    """Noise of the k observations without a known one, a mean and a noise model fitted in turn.

    The first mean model has one noise level for them. Residuals and noises are those left-one-out,
    so that none is predicted from itself. Cost of two refits a round. Source: Kersting, Plagemann,
    Pfaff and Burgard (2007), most likely heteroscedastic Gaussian process regression, here with
    closed forms for its samples.

    Args:
        X: Transformed inputs, ``batch x n x d``.
        Y: Targets, ``batch x n x m``.
        Yvar: Known noise variances, and NaN in the rows to be learned.
        rows: Indices of these, k.
        mean_draft: The model of the targets.
        noise_draft: The model of the log squared residuals.
        rounds: At least 1.
    """
    for _ in range(rounds):
        residuals = _residuals(_fitted(mean_draft(X, Y, Yvar)), X, Y, Yvar, rows)
        learned = _learned(noise_draft, X[..., rows, :], *log_squares(*residuals))
        Yvar = Yvar.index_copy(-2, rows, learned.noise.mT.to(Yvar))
    return learned


def _fitted(draft: GridGP) -> GridGP:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GridResolutionWarning)  # of a draft nobody predicts with
        relearn(draft)
    return draft


def _residuals(
    draft: GridGP, X: Tensor, Y: Tensor, Yvar: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Residuals left-one-out, variances of their predictions, and noise, ``batch x m x n`` each."""
    targets, noise = Y[..., rows, :].double().mT, Yvar[..., rows, :].double().mT
    level = (draft.noise_level() * draft.outcome_scale().square()).unsqueeze(-1)
    noise = torch.where(noise.isnan(), level.detach(), noise)
    mean, variance = leave_one_out(targets, *marginals(draft, X[..., rows, :]), noise)
    return targets - mean, variance, noise


def _learned(draft_of: Draft, X: Tensor, targets: Tensor, variances: Tensor) -> LearnedNoise:
    draft = _fitted(draft_of(X, targets.mT.to(X), variances.mT.to(X)))
    moments = leave_one_out(targets, *marginals(draft, X), variances)
    return LearnedNoise(expected_exponential(*moments), targets, variances)


@torch.no_grad()
def marginals(model: GridGP, X: Tensor) -> tuple[Tensor, Tensor]:
    """Posterior mean and variance of the targets at transformed inputs, ``batch x m x n`` each.

    In the units of the targets, before a standardisation. Cost O(n r²), some thousand rows at once.
    """
    inputs = X.double()
    process = model.process(inputs)
    parts = [_marginals(process, rows) for rows in inputs.split(_ROWS, -2)]
    mean, variance = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    offset, scale = (t.unsqueeze(-1) for t in model._outcomes.offset_and_scale(model._counts()))
    return offset + scale * mean, scale.square() * variance


def _marginals(process: PosteriorProcess, X: Tensor) -> tuple[Tensor, Tensor]:
    points = process.at(X)
    return process.mean_at(points), process.variance_at(points)

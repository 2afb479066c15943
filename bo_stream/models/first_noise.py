"""Noise of a first batch of observations, for which no model has learned one yet."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import dataclass

import torch
from botorch.models.transforms.outcome import Standardize
from torch import Tensor

from bo_stream.models.grid_gp import GridGP
from bo_stream.models.leave_one_out import leave_one_out
from bo_stream.models.log_noise import LearnedNoise, centre, marginals, noise_gp
from bo_stream.models.log_squares import SMALLEST_SHARE, expected_exponential, log_squares
from bo_stream.models.refit import relearn
from bo_stream.models.resolution_warning import GridResolutionWarning


@dataclass(frozen=True)
class FirstBatch:
    """Observations of which some have no known noise.

    Attributes:
        inputs: Transformed, ``batch x n x d``.
        targets: ``batch x m x n``.
        noise: Variances, ``batch x m x n``; NaN where unknown.
        rows: Indices of the k observations of unknown noise.
    """

    inputs: Tensor
    targets: Tensor
    noise: Tensor
    rows: Tensor


def learn_first_noise(
    model: GridGP, noise_model: GridGP, batch: FirstBatch, rounds: int
) -> LearnedNoise:
    """Noise of k observations, copies of a mean and a noise model fitted to them in turn.

    The first mean model has one noise level for them. Residuals and noises are those left-one-out,
    so that none is predicted from itself. Cost of two refits a round. Source: Kersting, Plagemann,
    Pfaff and Burgard (2007), most likely heteroscedastic Gaussian process regression, here with
    closed forms for its samples.

    Args:
        model: Of the mean; stays as it is, like the other, but for the record of refits that fail.
        noise_model: Of the log noise variance.
        batch: All first observations.
        rounds: At least 1.
    """
    rows, noise = batch.rows, batch.noise
    inputs, targets = batch.inputs[..., rows, :], batch.targets[..., rows]
    for _ in range(rounds):
        draft = _fitted(_mean_draft(model, batch, noise), model)
        level = (draft.noise_level() * draft.outcome_scale().square()).detach().unsqueeze(-1)
        present = torch.where(noise[..., rows].isnan(), level, noise[..., rows])
        mean, variance = _left_out(targets, *marginals(draft, inputs), present)
        learned = _learned(noise_model, inputs, *log_squares(targets - mean, variance, present))
        noise = noise.index_copy(-1, rows, learned.noise)
    return learned


def _learned(
    noise_model: GridGP, inputs: Tensor, measured: Tensor, variances: Tensor
) -> LearnedNoise:
    draft = _fitted(_noise_draft(noise_model, inputs, measured, variances), noise_model)
    moments = _left_out(measured, *marginals(draft, inputs), variances)
    return LearnedNoise(expected_exponential(*moments), measured, variances)


def _left_out(
    targets: Tensor, mean: Tensor, variance: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    return leave_one_out(targets, mean, variance.clamp_min(0.0), noise, SMALLEST_SHARE)


def _mean_draft(model: GridGP, batch: FirstBatch, noise: Tensor) -> GridGP:
    standardize = Standardize(m=model.num_outputs, batch_shape=model.batch_shape)
    return GridGP(
        batch.inputs,
        batch.targets.mT.to(batch.inputs),
        noise.mT.to(batch.inputs),
        covar_module=deepcopy(model.covar_module),
        mean_module=deepcopy(model.mean_module),
        outcome_transform=None if model._outcomes.standardize is None else standardize,
        bounds=model.bounds,
        grid_size=model.grid_size,
        tolerance=model.tolerance,
        max_rank=model.max_rank,
    )


def _noise_draft(noise_model: GridGP, inputs: Tensor, measured: Tensor, noise: Tensor) -> GridGP:
    draft = noise_gp(
        inputs,
        measured.mT.to(inputs),
        noise.mT.to(inputs),
        deepcopy(noise_model.covar_module),
        noise_model.bounds,
        noise_model.grid_size,
    )
    centre(draft, measured.mean(-1))
    return draft


def _fitted(draft: GridGP, model: GridGP) -> GridGP:
    """A draft with hyperparameters of its own; what that took is on the model's record."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GridResolutionWarning)  # of a draft nobody predicts with
        relearn(draft)
    for event in draft.numerical_log:
        model.log_event(f"{event.what}, of a draft")
    return draft

"""Predictions of a batch before a model has seen its outcomes, compared with these outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from botorch.exceptions.errors import UnsupportedError
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from torch import Tensor

from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.prevalence import prevalence
from bo_stream.linalg import safe_cholesky
from bo_stream.models.base import StreamingGP
from bo_stream.models.outcomes.counts import CountOutcomes
from bo_stream.models.outcomes.labels import LabelOutcomes, checked_labels
from bo_stream.models.outcomes.likelihood import REAL, LikelihoodOutcomes

Array = NDArray[np.float64]

JOINT = 512
"""Most rows of a batch that are whitened together, by a Cholesky factor of their covariance."""

FARTHEST = 38.0
"""Largest normal score: beyond it the PIT is 0 or 1 in float64."""

LEAST_PROBABILITY = 1e-12
"""Probability of a label that a model of other classes counts as having given it."""


@dataclass(frozen=True)
class PredictedBatch:
    """Outcomes of n rows and m outputs beside what a model predicted of them, ``n x m`` each.

    Outcomes are in original units, or as their transform (``Log``, ``Power``, ``Bilog``) gives them
    where it is no standardisation. Of labels of several classes m is 1.

    Attributes:
        outcome: What was observed.
        mean: Predictive mean; None for labels of several classes.
        deviation: Predictive standard deviation, noise included; None for labels and counts.
        error: Outcome less mean; of labels the root of the Brier score, which is not signed.
        log_density: Log density, or log probability, of the outcome.
        pit: Probability integral transform: predictive probability of an outcome of at most the
            observed one; None for labels and counts.
        innovations: Standard normal and independent of each other under the model, of Gaussian
            outcomes ``L⁻¹ (y − mean)`` with ``L Lᵀ`` the joint predictive covariance of the batch,
            in the order of its rows; else normal scores of the PIT. None for labels and counts.
        tested: Number of leading rows whose innovations are independent.
    """

    outcome: Array
    mean: Array | None
    deviation: Array | None
    error: Array
    log_density: Array
    pit: Array | None
    innovations: Array | None
    tested: int

    def __len__(self) -> int:
        return len(self.outcome)


@torch.no_grad()
def predict_batch(
    model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None = None
) -> PredictedBatch:
    """Predict outcomes at their inputs, and compare; the model stays as it is.

    The cost is that of a posterior's variances at n points and, up to ``JOINT`` of them, of their
    joint covariance, and O(n³). Of a larger batch the further rows' innovations are errors over
    predictive standard deviations, which are not independent and enter no sequential test.

    Args:
        model: Without batch shape, not conditioned on hypothetical observations.
        X: ``n x d``, as for :meth:`StreamingGP.update`.
        Y: ``n x m``, or labels.
        Yvar: Known noise variances shaped as Y; NaN: unknown.

    Raises:
        UnsupportedError: A model with a batch shape.
        BotorchTensorDimensionError, InputDataError: As :meth:`StreamingGP.update`.
    """
    check_validated(model)
    model._leave_training()
    if isinstance(model._units, LabelOutcomes):
        return _labels(model, X, Y)
    inputs = model.hypothetical_inputs(X)
    if isinstance(model._units, LikelihoodOutcomes) and not model._prior.is_gaussian:
        return _under_likelihood(model, inputs, X, Y)
    outcomes, noise = model.standardized(X, Y, all_variances(model, X, Y, Yvar))
    return _gaussian(model, inputs, outcomes, noise)


def check_validated(model: StreamingGP) -> None:
    """Check that a model can be validated.

    Raises:
        UnsupportedError: It has a batch shape, or is conditioned on hypothetical observations.
    """
    model._check_not_conditioned("Validation")
    if model.batch_shape:
        raise UnsupportedError(
            f"Expected a model without batch shape, got {tuple(model.batch_shape)}: its elements "
            "are different models. Validate a model of one of them."
        )


def all_variances(model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> Tensor | None:
    """Return noise variances with which a model takes rows where its noise depends on the inputs.

    Unknown ones are predicted. Of other models Yvar stays as it is.
    """
    if not model._inference.noise_varies:
        return Yvar
    predicted = model.noise_at(model.hypothetical_inputs(X)).mT
    variances = (predicted * model.outcome_scale().square().unsqueeze(-2)).to(Y).expand_as(Y)
    return variances if Yvar is None else torch.where(Yvar.isnan(), variances, Yvar)


def _gaussian(
    model: StreamingGP, inputs: Tensor, outcomes: Tensor, noise: Tensor
) -> PredictedBatch:
    """Compare with normal predictions; outcomes and noise are ``m x n`` in process units."""
    process = model.process(inputs)
    tested = min(JOINT, inputs.shape[-2])
    joint = process.joint(inputs[:tested])
    mean, covariance = joint.mean, joint.covariance() + torch.diag_embed(noise[:, :tested])
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    errors = (outcomes[:, :tested] - mean).unsqueeze(-1)
    whitened = torch.linalg.solve_triangular(safe_cholesky(covariance), errors, upper=False)
    innovations = whitened.squeeze(-1)
    if tested < inputs.shape[-2]:
        further = process.marginals(inputs[tested:])
        mean = torch.cat((mean, further[0]), -1)
        variance = torch.cat((variance, further[1] + noise[:, tested:]), -1)
        later = (outcomes - mean)[:, tested:] / variance[:, tested:].sqrt()
        innovations = torch.cat((innovations, later), -1)
    ratio = _array((outcomes - mean) / variance.sqrt())
    offset, scale = model._offset_and_scale()
    deviation = _array(scale * variance.sqrt())
    outcome, center = _array(offset + scale * outcomes), _array(offset + scale * mean)
    density = -0.5 * ratio**2 - np.log(deviation) - 0.5 * np.log(2.0 * np.pi)
    return PredictedBatch(
        outcome,
        center,
        deviation,
        outcome - center,
        density,
        ndtr(ratio),
        _array(innovations),
        tested,
    )


def _under_likelihood(model: StreamingGP, inputs: Tensor, X: Tensor, Y: Tensor) -> PredictedBatch:
    """Compare with the marginals of a likelihood: all of real outcomes, less of others."""
    predictive, density = model.predictive(X), model.log_predictive(X, Y)
    outcome, mean = rows_of(Y), rows_of(predictive.mean)
    if isinstance(model._units, CountOutcomes):  # positives, expected of those examined in a row
        outcome, mean = outcome[:, :1], rows_of(prevalence(model, X).mean) * outcome[:, 1:]
    if not isinstance(model.likelihood, REAL):
        return PredictedBatch(outcome, mean, None, outcome - mean, rows_of(density), None, None, 0)
    marginals = model.process(inputs).marginals(inputs)
    targets = model._standardized(Y.to(torch.float64)).mT
    likelihood = OutcomeModel.of(model.likelihood, model.num_outputs)
    pit = _array(likelihood.distribution_function(targets, *marginals)).clip(0.0, 1.0)
    scores = np.clip(ndtri(pit), -FARTHEST, FARTHEST)
    deviation = rows_of(predictive.variance.sqrt())
    return PredictedBatch(
        outcome, mean, deviation, outcome - mean, rows_of(density), pit, scores, min(1, len(pit))
    )


def _labels(model: StreamingGP, X: Tensor, Y: Tensor) -> PredictedBatch:
    """Compare labels with the probabilities of their classes."""
    kind: Any = model
    probabilities = rows_of(kind.class_probabilities(X))
    labels = checked_labels(Y, X).cpu().numpy()
    hits = np.zeros((len(labels), max(probabilities.shape[-1], int(labels.max(initial=0)) + 1)))
    hits[np.arange(len(labels)), labels] = 1.0
    missing = hits.shape[-1] - probabilities.shape[-1]
    probabilities = np.pad(probabilities, ((0, 0), (0, missing)))
    brier = np.sqrt(((hits - probabilities) ** 2).sum(-1, keepdims=True))
    given = (hits * probabilities).sum(-1, keepdims=True)
    density = np.log(given.clip(LEAST_PROBABILITY))
    return PredictedBatch(labels[:, None] * 1.0, None, None, brier, density, None, None, 0)


def _array(value: Tensor) -> Array:
    """Return ``m x n`` as ``n x m`` in NumPy."""
    return rows_of(value.mT)


def rows_of(value: Tensor) -> Array:
    """Copy a tensor to NumPy in float64."""
    return np.asarray(value.detach().to("cpu", torch.float64).numpy())

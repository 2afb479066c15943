"""Predictions of outcomes: of a batch before it is observed, and of observations in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch
from botorch.cross_validation import CVResults
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from linear_operator.utils.errors import NotPSDError
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from torch import Tensor

from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.likelihoods.counts import prevalence
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.linalg import inverse_lower, safe_cholesky
from bo_stream.models.auto.auto import AutoGP, family_model
from bo_stream.models.auto.families import EXACT
from bo_stream.models.base import StreamingGP
from bo_stream.models.checks import check_instance
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.memory import staying
from bo_stream.models.outcomes.gaussian import LabelOutcomes, checked_labels
from bo_stream.models.outcomes.likelihood import REAL, CountOutcomes, LikelihoodOutcomes
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.models.wiski.memory import RowMemory
from bo_stream.observation_space import ObservationSpaceProcess
from bo_stream.process import ROWS, IndependentOutputs, PosteriorProcess, WeightSpaceProcess
from bo_stream.process import leave_one_out as closed_form

Array = NDArray[np.float64]

JOINT = 512
"""Most rows of a batch that are whitened jointly, by a Cholesky factor of their covariance."""

_FARTHEST = 38.0
"""Largest normal score: beyond it the PIT is 0 or 1 in float64."""

_LEAST_PROBABILITY = 1e-12
"""Probability that counts for a label of a class that the model does not know."""


@dataclass(frozen=True)
class PredictedBatch:
    """Outcomes of n rows and m outputs, and a model's predictions of them, ``n x m`` each.

    Outcomes are in original units; with a transform that is no standardisation, such as ``Log``,
    ``Power`` or ``Bilog``, they are transformed outcomes. For labels of several classes m is 1.

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

    The cost is a posterior's variances at n points and, up to ``JOINT`` of them, their joint
    covariance, and O(n³). In a larger batch the further rows' innovations are errors over
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
    if isinstance(model.outcomes, LabelOutcomes):
        return _labels(model, X, Y)
    inputs = model.hypothetical_inputs(X)
    if isinstance(model.outcomes, LikelihoodOutcomes) and not model.prior.is_gaussian:
        return _under_likelihood(model, inputs, X, Y)
    outcomes, noise = model.standardized(X, Y, all_variances(model, X, Y, Yvar))
    return _gaussian(model, inputs, outcomes, noise)


def check_validated(model: StreamingGP) -> None:
    """Check that a model can be validated.

    Raises:
        UnsupportedError: It is none of this package's, has a batch shape, or is conditioned on
            hypothetical observations.
    """
    check_instance("model", model, StreamingGP, "AutoGP(X, Y)")
    model._check_not_conditioned("Validation")
    if model.batch_shape:
        raise UnsupportedError(
            f"Expected a model without batch shape, got {tuple(model.batch_shape)}: its elements "
            "are different models. Validate a model of one of them."
        )


def all_variances(model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None) -> Tensor | None:
    """Return Yvar with unknown noise variances predicted, if a model's noise depends on the inputs.

    For other models Yvar stays as it is.
    """
    if not model.inference.noise_varies:
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
    if isinstance(model.outcomes, CountOutcomes):  # positives, expected of those examined in a row
        outcome, mean = outcome[:, :1], rows_of(prevalence(model, X).mean) * outcome[:, 1:]
    if not isinstance(model.likelihood, REAL):
        return PredictedBatch(outcome, mean, None, outcome - mean, rows_of(density), None, None, 0)
    marginals = model.process(inputs).marginals(inputs)
    targets = model._standardized(Y.to(torch.float64)).mT
    likelihood = OutcomeModel.of(model.likelihood, model.num_outputs)
    pit = _array(likelihood.distribution_function(targets, *marginals)).clip(0.0, 1.0)
    scores = np.clip(ndtri(pit), -_FARTHEST, _FARTHEST)
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
    density = np.log(given.clip(_LEAST_PROBABILITY))
    return PredictedBatch(labels[:, None] * 1.0, None, None, brier, density, None, None, 0)


def _array(value: Tensor) -> Array:
    """Return ``m x n`` as ``n x m`` in NumPy."""
    return rows_of(value.mT)


def rows_of(value: Tensor) -> Array:
    """Copy a tensor to NumPy in float64."""
    return np.asarray(value.detach().to("cpu", torch.float64).numpy())


# --- cross-validation from memory: predictions without some of a model's observations ------------


Model = TypeVar("Model", bound=StreamingGP)

_NOT_STORED = (
    "Expected observations that are in memory, each with the noise it entered with; got some that "
    "leave less to the other observations than nothing. Pass X, Y and Yvar as they were given to "
    "the model."
)


@torch.no_grad()
def leave_one_out(
    model: StreamingGP,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None = None,
    observation_noise: bool = True,
) -> CVResults:
    """Predict each observation from all others in memory, at the present hyperparameters.

    The counterpart of ``botorch.cross_validation.loo_cv`` for models that do not keep their data:
    in closed form from the posterior, O(n r²), some thousand rows at a time, instead of O(n³).
    Equal to a model that is built without the row, at the same hyperparameters and standardisation,

    - for WISKI, and DirichletWISKI (Y are labels, and its scores are predicted), on one grid and
      with a stem that has not moved since the rows entered; while few observations are stored
      as rows, in O(n³) without features;
    - for HeteroscedasticWISKI, given the noise that the rows entered with, as Yvar;
    - for OSGPR at its present inducing points, for rows of its ``window``;
    - for AutoGP while it is exact, in O(n³), and then as for the family that it is in.

    Args:
        model: One of these.
        X: Inputs of observations in memory, ``batch_shape x n x d``; not necessarily all.
        Y: Their outcomes, ``batch_shape x n x m``.
        Yvar: Known noise variances shaped as Y, as given to the model; NaN: unknown.
        observation_noise: Whether variances are of outcomes, each with its own noise, or of the
            function.

    Returns:
        BoTorch's record, whose ``posterior`` is of ``batch_shape x n x 1 x m`` in units of Y.

    Raises:
        UnsupportedError: Another model, or one whose memory no longer holds the rows as they were.
        InputDataError: Rows that are not in memory, or that ``update`` would refuse.

    Example:
        >>> leave_one_out(model, train_X, train_Y).posterior.mean
    """
    rows = _checked_rows(model, X, Y, Yvar)
    mean, variance = rows.moments_without()
    if observation_noise:
        variance = variance + rows.noise
    offset, scale = (t.unsqueeze(-1) for t in model.prior.chain.offset_and_scale(model._counts()))
    means = (offset + scale * mean).to(X.dtype).mT.unsqueeze(-1)
    variances = (scale.square() * variance).to(X.dtype).mT.unsqueeze(-1)
    if model.num_outputs == 1:
        means, variances = means.squeeze(-2), variances.squeeze(-2)
    normal = MultivariateNormal(means, DiagLinearOperator(variances))
    joint = normal if model.num_outputs == 1 else IndependentOutputs.of(normal)
    posterior = model.prior.chain.untransform(GPyTorchPosterior(joint))
    return CVResults(
        model, posterior, Y.unsqueeze(-2), None if Yvar is None else Yvar.unsqueeze(-2)
    )


@torch.no_grad()
def without(model: Model, X: Tensor, Y: Tensor, Yvar: Tensor | None = None) -> Model:
    """Return a model of all observations in memory but some; the given one stays as it is.

    The opposite of ``condition_on_observations``: the memory is shared, the returned model
    predicts and fantasises, but cannot be updated. Cost O(k r² + k³) for k observations. Exact
    where :func:`leave_one_out` is.

    Args:
        model: See :func:`leave_one_out`, as for the other arguments and the errors.
        X: Inputs of the observations to leave out, ``batch_shape x k x d``.
        Y: Their outcomes, ``batch_shape x k x m``.
        Yvar: Known noise variances shaped as Y.
    """
    return model._with_process(_checked_rows(model, X, Y, Yvar).process_without())


def retracts_exactly(model: StreamingGP) -> bool:
    """Tell whether observations are retracted exactly, however many came since."""
    model = family_model(model)
    return isinstance(model, GridModel | AutoGP)  # an AutoGP here is exact


def _checked_rows(
    model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None
) -> _WeightSpaceRows | _StoredRows:
    """Check that a model has observations as its present basis would take them; return them."""
    given, model = model, family_model(model)
    if not isinstance(model, GridModel | OSGPR | AutoGP) or (
        isinstance(model, AutoGP) and model.family != EXACT
    ):
        name = type(model).__name__
        kind = f"an AutoGP in the family {name}" if isinstance(given, AutoGP) else f"a {name}"
        raise UnsupportedError(
            "Expected a model that is normal in its weights: WISKI, DirichletWISKI, "
            "HeteroscedasticWISKI, OSGPR, or an AutoGP that is exact or in the family of one of "
            f"these, got {kind}. For a model that keeps its data, as SingleTaskGP does, take "
            "botorch.cross_validation.loo_cv; else retract the observations from a copy of the "
            "model while it stores them, or build another without them."
        )
    if isinstance(model.likelihood, BinomialLikelihood):
        raise UnsupportedError(
            "Expected a model of Gaussian noise, got one of counts: without a row the sites of all "
            "others change. Retract the rows of a copy that holds them (AutoGP), or build another."
        )
    model._check_not_conditioned("Leaving observations out")
    Y, Yvar, _ = model.outcomes.checked(model, X, Y, Yvar, "Leaving observations out")
    model._check_retractable(X)
    rows = model._observations(X, Y, Yvar, 1.0)
    prior = model.prior
    if isinstance(model, AutoGP):
        stored, exact = model.memory.inner, model.memory.inference
        taken = replace(rows, sign=-1.0)
        return _StoredRows(
            cast(ObservationSpaceProcess, model.process()),
            stored.positions(rows),
            lambda: exact.process(stored.after(taken), None, prior)[0],
        )
    if isinstance(model, GridModel):
        inference, memory, _ = model._process_part()
        if isinstance(memory, RowMemory):
            few = memory
            return _StoredRows(
                cast(ObservationSpaceProcess, model.process()),
                few.positions(rows),
                lambda: inference.solve_rows(few.without(rows), prior),
            )
        if len(memory.earlier) > 0:
            raise UnsupportedError(
                "Expected a model on one grid, got one that was refined or merged: which of its "
                "grids an observation entered on is not known. Build it again on the present grid."
            )
    else:
        window = model.memory.rows.data
        missing = len(rows) - (len(window) - int(staying(window, rows).sum()))
        if missing > 0:
            raise UnsupportedError(
                "Expected observations that OSGPR holds in its window, the latest "
                f"{model.window}, got {missing} that it does not: what is left of them depends on "
                "the points that they entered at. Leave out later ones, or build the model with a "
                "larger window."
            )
    process = cast(WeightSpaceProcess, model.process(rows.X))
    return _WeightSpaceRows(process, rows.X, *model.prior.standardized(rows))


@dataclass(frozen=True)
class _StoredRows:
    """Observations to leave out of a model that stores all its rows.

    Attributes:
        process: The posterior given all rows.
        positions: Positions of the rows to leave out.
        process_without: Solves for the posterior given all other rows.
    """

    process: ObservationSpaceProcess
    positions: Tensor
    process_without: Callable[[], PosteriorProcess]

    @cached_property
    def noise(self) -> Tensor:
        """Noise variances of the observations, ``... x m x n``."""
        return self._chosen(self.process.told.noise)

    def moments_without(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the function at each row given all others, ``... x m x n``.

        With C the noisy covariance of all rows and r their residual, ``y_i − (C⁻¹ r)_i / (C⁻¹)_ii``
        and ``1 / (C⁻¹)_ii − noise`` (Rasmussen and Williams, 2006, eq. 5.12). Cost O(n³).
        """
        process, inverse = self.process, inverse_lower(self.process.factor)
        precision = inverse.square().sum(-2)
        innovation = (inverse.mT @ process.whitened).squeeze(-1) / precision
        mean = process.prior.mean + process.told.residual - innovation
        return self._chosen(mean), self._chosen(precision.reciprocal() - process.told.noise)

    def _chosen(self, values: Tensor) -> Tensor:
        index = self.positions.unsqueeze(-2)
        return values.gather(-1, index.expand(*values.shape[:-1], -1))


@dataclass(frozen=True)
class _WeightSpaceRows:
    """Observations in the units of a posterior over weights that they are part of.

    Inputs are ``... x n x d``, standardised outcomes and noise variances ``... x m x n``.
    """

    process: WeightSpaceProcess
    inputs: Tensor
    outcomes: Tensor
    noise: Tensor

    def moments_without(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the function at each row given all others.

        ``... x m x n`` each, by some thousand rows at a time.
        """
        means, variances = [], []
        for i in range(0, max(self.inputs.shape[-2], 1), ROWS):
            rows = slice(i, i + ROWS)
            points = self.process.at(self.inputs[..., rows, :])
            mean, variance = closed_form(
                self.outcomes[..., rows],
                self.process.mean_at(points),
                self.process.explained_variance_at(points),
                self.noise[..., rows],
            )
            residual = self.process.basis.residual_variance(points.X, points.prior)
            means.append(mean)
            variances.append(variance if residual is None else variance + residual)
        mean, variance = torch.cat(means, -1), torch.cat(variances, -1)
        if not bool(((variance >= 0.0) & mean.isfinite()).all()):
            raise InputDataError(_NOT_STORED)
        return mean, variance

    def process_without(self) -> WeightSpaceProcess:
        """Return the process given all other observations."""
        process = self.process
        features, centred = process.basis.features(self.inputs), self.outcomes - process.prior_mean
        try:
            weights = process.weights.retract(features, centred, self.noise)
        except NotPSDError as error:
            raise InputDataError(_NOT_STORED) from error
        return WeightSpaceProcess(process.basis, weights, process.prior_mean)

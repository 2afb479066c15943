"""Predictions without some of a model's observations: cross-validation from its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from botorch.cross_validation import CVResults
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.posteriors.posterior import Posterior
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.linalg import inverse_lower
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.auto.families import EXACT
from bo_stream.models.auto.view import family_model
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.memory import Observations, staying
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.models.wiski.rows import RowMemory
from bo_stream.process.observation_space import ObservationSpaceProcess
from bo_stream.process.process import ROWS, IndependentOutputs, PosteriorProcess, WeightSpaceProcess
from bo_stream.process.process import leave_one_out as closed_form

Model = TypeVar("Model", bound=StreamingGP)

_NOT_HELD = (
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
      with a stem that has not moved since the rows entered; while few observations are held as
      rows, in O(n³) without features;
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
    posterior = _marginals(model, mean, variance, X.dtype)
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
        model: See there, as for the other arguments and the errors.
        X: Inputs of the observations to leave out, ``batch_shape x k x d``.
        Y: Their outcomes, ``batch_shape x k x m``.
        Yvar: Known noise variances shaped as Y.
    """
    return model._with_process(_checked_rows(model, X, Y, Yvar).process_without())


def retracts_exactly(model: StreamingGP) -> bool:
    """Tell whether observations are taken out of a model exactly, whatever came since."""
    model = family_model(model)
    return isinstance(model, GridModel | AutoGP)  # an AutoGP here is exact


def _checked_rows(
    model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None
) -> _WeightSpaceRows | _HeldRows:
    """Check observations of a model that holds them."""
    model = family_model(model)
    if not isinstance(model, GridModel | OSGPR | AutoGP) or (
        isinstance(model, AutoGP) and model.family != EXACT
    ):
        raise UnsupportedError(
            "Expected a model that is normal in its weights: AutoGP, WISKI, DirichletWISKI, "
            f"HeteroscedasticWISKI or OSGPR, got a {type(model).__name__}. For a model that "
            "keeps its data, as SingleTaskGP does, take botorch.cross_validation.loo_cv; else "
            "build another without the observations."
        )
    if isinstance(model.likelihood, BinomialLikelihood):
        raise UnsupportedError(
            "Expected a model of Gaussian noise, got one of counts: without a row the sites of all "
            "others change. Retract the rows of a copy that holds them (AutoGP), or build another."
        )
    model._check_not_conditioned("Leaving observations out")
    Y, Yvar, _ = model._units.checked(model, X, Y, Yvar, "Leaving observations out")
    model._check_retractable(X)
    rows = model._observations(X, Y, Yvar, 1.0)
    prior = model._prior
    if isinstance(model, AutoGP):
        held, exact = model._memory.inner, model._memory.inference
        taken = replace(rows, sign=-1.0)
        return _HeldRows(
            cast(ObservationSpaceProcess, model.process()),
            held.positions(rows),
            lambda: exact.process(held.after(taken), None, prior)[0],
        )
    if isinstance(model, GridModel):
        inference, memory, _ = model._process_part()
        if isinstance(memory, RowMemory):
            few = memory
            return _HeldRows(
                cast(ObservationSpaceProcess, model.process()),
                few.positions(rows),
                lambda: inference.solve_rows(few.without(rows), prior),
            )
    _check_as_they_were(model, rows)
    process = cast(WeightSpaceProcess, model.process(rows.X))
    return _WeightSpaceRows(process, rows.X, *model._prior.standardized(rows))


@dataclass(frozen=True)
class _HeldRows:
    """Observations to leave out among all the rows that a model holds.

    Attributes:
        process: The posterior given all rows.
        positions: Of those to leave out.
        process_without: Solves for the posterior given all others.
    """

    process: ObservationSpaceProcess
    positions: Tensor
    process_without: Callable[[], PosteriorProcess]

    @cached_property
    def noise(self) -> Tensor:
        """Noise variances of the observations, ``... x m x n``."""
        return self._chosen(self.process.told.noise)

    def moments_without(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of the function at each, given all others, ``... x m x n``.

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
        """Return mean and variance of the function at each, given all others, ``... x m x n``."""
        parts = [
            self._moments_without(slice(i, i + ROWS))
            for i in range(0, max(self.inputs.shape[-2], 1), ROWS)
        ]
        mean, variance = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        if not bool(((variance >= 0.0) & mean.isfinite()).all()):
            raise InputDataError(_NOT_HELD)
        return mean, variance

    def _moments_without(self, rows: slice) -> tuple[Tensor, Tensor]:
        points = self.process.at(self.inputs[..., rows, :])
        explained = self.process.explained_variance_at(points)
        mean, variance = closed_form(
            self.outcomes[..., rows], self.process.mean_at(points), explained, self.noise[..., rows]
        )
        residual = self.process.basis.residual_variance(points.X, points.prior)
        return mean, variance if residual is None else variance + residual

    def process_without(self) -> WeightSpaceProcess:
        """Return the process given all others."""
        process = self.process
        features, centred = process.basis.features(self.inputs), self.outcomes - process.prior_mean
        try:
            weights = process.weights.retract(features, centred, self.noise)
        except NotPSDError as error:
            raise InputDataError(_NOT_HELD) from error
        return WeightSpaceProcess(process.basis, weights, process.prior_mean)


def _check_as_they_were(model: GridModel | OSGPR, rows: Observations) -> None:
    """Check that the memory holds the rows as its present basis would take them."""
    if isinstance(model, GridModel):
        if len(model._process_part()[1].earlier) > 0:
            raise UnsupportedError(
                "Expected a model on one grid, got one that was refined or merged: which of its "
                "grids an observation entered on is not known. Build it anew on the present grid."
            )
        return
    held = len(model._memory.rows.data) - int(staying(model._memory.rows.data, rows).sum())
    if held < len(rows):
        raise UnsupportedError(
            f"Expected observations that OSGPR holds in its window, the latest {model.window}, got "
            f"{len(rows) - held} that it does not: what is left of them depends on the points that "
            "they entered at. Leave out later ones, or build the model with a larger window."
        )


def _marginals(model: StreamingGP, mean: Tensor, variance: Tensor, dtype: torch.dtype) -> Posterior:
    """Return the posterior of ``... x n x 1 x m`` in original units for moments ``... x m x n``."""
    offset, scale = (t.unsqueeze(-1) for t in model._outcomes.offset_and_scale(model._counts()))
    means = (offset + scale * mean).to(dtype).mT.unsqueeze(-1)
    variances = (scale.square() * variance).to(dtype).mT.unsqueeze(-1)
    if model.num_outputs == 1:
        means, variances = means.squeeze(-2), variances.squeeze(-2)
    normal = MultivariateNormal(means, DiagLinearOperator(variances))
    joint = normal if model.num_outputs == 1 else IndependentOutputs.of(normal)
    return model._outcomes.untransform(GPyTorchPosterior(joint))

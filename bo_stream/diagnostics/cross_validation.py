"""Cross-validation from memory: predictions without some of a model's observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import torch
from botorch.cross_validation import CVResults
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.posteriors.gpytorch import GPyTorchPosterior
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.linalg import inverse_lower
from bo_stream.models.auto.auto import AutoGP, family_model
from bo_stream.models.auto.families import EXACT
from bo_stream.models.base import StreamingGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.memory import staying
from bo_stream.models.wiski.grid_model import GridModel
from bo_stream.models.wiski.memory import RowMemory
from bo_stream.observation_space import ObservationSpaceProcess
from bo_stream.process import ROWS, IndependentOutputs, PosteriorProcess, WeightSpaceProcess
from bo_stream.process import leave_one_out as closed_form

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
      with a stem that has not moved since the rows entered, and if ``forget`` was not called since,
      for a row is taken out as if it counted once; while few observations are stored as rows, in
      O(n³) without features;
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

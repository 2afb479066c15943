"""Fits beyond a refit: of stems, of inducing points, and without a factor of all centres."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from types import MappingProxyType

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from botorch.exceptions.warnings import OptimizationWarning
from botorch.optim.closures.core import ForwardBackwardClosure
from botorch.optim.core import OptimizationResult
from botorch.optim.fit import fit_gpytorch_mll_scipy
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from torch.nn import Parameter

from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.clustered import ClusteredGP
from bo_stream.models.inducing.osgpr import OSGPR
from bo_stream.models.stochastic.optimisers import ConstrainedAdam
from bo_stream.models.wiski.grid_model import GridModel

LEAST_POINTS = 10
"""Fewest points to learn a stem from."""


def pretrain(
    model: GridModel,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None = None,
    maxiter: int = 200,
    report: Callable[[int, float], None] | None = None,
) -> OptimizationResult:
    """Learn the stem and all hyperparameters by the marginal likelihood of a batch, by L-BFGS-B.

    The stem is calibrated on the batch at every step (a batch norm, through which gradients flow).
    Afterwards the model's memory holds exactly this batch, projected by the learned stem. Cost
    O(n r² + r³) an iteration. Source: the WISKI paper, section 5.1; it takes 200 steps of Adam.

    Args:
        model: With a stem; its memory is cleared first.
        X: ``n x d``.
        Y: ``n x m``.
        Yvar: Known noise variances shaped as Y; NaN: unknown.
        maxiter: Most iterations.
        report: Called after each with its number and the loss: the negative log posterior of the
            hyperparameters, a point.

    Returns:
        BoTorch's, with the last loss in ``fval``.

    Raises:
        InputDataError: Fewer than ten points, the cases in which ``update`` raises one, or a stem
            that was led out of the grid's cube; nothing is changed then.
        UnsupportedError: The model has no stem, or is conditioned on hypothetical observations.
    """
    model._check_not_conditioned("pretrain")
    model.standardized(X, Y, Yvar)  # raises what update would, before anything is dropped
    if model._modules.get("stem") is None:
        raise UnsupportedError(
            "Expected a model with a stem to pretrain, got one without. Learn its hyperparameters "
            "by botorch.fit.fit_gpytorch_mll."
        )
    if X.shape[-2] < LEAST_POINTS:
        raise InputDataError(
            f"Expected at least {LEAST_POINTS} points to pretrain a stem on, got {X.shape[-2]}."
        )
    if maxiter < 1:
        raise ValueError(f"Expected maxiter of at least 1, got {maxiter}.")
    state = deepcopy(model.state_dict())
    try:
        with model._undone_on_error():
            return _fitted(model, X, Y, Yvar, maxiter, report)
    except BaseException:
        model.zero_grad()
        model.load_state_dict(state)
        model.eval()
        raise


def _fitted(
    model: GridModel,
    X: Tensor,
    Y: Tensor,
    Yvar: Tensor | None,
    maxiter: int,
    report: Callable[[int, float], None] | None,
) -> OptimizationResult:
    mll = ExactMarginalLogLikelihood(model.likelihood, model)

    def likelihood() -> Tensor:
        return model.batch_log_marginal_likelihood(X, Y, Yvar, recalibrate=True)

    model.clear().update(X, Y, Yvar).train()
    result = minimise(
        mll,
        lambda: -with_priors(mll, likelihood()) / X.shape[-2],
        maxiter,
        callback=None if report is None else lambda _, found: report(found.step, found.fval),
    )
    model.zero_grad()
    with torch.no_grad():
        likelihood()  # calibrates the learned stem
    model.clear().update(X, Y, Yvar).eval()
    return result


def learn_points(model: OSGPR, maxiter: int = 30) -> OptimizationResult:
    """Learn a model's inducing points and hyperparameters together, by L-BFGS-B, in place.

    They move up the online bound. Observations before the window are known by their statistics at
    the old points, the window's rows as they are: a long window is what the points are learned
    from. Unlike a refit, in which those rows have their full covariance, an iteration costs
    O(M³ + window M²), so that a window of thousands of rows is cheap. Source: the bound of Bui,
    Nguyen and Turner (2017, eq. 7), learned as Titsias (2009) does.

    Args:
        model: With observations and inducing points.
        maxiter: Most iterations.

    Returns:
        BoTorch's, with the last loss in ``fval``: the negative bound and log priors, a point.

    Raises:
        UnsupportedError: The model is conditioned on hypothetical observations.
        ValueError: The model has no observations.
    """
    if maxiter < 1:
        raise ValueError(f"Expected maxiter of at least 1, got {maxiter}.")
    model._check_not_conditioned("learn_points")
    if len(model.inducing_points) == 0:
        raise ValueError("Expected a model with observations to learn points from, got none.")
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    points = Parameter(model.inducing_points.double())

    def loss() -> Tensor:
        return -with_priors(mll, model.bound_at(points)) / model.num_observations

    state, before = deepcopy(model.state_dict()), loss().detach()
    result = minimise(mll, loss, maxiter, {"inducing_points": points})
    with torch.no_grad():
        if not bool(loss() <= before):
            model.load_state_dict(state)
            points.copy_(model.inducing_points)
    model.zero_grad()
    model.place_points(points)
    model.eval()
    return result


def maximise_stochastically(
    model: ClusteredGP,
    steps: int = 100,
    learning_rate: float = 0.05,
    probes: int = 10,
    batch_size: int = 1000,
    tolerance: float | None = None,
    seed: int = 0,
) -> ClusteredGP:
    """Learn a model's hyperparameters by Adam on stochastic gradients, in place.

    Each step follows an unbiased estimate of the gradient of the log marginal likelihood and the
    log priors; no matrix is factorised. Cost of a step O(M²) for each iteration of conjugate
    gradients. [Terenin2024, appendix B.2]

    Args:
        model: Not conditioned on hypothetical observations; left in evaluation mode.
        steps: Number of steps.
        learning_rate: Adam's step; for positive parameters in their logarithms.
        probes: Hutchinson's probes in a step.
        batch_size: Centres whose rows of the kernel are differentiated in a step.
        tolerance: Relative residual at which conjugate gradients stop; the model's if omitted.
        seed: Seed of probes and rows.

    Returns:
        The model.
    """
    model.train()
    ascent = ConstrainedAdam(model, hyperparameters(model), learning_rate)
    generator = torch.Generator().manual_seed(seed)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    count = max(model.num_observations, 1.0)
    for _ in range(steps):
        objective = model.stochastic_objective(probes, batch_size, generator, tolerance)
        ascent.ascend(with_priors(mll, objective) / count)
    return model.eval()


def minimise(
    mll: ExactMarginalLogLikelihood,
    loss: Callable[[], Tensor],
    maxiter: int,
    others: Mapping[str, Parameter] = MappingProxyType({}),
    callback: Callable[..., None] | None = None,
) -> OptimizationResult:
    """Minimise a scalar loss in a model's learnable parameters, and in others, by L-BFGS-B.

    Reaching the most iterations is no failure; ``callback`` is that of BoTorch's
    ``fit_gpytorch_mll_scipy``.
    """
    learned = {name: p for name, p in mll.named_parameters() if p.requires_grad}
    parameters = {**learned, **others}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)
        return fit_gpytorch_mll_scipy(
            mll,
            parameters=parameters,
            closure=ForwardBackwardClosure(loss, parameters),
            options={"maxiter": maxiter},
            callback=callback,
        )


def stem_parameters(model: StreamingGP) -> list[Parameter]:
    """Return the learnable parameters of the stem."""
    stem = model._modules.get("stem")
    return [] if stem is None else [p for p in stem.parameters() if p.requires_grad]


def hyperparameters(model: StreamingGP) -> list[Parameter]:
    """Return the learnable parameters of kernel, mean and likelihood."""
    own = {id(p) for p in stem_parameters(model)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in own]


def with_priors(mll: ExactMarginalLogLikelihood, log_likelihood: Tensor) -> Tensor:
    """Add the log priors of all hyperparameters to a log likelihood, and sum over outputs."""
    return mll._add_other_terms(log_likelihood.clone(), []).sum()

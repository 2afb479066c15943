"""Distance of a model's approximation from an exact Gaussian process; its capacity; its inputs."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from torch import Tensor

from bo_stream.bases.grid.kernel import sufficient_grid_size
from bo_stream.bases.inducing import frozen, kernel_matrix
from bo_stream.diagnostics.validation import all_variances
from bo_stream.linalg import safe_cholesky
from bo_stream.models.auto.auto import AutoGP, family_model
from bo_stream.models.base import StreamingGP
from bo_stream.models.clustered.clustered import ClusteredGP
from bo_stream.models.decoupled.decoupled import DecoupledGP
from bo_stream.models.inducing.osgpr import OSGPR, OSVGP
from bo_stream.models.last_layer.last_layer import BayesianLastLayer
from bo_stream.models.local import LocalGP
from bo_stream.models.outcomes.gaussian import LabelOutcomes
from bo_stream.models.quadruply_stochastic.qsgp import QSGP, QSRVM
from bo_stream.models.wiski.grid_model import GridModel

BY_STEPS = (DecoupledGP, QSGP, QSRVM)
"""Models whose posteriors are learned by steps on a bound."""

_GRID_ERROR = 1e-3
"""Interpolation error, as a fraction of the prior variance, of the grid that is advised."""


@dataclass(frozen=True)
class ApproximationGap:
    """Differences of a model of some rows from the exact Gaussian process of these rows.

    Both have the hyperparameters of the model in question; its grid, points or centres stay. They
    predict the rows' function values.

    Attributes:
        rows: Number of rows.
        mean: Root mean squared difference of the means, in standard deviations of the exact
            prediction of an outcome, noise included.
        deviation: Median ratio of the standard deviations of outcomes, approximate over exact.
        exact: Exact means, standardised, of the first output.
        approximate: The model's means, of the first output.
    """

    rows: int
    mean: float
    deviation: float
    exact: list[float]
    approximate: list[float]


def approximation_gap(
    model: StreamingGP, X: Tensor, Y: Tensor, Yvar: Tensor | None = None
) -> ApproximationGap | str:
    """Compare a model's approximation on some rows with the exact Gaussian process of them.

    A copy of the model forgets all observations, takes the rows, and predicts there. Cost O(n³) of
    the exact process, 0.1 s for 500 rows, and the cost of the copy's update.

    Args:
        model: Stays as it is.
        X: ``n x d``.
        Y: ``n x m``.
        Yvar: Known noise variances shaped as Y; NaN: unknown.

    Returns:
        The gap; or why there is none, in words.
    """
    model = family_model(model)
    if isinstance(model, BY_STEPS):
        return "this model learns by steps on minibatches, of which some rows take too few"
    if isinstance(model.outcomes, LabelOutcomes):
        return "labels have no exact Gaussian process"
    if not isinstance(model.likelihood, _GaussianLikelihoodBase):
        return f"a {type(model.likelihood).__name__} has no exact Gaussian process"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the copy, which is no model of the user's
        Yvar = all_variances(model, X, Y, Yvar)
        outcomes, noise = model.standardized(X, Y, Yvar)
        inputs = model.coordinates(X).double()
        mean, variance = exact_marginals(model, inputs, outcomes, noise)
        copy: Any = deepcopy(model).clear()
        if isinstance(copy, OSVGP):
            copy.hyper_steps = 0
        if isinstance(copy, OSGPR | OSVGP) and copy.allocator is not None:
            copy.allocator = None  # the points stay
        copy.update(X, Y, Yvar)
        near, near_variance = copy.process(inputs).marginals(inputs)
    difference, observed = (near - mean).square(), variance + noise
    ratio = ((near_variance + noise) / observed).sqrt().median()
    return ApproximationGap(
        len(X),
        float((difference / observed).mean().sqrt()),
        float(ratio),
        mean[0].tolist(),
        near[0].tolist(),
    )


def exact_marginals(
    model: StreamingGP, inputs: Tensor, outcomes: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of the exact process at its own inputs.

    With C the noisy covariance of the rows: ``m + K C⁻¹ (y − m)`` and the diagonal of
    ``K − K C⁻¹ K`` (Rasmussen and Williams, 2006, eq. 2.23 and 2.24). Cost O(n³).

    Args:
        model: Of kernel and mean.
        inputs: As they enter memory, ``n x d``.
        outcomes: In units of the process, ``m x n``.
        noise: Variances in these units, ``m x n``.

    Returns:
        ``m x n`` each.
    """
    K = kernel_matrix(frozen(model.covar_module), inputs, inputs, model.num_outputs)
    center = model.prior.mean.unsqueeze(-1)
    factor = safe_cholesky(K + torch.diag_embed(noise))
    half = torch.linalg.solve_triangular(factor, K, upper=False)
    white = torch.linalg.solve_triangular(factor, (outcomes - center).unsqueeze(-1), upper=False)
    variance = K.diagonal(dim1=-2, dim2=-1) - half.square().sum(-2)
    return center + (half.mT @ white).squeeze(-1), variance


@dataclass(frozen=True)
class UsedCapacity:
    """Features, points or models that a posterior rests on: number in use, and the limit.

    Attributes:
        what: Features, inducing points, centres, local models, or basis functions.
        used: Number in use.
        limit: Most that there may be; None: no limit is set.
    """

    what: str
    used: int
    limit: int | None

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" of at most {self.limit:,}"
        return f"{self.used:,} {self.what}{limit}"


def capacity_of(model: StreamingGP) -> UsedCapacity | None:
    """Count the features, points or models of a posterior; None where the kind has none known."""
    model = family_model(model)
    kind: Any = model
    if isinstance(model, AutoGP):  # an exact one
        waits_until = model._memory.waits_until
        most = None if len(model.families) == 1 else max(model.max_exact, waits_until)
        return UsedCapacity("observations, exactly", int(model.num_observations), most)
    if isinstance(model, GridModel):
        inference, _, _ = model._process_part()
        return UsedCapacity("features", kind.rank, inference.max_rank)
    if isinstance(model, OSGPR | OSVGP):
        return UsedCapacity("inducing points", len(kind.inducing_points), kind.max_points)
    if isinstance(model, ClusteredGP):
        return UsedCapacity("centres", len(kind.centres), kind._inference.max_centres)
    if isinstance(model, LocalGP):
        models = int(kind.num_models.max())
        return UsedCapacity("local models", models, kind._inference.max_models)
    if isinstance(model, BayesianLastLayer):
        return UsedCapacity("features", kind._memory.rank, kind._memory.rank)
    return None


def rebuilt(
    model: StreamingGP, *options: str, kind: str = "", inputs: str = "", Yvar: str = ""
) -> str:
    """Return the line of code that builds a model again of the user's data.

    The likelihood, the classes and the box are those of the model; options that are not given are
    the defaults.

    Args:
        model: That the new one takes the place of.
        options: Further arguments, as code.
        kind: Name of another class, of Gaussian outcomes; empty: the model's own.
        inputs: Index of the columns of X that are taken, as code; empty: all.
        Yvar: Known noise variances, as code; empty: there are none.
    """
    arguments = [f"X{inputs}", "Y", *([f"train_Yvar={Yvar}"] if Yvar else [])]
    if kind:
        return f"model = {kind}({', '.join((*arguments, *options))})"
    family: Any = family_model(model)
    if not isinstance(model.likelihood, _GaussianLikelihoodBase):
        names = {f"likelihood.{name}" for name, _ in model.likelihood.named_parameters()}
        learns = isinstance(family, OSVGP) and not names <= set(family.inference.fixed)
        arguments.append(f"likelihood=model.likelihood{'.requires_grad_()' if learns else ''}")
    if isinstance(model, OSVGP | DecoupledGP) and "outcome_transform" in model._modules:
        arguments.append(f"outcome_transform=Standardize({model.num_outputs})")
    if isinstance(model.outcomes, LabelOutcomes) and model.outcomes.num_classes is not None:
        arguments.append(f"num_classes={model.outcomes.num_classes}")
    if isinstance(model, AutoGP) and model.inference.box is not None:
        arguments.append(f"bounds=bounds{inputs}")
    if isinstance(model, GridModel) and not {"input_transform", "stem"} & model._modules.keys():
        unit = torch.tensor([[0.0], [1.0]]).to(model.bounds)  # a box that needs no bounds
        if not torch.allclose(model.bounds, unit):
            arguments.append(f"bounds=model.bounds{inputs}")
    return f"model = {type(model).__name__}({', '.join((*arguments, *options))})"


def finer(model: StreamingGP, Yvar: str = "") -> str:
    """Return the line of code that makes a model's approximation finer.

    Args:
        model: Stays as it is.
        Yvar: Known noise variances, as code; empty: there are none.
    """
    kind: Any = family_model(model)
    if isinstance(model, AutoGP):  # by a move to a family, if possible
        if isinstance(kind, GridModel):
            inference, memory, _ = kind._process_part()
            enough = sufficient_grid_size(inference.kernel(kind.prior), memory.grid, _GRID_ERROR)
            size = None if enough is None else enough[0] if len(enough) == 1 else enough
            family, option = ("OSGPR", "") if size is None else ("WISKI", f"grid_size={size}")
        elif isinstance(kind, OSGPR | OSVGP):
            family, option = model.family, f"max_points={2 * kind.max_points}"
        else:
            return "fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))"
        if model.memory.held is None or family not in model.families:
            no_grid = 'families=("exact", "OSGPR")'
            return rebuilt(model, option or no_grid, Yvar=Yvar)
        return f'model.move_to("{family}"{option and ", " + option})'
    if isinstance(model, GridModel):
        inference, memory, _ = model._process_part()
        if kind.rank == inference.max_rank and kind.dropped > kind.interpolation_error():
            return rebuilt(model, f"max_rank={2 * inference.max_rank}", Yvar=Yvar)
        enough = sufficient_grid_size(inference.kernel(model.prior), memory.grid, _GRID_ERROR)
        if enough is None:
            line = rebuilt(model, kind="OSGPR", Yvar=Yvar)
            return f"{line}  # no grid that fits in memory would do"
        return f"model.refine(grid_size={enough[0] if len(enough) == 1 else enough})"
    if isinstance(model, OSGPR | OSVGP):
        most = 2 * max(kind.max_points, len(kind.inducing_points))
        return f"model.max_points, model.allocator = {most}, Novelty({most})"
    if isinstance(model, ClusteredGP):
        return f"model.resolve({kind.resolution / 2.0:.3g})"
    return rebuilt(model, kind="OSGPR", Yvar=Yvar)


@torch.no_grad()
def sensitivities(model: StreamingGP, X: Tensor) -> list[float]:
    """Compute how far the posterior mean moves when an input's values are shuffled among rows.

    Root mean squared change, over rows and outputs, in standard deviations of the outcomes in the
    units of the process; 0 of an input that is the same in all rows. (Breiman, Machine Learning 45,
    2001: permutation importance.)

    Args:
        model: Stays as it is.
        X: Rows, ``n x d``.

    Returns:
        A number for each of the d inputs.
    """
    random = np.random.default_rng(0)
    before = _means(model, X)
    effects = []
    for i in range(X.shape[-1]):
        shuffled = X.clone()
        shuffled[:, i] = X[torch.as_tensor(random.permutation(len(X)), device=X.device), i]
        effects.append(float((_means(model, shuffled) - before).square().mean().sqrt()))
    return effects


def _means(model: StreamingGP, X: Tensor) -> Tensor:
    inputs = model.observation_inputs(X)
    return model.process(inputs).marginals(inputs)[0]

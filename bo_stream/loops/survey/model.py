"""The model of a survey: the logit of prevalence from counts, positions and covariates."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from gpytorch.means import ConstantMean
from gpytorch.priors import NormalPrior
from torch import Tensor

from bo_stream.errors import UsageError, check_whole
from bo_stream.likelihoods.binomial import BinomialLikelihood
from bo_stream.likelihoods.outliers import Outliers
from bo_stream.mapping import map_inputs, survey_kernel
from bo_stream.mapping.positions import Units
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import (
    hyperparameters,
    relearn,
    set_hyperparameters,
    total_loss,
)
from bo_stream.models.inducing.osvgp import OSVGP

MEAN_SD = 3.0
"""Standard deviation of the prior of the mean logit, about that of all people examined."""

FIRST_ROUNDS, ROUNDS = 3, 1
"""How often hyperparameters and sites are found in turn, at most, without and with a former model;
the first time is the one from each start."""

SMOOTH = (5.0, 0.3)
"""Factors of length scale and output scale of position that make of the kernel's first values the
start for a smooth map, most of which is in the covariates."""

SETTLED = 0.05
"""Gain of the objective by a round, in nats, from which another one is worth its time."""

CONCENTRATION_STEPS, CONCENTRATION_RATE = 10, 0.1
"""Steps of Adam, in each such round, in which the concentration of beta-binomial counts moves, and
their size: few large ones, for the kernel, which they move along, is found anew afterwards."""


@dataclass(frozen=True, kw_only=True)
class SurveyModelSettings:
    """Settings of a survey's model.

    Attributes:
        trials: Expected number of people examined at a site; None: the mean of those so far.
        overdispersion: Whether counts at a site vary more than binomial ones, as where whole
            households are examined; what differs between sites is in the kernel.
        outliers: Share of sites whose prevalence has nothing to do with that of others like them,
            but is distributed as that of all results, in [0, 1): a few villages that jump, or were
            entered wrongly, leave the rest of the map alone, and smooth. Of 0, 0.01 and 0.1 the
            last is the safest (``python -m benchmarks.maps.outliers``).
        max_points: Largest number of inducing points; with fewer sites in the results each is one.
        units: Of positions: ``"degrees"``, or ``"kilometres"`` or ``"metres"`` on a map projection.
    """

    trials: int | None = None
    overdispersion: bool = False
    outliers: float = 0.1
    max_points: int = 1024
    units: Units = "degrees"

    def __post_init__(self) -> None:
        check_whole("max_points", self.max_points, 1)
        if not 0.0 <= self.outliers < 1.0:
            raise UsageError(
                f"Expected outliers as a share of the sites in [0, 1), got {self.outliers}."
            )


def survey_model(
    sites: Tensor,
    X: Tensor,
    Y: Tensor,
    settings: SurveyModelSettings | None = None,
    former: StreamingGP | None = None,
) -> StreamingGP:
    """Fit a Gaussian process of the logit of prevalence to counts.

    An :class:`~bo_stream.OSVGP` with a :class:`~bo_stream.BinomialLikelihood` with outliers and the
    kernel of :func:`~bo_stream.mapping.survey_kernel`. Its hyperparameters maximise the evidence
    lower bound and their priors: sites of the likelihood and hyperparameters are found in turn,
    each given the other. The bound has several maxima, of small rough parts and of large smooth
    ones: of two starts, of which one stands for a smooth map, the one that is better after one such
    round goes on; and sites have, with outliers, so that a round that ends lower is taken back.
    Cost O(n³) a step for n results up to ``max_points``.

    Args:
        sites: ``N x d``, all sites that are to be mapped, surveyed or not: longitude and latitude,
            or east and north, then covariates, without missing values. They make the units of the
            inputs.
        X: ``n x d``, inputs of the results.
        Y: ``n x 2``, ``[positives, examined]`` of each.
        settings: Default: those of the class.
        former: The model of earlier results with the same sites, from whose hyperparameters the fit
            starts, instead of the kernel's first values; it is not changed. Where it has as many
            results as there are now, or more, there is no other start.

    Returns:
        The model, of one output; :func:`bo_stream.prevalence` gives its prevalences.

    Raises:
        InputDataError: Positions are not in the settings' units, covariates are missing, rows are
            no counts.
    """
    settings = settings or SurveyModelSettings()
    others = Outliers.like(Y[:, 0].double(), Y[:, 1].double(), settings.outliers)
    likelihood = BinomialLikelihood(
        settings.trials,
        settings.overdispersion,
        outliers=others.share,
        outlier_beta=(others.a, others.b),
    )
    model = OSVGP(
        X[:0],
        Y[:0],
        likelihood,
        covar_module=survey_kernel(sites, units=settings.units),
        mean_module=_mean_about(Y),
        input_transform=map_inputs(sites, units=settings.units),
        max_points=settings.max_points,
        learning_rate=CONCENTRATION_RATE,
        window=0,  # all results enter as one batch
    )
    starts = [model]
    if former is None or float(former.num_observations) < len(X):
        starts.append(deepcopy(model))
        position = starts[-1].covar_module.kernels[0]
        position.base_kernel.lengthscale = SMOOTH[0] * position.base_kernel.lengthscale.detach()
        position.outputscale = SMOOTH[1] * position.outputscale.detach()
    if former is not None:
        set_hyperparameters(model, hyperparameters(former))
    if len(X) == 0:
        return model
    ends = []
    for start in starts:
        start.update(X, Y)
        start.hyper_steps = CONCENTRATION_STEPS if settings.overdispersion else 0
        ends.append(_round(start, X, Y))
    model, loss = min(ends, key=lambda end: end[1])
    for _ in range(1, FIRST_ROUNDS if former is None else ROUNDS):
        again, reached = _round(deepcopy(model), X, Y)
        gain = loss - reached
        if gain > 0.0:
            model, loss = again, reached
        if gain < SETTLED:
            break
    if settings.overdispersion:
        model.hyper_steps = 0
        relearn(model)
        model.clear().update(X, Y)
    return model


def _round(model: OSVGP, X: Tensor, Y: Tensor) -> tuple[OSVGP, float]:
    """Learn hyperparameters, in place, then find sites; and return what is minimised, in nats."""
    relearn(model)
    model.clear().update(X, Y)
    return model, total_loss(model)


def _mean_about(Y: Tensor) -> ConstantMean:
    """Make the mean logit, with a prior about the logit of the prevalence of all examined."""
    positives, examined = Y.double().sum(0)
    logit = float(torch.logit((positives + 0.5) / (examined + 1.0)))
    mean = ConstantMean(constant_prior=NormalPrior(logit, MEAN_SD))
    mean.initialize(constant=logit)
    return mean.to(Y)

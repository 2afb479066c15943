"""Outcomes at single points: their moments, log density and draws, with the noise in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from botorch.models.utils import fantasize as fantasize_flag
from botorch.sampling.base import MCSampler
from torch import Tensor

from bo_stream.models.checks import check_hypothetical
from bo_stream.models.outcomes.base import Drawing

if TYPE_CHECKING:
    from bo_stream.models.base import StreamingGP


@dataclass(frozen=True)
class Predictive:
    """Mean and variance of outcomes at single points, ``... x q x m`` each.

    Attributes:
        mean: Of a label, its probability; of counts, the positives of a hypothetical survey.
        variance: Of the outcome, noise included.
    """

    mean: Tensor
    variance: Tensor


def predictive(model: StreamingGP, X: Tensor) -> Predictive:
    """Mean and variance of outcomes at single points; differentiable in X.

    Of the likelihood's marginal: in closed form where gpytorch has one (Bernoulli, Gaussian),
    else by quadrature. Cost as that of a posterior's variances.

    Args:
        model: Itself.
        X: ``... x q x d``.

    Raises:
        BotorchTensorDimensionError: X has the wrong width or too few dimensions.
        InputDataError: X has a wrong dtype or device, or is not finite.
        UnsupportedError: An outcome transform other than ``Standardize``.
    """
    inputs, mean, variance = model._marginals(X)
    noise = partial(model.noise_at, inputs)
    mean, variance = model._units.moments(model._prior, mean, variance, noise)
    offset, scale = model._offset_and_scale()
    return Predictive((offset + scale * mean).mT.to(X), (scale.square() * variance).mT.to(X))


def log_predictive(model: StreamingGP, X: Tensor, Y: Tensor) -> Tensor:
    """Log density, or log probability, of each outcome at its point, ``... x q x m``.

    In closed form as :meth:`predictive`, and of a Laplace likelihood; else by quadrature, which
    is rough where the process is many times less certain than the likelihood is wide.

    Args:
        model: Itself.
        X: ``... x q x d``.
        Y: ``...' x q x m``, leading dimensions broadcast against those of X.

    Raises:
        BotorchTensorDimensionError: A wrong width, number of rows or batch shape.
        InputDataError: A wrong dtype or device, NaN or infinity; outcomes that the likelihood
            cannot have.
        UnsupportedError: An outcome transform other than ``Standardize``.
    """
    inputs, mean, variance = model._marginals(X)
    check_hypothetical(mean.mT.to(X), Y, None, model.num_outputs * model._units.columns)
    targets, noise = model._standardized(Y.to(torch.float64)).mT, partial(model.noise_at, inputs)
    density = model._units.log_density(model._prior, targets, mean, variance, noise)
    return (density - model._offset_and_scale()[1].log()).mT.to(X)


def drawn(
    model: StreamingGP, X: Tensor, sampler: MCSampler, drawing: Drawing
) -> tuple[Tensor, Tensor | None]:
    """Outcomes drawn from their joint posterior at X, ``sample_shape x ... x q x (m, counts 2)``.

    And their noise variances where these are not the model's own.
    """
    if X.shape[-2] == 0:
        width = model.num_outputs * model._units.columns
        nothing = X.new_empty(*sampler.sample_shape, *X.shape[:-1], width)
        return nothing, None
    with fantasize_flag():
        samples = sampler(model.posterior(X))
    values = model._standardized(samples.to(torch.float64)).mT
    kept = values.shape[values.ndim - len(model._batch_shape) - 2 :]
    flat = values.reshape(sampler.sample_shape.numel(), -1, *kept)
    outcomes, noise = drawing(flat, sampler.seed)
    offset, scale = model._offset_and_scale()
    Y = (offset + scale * outcomes.view(*values.shape[:-2], *outcomes.shape[-2:])).mT.to(X)
    return Y, None if noise is None else noise.view(values.shape).mT.to(X)

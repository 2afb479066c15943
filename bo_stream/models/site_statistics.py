"""Sites as statistics: Gaussian pseudo-observations of unit noise level, and their scale."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from bo_stream.models.inducing_memory import InducingMemory, Missed
from bo_stream.models.memory import Whitened, WhitenedMemory
from bo_stream.sufficient_statistics import SufficientStatistics, target_columns
from bo_stream.variational import Fit


def site_statistics(features: Tensor, fit: Fit, targets: Tensor) -> Whitened:
    """Statistics whose likelihood is the product of sites at their scales. Cost O(n M²).

    A site is a Gaussian observation of ``shift / precision`` with variance ``1 / precision``, so
    that a constant mean may change after the data are gone. The energy holds the scales too: the
    collapsed bound of the statistics is the online bound. The noise is all in the columns.

    Args:
        features: Whitened, ``... x m x n x M``.
        fit: Of the sites, ``... x m x n``.
        targets: Outcomes, ``... x m x n``.
    """
    precision, shift = fit.sites.precision, fit.sites.shift
    columns = torch.stack((shift, precision), -1)
    outcomes = target_columns(targets)
    first = -2.0 * fit.log_scale.sum(-1) - math.log(2.0 * math.pi) * targets.shape[-1]
    cross, last = shift.sum(-1), precision.sum(-1)
    zero = torch.zeros_like(cross)
    return SufficientStatistics(
        features.mT @ (features * precision.unsqueeze(-1)),
        features.mT @ columns,
        torch.stack((torch.stack((first, cross), -1), torch.stack((cross, last), -1)), -2),
        outcomes.mT @ outcomes,
        zero,
        zero,
    )


def with_sites(
    memory: InducingMemory,
    features: Tensor,
    residual: Tensor,
    fit: Fit,
    targets: Tensor,
    sign: float,
) -> InducingMemory:
    """A memory with a batch of sites more, or less.

    Args:
        memory: In the basis of the features.
        features: Whitened, ``... x m x n x M``.
        residual: Variance that these miss, ``... x m x n``.
        fit: Of the sites.
        targets: Outcomes, ``... x m x n``.
        sign: 1 to add, −1 to take out.
    """
    batch = site_statistics(features, fit, targets).scale(sign)
    missed = sign * (residual * fit.sites.precision).sum(-1)
    return replace(
        memory,
        statistics=WhitenedMemory(memory.statistics.learned + batch, None),
        missed=memory.missed + Missed(missed, torch.zeros_like(missed)),
    )

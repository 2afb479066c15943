"""Warnings of models, and a log of jitters and fallbacks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from botorch.exceptions.warnings import BotorchWarning
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from bo_stream.allocation.oips import NOVEL
from bo_stream.bases.kernels import RadialPart

_LIBRARIES = ("bo_stream", "torch", "gpytorch", "botorch")


def users_stack_level() -> int:
    """Return the ``stacklevel`` of the user's code, for the caller's ``warnings.warn``.

    It is the first frame outside the libraries: gpytorch's modules and BoTorch's fits put a model
    into evaluation mode as often as a user does.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _LIBRARIES:
            break
        level, frame = level + 1, frame.f_back
    return level


class ProductKernelWarning(BotorchWarning):
    """A kernel of the distance in several inputs was replaced by a product over inputs."""


def warn_of_product(parts: Sequence[RadialPart]) -> None:
    """Warn that Matérn kernels of several inputs were replaced by products, and of the change.

    Args:
        parts: The replaced kernels, one or more.
    """
    changes = dict.fromkeys(
        f"of inputs {part.inputs}, nu {part.kernel.nu:g}: {{:.3f}} becomes {{:.3f}}".format(
            *part.correlations()
        )
        for part in parts
    )
    warnings.warn(
        "A grid represents products of one-dimensional kernels, which a MaternKernel of several "
        "inputs is not: covar_module is a copy of the one given, with a ProductMatern of the same "
        "hyperparameters in its place. The correlation of points one lengthscale apart in every "
        f"input ({'; '.join(changes)}). Give bo_stream.ProductMatern for the product, or take "
        "OSGPR, or AutoGP without families, to keep the kernel.",
        ProductKernelWarning,
        stacklevel=users_stack_level(),
    )


class CoarsePointsWarning(BotorchWarning):
    """Inducing points, centres, grid nodes or features miss more than the noise hides."""


class ShortTrainingWarning(BotorchWarning):
    """A training was cut short, or its model has not come far: see the result of ``fit``."""


class WideVarianceWarning(BotorchWarning):
    """Predicted variances are far larger than the errors: see the result of ``fit``."""


def warn_of_coarse_points(ratio: float, points: int, max_points: int) -> None:
    """Warn that inducing points are coarser than the noise, with remedies.

    Args:
        ratio: Prior variance that the points leave unknown at the observations, in mean, in units
            of their noise variances.
        points: Number of points.
        max_points: Largest number of points.
    """
    warnings.warn(
        f"{points:,} inducing points leave, in mean over the observations, {ratio:.2g} times the "
        "noise variance of the process unknown: the approximation is coarser than the noise. Raise "
        f"max_points ({max_points:,}), or take an allocator that takes more points (of an AutoGP: "
        f"move_to(model.family, max_points={2 * max_points})).",
        CoarsePointsWarning,
        stacklevel=users_stack_level(),
    )


def warn_of_coarse_centres(ratio: float, resolution: float, max_centres: int | None) -> None:
    """Warn that clusters' centres are coarser than the noise, with remedies.

    Args:
        ratio: Prior variance of the process between an input and its cluster's centre, in mean
            over the observations, in units of their noise variances.
        resolution: Largest distance of an input from its centre.
        max_centres: Largest number of centres; None: the resolution was given.
    """
    remedy = "Build the model with a finer resolution"
    if max_centres is not None:
        remedy = f"Build the model with a larger max_centres ({max_centres:,})"
    warnings.warn(
        f"At a resolution of {resolution:.2g} the process differs between inputs and their "
        f"clusters' centres by {ratio:.2g} times the noise variance, in mean over the "
        "observations: the approximation is coarser than the noise, and predicted means may be off "
        f"by {ratio**0.5:.2g} of its standard deviations. {remedy}, or say that the noise is as "
        "large as that.",
        CoarsePointsWarning,
        stacklevel=users_stack_level(),
    )


def warn_of_small_outcomes(variance: float, noise: float, outputs: int) -> None:
    """Warn that outcomes vary as little as a model's least noise, with a remedy.

    Args:
        variance: Of the outcomes.
        noise: Least noise variance that the model begins with.
        outputs: Number of outputs m.
    """
    warnings.warn(
        f"Outcomes have a variance of {variance:.2g}, and the noise begins with {noise:g} or more: "
        "they would be taken for noise. Give them in a smaller unit, or "
        f"outcome_transform=Standardize({outputs}).",
        NumericalWarning,
        stacklevel=users_stack_level(),
    )


_LOST = 1e-3
"""Rounding error of a sum of squares, in parts of what is left, from which there is a warning."""

_FAR = 1e8
"""Squares that are taken out, over those that are left, from which there may be one."""


def warn_of_lost_digits(after: Tensor, before: Tensor) -> None:
    """Warn where outcomes were so large that the others' squares were rounded away beside theirs.

    Args:
        after: ``[Y, 1]ᵀ [Y, 1]`` of the outcomes that are left, ``... x 2 x 2``.
        before: With those that were taken out.
    """
    count = after[..., 1, 1].clamp_min(1.0)
    squares = after[..., 0, 0] - after[..., 0, 1].square() / count
    gone = before[..., 0, 0] - after[..., 0, 0]
    lost = torch.finfo(before.dtype).eps * gone > _LOST * squares
    far = gone > _FAR * after[..., 0, 0]  # those that are left may all be equal
    if bool((lost & far & (after[..., 1, 1] > 1.5)).any()):
        warnings.warn(
            "Outcomes were taken out that are so much larger than the others that sums of these "
            "were rounded beside them: what is learned from now on (scale, noise) is not what the "
            "others say, nor are predictions, if they were larger still. Build the model again "
            "without those outcomes.",
            NumericalWarning,
            stacklevel=users_stack_level(),
        )


MOST_RESIDUAL = 3.0
"""Root mean square residual, in standard deviations of the known noise, that needs no warning."""


def warn_of_few_features(residual: float, features: int) -> None:
    """Warn that features explain outcomes less precisely than their noise, with remedies.

    Args:
        residual: Root mean square of outcomes less the posterior mean, in standard deviations of
            their noise.
        features: Number of features.
    """
    warnings.warn(
        f"{features:,} features leave outcomes {residual:.2g} standard deviations of their known "
        "noise from the posterior mean: predicted means elsewhere are off by as much, and more "
        "than predicted. Fit the model, give it a wider network, or say that the noise is as large "
        "as that.",
        CoarsePointsWarning,
        stacklevel=users_stack_level(),
    )


def warn_of_neighbours(residual: float) -> None:
    """Warn that neighbouring local models are coarser than the noise, with remedies.

    Args:
        residual: Root mean square of outcomes less the posterior mean of local models, in standard
            deviations of their noise.
    """
    warnings.warn(
        f"Averages of neighbouring local models lie {residual:.2g} standard deviations of the "
        "known noise from the outcomes that some of them have seen, and predictions elsewhere are "
        "as coarse; posterior variances are as large. Take OSGPR or AutoGP for an interpolating "
        "process, raise max_size, or say that the noise is as large as that.",
        CoarsePointsWarning,
        stacklevel=users_stack_level(),
    )


_FAR_OUT = 1e4
"""Norm of whitened weights beyond which outcomes are not draws from the prior."""

MOST_ERROR = 0.1
"""Error of a posterior mean, in posterior standard deviations, that passes without a warning."""


def error_of_rounding(weights: Tensor, precision: Tensor) -> float:
    """Estimate the error of a posterior mean by rounding, in posterior standard deviations.

    ``NOVEL · |w| / σ²``: a kernel in float64 at inducing points is known up to ``NOVEL`` of the
    prior variance, and the whitened weights w multiply this error. Against a process in 60 digits
    (a squared exponential kernel, lengthscale 0.4, 40 inputs on a line, one outcome of 1e5 or 1e8,
    noise 1e-2 to 1e-6) the largest errors were 0.1 to 2 times the estimate; in two and three
    dimensions, where kernel matrices are better conditioned, less than a hundredth of it.

    Args:
        weights: Posterior mean of the whitened weights, ``... x m x M x 1``.
        precision: Mean precision ``1 / σ²`` of an observation, ``... x m``.
    """
    norm = weights.square().sum((-2, -1)).sqrt()
    if norm.numel() == 0 or float(norm.max()) <= _FAR_OUT:
        return 0.0
    return NOVEL * float((norm * precision).max())


def warn_of_rounding(error: float) -> None:
    """Warn that rounding makes posterior means inexact, with remedies.

    Args:
        error: See :func:`error_of_rounding`.
    """
    warnings.warn(
        "Outcomes lie so far from the process that float64 does not resolve the others: posterior "
        f"means may be off by up to {error:.1g} posterior standard deviations. Drop or clip "
        "outliers, standardise Y, or raise the noise variance.",
        NumericalWarning,
        stacklevel=users_stack_level(),
    )


class ProjectionWarning(UserWarning):
    """A memory was expressed by points that do not determine it: an approximation from now on."""


@dataclass(frozen=True)
class NumericalEvent:
    """A jitter or fallback that a model used, once or several times.

    Attributes:
        what: The remedy, in words.
        size: Largest size so far of a matrix, or number of points, that needed it.
        jitter: Jitter relative to the mean of the diagonal; 0 for a remedy without jitter.
        observations: Number of observations in memory when it was first used.
        times: Number of uses so far.
    """

    what: str
    size: int
    jitter: float
    observations: float
    times: int = 1

    def __str__(self) -> str:
        jitter = f", jitter {self.jitter:.0e}" if self.jitter else ""
        size = f" (size {self.size:,}{jitter})" if self.size else ""
        often = f", {self.times:,} times" if self.times > 1 else ""
        return f"{self.what}{size}, first at {self.observations:,.0f} observations{often}"


NumericalLog = tuple[NumericalEvent, ...]
"""Events in the order of their first use, one for each remedy."""


def with_event(log: NumericalLog, event: NumericalEvent) -> NumericalLog:
    """Append an event to a log, or count it where the log has the same remedy and jitter."""
    for i, known in enumerate(log):
        if (known.what, known.jitter) == (event.what, event.jitter):
            size, times = max(known.size, event.size), known.times + event.times
            return (*log[:i], replace(known, size=size, times=times), *log[i + 1 :])
    return (*log, event)

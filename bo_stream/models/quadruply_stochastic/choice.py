"""Choices of functions and covariance, and checks of a constructor's arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import _DefaultType
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    GaussianLikelihood,
    LaplaceLikelihood,
    Likelihood,
    PoissonLikelihood,
)
from torch import Tensor

from bo_stream.allocation.allocator import checked_number
from bo_stream.likelihoods.outcome_model import LogisticLikelihood
from bo_stream.models.outcomes.likelihood import REAL, check_transform


@dataclass(frozen=True)
class FourierFeatures:
    """Random Fourier features, for RBF and Matérn kernels.

    Attributes:
        count: Number of features, even: a cosine and a sine of each frequency. Up to 10⁷; more are
            never worse, and cost memory but no time in a step.
        seed: Of the frequencies.
    """

    count: int = 20_000
    seed: int = 0

    def __post_init__(self) -> None:
        if checked_number("count", self.count, 2) % 2 != 0:
            raise ValueError(f"Expected an even count of Fourier features, got {self.count}.")


@dataclass(frozen=True)
class InducingAtData:
    """Kernel functions at the data, for any kernel.

    Attributes:
        max_points: Most of them; data beyond add none.
    """

    max_points: int = 100_000

    def __post_init__(self) -> None:
        checked_number("max_points", self.max_points)


@dataclass(frozen=True)
class MeanField:
    """A posterior covariance of weights that is diagonal."""

    @property
    def columns(self) -> int:
        """No column is dense."""
        return 0


@dataclass(frozen=True)
class Chevron:
    """A posterior covariance of weights whose root has a few dense columns.

    Attributes:
        columns: How many; the first functions are theirs. Memory and time are this many times
            those of ``MeanField``.
    """

    columns: int

    def __post_init__(self) -> None:
        checked_number("columns", self.columns)


def choose_empirical_bayes(asked: bool | None, basis: FourierFeatures | InducingAtData) -> bool:
    """Learn hyperparameters where S is diagonal, unless the user says not.

    Raises:
        UnsupportedError: They are to be learned where S is not diagonal.
    """
    diagonal = isinstance(basis, FourierFeatures)
    if asked and not diagonal:
        raise UnsupportedError(
            "empirical_bayes needs a diagonal prior precision, but that of InducingAtData is the "
            "kernel's matrix, whose determinant cannot be estimated from a few functions. Take "
            "basis=FourierFeatures(), or QSRVM, or fit the hyperparameters of an exact GP on "
            "some of the data and give its covar_module and likelihood."
        )
    return diagonal if asked is None else asked


def choose_transform(
    transform: OutcomeTransform | _DefaultType | None, likelihood: Likelihood | None
) -> OutcomeTransform | _DefaultType | None:
    """Choose a standardisation of real outcomes by default, of others none.

    Raises:
        UnsupportedError: Another transform, or one of labels or counts.
    """
    if isinstance(transform, _DefaultType):
        is_real = likelihood is None or isinstance(likelihood, REAL)
        return transform if is_real else None
    check_transform(transform, likelihood)
    return transform


def check_unbatched(X: Tensor) -> None:
    """Check that there are no batch dimensions.

    Raises:
        UnsupportedError: There are.
    """
    if isinstance(X, Tensor) and X.ndim > 2:
        raise UnsupportedError(
            f"Expected train_X of shape `n x d`, got {tuple(X.shape)}: this model takes no "
            "batches. Build one for each batch element."
        )


def check_arithmetic(dtype: torch.dtype) -> torch.dtype:
    """Check the dtype that a model works in.

    Raises:
        ValueError: It is neither of the two.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"Expected arithmetic in torch.float32 or torch.float64, got {dtype}.")
    return dtype


def check_columns(columns: int, basis: FourierFeatures | InducingAtData) -> None:
    """Check that there are as many functions as dense columns.

    Raises:
        ValueError: There are fewer.
    """
    most = basis.count if isinstance(basis, FourierFeatures) else basis.max_points
    if columns > most:
        raise ValueError(f"Expected at most {most} columns of Chevron, got {columns}.")


def check_gaussian(likelihood: Likelihood | None) -> None:
    """Check that a likelihood is Gaussian.

    Raises:
        UnsupportedError: It is not.
    """
    if likelihood is not None and not isinstance(likelihood, GaussianLikelihood):
        raise UnsupportedError(
            f"Expected likelihood to be a GaussianLikelihood, got {type(likelihood).__name__}: "
            "precisions are learned for that alone. For other likelihoods take QSGP."
        )


LOG_CONCAVE = (
    GaussianLikelihood,
    LaplaceLikelihood,
    BernoulliLikelihood,
    LogisticLikelihood,
    PoissonLikelihood,
)
"""Likelihoods whose logarithm is concave in the function value."""


def check_log_concave(likelihood: Likelihood) -> None:
    """Check that Theorem 3 bounds a likelihood.

    Raises:
        UnsupportedError: Its logarithm is not known to be concave.
    """
    if not isinstance(likelihood, LOG_CONCAVE):
        names = ", ".join(one.__name__ for one in LOG_CONCAVE)
        raise UnsupportedError(
            f"Expected a likelihood whose logarithm is concave ({names}), got "
            f"{type(likelihood).__name__}: with a few functions drawn, Jensen's inequality would "
            "not make the estimate a lower bound. For outliers take LaplaceLikelihood, for any "
            "likelihood OSVGP."
        )

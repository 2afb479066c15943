"""What the constructor of a quadruply stochastic model checks and chooses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import _DefaultType
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from bo_stream.allocation.numbers import checked_number
from bo_stream.models.latent_choice import REAL, check_transform
from bo_stream.models.weight_layout import FourierFeatures, InducingAtData


@dataclass(frozen=True)
class StepOptions:
    """How a model learns; see :class:`~bo_stream.QSGP` for what each means.

    Attributes:
        batch_size: Of data.
        functions: Drawn.
        control_points: Of the control variate.
        update_steps: Of an update.
        initial_points: Of the exact GP.
        freeze_steps: Of the hyperparameters.
        learning_rate: Of weights.
        hyper_rate: Of hyperparameters.
        half_life: Of both.
    """

    batch_size: int | None
    functions: int | None
    control_points: int
    update_steps: int
    initial_points: int
    freeze_steps: int
    learning_rate: float
    hyper_rate: float
    half_life: float

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("functions", 1),
            ("control_points", 0),
            ("update_steps", 0),
            ("initial_points", 0),
            ("freeze_steps", 0),
        ):
            value = getattr(self, name)
            if value is not None:
                checked_number(name, value, least)
        for name in ("learning_rate", "half_life"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"Expected {name} to be positive, got {getattr(self, name)}.")
        if not self.hyper_rate >= 0.0:
            raise ValueError(f"Expected hyper_rate to be at least 0, got {self.hyper_rate}.")


def choose_empirical_bayes(asked: bool | None, basis: FourierFeatures | InducingAtData) -> bool:
    """Whether hyperparameters are learned: where S is diagonal, unless the user says not.

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
    """Of real outcomes a standardisation by default, of others none.

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

"""What the constructor of a quadruply stochastic model checks and chooses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.utils.types import _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from bo_stream.allocation.allocator import checked_number
from bo_stream.bases.sampled import (
    FourierBasis,
    PointBasis,
    RelevanceBasis,
    SampledBasis,
    check_spectral,
)
from bo_stream.models.latent_choice import REAL, check_transform


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
        """None that are dense."""
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


class Layout(ABC):
    """The functions of a model, as they are now."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number p of functions."""

    @abstractmethod
    def basis(self, kernel: Kernel, precisions: Tensor | None) -> SampledBasis:
        """Of a kernel, and of precisions ``m x p`` where functions have their own."""

    @abstractmethod
    def grown(self, X: Tensor) -> Layout:
        """With functions for further inputs, ``n x d``, or the same."""

    @property
    @abstractmethod
    def points(self) -> Tensor:
        """Where the functions are, ``p x d``; none where they are nowhere."""

    @abstractmethod
    def since(self, start: int) -> Layout:
        """The functions from one on, as functions of their own."""

    @abstractmethod
    def select(self, outputs: list[int]) -> Layout:
        """Of some outputs."""

    @abstractmethod
    def to(self, device: torch.device) -> Layout:
        """On another device."""


@dataclass(frozen=True)
class FourierLayout(Layout):
    """Features from a seed.

    Attributes:
        choice: What the user said.
    """

    choice: FourierFeatures

    @property
    def size(self) -> int:
        """Number p of features."""
        return self.choice.count

    def basis(self, kernel: Kernel, precisions: Tensor | None) -> SampledBasis:
        """Of a kernel."""
        return FourierBasis(kernel, self.choice.count, self.choice.seed)

    def grown(self, X: Tensor) -> Layout:
        """The same."""
        return self

    @property
    def points(self) -> Tensor:
        """None."""
        return torch.zeros(0, 0)

    def since(self, start: int) -> Layout:
        """All: they come at once."""
        return self

    def select(self, outputs: list[int]) -> Layout:
        """The same: outputs differ by their kernels only."""
        return self

    def to(self, device: torch.device) -> Layout:
        """The same."""
        return self


@dataclass(frozen=True)
class PointLayout(Layout):
    """Kernel functions at points.

    Attributes:
        Z: ``p x d``.
        outputs: m.
        limit: Most points.
    """

    Z: Tensor
    outputs: int
    limit: int

    @property
    def size(self) -> int:
        """Number p of points."""
        return len(self.Z)

    def basis(self, kernel: Kernel, precisions: Tensor | None) -> SampledBasis:
        """With ``S = K_ZZ``, or with precisions of their own."""
        if precisions is None:
            return PointBasis(kernel, self.Z, self.outputs)
        return RelevanceBasis(kernel, self.Z, self.outputs, precisions)

    def grown(self, X: Tensor) -> Layout:
        """With the inputs as points, as many as there is room for."""
        room = max(0, self.limit - len(self.Z))
        return self if room == 0 else replace(self, Z=torch.cat((self.Z, X[:room].to(self.Z))))

    @property
    def points(self) -> Tensor:
        """Z."""
        return self.Z

    def since(self, start: int) -> Layout:
        """At the later points."""
        return replace(self, Z=self.Z[start:])

    def select(self, outputs: list[int]) -> Layout:
        """At the same points."""
        return replace(self, outputs=len(outputs))

    def to(self, device: torch.device) -> Layout:
        """On another device."""
        return replace(self, Z=self.Z.to(device))


def layout_of(
    choice: FourierFeatures | InducingAtData, kernel: Kernel, X: Tensor, outputs: int
) -> Layout:
    """The first functions.

    Args:
        choice: Of the user.
        kernel: Of the model.
        X: First inputs, ``n x d``, float64; none of them is a point yet.
        outputs: m.

    Raises:
        UnsupportedError: The kernel has no such features.
    """
    if isinstance(choice, FourierFeatures):
        check_spectral(kernel)
        return FourierLayout(choice)
    return PointLayout(X[:0], outputs, choice.max_points)


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

"""Which basis functions a quadruply stochastic model has, and what a user says of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.numbers import checked_number
from bo_stream.bases.fourier import FourierBasis, check_spectral
from bo_stream.bases.point_basis import PointBasis, RelevanceBasis
from bo_stream.bases.sampled_basis import SampledBasis


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

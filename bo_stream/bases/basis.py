"""The interface of a basis: whitened features and the residual covariance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Basis(ABC):
    """Features z of a Gaussian process with ``k(x, x') = z(x)ᵀ z(x') + residual(x, x')``.

    Whitened: the prior over weights is N(0, I), the prior root is folded into the features.

    Attributes:
        has_residual: Whether there is a residual; without one, functions of the process are
            combinations of the features.
    """

    has_residual: ClassVar[bool] = False

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number r of features."""

    @abstractmethod
    def features(self, X: Tensor) -> Tensor:
        """Compute the features, ``... x n x d -> ... x m x n x r``, differentiable in X."""

    def residual_covariance(
        self, X: Tensor, X2: Tensor, features: Tensor, features2: Tensor
    ) -> Tensor | None:
        """Compute ``k − z zᵀ``, ``... x m x n x n'``, from the features at both; None is zero."""
        return None

    def residual_variance(self, X: Tensor, features: Tensor | None = None) -> Tensor | None:
        """Compute the diagonal of the residual covariance, ``... x m x n``; None is zero."""
        return None

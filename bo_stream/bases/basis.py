"""The interface of a basis: whitened features and the residual covariance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor


class Basis(ABC):
    """Features z of a Gaussian process with ``k(x, x') = z(x)ᵀ z(x') + residual(x, x')``.

    Whitened: the prior over weights is N(0, I), the prior root is folded into the features.

    Attributes:
        has_residual: Whether there may be a residual; without one, functions of the process are
            combinations of the features.
    """

    has_residual: ClassVar[bool] = True

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number r of features."""

    @abstractmethod
    def features(self, X: Tensor) -> Tensor:
        """Compute the features, ``... x n x d -> ... x m x n x r``, differentiable in X."""

    @abstractmethod
    def residual_covariance(
        self,
        X: Tensor,
        X2: Tensor,
        features: Tensor | None = None,
        features2: Tensor | None = None,
    ) -> Tensor | None:
        """Compute ``k − z zᵀ``, ``... x m x n x n'``; None where it is zero everywhere.

        Args:
            X: ``... x n x d``.
            X2: ``... x n' x d``.
            features: At X, if they are known already.
            features2: At X2, if they are known already.
        """

    @abstractmethod
    def residual_variance(self, X: Tensor, features: Tensor | None = None) -> Tensor | None:
        """Compute the diagonal of the residual covariance, ``... x m x n``, or None likewise."""

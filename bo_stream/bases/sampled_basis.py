"""The interface of a basis of which some functions at a time are evaluated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from gpytorch.kernels import Kernel
from torch import Tensor


class SampledBasis(ABC):
    """Functions φ of a process ``f = φ w``, ``w ~ N(0, S⁻¹)``, any few of them at their own cost.

    ``k(x, x') ≈ φ(x) S⁻¹ φ(x')ᵀ``. [Evans2020, section 2]
    """

    kernel: Kernel

    @abstractmethod
    def with_kernel(self, kernel: Kernel, outputs: int) -> Self:
        """The same functions of another kernel, of m outputs; precisions of their own stay."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number p of functions."""

    @property
    @abstractmethod
    def is_diagonal(self) -> bool:
        """Whether S is diagonal."""

    @abstractmethod
    def functions(self, X: Tensor, index: Tensor) -> Tensor:
        """Some functions, ``... x n x d`` and ``k`` to ``... x m x n x k``.

        Differentiable in X and in the kernel's hyperparameters.
        """

    @abstractmethod
    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """``S[index, others]``, ``m x k x k'``, or with 1 for m where outputs share it."""

    @abstractmethod
    def precision_diagonal(self, index: Tensor) -> Tensor:
        """The diagonal of S at some functions, ``m x k``, or with 1 for m."""

    @abstractmethod
    def mean_squares(self, X: Tensor) -> Tensor:
        """About the mean of each function's square at inputs like X, ``m x p``, or with 1 for m.

        Cost O(p), times the number of inputs where there is no closed form.
        """

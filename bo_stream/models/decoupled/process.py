"""A process whose mean lives in a basis of its own."""

from __future__ import annotations

from dataclasses import dataclass

from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.functions import InducingFunctions
from bo_stream.linalg import row_product
from bo_stream.process.process import Joint, Points, PosteriorProcess


@dataclass(frozen=True)
class KernelExpansion:
    """A function ``x ↦ k(x, α) a`` of each output.

    Attributes:
        kernel: Any.
        functions: α.
        weights: a, ``... x m x M``.
    """

    kernel: Kernel
    functions: InducingFunctions
    weights: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """Values at ``... x n x d`` inputs, ``... x m x n``. Cost O(n M d)."""
        cross = self.functions.with_values(self.kernel, X, self.weights.shape[-2])
        return row_product(self.weights.unsqueeze(-2), cross).squeeze(-2)


@dataclass(frozen=True)
class ShiftedProcess(PosteriorProcess):
    """A process with a function added to its mean; covariances are the base's.

    Attributes:
        base: The process before.
        shift: The function.
    """

    base: PosteriorProcess
    shift: KernelExpansion

    def at(self, X: Tensor) -> Points:
        """Evaluate the base's features."""
        return self.base.at(X)

    def mean_at(self, points: Points) -> Tensor:
        """The base's and the function."""
        return self.base.mean_at(points) + self.shift(points.X)

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """The base's."""
        return self.base.cross_covariance(points, others)

    def variance_at(self, points: Points) -> Tensor:
        """The base's."""
        return self.base.variance_at(points)

    def joint_at(self, points: Points) -> Joint:
        """The base's factors around another mean."""
        base = self.base.joint_at(points)
        return Joint(base.mean + self.shift(points.X), base.root, base.downdate, base.residual)

"""Parts of functions drawn from a posterior: each is a function of the inputs, in closed form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.acquisition.weight_space import check_inside
from bo_stream.bases.basis import Basis
from bo_stream.bases.spectral import FourierFunctions
from bo_stream.linalg import row_product
from bo_stream.models.clustered.solver import cross_matrix
from bo_stream.models.decoupled.process import KernelExpansion
from bo_stream.models.quadruply_stochastic.function_process import FunctionProcess
from bo_stream.process.process import Points, PosteriorProcess

Rule = Callable[[Tensor], Tensor]


class PathTerm(ABC):
    """A function of each draw, batch element and output, in transformed units.

    Drawn tensors have the leading dimensions ``sample_shape x batch_shape x m``.
    """

    @abstractmethod
    def __call__(self, X: Tensor) -> Tensor:
        """Values at transformed inputs, float64, ``... x n x d -> ... x m x n``."""

    @abstractmethod
    def map(self, rule: Rule) -> Self:
        """The functions after a rule for the first dimensions of all drawn tensors."""


@dataclass(frozen=True)
class Mean(PathTerm):
    """A process's mean, the same for every draw.

    Attributes:
        process: Any.
    """

    process: PosteriorProcess

    def __call__(self, X: Tensor) -> Tensor:
        """The mean."""
        return self.process.mean(X)

    def map(self, rule: Rule) -> Self:
        """Nothing is drawn."""
        return self


@dataclass(frozen=True)
class Constant(PathTerm):
    """A prior mean, the same for every draw.

    Attributes:
        value: ``... x m x 1``.
    """

    value: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """The constant, which broadcasts."""
        return self.value

    def map(self, rule: Rule) -> Self:
        """Nothing is drawn."""
        return self


@dataclass(frozen=True)
class Features(PathTerm):
    """``z(x)ᵀ w``.

    Attributes:
        basis: Gives the features z.
        weights: w, ``... x m x r x 1``.
    """

    basis: Basis
    weights: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """Cost O(n r) beside the features.

        Raises:
            InputDataError: X lies outside the box of the basis's grid.
        """
        check_inside(self.basis, X)
        return row_product(self.basis.features(X), self.weights).squeeze(-1)

    def map(self, rule: Rule) -> Self:
        """A rule for w."""
        return replace(self, weights=rule(self.weights))


@dataclass(frozen=True)
class Prior(PathTerm):
    """Functions drawn from the prior, of mean zero.

    Attributes:
        functions: In random frequencies.
    """

    functions: FourierFunctions

    def __call__(self, X: Tensor) -> Tensor:
        """Cost O(n p d)."""
        return self.functions(X)

    def map(self, rule: Rule) -> Self:
        """A rule for what is drawn."""
        return replace(self, functions=self.functions.map(rule))


@dataclass(frozen=True)
class KernelSum(PathTerm):
    """``Σ_i a_i k(x, z_i)``.

    Attributes:
        kernel: Frozen, in the dtype of Z.
        Z: ``M x d``, M > 0.
        outputs: m.
        weights: a, ``... x m x M x 1``.
    """

    kernel: Kernel
    Z: Tensor
    outputs: int
    weights: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """Cost O(n M d)."""
        cross = cross_matrix(self.kernel, X.to(self.Z), self.Z, self.outputs)
        return row_product(cross, self.weights.to(cross)).squeeze(-1).double()

    def map(self, rule: Rule) -> Self:
        """A rule for a."""
        return replace(self, weights=rule(self.weights))


@dataclass(frozen=True)
class Expansion(PathTerm):
    """``Σ_i a_i cov(x, i)`` with linear functionals i of the process.

    Attributes:
        expansion: The sum.
        drawn: Whether a is drawn, or the same for every draw.
    """

    expansion: KernelExpansion
    drawn: bool

    def __call__(self, X: Tensor) -> Tensor:
        """Cost O(n M d)."""
        return self.expansion(X)

    def map(self, rule: Rule) -> Self:
        """A rule for a, if it is drawn."""
        if not self.drawn:
            return self
        weights = rule(self.expansion.weights)
        return replace(self, expansion=replace(self.expansion, weights=weights))


@dataclass(frozen=True)
class Update(PathTerm):
    """``Σ_i a_i cov(f(x), f(x_i))`` with the covariance of a process.

    Attributes:
        process: Any.
        points: The x_i, ``... x q x d`` evaluated by the process.
        weights: a, ``... x m x q x 1``.
    """

    process: PosteriorProcess
    points: Points
    weights: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """Cost as of the process's cross-covariance."""
        cross = self.process.cross_covariance(self.process.at(X), self.points)
        return row_product(cross, self.weights).squeeze(-1)

    def map(self, rule: Rule) -> Self:
        """A rule for a."""
        return replace(self, weights=rule(self.weights))


@dataclass(frozen=True)
class WeightedFunctions(PathTerm):
    """``φ(x)ᵀ w`` of very many functions φ.

    Attributes:
        process: Evaluates them.
        weights: w, ``... x m x p``.
    """

    process: FunctionProcess
    weights: Tensor

    def __call__(self, X: Tensor) -> Tensor:
        """Cost O(n p)."""
        return self.process.weighted(self.process.at(X), self.weights)

    def map(self, rule: Rule) -> Self:
        """A rule for w."""
        return replace(self, weights=rule(self.weights))


@dataclass(frozen=True)
class Augmented(PathTerm):
    """``a(x) f(x)``: a drawn function in proportion to a process's augmentation.

    Attributes:
        process: Gives the factor a.
        functions: Gives f, from the prior.
    """

    process: FunctionProcess
    functions: FourierFunctions

    def __call__(self, X: Tensor) -> Tensor:
        """Cost O(n p)."""
        return self.process.augmentation_factor(self.process.at(X)) * self.functions(X)

    def map(self, rule: Rule) -> Self:
        """A rule for what is drawn."""
        return replace(self, functions=self.functions.map(rule))


@dataclass(frozen=True)
class Selected(PathTerm):
    """Some outputs of other functions.

    Attributes:
        terms: Of all outputs.
        outputs: Those to keep.
    """

    terms: tuple[PathTerm, ...]
    outputs: tuple[int, ...]

    def __call__(self, X: Tensor) -> Tensor:
        """Cost as of the terms."""
        return sum_of(self.terms, X)[..., list(self.outputs), :]

    def map(self, rule: Rule) -> Self:
        """A rule for what the terms have drawn."""
        return replace(self, terms=tuple(term.map(rule) for term in self.terms))


def sum_of(terms: tuple[PathTerm, ...], X: Tensor) -> Tensor:
    """Values of the sum of some functions, ``... x m x n``."""
    values = torch.broadcast_tensors(*(term(X) for term in terms))
    total: Any = sum(values)
    return total

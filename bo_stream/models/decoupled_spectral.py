"""Covariance functions that combine the mean's: the prior's leading eigenfunctions in their span.

Of all M_β functions that a process can be known by, the prior's leading eigenfunctions under the
inputs' distribution leave the least variance (kin40k: 128 of them 0.020, values at 128 learned
points 0.038, at 256 0.018). Here they are sought in the span of the values at some of α, and anew
as the kernel moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.function_basis import FunctionBasis
from bo_stream.bases.inducing_functions import InducingFunctions
from bo_stream.linalg import cholesky_with_nugget, solve_lower
from bo_stream.models.decoupled_bound import Expanded
from bo_stream.models.decoupled_posterior import NUGGET, DecoupledPosterior, HybridSpread

_RIDGE = 1e-6
"""Noise of the values that are combined, in parts of their variance, when eigenfunctions are
sought: where values say almost the same, their differences are left out of the combinations.
"""


@dataclass(frozen=True)
class SpectralSpread(HybridSpread):
    """A hybrid's, of combinations of the values at β, which are the first functions of α.

    Attributes:
        combination: L, ``... x m x S x M``; a function a column.
    """

    combination: Tensor

    def basis(self, kernel: Kernel, beta: InducingFunctions, outputs: int) -> FunctionBasis:
        """Of combinations. Cost O(S² (d + M) + M³)."""
        left = self.combination
        inner = left.mT @ beta.with_functions(kernel, beta, outputs) @ left
        return FunctionBasis(kernel, beta, outputs, cholesky_with_nugget(inner, NUGGET), left)

    def expansion(self, basis: FunctionBasis) -> Tensor:
        """What values at β each feature is made of, ``... x m x S x M``: ``L F⁻ᵀ``."""
        return solve_lower(basis.factor, self.combination.mT).mT

    def map(self, rule: Callable[[Tensor], Tensor]) -> SpectralSpread:
        """A rule for the tensors."""
        return SpectralSpread(rule(self.moment), rule(self.gram), rule(self.combination))


@torch.no_grad()
def with_eigenfunctions(now: Expanded, X: Tensor, span: int, most: int) -> DecoupledPosterior:
    """A posterior whose covariance functions fit the kernel as it is now; the mean stays.

    What the data have said of the functions before says the same of those that are in their span,
    and nothing yet of the others.

    Args:
        now: The posterior with its kernel.
        X: Inputs that stand for their distribution, ``... x n x d``.
        span: Most functions of α to combine, S; the first ones.
        most: Most combinations M_β.

    Returns:
        The posterior. Cost O(n S (d + S) + S³).
    """
    before, kernel, m = now.posterior, now.kernel, now.outputs
    beta = before.alpha.rows(slice(0, span))
    between = beta.with_functions(kernel, beta, m)
    combination = _eigenfunctions(beta, between, kernel, X, m, most)
    none = combination.new_zeros(*combination.shape[:-2], combination.shape[-1], 1)
    spread = SpectralSpread(none, none @ none.mT, combination)
    basis = spread.basis(kernel, beta, m)
    coefficients = now.coefficients.clone()
    if isinstance(before.spread, SpectralSpread) and len(before.beta) > 0:
        own = before.spread.expansion(now.basis)
        coefficients[..., : own.shape[-2]] += (own @ now.remaining).squeeze(-1)
        overlap = basis.whitened(between[..., : own.shape[-2]] @ own).mT
        spread = replace(spread, gram=overlap @ before.spread.gram @ overlap.mT)
    after = replace(before, beta=beta, spread=spread)
    after = after.with_expansion(coefficients, kernel, m)
    explained = replace(now, posterior=after).explained
    moment = explained + spread.gram @ explained
    return replace(after, spread=replace(spread, moment=moment))


def _eigenfunctions(
    beta: InducingFunctions, between: Tensor, kernel: Kernel, X: Tensor, outputs: int, most: int
) -> Tensor:
    """Combinations of values that account for most of the variance at X, ``... x m x S x M``."""
    root = cholesky_with_nugget(between, _RIDGE)
    features = solve_lower(root, beta.with_values(kernel, X, outputs))
    _, directions = torch.linalg.eigh(features @ features.mT)
    chosen = directions[..., max(len(beta) - most, 0) :].flip(-1)
    return torch.linalg.solve_triangular(root.mT, chosen, upper=True)

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
    root = cholesky_with_nugget(beta.with_functions(kernel, beta, m), _RIDGE)
    features = solve_lower(root, beta.with_values(kernel, X, m))
    spread = _known_nothing_of(_leading(root, features @ features.mT, most))
    basis = spread.basis(kernel, beta, m)
    coefficients = now.coefficients.clone()
    if isinstance(before.spread, SpectralSpread) and len(before.beta) > 0:
        own = before.spread.expansion(now.basis)
        coefficients[..., : own.shape[-2]] += (own @ now.remaining).squeeze(-1)
        overlap = basis.whitened(beta.with_functions(kernel, before.beta, m) @ own).mT
        spread = replace(spread, gram=overlap @ before.spread.gram @ overlap.mT)
    after = replace(before, beta=beta, spread=spread).with_expansion(coefficients, kernel, m)
    return _of_the_mean(replace(now, posterior=after), spread)


@torch.no_grad()
def with_best_functions(now: Expanded, root: Tensor, gram: Tensor, most: int) -> DecoupledPosterior:
    """A posterior whose covariance is the best that so many functions in α's span can have.

    The leading eigenfunctions of what all data say of α, which maximise the bound of a Gaussian
    likelihood; the mean stays. Cost O(M_α³).

    Args:
        now: A posterior whose mean is ``k(x, α) a`` alone, with its kernel.
        root: R, ``... x m x M_α x M_α``: ``R Rᵀ = K_α``, but for a nugget.
        gram: ``R⁻¹ (Σ p k(α, x) k(x, α)) R⁻ᵀ`` of all data with precisions p, likewise.
        most: Number M_β.
    """
    before = now.posterior
    spread = _known_nothing_of(_leading(root, gram, most))
    seen = spread.basis(now.kernel, before.alpha, now.outputs).whitened(root)
    spread = replace(spread, gram=seen.mT @ gram @ seen)
    after = replace(before, beta=before.alpha, spread=spread)
    return _of_the_mean(replace(now, posterior=after), spread)


def without_functions(posterior: DecoupledPosterior) -> DecoupledPosterior:
    """A spectral posterior without any for its covariance; the mean is ``k(x, α) a`` alone."""
    none = posterior.coefficients.new_zeros(*posterior.coefficients.shape[:-1], 0, 0)
    beta = posterior.alpha.rows(slice(0, 0))
    return replace(posterior, beta=beta, spread=_known_nothing_of(none))


def _of_the_mean(now: Expanded, spread: SpectralSpread) -> DecoupledPosterior:
    """The posterior with the weights' mean that k(x, α) a makes of them, which adds nothing."""
    explained = now.explained
    moment = explained + spread.gram @ explained
    return replace(now.posterior, spread=replace(spread, moment=moment))


def _known_nothing_of(combination: Tensor) -> SpectralSpread:
    none = combination.new_zeros(*combination.shape[:-2], combination.shape[-1], 1)
    return SpectralSpread(none, none @ none.mT, combination)


def _leading(root: Tensor, gram: Tensor, most: int) -> Tensor:
    """Combinations of values with most of the variance, ``... x m x S x M``; of whitened ones."""
    _, directions = torch.linalg.eigh(gram)
    chosen = directions[..., max(gram.shape[-1] - most, 0) :].flip(-1)
    return torch.linalg.solve_triangular(root.mT, chosen, upper=True)

"""Growth of the two bases with the data: algorithm 1 of Cheng and Boots (2017)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.allocator import checked_number
from bo_stream.collective import ALONE, Collective
from bo_stream.linalg import cholesky_with_nugget, solve_lower
from bo_stream.models.decoupled.bound import Expanded
from bo_stream.models.decoupled.posterior import (
    DecoupledPosterior,
    HybridCovariance,
    SpectralCovariance,
)

_RIDGE = 1e-6
"""Noise of the values that are combined, in parts of their variance, when eigenfunctions are
computed: where values say almost the same, their differences are left out of the combinations.
"""


@torch.no_grad()
def with_eigenfunctions(
    now: Expanded, X: Tensor, span: int, most: int, collective: Collective = ALONE
) -> DecoupledPosterior:
    """Fit a posterior's covariance functions to the kernel as it is now; the mean stays.

    They are at most M_β combinations of the first S = ``span`` functions of α, for inputs that are
    distributed as X, ``... x n x d``, of all processes. What the data have said of the functions
    before says the same of those that are in their span, and nothing yet of the others. Cost
    O(n S (d + S) + S³).
    """
    before, kernel, m = now.posterior, now.kernel, now.outputs
    beta = before.alpha.rows(slice(0, span))
    root = cholesky_with_nugget(beta.with_functions(kernel, beta, m), _RIDGE)
    features = solve_lower(root, beta.with_values(kernel, X, m))
    gram = collective.sum(features @ features.mT)
    covariance = _known_nothing_of(_leading(root, gram, most))
    basis = covariance.basis(kernel, beta, m)
    coefficients = now.coefficients.clone()
    if isinstance(before.covariance, SpectralCovariance) and len(before.beta) > 0:
        # values that each feature is made of
        own = solve_lower(now.basis.factor, before.covariance.combination.mT).mT
        coefficients[..., : own.shape[-2]] += (own @ now.remaining).squeeze(-1)
        overlap = basis.whitened(beta.with_functions(kernel, before.beta, m) @ own).mT
        covariance = replace(covariance, gram=overlap @ before.covariance.gram @ overlap.mT)
    after = replace(before, beta=beta, covariance=covariance).with_expansion(
        coefficients, kernel, m
    )
    return _of_the_mean(replace(now, posterior=after), covariance)


@torch.no_grad()
def with_best_functions(now: Expanded, root: Tensor, gram: Tensor, most: int) -> DecoupledPosterior:
    """Give a posterior the best covariance of so many functions in α's span; the mean stays.

    The leading eigenfunctions of what all data say of α, which maximise the bound of a Gaussian
    likelihood. Cost O(M_α³).

    Args:
        now: A posterior whose mean is ``k(x, α) a`` alone, with its kernel.
        root: R, ``... x m x M_α x M_α``: ``R Rᵀ = K_α``, but for a nugget.
        gram: ``R⁻¹ (Σ p k(α, x) k(x, α)) R⁻ᵀ`` of all data with precisions p, likewise.
        most: Number M_β.
    """
    before = now.posterior
    covariance = _known_nothing_of(_leading(root, gram, most))
    seen = covariance.basis(now.kernel, before.alpha, now.outputs).whitened(root)
    covariance = replace(covariance, gram=seen.mT @ gram @ seen)
    after = replace(before, beta=before.alpha, covariance=covariance)
    return _of_the_mean(replace(now, posterior=after), covariance)


def without_functions(posterior: DecoupledPosterior) -> DecoupledPosterior:
    """Drop a spectral posterior's covariance functions; the mean is ``k(x, α) a`` alone."""
    none = posterior.coefficients.new_zeros(*posterior.coefficients.shape[:-1], 0, 0)
    beta = posterior.alpha.rows(slice(0, 0))
    return replace(posterior, beta=beta, covariance=_known_nothing_of(none))


def _of_the_mean(now: Expanded, covariance: SpectralCovariance) -> DecoupledPosterior:
    """Set the weights' mean to what k(x, α) a makes of them, which adds nothing to the mean."""
    explained = now.explained
    moment = explained + covariance.gram @ explained
    return replace(now.posterior, covariance=replace(covariance, moment=moment))


def _known_nothing_of(combination: Tensor) -> SpectralCovariance:
    none = combination.new_zeros(*combination.shape[:-2], combination.shape[-1], 1)
    return SpectralCovariance(none, none @ none.mT, combination)


def _leading(root: Tensor, gram: Tensor, most: int) -> Tensor:
    """Combine values, given whitened, for most of the variance, ``... x m x S x M``."""
    _, directions = torch.linalg.eigh(gram)
    chosen = directions[..., max(gram.shape[-1] - most, 0) :].flip(-1)
    return torch.linalg.solve_triangular(root.mT, chosen, upper=True)


@dataclass(frozen=True)
class Growth:
    """Caps of the bases, and how fast they are reached.

    Attributes:
        mean: Most functions M_α of the mean.
        covariance: Most functions M_β of the covariance.
        step: Most functions N_Δ that a minibatch adds to each.
        span: Most functions of the mean that a spectral parametrization combines.
    """

    mean: int
    covariance: int
    step: int
    span: int

    @classmethod
    def checked(cls, mean: int, covariance: int, step: int, span: int | None) -> Growth:
        """Check numbers that a user gave.

        Raises:
            ValueError: One is negative or no whole number; a mean of fewer functions than the
                covariance; a span of fewer than the covariance or more than the mean.
        """
        mean = checked_number("num_mean", mean, 0)
        covariance = checked_number("num_covar", covariance, 0)
        span = min(4 * covariance, mean) if span is None else checked_number("num_span", span, 0)
        if mean < covariance:
            raise ValueError(
                f"Expected num_mean of at least num_covar = {covariance}, got {mean}: functions of "
                "the mean cost less than those of the covariance."
            )
        if not covariance <= span <= mean:
            raise ValueError(
                f"Expected num_span of num_covar = {covariance} to num_mean = {mean}, got {span}: "
                "the covariance's functions combine some of the mean's."
            )
        return cls(mean, covariance, checked_number("num_added", step), span)

    def finished(self, posterior: DecoupledPosterior) -> bool:
        """Say whether both caps are reached."""
        spectral = isinstance(posterior.covariance, SpectralCovariance)
        full = spectral or len(posterior.beta) >= self.covariance
        return full and len(posterior.alpha) >= self.mean

    def grown(
        self, posterior: DecoupledPosterior, X: Tensor, kernel: Kernel, outputs: int
    ) -> DecoupledPosterior:
        """Add values at inputs ``... x n x d`` as further functions, which change nothing at first.

        A direct parametrization takes the same inputs for both bases [A.2]; a hybrid one takes
        others for the mean, for β has a mean of its own; a spectral one for the mean alone, some of
        which :func:`with_eigenfunctions` combines. Inputs that are points already are left.
        """
        if self.finished(posterior):
            return posterior
        if isinstance(posterior.covariance, SpectralCovariance):
            most = min(self.mean - len(posterior.alpha), self.step)
            return posterior.with_mean_values(_points(X, posterior, most))
        room = self.covariance - len(posterior.beta)
        points = _points(X, posterior, 2 * self.step)
        first = points[..., : min(room, self.step), :]
        grown = posterior.with_covariance_values(first, kernel, outputs)
        rest = points
        if isinstance(posterior.covariance, HybridCovariance):
            rest = points[..., first.shape[-2] :, :]
        more = rest[..., : min(self.mean - len(posterior.alpha), self.step), :]
        return grown.with_mean_values(more)


def _points(X: Tensor, posterior: DecoupledPosterior, most: int) -> Tensor:
    """Choose the first inputs that are not among the points, each once, ``... x m x k x d``."""
    beta, alpha = posterior.beta.points, posterior.alpha.points
    known = torch.cat((beta, alpha), -2)
    wide = X.unsqueeze(-3).expand(*known.shape[:-2], *X.shape[-2:])[..., : 2 * most, :]
    same = _equal(wide, wide).tril(-1).any(-1)
    there = _equal(wide, known).any(-1)
    old = (same | there).flatten(0, -2).any(0)
    return wide[..., torch.nonzero(~old).flatten()[:most], :]


def _equal(A: Tensor, B: Tensor) -> Tensor:
    """Compare rows, ``... x n x d`` and ``... x n' x d`` to ``... x n x n'``."""
    same = torch.ones(*A.shape[:-1], B.shape[-2], dtype=torch.bool, device=A.device)
    for a, b in zip(A.unbind(-1), B.unbind(-1), strict=True):
        same &= a.unsqueeze(-1) == b.unsqueeze(-2)
    return same

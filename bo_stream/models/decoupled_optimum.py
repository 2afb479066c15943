"""The best variational parameters of a decoupled model's functions, from all data at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.inducing_functions import InducingFunctions
from bo_stream.linalg import cholesky_with_nugget, safe_cholesky, solve_lower
from bo_stream.models.decoupled_bound import Expanded, Marginals
from bo_stream.models.decoupled_posterior import NUGGET, DecoupledPosterior, HybridSpread
from bo_stream.models.decoupled_spectral import (
    SpectralSpread,
    with_best_functions,
    without_functions,
)
from bo_stream.variational import ExpectedLogProb, local_sites


@torch.no_grad()
def optimum(
    now: Expanded,
    batches: Iterable[tuple[Tensor, ExpectedLogProb]],
    weight: float,
    rank: int | None = None,
) -> DecoupledPosterior:
    """The mean and, where β's weights have one, the covariance that maximise the bound.

    For a Gaussian likelihood: normal equations of the mean's functions, and the weights' precision
    ``I + Σ p z zᵀ``. For another the same of its sites, a Newton step. A direct parametrization's
    covariance stays. Cost O(n (M_α + M_β)² + M_α³), and memory O(M_α²).

    Args:
        now: The posterior with its kernel.
        batches: Inputs with the likelihood of their outcomes, all of them.
        weight: Of their sum.
        rank: Functions of a spectral covariance, which are sought anew in the span of all of α;
            None: they stay, as they must where the likelihood is not Gaussian.
    """
    seeks = rank is not None and isinstance(now.posterior.spread, SpectralSpread)
    if seeks:
        now = replace(now, posterior=without_functions(now.posterior))
    before, kernel, m = now.posterior, now.kernel, now.outputs
    whole = _Functions.of(now)
    root = cholesky_with_nugget(whole.covariance(now), NUGGET)
    total = _Sums(root.new_zeros(root.shape), root.new_zeros(*root.shape[:-1], 1), None)
    for X, expected in batches:
        there = now.at(X)
        features = solve_lower(root, whole.at(now, X, there))
        total = total.plus(now, there, expected, features)
    precision = _one_plus(weight * total.gram)
    weights = torch.cholesky_solve(weight * total.pull, safe_cholesky(precision))
    c = torch.linalg.solve_triangular(root.mT, weights, upper=True).squeeze(-1)
    after = before.with_expansion(c[..., : len(before.alpha)], kernel, m)
    if seeks and rank is not None:
        gram = weight * total.gram
        return with_best_functions(replace(now, posterior=after), root, gram, rank)
    if not isinstance(before.spread, HybridSpread) or total.spread is None:
        return after
    v = replace(now, posterior=after).explained
    if whole.beta is not None:
        v = v + now.basis.factor.mT @ c[..., len(before.alpha) :].unsqueeze(-1)
    gram = weight * total.spread
    spread = replace(before.spread, moment=v + gram @ v, gram=gram)
    return replace(after, spread=spread)


@dataclass(frozen=True)
class _Functions:
    """All that the mean is made of: α, and β unless it combines some of α or has no mean."""

    alpha: InducingFunctions
    beta: InducingFunctions | None

    @classmethod
    def of(cls, now: Expanded) -> _Functions:
        p = now.posterior
        apart = isinstance(p.spread, HybridSpread) and not isinstance(p.spread, SpectralSpread)
        return cls(p.alpha, p.beta if apart else None)

    def covariance(self, now: Expanded) -> Tensor:
        """``... x m x M x M``."""
        alpha, kernel, m = self.alpha, now.kernel, now.outputs
        own = alpha.with_functions(kernel, alpha, m)
        if self.beta is None:
            return own
        cross = alpha.with_functions(kernel, self.beta, m)
        upper = torch.cat((own, cross), -1)
        return torch.cat(
            (upper, torch.cat((cross.mT, self.beta.with_functions(kernel, self.beta, m)), -1)), -2
        )

    def at(self, now: Expanded, X: Tensor, there: Marginals) -> Tensor:
        """``... x m x M x n``, of inputs where α's part is known already."""
        if self.beta is None:
            return there.cross
        return torch.cat((there.cross, self.beta.with_values(now.kernel, X, now.outputs)), -2)


@dataclass(frozen=True)
class _Sums:
    """Over data seen so far.

    Attributes:
        gram: ``Σ p φ φᵀ`` of the mean's whitened functions, ``... x m x M x M``.
        pull: ``Σ s φ``, ``... x m x M x 1``.
        spread: ``Σ p z zᵀ`` of β's features; None before any data.
    """

    gram: Tensor
    pull: Tensor
    spread: Tensor | None

    def plus(
        self, now: Expanded, there: Marginals, expected: ExpectedLogProb, features: Tensor
    ) -> _Sums:
        """With a batch, whose marginals and whitened functions are given."""
        sites, _ = local_sites(expected, there.mean.detach(), there.variance.detach())
        z, precision = there.features, sites.precision
        shift = sites.shift - precision * now.constant.unsqueeze(-1)
        spread = z.mT @ (precision.unsqueeze(-1) * z)
        return _Sums(
            self.gram + (features * precision.unsqueeze(-2)) @ features.mT,
            self.pull + features @ shift.unsqueeze(-1),
            spread if self.spread is None else self.spread + spread,
        )


def _one_plus(gram: Tensor) -> Tensor:
    return gram + torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)


def between(
    before: DecoupledPosterior, after: DecoupledPosterior, share: float
) -> DecoupledPosterior:
    """Some of the way from one posterior of the same functions to another.

    Args:
        before: The one.
        after: The other.
        share: Of the way, in [0, 1].
    """
    a = torch.lerp(before.coefficients, after.coefficients, share)
    result = replace(after, coefficients=a)
    first, last = before.spread, after.spread
    if not isinstance(first, HybridSpread) or not isinstance(last, HybridSpread):
        return result
    v = torch.lerp(first.weights()[0], last.weights()[0], share)
    gram = torch.lerp(first.gram, last.gram, share)
    return replace(result, spread=replace(last, moment=v + gram @ v, gram=gram))

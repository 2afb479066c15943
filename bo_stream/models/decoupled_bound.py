"""The variational bound of a decoupled model: exact, or one unbiased draw at linear cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.function_basis import FunctionBasis
from bo_stream.bases.inducing import kernel_variance
from bo_stream.linalg import row_product
from bo_stream.models.decoupled_posterior import DecoupledPosterior, HybridSpread
from bo_stream.variational import ExpectedLogProb

COLUMNS = 1024
"""Columns of K_α that an exact divergence visits at a time."""


@dataclass(frozen=True)
class Expanded:
    """A posterior with a kernel: all that does not depend on the data.

    Attributes:
        posterior: The variational parameters.
        kernel: The prior's.
        constant: Prior mean, ``... x m``.
        outputs: Number m of outputs.
    """

    posterior: DecoupledPosterior
    kernel: Kernel
    constant: Tensor
    outputs: int

    @cached_property
    def basis(self) -> FunctionBasis:
        """Features of β. Cost O(M_β³)."""
        p = self.posterior
        return p.spread.basis(self.kernel, p.beta, self.outputs)

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Mean and root of their weights."""
        return self.posterior.spread.weights()

    @cached_property
    def coefficients(self) -> Tensor:
        """a, ``... x m x M_α``."""
        return self.posterior.expansion(self.kernel, self.outputs)

    @cached_property
    def alpha_features(self) -> Tensor | None:
        """Features of α, ``... x m x M_α x M_β``; None where the weights have no mean.

        Cost O(M_α M_β²).
        """
        p = self.posterior
        if not isinstance(p.spread, HybridSpread):
            return None
        return self.basis.whitened(p.beta.with_functions(self.kernel, p.alpha, self.outputs))

    @cached_property
    def explained(self) -> Tensor:
        """What the weights would be if the mean were ``k(x, α) a`` alone, ``... x m x M_β x 1``."""
        if self.alpha_features is None:
            return torch.zeros_like(self.weights[0])
        return self.alpha_features.mT @ self.coefficients.unsqueeze(-1)

    @cached_property
    def remaining(self) -> Tensor:
        """Coordinates of β's part of the mean, ``... x m x M_β x 1``.

        The weights' mean is of the whole process: k(x, α) a accounts for some of it. [eq. 12, in
        the total ``m̃ + k(β, α) a`` for m̃, in which eq. 14 has no mixed term]
        """
        return self.weights[0] - self.explained

    def columns(self, index: Tensor) -> Tensor:
        """``K[J, α]``, ``... x m x c x M_α``. Cost O(c M_α d)."""
        alpha = self.posterior.alpha
        return alpha.rows(index).with_functions(self.kernel, alpha, self.outputs)

    def slopes(self, index: Tensor, rows: Tensor) -> Tensor:
        """The mean's divergence by some coefficients, β's weights held: ``... x m x c``.

        ``(K_α a)_J`` less what β's features explain of it.

        Args:
            index: J.
            rows: ``K[J, α]``.
        """
        product = rows @ self.coefficients.unsqueeze(-1)
        if self.alpha_features is not None:
            product = product - self.alpha_features[..., index, :] @ self.explained
        return product.squeeze(-1)

    def mean_divergence(self, index: Tensor, rows: Tensor) -> Tensor:
        """Unbiased for ``½ aᵀ K_α a``, the mean of β's weights included, ``... x m``.

        From c of the columns of K_α, scaled by ``M_α / c``; from all of them exact. Of a hybrid
        posterior this is ``½ |v|² + ½ aᵀ (K_α − z zᵀ) a``: only the remainder that β's features
        leave is sampled, which is small. [Cheng2017, section 3.4]

        Args:
            index: The columns J.
            rows: ``K[J, α]``.
        """
        part = (self.coefficients[..., index] * self.slopes(index, rows)).sum(-1)
        weight = len(self.posterior.alpha) / max(len(index), 1)
        return 0.5 * (weight * part + self.weights[0].square().sum((-2, -1)))

    def exact_mean_divergence(self) -> Tensor:
        """Of all columns, few at a time. Cost O(M_α² d)."""
        a = self.coefficients
        total = 0.5 * self.weights[0].square().sum((-2, -1))
        for index in torch.arange(a.shape[-1], device=a.device).split(COLUMNS):
            part = a[..., index] * self.slopes(index, self.columns(index))
            total = total + 0.5 * part.sum(-1)
        return total

    def covariance_divergence(self) -> Tensor:
        """The rest of the divergence, ``... x m``. Cost O(M_β³)."""
        return self.posterior.spread.divergence(self.basis)

    def at(self, X: Tensor) -> Marginals:
        """What there is at inputs, ``... x n x d``. Cost O(n M_α d + n M_β²)."""
        features, alpha = self.basis.features(X), self.posterior.alpha
        mean, cross = alpha.weighted_values(self.kernel, X, self.outputs, self.coefficients)
        mean = mean + (features @ self.remaining).squeeze(-1) + self.constant.unsqueeze(-1)
        left = kernel_variance(self.kernel, X, self.outputs) - features.square().sum(-1)
        spread = row_product(features, self.weights[1]).square().sum(-1)
        return Marginals(cross, features, mean, left.clamp_min(0.0) + spread)


@dataclass(frozen=True)
class Marginals:
    """The process at n inputs.

    Attributes:
        cross: ``k(α, x)``, ``... x m x M_α x n``, without gradients.
        features: Of β, ``... x m x n x M_β``.
        mean: ``... x m x n``.
        variance: ``... x m x n``.
    """

    cross: Tensor
    features: Tensor
    mean: Tensor
    variance: Tensor


def exact_bound(
    expanded: Expanded, batches: Iterable[tuple[Tensor, ExpectedLogProb]], weight: float
) -> Tensor:
    """``Σ E log p(y | f) − KL``, ``... x m``. Cost O(n (M_α + M_β²) + M_α² + M_β³).

    Args:
        expanded: The posterior.
        batches: Inputs with the likelihood of their outcomes, all of them.
        weight: Of their sum.
    """
    divergence = expanded.exact_mean_divergence() + expanded.covariance_divergence()
    total = -divergence
    for X, expected in batches:
        there = expanded.at(X)
        total = total + weight * expected(there.mean, there.variance).sum(-1)
    return total


@dataclass(frozen=True)
class Draw:
    """One unbiased draw of the bound, and what it was made of.

    Attributes:
        expanded: The posterior.
        there: At the minibatch.
        columns: J, those of K_α.
        rows: ``K[J, α]``, ``... x m x c x M_α``.
        weight: n over the minibatch's size.
        value: Of the bound, ``... x m``.
    """

    expanded: Expanded
    there: Marginals
    columns: Tensor
    rows: Tensor
    weight: float
    value: Tensor

    @classmethod
    def of(
        cls, expanded: Expanded, X: Tensor, expected: ExpectedLogProb, weight: float, index: Tensor
    ) -> Draw:
        """From a minibatch and some columns. Cost O((b + c) M_α d + (b + M_α) M_β² + M_β³).

        Args:
            expanded: The posterior.
            X: Inputs of the minibatch, ``... x b x d``.
            expected: Of their outcomes.
            weight: n / b.
            index: The columns, ``c``.
        """
        there, rows = expanded.at(X), expanded.columns(index)
        data = weight * expected(there.mean, there.variance).sum(-1)
        divergence = expanded.mean_divergence(index, rows) + expanded.covariance_divergence()
        return cls(expanded, there, index, rows, weight, data - divergence)


def drawn_columns(posterior: DecoupledPosterior, most: int, generator: torch.Generator) -> Tensor:
    """Some columns of K_α in random order, equally likely, none twice. Cost O(M_α)."""
    total = len(posterior.alpha)
    index = torch.randperm(total, generator=generator)[: min(most, total)]
    return index.to(posterior.alpha.points.device)

"""The variational bound of a decoupled model: exact, or one unbiased draw at linear cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.functions import FunctionBasis
from bo_stream.bases.inducing import kernel_variance
from bo_stream.collective import ALONE, Collective
from bo_stream.likelihoods.sites import ExpectedLogProb
from bo_stream.linalg import row_product
from bo_stream.models.decoupled.posterior import DecoupledPosterior, HybridCovariance
from bo_stream.models.prior import Hyperparameters

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

    @classmethod
    def of(cls, posterior: DecoupledPosterior, hyper: Hyperparameters) -> Expanded:
        """Take the kernel and the prior mean of some hyperparameters."""
        batch = posterior.coefficients.shape[:-1]
        return cls(posterior, hyper.covar_module, hyper.constant(batch), batch[-1])

    @cached_property
    def basis(self) -> FunctionBasis:
        """Features of β. Cost O(M_β³)."""
        p = self.posterior
        return p.covariance.basis(self.kernel, p.beta, self.outputs)

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Mean and root of their weights."""
        return self.posterior.covariance.weights()

    @cached_property
    def coefficients(self) -> Tensor:
        """a, ``... x m x M_α``."""
        p = self.posterior
        if not p.jacobi:
            return p.coefficients
        return p.coefficients / p.alpha.variance(self.kernel, self.outputs)

    def alpha_features(self, index: Tensor) -> Tensor | None:
        """Evaluate features of some of α, ``... x m x c x M_β``; None if the weights have no mean.

        Cost O(c S (d + M_β) + c M_β²) for a basis of S functions.
        """
        p = self.posterior
        if not isinstance(p.covariance, HybridCovariance):
            return None
        some = p.alpha.rows(index)
        return self.basis.whitened(p.beta.with_functions(self.kernel, some, self.outputs))

    @cached_property
    def explained(self) -> Tensor:
        """Weights if the mean were ``k(x, α) a`` alone, ``... x m x M_β x 1``.

        Cost O(M_α S d).
        """
        p = self.posterior
        if not isinstance(p.covariance, HybridCovariance):
            return torch.zeros_like(self.weights[0])
        a = self.coefficients
        values, _ = p.alpha.weighted_functions(self.kernel, p.beta, self.outputs, a)
        return self.basis.whitened(values.unsqueeze(-1)).mT

    @cached_property
    def remaining(self) -> Tensor:
        """Coordinates of β's part of the mean, ``... x m x M_β x 1``.

        The weights' mean is of the whole process: k(x, α) a accounts for some of it. [eq. 12, in
        the total ``m̃ + k(β, α) a`` for m̃, in which eq. 14 has no mixed term]
        """
        return self.weights[0] - self.explained

    def columns(self, index: Tensor) -> Columns:
        """Evaluate some columns J of K_α. Cost O(c M_α d), and of features."""
        alpha, a = self.posterior.alpha, self.coefficients
        some = alpha.rows(index)
        slopes, cross = alpha.weighted_functions(self.kernel, some, self.outputs, a)
        features = self.alpha_features(index)
        if features is not None:
            slopes = slopes - (features @ self.explained).squeeze(-1)
        return Columns(index, cross, features, slopes)

    def mean_divergence(self, columns: Columns) -> Tensor:
        """Estimate ``½ aᵀ K_α a`` with the mean of β's weights without bias, ``... x m``.

        From c of the columns of K_α, scaled by ``M_α / c``; from all of them exact. Of a hybrid
        posterior this is ``½ |v|² + ½ aᵀ (K_α − z zᵀ) a``: only the remainder that β's features
        leave is sampled, which is small. [Cheng2017, section 3.4]
        """
        part = (self.coefficients[..., columns.index] * columns.slopes).sum(-1)
        weight = len(self.posterior.alpha) / max(len(columns.index), 1)
        return 0.5 * (weight * part + self.weights[0].square().sum((-2, -1)))

    def exact_mean_divergence(self) -> Tensor:
        """Compute :meth:`mean_divergence` of all columns, few at a time. Cost O(M_α² d)."""
        a = self.coefficients
        total = 0.5 * self.weights[0].square().sum((-2, -1))
        for index in torch.arange(a.shape[-1], device=a.device).split(COLUMNS):
            part = a[..., index] * self.columns(index).slopes
            total = total + 0.5 * part.sum(-1)
        return total

    def covariance_divergence(self) -> Tensor:
        """Compute the covariance's part of the divergence, ``... x m``. Cost O(M_β³)."""
        return self.posterior.covariance.divergence(self.basis)

    def at(self, X: Tensor) -> Marginals:
        """Evaluate the process at inputs, ``... x n x d``. Cost O(n M_α d + n M_β²)."""
        features, alpha = self.basis.features(X), self.posterior.alpha
        mean, cross = alpha.weighted_values(self.kernel, X, self.outputs, self.coefficients)
        mean = mean + (features @ self.remaining).squeeze(-1) + self.constant.unsqueeze(-1)
        left = kernel_variance(self.kernel, X, self.outputs) - features.square().sum(-1)
        covariance = row_product(features, self.weights[1]).square().sum(-1)
        return Marginals(cross, features, mean, left.clamp_min(0.0) + covariance)


@dataclass(frozen=True)
class Columns:
    """Some columns J of K_α, and the mean's divergence by their coefficients.

    Attributes:
        index: J, ``c`` places.
        cross: ``K[α, J]``, ``... x m x M_α x c``, without gradients.
        features: Of these functions, ``... x m x c x M_β``; None where β's weights have no mean.
        slopes: The mean's divergence by their coefficients, β's weights held, ``... x m x c``:
            ``(K_α a)_J`` less what β's features explain of it.
    """

    index: Tensor
    cross: Tensor
    features: Tensor | None
    slopes: Tensor


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


Term = Callable[[Expanded], Tensor]
"""Part of a bound, ``... x m``."""


def bound_terms(
    batches: Iterable[tuple[Tensor, ExpectedLogProb]], weight: float, share: float = 1.0
) -> Iterator[Term]:
    """Yield terms that sum up to ``Σ E log p(y | f) − KL``: the divergence, then each batch.

    Of inputs with the likelihood of their outcomes, each weighted alike; of the divergence only a
    share where other processes have further batches. Cost of all O(n (M_α + M_β²) + M_α² + M_β³).
    """
    yield lambda now: -share * (now.exact_mean_divergence() + now.covariance_divergence())
    for X, expected in batches:
        yield partial(_data_term, X, expected, weight)


def _data_term(X: Tensor, expected: ExpectedLogProb, weight: float, now: Expanded) -> Tensor:
    there = now.at(X)
    return weight * expected(there.mean, there.variance).sum(-1)


@dataclass(frozen=True)
class Draw:
    """One unbiased draw of the bound, and what it was made of.

    Attributes:
        expanded: The posterior.
        there: At the minibatch.
        columns: Those of K_α.
        weight: n over the minibatch's size.
        value: Of the bound, ``... x m``.
        collective: Processes that have rows of the minibatch; their values sum up to the bound.
    """

    expanded: Expanded
    there: Marginals
    columns: Columns
    weight: float
    value: Tensor
    collective: Collective

    @classmethod
    def of(
        cls,
        expanded: Expanded,
        X: Tensor,
        expected: ExpectedLogProb,
        weight: float,
        index: Tensor,
        collective: Collective = ALONE,
    ) -> Draw:
        """Estimate the bound from b inputs that stand for ``weight`` each, and some columns.

        Cost O((b + c + S) M_α d + (b + c + S) S M_β + M_β³) for β of S values.
        """
        there, columns = expanded.at(X), expanded.columns(index)
        data = weight * expected(there.mean, there.variance).sum(-1)
        divergence = expanded.mean_divergence(columns) + expanded.covariance_divergence()
        value = data - collective.share * divergence
        return cls(expanded, there, columns, weight, value, collective)


def drawn_columns(posterior: DecoupledPosterior, most: int, generator: torch.Generator) -> Tensor:
    """Draw some columns of K_α in random order, equally likely, none twice. Cost O(M_α)."""
    total = len(posterior.alpha)
    index = torch.randperm(total, generator=generator)[: min(most, total)]
    return index.to(posterior.alpha.points.device)

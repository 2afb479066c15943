"""The posterior of decoupled bases, what a model remembers of it, and the evidence lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.nn.functional import pad

from bo_stream.bases.inducing import FunctionBasis, InducingFunctions, kernel_variance
from bo_stream.collective import ALONE, Collective
from bo_stream.likelihoods.sites import ExpectedLogProb
from bo_stream.linalg import (
    cholesky_with_nugget,
    identity,
    inverse_root,
    row_product,
    safe_cholesky,
    solve_lower,
)
from bo_stream.models.inference import Hyperparameters
from bo_stream.models.outcomes.base import subset_moments
from bo_stream.models.stochastic.replay import HoldsRows, Replay
from bo_stream.process import Joint, Points, PosteriorProcess
from bo_stream.tensors import map_tensors

NUGGET = 1e-9
"""Noise of the values at β, in parts of their variance: without any, features of points that lie
close together have rounding errors larger than what they leave of the kernel.
"""


@dataclass(frozen=True)
class DirectCovariance:
    """Noisy values at β of precision ``B = L Lᵀ``, as in [Cheng2017, eq. 8 and 9].

    ``k − k_xβ (B⁻¹ + K_β)⁻¹ k_βx = k − |z|²`` with ``z = F⁻¹ Lᵀ k_βx`` and ``F Fᵀ = I + Lᵀ K_β L``.

    Attributes:
        root: L, ``... x m x M x M``; with a preconditioner ``diag(K_β) L``.
        jacobi: Whether it is so preconditioned. [Cheng2017, A.1]
    """

    root: Tensor
    jacobi: bool = False

    def basis(self, kernel: Kernel, beta: InducingFunctions, outputs: int) -> FunctionBasis:
        """Return features of noisy values, differentiable in everything. Cost O(M³)."""
        root = self.root
        if self.jacobi:
            root = root / beta.variance(kernel, outputs).unsqueeze(-1)
        inner = root.mT @ beta.with_functions(kernel, beta, outputs) @ root
        return FunctionBasis(
            kernel, beta, outputs, safe_cholesky(inner + identity(inner), True), root
        )

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return mean and root of the features' weights, ``... x m x M x 1`` and ``x M``: zeros.

        The features say all there is.
        """
        return self.root.new_zeros(*self.root.shape[:-1], 1), torch.zeros_like(self.root)

    def divergence(self, basis: FunctionBasis) -> Tensor:
        """Compute the KL of q from the prior, ``... x m``, were their means equal.

        That is ``½ log |H| − ½ tr(I − H⁻¹)``, ``H = F Fᵀ``. [Cheng2017, last two terms of eq. 9]
        """
        factor = basis.factor
        inverse = solve_lower(factor, identity(factor).expand_as(factor))
        trace = (1.0 - inverse.square().sum(-2)).sum(-1)
        return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * trace

    def widened(
        self, kernel: Kernel, functions: InducingFunctions, outputs: int
    ) -> DirectCovariance:
        """Add functions, as if observed with noise of the prior's variance; 0 would never leave."""
        variance = functions.variance(kernel, outputs).expand(functions.points.shape[:-1])
        new = variance.sqrt() if self.jacobi else variance.rsqrt()
        n, k = self.root.shape[-1], new.shape[-1]
        return replace(self, root=pad(self.root, (0, k, 0, k)) + torch.diag_embed(pad(new, (n, 0))))


@dataclass(frozen=True)
class HybridCovariance:
    """Values at β with a posterior of their own, of [Cheng2017, eq. 11 to 14].

    Whitened weights ``v = F⁻¹ f(β)``, ``F Fᵀ = K_β`` with ``NUGGET``, in natural parameters, along
    which natural gradients are straight: ``v ~ N(Q⁻¹ moment, Q⁻¹)``, ``Q = I + gram``.

    Attributes:
        moment: ``... x m x M x 1``.
        gram: ``... x m x M x M``.
    """

    moment: Tensor
    gram: Tensor

    def basis(self, kernel: Kernel, beta: InducingFunctions, outputs: int) -> FunctionBasis:
        """Return features of values, differentiable in everything. Cost O(M³)."""
        inner = beta.with_functions(kernel, beta, outputs)
        return FunctionBasis(
            kernel, beta, outputs, cholesky_with_nugget(inner, NUGGET, is_new=True), None
        )

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return ``Q⁻¹ moment`` and a root of ``Q⁻¹``, ``... x m x M x 1`` and ``x M``."""
        root = inverse_root(self.gram + identity(self.gram), is_new=True)
        return root @ (root.mT @ self.moment), root

    def divergence(self, basis: FunctionBasis) -> Tensor:
        """Compute ``½ (tr Q⁻¹ − M + log |Q|)``.

        That is [Cheng2017, eq. 14], corrected: with its ``−log |K⁻¹ S|`` halved.
        """
        _, root = self.weights()
        log_precision = -2.0 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return 0.5 * (root.square().sum((-2, -1)) - root.shape[-1] + log_precision)

    def widened(
        self, kernel: Kernel, functions: InducingFunctions, outputs: int
    ) -> HybridCovariance:
        """Add weights as before any data; the others stay, for F grows at its lower end."""
        k = len(functions)
        return HybridCovariance(pad(self.moment, (0, 0, 0, k)), pad(self.gram, (0, k, 0, k)))


@dataclass(frozen=True)
class SpectralCovariance(HybridCovariance):
    """A hybrid covariance of combinations of the values at β, the first functions of α.

    Attributes:
        combination: L, ``... x m x S x M``; a function a column.
    """

    combination: Tensor

    def basis(self, kernel: Kernel, beta: InducingFunctions, outputs: int) -> FunctionBasis:
        """Return features of combinations. Cost O(S² (d + M) + M³).

        The values have the nugget with which they were whitened: where it is all that is left of a
        combination's variance, this would be rounding otherwise.
        """
        left, values = self.combination, beta.with_functions(kernel, beta, outputs)
        nugget = NUGGET * values.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        inner = left.mT @ (values @ left + nugget * left)
        return FunctionBasis(
            kernel, beta, outputs, cholesky_with_nugget(inner, NUGGET, is_new=True), left
        )


VariationalCovariance = DirectCovariance | HybridCovariance
"""The variational parameters of the process's covariance, one entry a function of β."""


@dataclass(frozen=True)
class DecoupledPosterior:
    """``m(x) = k(x, α) a`` beside the mean of β's weights, if these have one; β's covariance.

    [Cheng2017, eq. 7 and 8]

    Attributes:
        alpha: α, ``M_α`` functions.
        coefficients: a, ``... x m x M_α``; with a preconditioner ``diag(K_α) a``.
        beta: β, ``M_β`` functions.
        covariance: The covariance.
        jacobi: Whether a is so preconditioned. [Cheng2017, A.1]
    """

    alpha: InducingFunctions
    coefficients: Tensor
    beta: InducingFunctions
    covariance: VariationalCovariance
    jacobi: bool = False

    def with_expansion(self, a: Tensor, kernel: Kernel, outputs: int) -> DecoupledPosterior:
        """Set another a, ``... x m x M_α``."""
        if self.jacobi:
            a = a * self.alpha.variance(kernel, outputs)
        return replace(self, coefficients=a)

    def with_mean_values(self, points: Tensor) -> DecoupledPosterior:
        """Add values at further points, ``... x m x k x d``, to α; the mean stays."""
        zero = torch.zeros_like(points[..., 0])
        return replace(
            self,
            alpha=self.alpha.followed_by(points),
            coefficients=torch.cat((self.coefficients, zero), -1),
        )

    def with_covariance_values(
        self, points: Tensor, kernel: Kernel, outputs: int
    ) -> DecoupledPosterior:
        """Add values at further points, ``... x m x k x d``, to β."""
        beta = self.beta.followed_by(points)
        new = beta.rows(slice(len(self.beta), None))
        return replace(self, beta=beta, covariance=self.covariance.widened(kernel, new, outputs))


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
        """Evaluate at inputs ``... x n x d``, ``... x m x n``. Cost O(n M d)."""
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
        """Add the function to the base's."""
        return self.base.mean_at(points) + self.shift(points.X)

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Return the base's."""
        return self.base.cross_covariance(points, others)

    def variance_at(self, points: Points) -> Tensor:
        """Return the base's."""
        return self.base.variance_at(points)

    def joint_at(self, points: Points) -> Joint:
        """Return the base's factors around another mean."""
        base = self.base.joint_at(points)
        return replace(base, mean=base.mean + self.shift(points.X))


# --- memory of a decoupled model: its posterior, observations to draw from -----------------------


Moments = dict[str, Any]


@dataclass(frozen=True)
class DecoupledMemory(HoldsRows):
    """Variational parameters, observations, and the state of training. A step makes another value.

    Attributes:
        posterior: The variational parameters.
        replay: Observations in units of the process, outcomes ``batch_shape x n x m``.
        steps: Taken so far.
        unit: What inputs vary by, from the first data.
        hyper_names: Hyperparameters that learned last.
        hyper_moments: Adam's state for them, or None before the first step.
        variational_moments: The same for the variational parameters.
        begun: Whether there was a call to fit.
    """

    posterior: DecoupledPosterior
    replay: Replay
    steps: int
    unit: float
    hyper_names: tuple[str, ...] = ()
    hyper_moments: Moments | None = None
    variational_moments: Moments | None = None
    begun: bool = False

    @property
    def counts(self) -> Tensor:
        """Number of observations that came, ``... x m``."""
        like = self.posterior.coefficients
        return like.new_full(like.shape[:-1], float(self.replay.count))

    def select(self, outputs: list[int]) -> DecoupledMemory:
        """Copy for some of the outputs."""
        *lead, of, _ = self.posterior.coefficients.shape
        hyper, variational = self.hyper_moments, self.variational_moments
        index = torch.tensor(outputs, device=self.posterior.coefficients.device)

        def chosen(tensor: Tensor) -> Tensor:
            return tensor.index_select(len(lead), index)

        return replace(
            self,
            posterior=map_tensors(self.posterior, chosen),
            replay=self.replay.select(outputs),
            hyper_moments=hyper and subset_moments(hyper, torch.Size(lead), of, outputs),
            variational_moments=variational and _mapped(variational, chosen),
        )

    def to(self, device: torch.device) -> DecoupledMemory:
        """Move to another device, Adam's moments too."""
        hyper, variational = self.hyper_moments, self.variational_moments
        return replace(
            self,
            posterior=map_tensors(self.posterior, lambda t: t.to(device)),
            replay=self.replay.to(device),
            hyper_moments=hyper and _mapped(hyper, lambda t: t.to(device)),
            variational_moments=variational and _mapped(variational, lambda t: t.to(device)),
        )


def _mapped(moments: Moments, rule: Callable[[Tensor], Tensor]) -> Moments:
    """Apply a rule to Adam's moments, but not to its counts of steps, which stay on the CPU."""
    state = {
        number: {name: t if name == "step" else rule(t) for name, t in tensors.items()}
        for number, tensors in moments["state"].items()
    }
    return {**moments, "state": state}


# --- the variational bound of a decoupled model: exact -------------------------------------------


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

        The weights' mean is of the whole process: k(x, α) a accounts for some of it. [Cheng2017,
        eq. 12, in the total ``m̃ + k(β, α) a`` for m̃, in which eq. 14 has no mixed term]
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

    def at(self, X: Tensor) -> Marginals:
        """Evaluate the process at inputs, ``... x n x d``. Cost O(n M_α d + n M_β²)."""
        features, alpha = self.basis.features(X), self.posterior.alpha
        values = InducingFunctions(X.unsqueeze(-3))
        mean, cross = alpha.weighted_functions(self.kernel, values, self.outputs, self.coefficients)
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
        slopes: The mean's divergence by their coefficients, β's weights fixed, ``... x m x c``:
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
    [Cheng2017, eq. 9 and 10]
    """
    yield (
        lambda now: (
            -share * (now.exact_mean_divergence() + now.posterior.covariance.divergence(now.basis))
        )
    )
    for X, expected in batches:
        yield partial(_data_term, X, expected, weight)


def _data_term(X: Tensor, expected: ExpectedLogProb, weight: float, now: Expanded) -> Tensor:
    there = now.at(X)
    return weight * expected(there.mean, there.variance).sum(-1)


@dataclass(frozen=True)
class Draw:
    """One unbiased draw of the bound, and what it was made of. [Cheng2017, section 3.4].

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
        apart = expanded.posterior.covariance.divergence(expanded.basis)
        value = data - collective.share * (expanded.mean_divergence(columns) + apart)
        return cls(expanded, there, columns, weight, value, collective)


def drawn_columns(posterior: DecoupledPosterior, most: int, generator: torch.Generator) -> Tensor:
    """Draw some columns of K_α in random order, equally likely, none twice. Cost O(M_α)."""
    total = len(posterior.alpha)
    index = torch.randperm(total, generator=generator)[: min(most, total)]
    return index.to(posterior.alpha.points.device, non_blocking=True)

"""The gradient of an estimated bound in the weights that were drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from bo_stream.bases.inducing import kernel_matrix
from bo_stream.bases.sampled import Draw, PointBasis, SampledBasis, draw
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.linalg import cholesky_with_nugget, inverse_lower, safe_cholesky
from bo_stream.models.hyperparameters import Hyperparameters
from bo_stream.models.quadruply_stochastic.sampled import (
    Batch,
    Control,
    Sample,
    Union,
    gaussian_estimate,
    likelihood_estimate,
)
from bo_stream.models.quadruply_stochastic.weight_posterior import (
    ChevronPosterior,
    Slice,
    proposition_1,
)

_CHUNK = 1 << 21
"""Numbers of features that are held at a time."""


SAMPLE = 20
"""Data that a control variate looks at for each support point."""

_NUGGET = 1e-6
"""Added to the diagonal of the support points' kernel, in parts of it."""


@dataclass(frozen=True)
class Projection:
    """What support points say of a sample of the data, by least squares in the kernel.

    ``Φ_x ≈ B Φ_p`` with ``B = K_xp K_pp⁻¹``, so that the misfit of all n data is about that of
    ``R a`` and t, where ``√(n / N) [B, y] = Q [R, t]`` for a sample of N. In the paper the support
    points are the sample, ``B = I``: on kin40k 300 of them then lower the gradient's variance 4.8
    times, instead of 6.0 times.

    Attributes:
        root: R, ``m x s x s``, or with 1 for m.
        targets: t, ``m x s``.
        ones: The same of a 1 in place of each outcome, ``m x s``, or with 1 for m.
    """

    root: Tensor
    targets: Tensor
    ones: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls, kernel: Kernel, X: Tensor, sample: tuple[Tensor, Tensor], weight: float
    ) -> Projection:
        """Cost O(N s²).

        Args:
            kernel: Of the process.
            X: Support points, ``s x d``.
            sample: Inputs and outcomes, ``N x d`` and ``m x N``, N at least s.
            weight: How many of the data each of the sample stands for.
        """
        inputs, targets = sample
        outputs, points = len(targets), X.double()
        K = kernel_matrix(kernel, points, points, outputs)
        factor = cholesky_with_nugget(K, _NUGGET)
        cross = kernel_matrix(kernel, points, inputs.double(), outputs)
        Q, R = torch.linalg.qr(torch.cholesky_solve(cross, factor).mT)
        root = weight**0.5
        t = (Q.mT @ targets.double().unsqueeze(-1)).squeeze(-1)
        return cls((root * R).to(X), (root * t).to(X), (root * Q.sum(-2)).to(X))

    def select(self, of: int, outputs: list[int]) -> Projection:
        """Of some of the outputs."""
        root, ones = (t[outputs] if t.shape[0] == of else t for t in (self.root, self.ones))
        return Projection(root, self.targets[outputs], ones)


@dataclass(frozen=True)
class ControlPoints:
    """Points, functions that stay as they were, and ``a = Φ_p [μ, c_1, ...]``.

    Functions are those of the hyperparameters at the start: the variate need not follow them to be
    right, only to be good. [Evans2020, proposition 3 and appendix F.3]

    Attributes:
        basis: Of functions that stay.
        X: ``s x d``.
        projection: What they say of the data.
        values: a, ``m x s x (1 + columns)``; moved in place.
        prior_root: ``L⁻¹`` with ``L Lᵀ = K_pp``, or None.
    """

    basis: SampledBasis
    X: Tensor
    projection: Projection
    values: Tensor
    prior_root: Tensor | None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        basis: SampledBasis,
        size: int,
        sample: tuple[Tensor, Tensor],
        count: float,
        posterior: ChevronPosterior,
    ) -> ControlPoints:
        """At some weights. Cost O(s p + N s²) for s points, or O(N s²) where weights are zero.

        Args:
            basis: Of a frozen kernel.
            size: Number s of points, the first of the sample.
            sample: Inputs and outcomes, ``N x d`` and ``m x N``, N at least s.
            count: Number n of all data.
            posterior: Whose weights.
        """
        X, targets = sample[0][:size], sample[1]
        projection = Projection.of(basis.kernel, X, sample, count / targets.shape[-1])
        values = targets.new_zeros(len(targets), len(X), 1 + posterior.columns)
        points = cls(basis, X, projection, values, _root(basis, X))
        chunk = max(1, _CHUNK // max(1, len(X)))
        for index in torch.arange(posterior.size, device=X.device).split(chunk):
            weights = posterior.dense_columns(index)
            if bool(weights.any()):
                points.follow(points.functions(index), weights)
        return points

    def functions(self, index: Tensor) -> Tensor:
        """``Φ_p`` of some functions, ``m x s x k``. Cost O(s k d)."""
        with torch.no_grad():
            return self.basis.functions(self.X, index).to(self.X)

    def follow(self, functions: Tensor, moves: Tensor) -> None:
        """Take over moves of some weights, in place. Cost O(s k). [Evans2020, proposition 3].

        Args:
            functions: At the points, ``m x s x k``.
            moves: Of weights and dense columns, ``m x k x (1 + columns)``.
        """
        self.values.add_(functions @ moves)

    def control(self, mean: Tensor) -> Control:
        """The control variate.

        Args:
            mean: The prior mean, ``m x 1``.
        """
        known = self.projection
        residual = known.targets - mean * known.ones
        return Control(self.values.clone(), known.root, residual, self.prior_root)

    def clone(self) -> ControlPoints:
        """With values of its own."""
        return replace(self, values=self.values.clone())


def _root(basis: SampledBasis, X: Tensor) -> Tensor | None:
    if not isinstance(basis, PointBasis):
        return None
    K = kernel_matrix(basis.kernel, X.double(), X.double(), basis.outputs)
    return inverse_lower(safe_cholesky(K)).to(X)


@dataclass(frozen=True)
class Drawn:
    """Data of a step.

    Attributes:
        X: Transformed inputs, ``b x d``.
        targets: Transformed outcomes, ``m x b``.
        count: Number n of all data.
    """

    X: Tensor
    targets: Tensor
    count: float

    @property
    def weight(self) -> float:
        """How many of the data each stands for."""
        return self.count / len(self.X)


@dataclass(frozen=True)
class Leaf:
    """A draw of functions, and what their weights are differentiated in.

    Attributes:
        draw: Which functions.
        functions: At the data, ``m x b x k``.
        squares: Sums of their squares over the data, ``m x k``.
        support: At support points, ``m x s x k``, or None without any.
        coefficients: ``m x k x (1 + columns)``.
        log_scale: ``m x k``.
    """

    draw: Draw
    functions: Tensor
    squares: Tensor
    support: Tensor | None
    coefficients: Tensor
    log_scale: Tensor


@dataclass(frozen=True)
class SampledGradient:
    """Of the bound in the weights of all that was drawn; others have none.

    Attributes:
        drawn: Which.
        coefficients: ``m x k x (1 + columns)``.
        log_scale: ``m x k``.
    """

    drawn: Union
    coefficients: Tensor
    log_scale: Tensor

    @classmethod
    def of(cls, leaves: list[Leaf]) -> SampledGradient:
        """Of leaves through which a loss, the bound's negative, was differentiated."""
        drawn = Union.of([leaf.draw.index for leaf in leaves])
        coefficients = -drawn.total([_gradient(leaf.coefficients) for leaf in leaves])
        columns = torch.arange(coefficients.shape[-1] - 1, device=drawn.index.device)
        coefficients[..., 1:] *= drawn.index.unsqueeze(-1) > columns  # above: no parameters
        log_scale = -drawn.total([_gradient(leaf.log_scale) for leaf in leaves])
        return cls(drawn, coefficients, log_scale)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


@dataclass(frozen=True)
class Estimator:
    """Estimates of the bound of a posterior at some hyperparameters.

    Attributes:
        posterior: Of the weights.
        control: Support points of a control variate, or None.
        hyper: Mean and likelihood.
        basis: Of hyperparameters.
        functions: Number m̃ of functions of a draw.
        log_precision: ``log |S|``, ``m``, of an S that is not diagonal; else None.
    """

    posterior: ChevronPosterior
    control: ControlPoints | None
    hyper: Hyperparameters
    basis: Callable[[Hyperparameters], SampledBasis]
    functions: int
    log_precision: Tensor | None

    @property
    def _is_gaussian(self) -> bool:
        return isinstance(self.hyper.likelihood, GaussianLikelihood)

    def draws(self, generator: torch.Generator) -> list[Draw]:
        """Two independent draws of functions, or one where no product needs two."""
        size, device = self.posterior.size, self.posterior.coefficients.device
        count = min(self.functions, size)
        first = draw(count, size, generator, device)
        if first.is_all or (not self._is_gaussian and self.log_precision is None):
            return [first]
        return [first, draw(count, size, generator, device)]

    def leaves(self, draws: list[Draw], data: Drawn, learns: bool) -> list[Leaf]:
        """Evaluate the functions. Cost O((b + s) k (d + columns)) for k functions.

        Args:
            draws: Of functions.
            data: Of the step.
            learns: Whether to be differentiable in the hyperparameters.
        """
        with torch.set_grad_enabled(learns):
            basis = self.basis(self.hyper)
            return [self._leaf(basis, one, data, len(draws) > 1) for one in draws]

    def _leaf(self, basis: SampledBasis, one: Draw, data: Drawn, controlled: bool) -> Leaf:
        posterior, index = self.posterior, one.index
        control = self.control if controlled and self._is_gaussian else None
        functions = basis.functions(data.X, index).to(data.X)
        return Leaf(
            one,
            functions,
            functions.square().sum(-2),
            None if control is None else control.functions(index),
            posterior.coefficients[:, index].requires_grad_(),
            posterior.learned_scale(index).requires_grad_(),
        )

    def value(self, leaves: list[Leaf], data: Drawn, learns: bool) -> Tensor:
        """The bound, estimated, ``m``; arguments as for :meth:`leaves`."""
        with torch.set_grad_enabled(learns):
            basis = self.basis(self.hyper)
            mean = self.hyper.constant(data.targets.shape[:1]).unsqueeze(-1).to(data.targets)
        batch = Batch(data.X, data.targets - mean, data.weight)
        first, *others = (self._sample(basis, leaf, data.count) for leaf in leaves)
        samples = first, others[-1] if others else first
        if not self._is_gaussian:
            return self._of_likelihood(batch, basis, samples, data.targets, mean)
        noise = self._noise().to(mean)
        controls = self._controls(leaves, mean.detach())
        return gaussian_estimate(
            batch,
            noise if learns else noise.detach(),
            data.count,
            basis,
            samples,
            self.log_precision,
            controls,
        )

    def _of_likelihood(
        self,
        batch: Batch,
        basis: SampledBasis,
        samples: tuple[Sample, Sample],
        targets: Tensor,
        mean: Tensor,
    ) -> Tensor:
        model = OutcomeModel(self.hyper.likelihood, len(targets))
        log_prob = model.expected_log_prob(targets.double())

        def expected(f: Tensor, variance: Tensor) -> Tensor:
            return log_prob((f + mean).double(), variance.double()).to(f)

        return likelihood_estimate(batch, expected, basis, samples, self.log_precision)

    def _noise(self) -> Tensor:
        return self.hyper.likelihood.noise.reshape(-1)

    def _sample(self, basis: SampledBasis, leaf: Leaf, count: float) -> Sample:
        index = leaf.draw.index
        measured = measured_scale(self.posterior, basis, index, count, self.hyper.likelihood)
        weights = Slice.of(index, leaf.coefficients, leaf.log_scale, measured)
        return Sample(leaf.draw, leaf.functions, leaf.squares, weights)

    def _controls(self, leaves: list[Leaf], mean: Tensor) -> tuple[Control, Tensor, Tensor] | None:
        first, second = leaves[0].support, leaves[-1].support
        if self.control is None or first is None or second is None:
            return None
        return self.control.control(mean), first, second

    def sampled(self, data: Drawn, generator: torch.Generator) -> tuple[Tensor, SampledGradient]:
        """One unbiased draw of the bound, ``m``, and of its gradient in the weights."""
        leaves = self.leaves(self.draws(generator), data, learns=False)
        with torch.enable_grad():
            value = self.value(leaves, data, learns=False)
            (-value.sum()).backward()
        return value.detach(), SampledGradient.of(leaves)


@torch.no_grad()
def measured_scale(
    posterior: ChevronPosterior,
    basis: SampledBasis,
    index: Tensor,
    count: float,
    likelihood: Likelihood,
) -> Tensor | None:
    """Entries of the diagonal by Proposition 1, ``m x k``; None where they are learned.

    Held: where they are best the bound has no slope in them.

    Args:
        posterior: That has mean squares of the functions, or none.
        basis: For S.
        index: Of the functions, ``k``.
        count: Number of all data.
        likelihood: Gaussian, where there are mean squares.
    """
    if posterior.mean_squares is None:
        return None
    squares = posterior.mean_squares[:, index]
    precision = basis.precision_diagonal(index).to(squares)
    return proposition_1(squares, precision, count, likelihood.noise.reshape(-1).to(squares))

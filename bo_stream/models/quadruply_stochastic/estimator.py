"""Unbiased estimates of the bound and its gradient from few data and few functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from bo_stream.bases.sampled import Draw, SampledBasis, draw
from bo_stream.likelihoods.outcome_model import OutcomeModel
from bo_stream.likelihoods.sites import ExpectedLogProb
from bo_stream.models.prior import Hyperparameters
from bo_stream.models.quadruply_stochastic.control_variate import Control, ControlPoints
from bo_stream.models.quadruply_stochastic.weight_posterior import (
    ChevronPosterior,
    Slice,
    proposition_1,
)


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
        """Draw functions twice, independently, or once where no product needs two."""
        size, device = self.posterior.size, self.posterior.coefficients.device
        count = min(self.functions, size)
        first = draw(count, size, generator, device)
        if first.is_all or (not self._is_gaussian and self.log_precision is None):
            return [first]
        return [first, draw(count, size, generator, device)]

    def evaluated(self, draws: list[Draw], data: Minibatch, learns: bool) -> list[DrawnFunctions]:
        """Evaluate the functions. Cost O((b + s) k (d + columns)) for k functions.

        Args:
            draws: Of functions.
            data: Of the step.
            learns: Whether to be differentiable in the hyperparameters.
        """
        with torch.set_grad_enabled(learns):
            basis = self.basis(self.hyper)
            return [self._evaluated(basis, one, data, len(draws) > 1) for one in draws]

    def _evaluated(
        self, basis: SampledBasis, one: Draw, data: Minibatch, controlled: bool
    ) -> DrawnFunctions:
        posterior, index = self.posterior, one.index
        control = self.control if controlled and self._is_gaussian else None
        functions = basis.functions(data.X, index).to(data.X)
        return DrawnFunctions(
            one,
            functions,
            functions.square().sum(-2),
            None if control is None else control.functions(index),
            posterior.coefficients[:, index].requires_grad_(),
            posterior.learned_scale(index).requires_grad_(),
        )

    def value(self, evaluated: list[DrawnFunctions], data: Minibatch, learns: bool) -> Tensor:
        """Estimate the bound, ``m``; arguments as for :meth:`evaluated`."""
        with torch.set_grad_enabled(learns):
            basis = self.basis(self.hyper)
            mean = self.hyper.constant(data.targets.shape[:1]).unsqueeze(-1).to(data.targets)
        first, *others = (self._sample(basis, one, data.count) for one in evaluated)
        samples = first, others[-1] if others else first
        if not self._is_gaussian:
            return self._of_likelihood(data, basis, samples, mean)
        noise = self._noise().to(mean)
        controls = self._controls(evaluated, mean.detach())
        return gaussian_estimate(
            data,
            data.targets - mean,
            noise if learns else noise.detach(),
            basis,
            samples,
            self.log_precision,
            controls,
        )

    def _of_likelihood(
        self,
        data: Minibatch,
        basis: SampledBasis,
        samples: tuple[Sample, Sample],
        mean: Tensor,
    ) -> Tensor:
        model = OutcomeModel(self.hyper.likelihood, len(data.targets))
        log_prob = model.expected_log_prob(data.targets.double())

        def expected(f: Tensor, variance: Tensor) -> Tensor:
            return log_prob((f + mean).double(), variance.double()).to(f)

        return likelihood_estimate(data.weight, expected, basis, samples, self.log_precision)

    def _noise(self) -> Tensor:
        return self.hyper.likelihood.noise.reshape(-1)

    def _sample(self, basis: SampledBasis, one: DrawnFunctions, count: float) -> Sample:
        index = one.draw.index
        measured = measured_scale(self.posterior, basis, index, count, self.hyper.likelihood)
        weights = Slice.of(index, one.coefficients, one.log_scale, measured)
        return Sample(one.draw, one.functions, one.squares, weights)

    def _controls(
        self, evaluated: list[DrawnFunctions], mean: Tensor
    ) -> tuple[Control, Tensor, Tensor] | None:
        first, second = evaluated[0].support, evaluated[-1].support
        if self.control is None or first is None or second is None:
            return None
        return self.control.control(mean), first, second

    def sampled(
        self, data: Minibatch, generator: torch.Generator
    ) -> tuple[Tensor, SampledGradient]:
        """Draw the bound, ``m``, and its gradient in the weights, both without bias."""
        evaluated = self.evaluated(self.draws(generator), data, learns=False)
        with torch.enable_grad():
            value = self.value(evaluated, data, learns=False)
            (-value.sum()).backward()
        return value.detach(), SampledGradient.of(evaluated)


@dataclass(frozen=True)
class Minibatch:
    """The data of a step.

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
class DrawnFunctions:
    """A draw of functions at a minibatch, and the tensors that are differentiated in.

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
    """Gradient of the bound in the weights of the functions drawn; of others it is 0.

    Attributes:
        drawn: Which.
        coefficients: ``m x k x (1 + columns)``.
        log_scale: ``m x k``.
    """

    drawn: DrawIndex
    coefficients: Tensor
    log_scale: Tensor

    @classmethod
    def of(cls, evaluated: list[DrawnFunctions]) -> SampledGradient:
        """Collect the gradients of a loss, the bound's negative, in what was evaluated."""
        drawn = DrawIndex.of([one.draw.index for one in evaluated])
        coefficients = -drawn.total([_gradient(one.coefficients) for one in evaluated])
        columns = torch.arange(coefficients.shape[-1] - 1, device=drawn.index.device)
        coefficients[..., 1:] *= drawn.index.unsqueeze(-1) > columns  # above: no parameters
        log_scale = -drawn.total([_gradient(one.log_scale) for one in evaluated])
        return cls(drawn, coefficients, log_scale)


def _gradient(one: Tensor) -> Tensor:
    return torch.zeros_like(one) if one.grad is None else one.grad


@dataclass(frozen=True)
class DrawIndex:
    """The distinct functions of several draws.

    Attributes:
        index: Distinct.
        places: Of each drawn one among them.
        times: That each was drawn.
    """

    index: Tensor
    places: Tensor | None
    times: Tensor | None

    @classmethod
    def of(cls, draws: list[Tensor]) -> DrawIndex:
        """Join the indices of one draw or several."""
        if len(draws) == 1:
            return cls(draws[0], None, None)
        return cls(*torch.unique(torch.cat(draws), return_inverse=True, return_counts=True))

    def total(self, parts: list[Tensor]) -> Tensor:
        """Sum what the draws have for each, ``m x k ...``."""
        if self.places is None:
            return parts[0]
        whole = torch.cat(parts, 1)
        total = whole.new_zeros(len(whole), len(self.index), *whole.shape[2:])
        return total.index_add_(1, self.places, whole)

    def parts(self, whole: Tensor) -> Tensor:
        """Share what is had once for each among the draws: undo :meth:`total`."""
        if self.places is None or self.times is None:
            return whole
        return (whole / self.times[:, None])[:, self.places]


@torch.no_grad()
def measured_scale(
    posterior: ChevronPosterior,
    basis: SampledBasis,
    index: Tensor,
    count: float,
    likelihood: Likelihood,
) -> Tensor | None:
    """Compute the diagonal by Proposition 1, ``m x k``; None where it is learned.

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


@dataclass(frozen=True)
class Sample:
    """Drawn functions at a minibatch, and their weights.

    Attributes:
        draw: Which.
        functions: ``m x b x k``.
        squares: Sums of their squares over the batch, ``m x k``.
        weights: Of them.
    """

    draw: Draw
    functions: Tensor
    squares: Tensor
    weights: Slice

    @property
    def share(self) -> Tensor:
        """How many functions each stands for, ``k``."""
        return self.draw.weight.to(self.weights.mean)

    def sums(self, functions: Tensor) -> Tensor:
        """Estimate ``φ μ`` and ``φ c_r`` of the dense columns, ``m x b x (1 + columns)``."""
        return functions @ (self.weights.columns * self.share.unsqueeze(-1))

    def power(self) -> Tensor:
        """Estimate ``Σ φ² c²`` of the diagonal columns and of the batch, ``m``."""
        return (self.squares * self.weights.scale.square() * self.share).sum(-1)


def sum_of_squares(residual: Tensor, weight: float, one: Sample, other: Sample) -> Tensor:
    """Estimate ``E_q |y − f|²`` of all data, ``m``. [Evans2020, theorems 1 and 2].

    Products of sums of independent draws; what is linear in a draw is averaged over both.

    Args:
        residual: Outcomes of a minibatch less the prior mean, ``m x b``.
        weight: How many of the data each stands for.
        one: Draw.
        other: Another, independent of it.
    """
    first = one.sums(one.functions)
    second = first if other is one else other.sums(other.functions)
    target = residual.unsqueeze(-1)
    misfit = ((first[..., :1] - target) * (second[..., :1] - target)).sum((-2, -1))
    dense = (first[..., 1:] * second[..., 1:]).sum((-2, -1))
    diagonal = 0.5 * (one.power() + other.power())
    return weight * (misfit + dense + diagonal)


def divergence(
    basis: SampledBasis, one: Sample, other: Sample, log_precision: Tensor | None
) -> Tensor:
    """Estimate ``KL(q ‖ p)`` of all weights, ``m``. [Evans2020, theorems 1, 2, proposition 2].

    Args:
        basis: For S.
        one: Draw.
        other: Another, independent of it where S is not diagonal.
        log_precision: ``log |S|``, ``m``; None: by Proposition 2, of a diagonal S.
    """
    squares = quadratic(basis, one, other)
    parts = [_linear_divergence(basis, sample, log_precision is None) for sample in (one, other)]
    total = 0.5 * (squares + 0.5 * (parts[0] + parts[1]) - basis.size)
    return total if log_precision is None else total - 0.5 * log_precision


def _linear_divergence(basis: SampledBasis, sample: Sample, own: bool) -> Tensor:
    """Estimate ``Σ s c² − 2 log c_rr``, and ``− log s`` if the determinant is its own, ``m``."""
    weights = sample.weights
    precision = basis.precision_diagonal(sample.draw.index).to(sample.weights.mean)
    terms = precision * weights.scale.square() - 2.0 * weights.log_diagonal
    if own:
        terms = terms - precision.log()
    return (terms * sample.share).sum(-1)


def quadratic(basis: SampledBasis, one: Sample, other: Sample) -> Tensor:
    """Estimate ``μᵀ S μ + Σ c_rᵀ S c_r`` of the dense columns, ``m``."""
    if basis.is_diagonal:
        parts = [_diagonal_quadratic(basis, sample) for sample in (one, other)]
        return 0.5 * (parts[0] + parts[1])
    S = basis.precision(one.draw.index, other.draw.index).to(one.weights.mean)
    first, second = (s.weights.columns * s.share.unsqueeze(-1) for s in (one, other))
    return (first * (S @ second)).sum((-2, -1))


def _diagonal_quadratic(basis: SampledBasis, sample: Sample) -> Tensor:
    precision = basis.precision_diagonal(sample.draw.index).to(sample.weights.mean)
    squares = sample.weights.columns.square().sum(-1)
    return (precision * squares * sample.share).sum(-1)


def gaussian_estimate(
    data: Minibatch,
    residual: Tensor,
    noise: Tensor,
    basis: SampledBasis,
    samples: tuple[Sample, Sample],
    log_precision: Tensor | None,
    controls: tuple[Control, Tensor, Tensor] | None,
) -> Tensor:
    """Estimate the bound for a Gaussian likelihood without bias, ``m``. [Evans2020, eq. 2].

    Args:
        data: Of the step.
        residual: Their outcomes less the prior mean, ``m x b``.
        noise: Their variance, ``m``.
        basis: Of the functions.
        samples: Two independent draws.
        log_precision: As for :func:`divergence`.
        controls: A control variate, and the functions of both draws at its points.
    """
    squares = sum_of_squares(residual, data.weight, *samples)
    apart = divergence(basis, *samples, log_precision)
    if controls is not None:
        control, *functions = controls
        sums = [sample.sums(at) for sample, at in zip(samples, functions, strict=True)]
        squares = squares + control.misfit(*sums)
        apart = apart + 0.5 * control.penalty(*sums)
    return -0.5 * (squares / noise + data.count * (2.0 * math.pi * noise).log()) - apart


def likelihood_estimate(
    weight: float,
    expected: ExpectedLogProb,
    basis: SampledBasis,
    samples: tuple[Sample, Sample],
    log_precision: Tensor | None,
) -> Tensor:
    """Estimate a bound below that for a log-concave likelihood, ``m``. [Evans2020, theorem 3].

    Corrected: ``f = φ μ + φ C ε`` with ``ε ~ N(0, I)`` is estimated by a draw, linearly and without
    bias, inside a concave function; the paper scales ε by a variance for a standard deviation.
    Given the draw f is normal, and its expectation is had in closed form or by quadrature. Equal to
    the bound where all functions are drawn.

    Args:
        weight: How many of the data each of a minibatch stands for.
        expected: ``E log p(y | f)`` of the minibatch from means and variances, ``m x b``.
        basis: Of the functions.
        samples: Two independent draws.
        log_precision: As for :func:`divergence`.
    """
    one = samples[0]
    sums = one.sums(one.functions)
    scaled = (one.weights.scale * one.share).square().unsqueeze(-1)
    variance = sums[..., 1:].square().sum(-1) + (one.functions.square() @ scaled).squeeze(-1)
    data = weight * expected(sums[..., 0], variance).sum(-1)
    return data - divergence(basis, *samples, log_precision)

"""Unbiased estimates of a bound from a few data and a few basis functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.bases.sampled import Draw, SampledBasis
from bo_stream.likelihoods.sites import ExpectedLogProb
from bo_stream.models.quadruply_stochastic.weight_posterior import Slice


@dataclass(frozen=True)
class Union:
    """All that several draws drew.

    Attributes:
        index: Distinct.
        places: Of each drawn one among them.
        times: That each was drawn.
    """

    index: Tensor
    places: Tensor | None
    times: Tensor | None

    @classmethod
    def of(cls, draws: list[Tensor]) -> Union:
        """Of the indices of one draw or several."""
        if len(draws) == 1:
            return cls(draws[0], None, None)
        return cls(*torch.unique(torch.cat(draws), return_inverse=True, return_counts=True))

    def total(self, parts: list[Tensor]) -> Tensor:
        """Sum of what the draws have for each, ``m x k ...``."""
        if self.places is None:
            return parts[0]
        whole = torch.cat(parts, 1)
        total = whole.new_zeros(len(whole), len(self.index), *whole.shape[2:])
        return total.index_add_(1, self.places, whole)

    def parts(self, whole: Tensor) -> Tensor:
        """What is had once for each, shared by the draws: undoes :meth:`total`."""
        if self.places is None or self.times is None:
            return whole
        return (whole / self.times[:, None])[:, self.places]


@dataclass(frozen=True)
class Batch:
    """Some of the data, less the prior mean.

    Attributes:
        X: ``b x d``.
        residual: Outcomes less the prior mean, ``m x b``.
        weight: How many of the data each stands for.
    """

    X: Tensor
    residual: Tensor
    weight: float


@dataclass(frozen=True)
class Sample:
    """Drawn functions at a batch, and their weights.

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
        """``φ μ`` and ``φ c_r`` of the dense columns, estimated, ``m x b x (1 + columns)``."""
        return functions @ (self.weights.columns * self.share.unsqueeze(-1))

    def power(self) -> Tensor:
        """``Σ φ² c²`` of the diagonal columns and of the batch, estimated, ``m``."""
        return (self.squares * self.weights.scale.square() * self.share).sum(-1)


@dataclass(frozen=True)
class Control:
    """A control variate of the products of two draws, current at the weights. [Evans2020, eq. 3].

    The sums at fixed support points ``a = Φ_p [μ, c_1, ...]`` are known, so that the products of
    their estimates may be replaced. What they say of all data is ``R a``, see
    :class:`~bo_stream.models.quadruply_stochastic.sampled_gradient.ControlPoints`. Beside the
    quadratic term it serves the term that is linear in the outcomes, and of inducing points the
    prior's, whose Nyström approximation at the same points is ``aᵀ K_pp⁻¹ a``. [appendix F.2]

    Attributes:
        values: a, ``m x s x (1 + columns)``.
        data_root: R, ``m x s x s``, or with 1 for m.
        residual: What R a is to be, ``m x s``.
        prior_root: ``L⁻¹`` with ``L Lᵀ = K_pp``, ``m x s x s``, or None where S is diagonal.
    """

    values: Tensor
    data_root: Tensor
    residual: Tensor
    prior_root: Tensor | None

    def misfit(self, one: Tensor, other: Tensor) -> Tensor:
        """What to add to the sum of squares, on average 0, ``m``; arguments as :meth:`penalty`."""
        gap = self.residual.unsqueeze(-1)
        said = (self.data_root @ v for v in (self.values, one, other))
        ours, first, second = (torch.cat((v[..., :1] - gap, v[..., 1:]), -1) for v in said)
        return _difference(ours, first, second)

    def penalty(self, one: Tensor, other: Tensor) -> Tensor:
        """The same for ``μᵀ S μ + Σ c_rᵀ S c_r``, ``m``.

        Args:
            one: Estimate of a by one draw, ``m x s x (1 + columns)``.
            other: By another.
        """
        if self.prior_root is None:
            return torch.zeros_like(self.residual[..., 0])
        return _difference(*(self.prior_root @ v for v in (self.values, one, other)))


def _difference(exact: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """``|a|² − â · ǎ``, with the gradient of ``|a|²`` estimated through both estimates of a.

    Each gives the gradient in the weights drawn, as often as to stand for all. [appendix F.1]
    """
    moving = (one - one.detach()) + (other - other.detach())
    value = exact.square() + exact * moving - one * other
    return value.sum((-2, -1))


def sum_of_squares(batch: Batch, one: Sample, other: Sample) -> Tensor:
    """``E_q |y − f|²`` of all data, estimated, ``m``. [Evans2020, theorems 1 and 2].

    Products of sums of independent draws; what is linear in a draw is averaged over both.
    """
    first = one.sums(one.functions)
    second = first if other is one else other.sums(other.functions)
    target = batch.residual.unsqueeze(-1)
    misfit = ((first[..., :1] - target) * (second[..., :1] - target)).sum((-2, -1))
    dense = (first[..., 1:] * second[..., 1:]).sum((-2, -1))
    diagonal = 0.5 * (one.power() + other.power())
    return batch.weight * (misfit + dense + diagonal)


def divergence(
    basis: SampledBasis, one: Sample, other: Sample, log_precision: Tensor | None
) -> Tensor:
    """``KL(q ‖ p)`` of all weights, estimated, ``m``. [Evans2020, theorems 1 and 2, proposition 2].

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
    """``Σ s c² − 2 log c_rr``, and ``− log s`` where the determinant of S is its own, ``m``."""
    weights = sample.weights
    precision = basis.precision_diagonal(sample.draw.index).to(sample.weights.mean)
    terms = precision * weights.scale.square() - 2.0 * weights.log_diagonal
    if own:
        terms = terms - precision.log()
    return (terms * sample.share).sum(-1)


def quadratic(basis: SampledBasis, one: Sample, other: Sample) -> Tensor:
    """``μᵀ S μ + Σ c_rᵀ S c_r`` of the dense columns, estimated, ``m``."""
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
    batch: Batch,
    noise: Tensor,
    count: float,
    basis: SampledBasis,
    samples: tuple[Sample, Sample],
    log_precision: Tensor | None,
    controls: tuple[Control, Tensor, Tensor] | None,
) -> Tensor:
    """The bound for a Gaussian likelihood, unbiased, ``m``. [Evans2020, eq. 2].

    Args:
        batch: Of the data.
        noise: Their variance, ``m``.
        count: Number of all data.
        basis: Of the functions.
        samples: Two independent draws.
        log_precision: As for :func:`divergence`.
        controls: A control variate, and the functions of both draws at its points.
    """
    squares = sum_of_squares(batch, *samples)
    apart = divergence(basis, *samples, log_precision)
    if controls is not None:
        control, *functions = controls
        sums = [sample.sums(at) for sample, at in zip(samples, functions, strict=True)]
        squares = squares + control.misfit(*sums)
        apart = apart + 0.5 * control.penalty(*sums)
    return -0.5 * (squares / noise + count * (2.0 * math.pi * noise).log()) - apart


def likelihood_estimate(
    batch: Batch,
    expected: ExpectedLogProb,
    basis: SampledBasis,
    samples: tuple[Sample, Sample],
    log_precision: Tensor | None,
) -> Tensor:
    """A bound below the bound for a log-concave likelihood, ``m``. [Evans2020, theorem 3].

    Corrected: ``f = φ μ + φ C ε`` with ``ε ~ N(0, I)`` is estimated by a draw, linearly and without
    bias, inside a concave function; the paper scales ε by a variance for a standard deviation.
    Given the draw f is normal, and its expectation is had in closed form or by quadrature. Equal to
    the bound where all functions are drawn.

    Args:
        batch: Of the data; its outcomes are in ``expected``.
        expected: ``E log p(y | f)`` of the batch from means and variances, ``m x b``.
        basis: Of the functions.
        samples: Two independent draws.
        log_precision: As for :func:`divergence`.
    """
    one = samples[0]
    sums = one.sums(one.functions)
    scaled = (one.weights.scale * one.share).square().unsqueeze(-1)
    variance = sums[..., 1:].square().sum(-1) + (one.functions.square() @ scaled).squeeze(-1)
    data = batch.weight * expected(sums[..., 0], variance).sum(-1)
    return data - divergence(basis, *samples, log_precision)

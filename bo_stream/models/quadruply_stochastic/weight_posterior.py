"""The normal posterior of many weights, and its bound on all data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.bases.sampled import SampledBasis
from bo_stream.likelihoods.sites import ExpectedLogProb
from bo_stream.linalg import safe_cholesky
from bo_stream.models.quadruply_stochastic.function_process import FunctionProcess


@dataclass(frozen=True)
class ChevronPosterior:
    """``w ~ N(μ, C Cᵀ)`` with C lower triangular, diagonal beyond its first k columns.

    What learns moves the tensors in place. O(m p (k + 2)) numbers. [Evans2020, section 2.2]

    Attributes:
        coefficients: μ, then the columns below the diagonal, ``m x p x (1 + k)``.
        log_scale: Logarithms of entries of the diagonal that are learned by steps: the first k of
            them, or all, ``m x k`` or ``m x p``.
        mean_squares: Of the functions at the data, where entries of the diagonal beyond the first k
            follow from them by Proposition 1, ``m x p``; None where those are learned.
    """

    coefficients: Tensor
    log_scale: Tensor
    mean_squares: Tensor | None

    @classmethod
    def empty(cls, outputs: int, columns: int, measured: bool, like: Tensor) -> ChevronPosterior:
        """Begin without weights.

        Args:
            outputs: m.
            columns: k.
            measured: Whether Proposition 1 gives the diagonal.
            like: Of the dtype and device.
        """
        coefficients = like.new_zeros(outputs, 0, 1 + columns)
        log_scale = like.new_zeros(outputs, columns if measured else 0)
        return cls(coefficients, log_scale, coefficients[..., 0] if measured else None)

    @property
    def columns(self) -> int:
        """Number k of columns that are not diagonal."""
        return self.coefficients.shape[-1] - 1

    @property
    def size(self) -> int:
        """Number p of weights."""
        return self.coefficients.shape[-2]

    @property
    def is_measured(self) -> bool:
        """Whether Proposition 1 gives the diagonal beyond the first k entries."""
        return self.mean_squares is not None

    def learned_scale(self, index: Tensor) -> Tensor:
        """Return what is learned of the diagonal, ``m x k``; zeros where it is not."""
        learned = self.log_scale.shape[-1]
        if learned == 0:
            return torch.zeros_like(self.coefficients[:, index, 0])
        return self.log_scale[:, index.clamp_max(learned - 1)] * (index < learned)

    def dense_columns(self, index: Tensor) -> Tensor:
        """Return mean and dense columns of C of some weights, ``m x k x (1 + k)``."""
        scale = self.learned_scale(index)
        return Slice.of(index, self.coefficients[:, index], scale, scale.exp()).columns

    def grown(self, first: ChevronPosterior) -> ChevronPosterior:
        """Add further weights.

        Args:
            first: Those weights, with scales for all of them.
        """
        squares, more = self.mean_squares, first.mean_squares
        return ChevronPosterior(
            torch.cat((self.coefficients, first.coefficients), -2),
            self._grown_scales(first.log_scale),
            None if squares is None or more is None else torch.cat((squares, more), -1),
        )

    def _grown_scales(self, first: Tensor) -> Tensor:
        if not self.is_measured:
            return torch.cat((self.log_scale, first), -1)
        scales, start = self.log_scale.clone(), self.size
        room = scales[:, start:]
        room[:, : first.shape[-1]] = first[:, : room.shape[-1]]
        return scales


@dataclass(frozen=True)
class Slice:
    """Mean and root of the covariance of some functions' weights.

    Attributes:
        mean: ``m x k``.
        rows: Of the dense columns of C, diagonal included, ``m x k x columns``.
        scale: Entries of the diagonal of C where its column is diagonal, else 0, ``m x k``.
        log_diagonal: Logarithms of all entries of the diagonal, ``m x k``.
    """

    mean: Tensor
    rows: Tensor
    scale: Tensor
    log_diagonal: Tensor

    @classmethod
    def of(
        cls, index: Tensor, coefficients: Tensor, log_scale: Tensor, measured: Tensor | None
    ) -> Slice:
        """Build C's rows, differentiable in what is learned.

        Args:
            index: Of the functions, ``k``.
            coefficients: Of them, ``m x k x (1 + columns)``.
            log_scale: What is learned of the diagonal: at the functions, ``m x k``; anything where
                it is not learned.
            measured: The diagonal by Proposition 1, ``m x k``, or None where all of it is learned.
        """
        columns = torch.arange(coefficients.shape[-1] - 1, device=index.device)
        below, on = index.unsqueeze(-1) > columns, index.unsqueeze(-1) == columns
        is_dense = index < len(columns)
        if measured is None:
            log_diagonal = log_scale
        else:
            log_diagonal = torch.where(is_dense, log_scale, measured.log())
        diagonal = log_diagonal.exp()
        rows = coefficients[..., 1:] * below + diagonal.unsqueeze(-1) * on
        return cls(coefficients[..., 0], rows, diagonal * ~is_dense, log_diagonal)

    @property
    def columns(self) -> Tensor:
        """The mean and the dense columns, ``m x k x (1 + columns)``."""
        return torch.cat((self.mean.unsqueeze(-1), self.rows), -1)


def proposition_1(mean_squares: Tensor, precision: Tensor, count: float, noise: Tensor) -> Tensor:
    """Compute the best entries of a diagonal C, ``m x k``. [Evans2020, proposition 1].

    Args:
        mean_squares: Of the functions at the data, ``m x k``.
        precision: Diagonal of S, ``m x k``.
        count: Number of data.
        noise: Their variance, ``m``.
    """
    noise = noise.unsqueeze(-1)
    return (noise / (count * mean_squares + noise * precision)).sqrt()


LARGEST = 1e8
"""Precision of a weight that is zero."""


def best_precisions(moment: Tensor, sharpness: Tensor) -> Tensor:
    """Compute the best prior precisions of weights with Proposition 1's variances, ``m x k``.

    The bound's maximum in s with ``c² = 1 / (h + s)``: ``s² + h s = h / e``.

    Args:
        moment: e, squared mean and the variance that the dense columns bring.
        sharpness: h, what the data say: ``|φ|² / σ²``.
    """
    tiny = LARGEST**-2
    root = (sharpness.square() + 4.0 * sharpness / moment.clamp_min(tiny)).sqrt()
    return (2.0 * sharpness / moment.clamp_min(tiny) / (sharpness + root)).clamp_max(LARGEST)


DETERMINED = 4096
"""Up to this many functions the determinant of an S that is not diagonal is computed."""

_PART = 4096


def log_precision(basis: SampledBasis) -> Tensor | None:
    """Compute ``log |S|``, ``m``; None where S is diagonal. Cost O(p³).

    Beyond ``DETERMINED`` functions 0: bounds are then too small by half of it, which is a constant.
    """
    if basis.is_diagonal:
        return None
    index = torch.arange(basis.size)
    if basis.size > DETERMINED:
        return basis.precision_diagonal(index[:1]).new_zeros(1)
    factor = safe_cholesky(basis.precision(index, index))
    return 2.0 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def full_divergence(
    basis: SampledBasis, posterior: ChevronPosterior, measured: Tensor | None
) -> Tensor:
    """Compute ``KL(q ‖ p)``, ``m``, in float64. Cost O(p), or O(p²) where S is not diagonal.

    Args:
        basis: For S.
        posterior: q.
        measured: Its diagonal where Proposition 1 gives it, ``m x p``, else None.
    """
    parts = torch.arange(basis.size, device=posterior.coefficients.device).split(_PART)
    slices = [(index, _slice(posterior, index, measured)) for index in parts]
    total = basis.precision_diagonal(parts[0][:0]).sum(-1)
    for index, weights in slices:
        own, columns = basis.precision_diagonal(index), weights.columns
        terms = own * weights.scale.square() - 2.0 * weights.log_diagonal - 1.0
        if basis.is_diagonal:
            terms = terms + own * columns.square().sum(-1) - own.log()
        else:
            terms = terms + (columns * _applied(basis, index, slices)).sum(-1)
        total = total + 0.5 * terms.sum(-1)
    determinant = log_precision(basis)
    return total if determinant is None else total - 0.5 * determinant


def _applied(basis: SampledBasis, index: Tensor, slices: list[tuple[Tensor, Slice]]) -> Tensor:
    """Multiply rows of S by mean and dense columns of all, ``m x k x (1 + columns)``."""
    products = [basis.precision(index, others) @ weights.columns for others, weights in slices]
    return torch.stack(products).sum(0)


def _slice(posterior: ChevronPosterior, index: Tensor, measured: Tensor | None) -> Slice:
    return Slice.of(
        index,
        posterior.coefficients[:, index].double(),
        posterior.learned_scale(index).double(),
        None if measured is None else measured[:, index].double(),
    )


def full_bound(
    process: FunctionProcess,
    batches: Iterable[tuple[Tensor, ExpectedLogProb]],
    weight: float,
    apart: Tensor,
) -> Tensor:
    """Compute ``Σ E log p(y | f) − KL``, ``m``. Cost O(n p).

    Differentiable where the process is, in O(n + p) memory.

    Args:
        process: Of the posterior, not augmented.
        batches: Inputs with the likelihood of their outcomes.
        weight: How many of the data each input stands for.
        apart: The divergence, ``m``.
    """
    total = -apart
    for X, expected in batches:
        total = total + weight * expected(*process.marginals(X)).sum(-1)
    return total

"""Local models blended into one Gaussian process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.inducing import kernel_matrix, kernel_variance
from bo_stream.bases.kernels import stacked_correlation, stacked_kernel
from bo_stream.linalg import safe_cholesky
from bo_stream.process.joint import Joint, Residual
from bo_stream.process.process import Points, PosteriorProcess

FAINT = 1e-12
"""Correlations with a centre below this are equal: far from all centres all models count alike."""


@dataclass(frozen=True)
class Experts:
    """Exact Gaussian processes of C local models, each given its own observations.

    Attributes:
        X: Their inputs, ``C x batch_shape x m x s x d``.
        centres: ``batch_shape x m x C x d``.
        alive: Whether each has observations, ``batch_shape x m x C``.
        whitener: ``L⁻¹ S`` with ``L Lᵀ = I + S K S`` and S the root of the noise precision, ``C x
            batch_shape x m x s x s``.
        whitened_targets: ``L⁻¹ S r`` with r the outcomes less the prior mean, ``C x batch_shape x m
            x s``.
    """

    X: Tensor
    centres: Tensor
    alive: Tensor
    whitener: Tensor
    whitened_targets: Tensor

    def with_models(self, numbers: Tensor, part: Experts) -> Experts:
        """Replace the whiteners and targets of models of some numbers by those of a part."""
        whitener = self.whitener.index_copy(0, numbers, part.whitener)
        targets = self.whitened_targets.index_copy(0, numbers, part.whitened_targets)
        return replace(part, whitener=whitener, whitened_targets=targets)


def scaled_prior(K: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``S K S``, ``... x s x s``, and the diagonal of S, the root of the noise precision.

    The precision is ``... x s``, 0 where nothing was observed.
    """
    there = precision > 0.0
    root = torch.where(there, torch.where(there, precision, 1.0).sqrt(), 0.0)
    return root.unsqueeze(-1) * K * root.unsqueeze(-2), root


def factor_of(K: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Compute L with ``L Lᵀ = I + S K S``, never less than the identity, and the diagonal of S.

    No noise, however small, and no two equal inputs ask for jitter. Cost O(s³) a matrix.
    """
    scaled, root = scaled_prior(K, precision)
    return safe_cholesky(scaled + torch.diag_embed(torch.ones_like(root))), root


@dataclass(frozen=True)
class LocalProcess(PosteriorProcess):
    """``f(x) = Σ √w_c(x) g_c(x)`` about the mean ``Σ w_c(x) E f_c(x)``, g_c independent.

    g_c is what model c does not know of f. So the marginals have the mean and the variance of the
    weighted models, the covariance ``Σ √(w_c(x) w_c(x')) cov_c(x, x')`` is positive semi-definite,
    and without data it is the prior where all weights agree.

    Attributes:
        kernel: In float64.
        outputs: m.
        prior_mean: ``batch_shape x m x 1``.
        experts: The models.
        nearest: How many models, the most similar ones, count at an input.
    """

    kernel: Kernel
    outputs: int
    prior_mean: Tensor
    experts: Experts
    nearest: int

    def at(self, X: Tensor) -> Points:
        """Compute root weights and, times these, whitened covariances, ``... x m x n x (C s)``.

        Cost O(n s²) a model that counts at any input.
        """
        amplitudes = self.amplitudes(X)
        used = (amplitudes > 0.0).flatten(0, -2).any(0).nonzero().squeeze(-1)
        columns = self._columns(X, used) * amplitudes[..., used].unsqueeze(-1)
        room = columns.new_zeros(*amplitudes.shape, columns.shape[-1])
        return Points(X, amplitudes, room.index_copy(-2, used, columns).flatten(-2))

    def amplitudes(self, X: Tensor) -> Tensor:
        """Compute ``√w_c(x)``, ``... x n x d -> ... x m x n x C``; squares sum to 1.

        The weights are the correlations with the centres. [NguyenTuong2008, algorithm 2]
        """
        each = X.unsqueeze(-3)
        similarity = stacked_correlation(self.kernel, each, self.experts.centres, self.outputs)
        alive = self.experts.alive.unsqueeze(-2)
        nobody = ~alive.any(-1, keepdim=True)
        similarity = torch.where(alive | nobody, similarity.clamp_min(FAINT), 0.0)
        best = similarity.detach().topk(min(self.nearest, similarity.shape[-1]), -1).indices
        counts = torch.zeros_like(similarity, dtype=torch.bool).scatter(-1, best, True)
        counts = counts & (similarity > 0.0)
        total = torch.where(counts, similarity, 0.0).sum(-1, keepdim=True)
        return torch.where(counts, torch.where(counts, similarity / total, 1.0).sqrt(), 0.0)

    def _columns(self, X: Tensor, used: Tensor) -> Tensor:
        """Compute ``L⁻¹ S k(X_c, x)`` of some models, ``... x m x n x C' x s``."""
        whitener, inputs = self.experts.whitener[used], self.experts.X[used]
        more = max(0, X.ndim + 2 - inputs.ndim)
        shape = (len(used), *(1,) * more)
        inputs = inputs.view(*shape, *inputs.shape[1:])
        cross = stacked_kernel(self.kernel, inputs, X.unsqueeze(-3), self.outputs)
        columns = whitener.view(*shape, *whitener.shape[1:]) @ cross
        return columns.movedim(0, -1).movedim(-3, -1)

    def mean_at(self, points: Points) -> Tensor:
        """Compute ``prior_mean + Σ w_c mean_c``."""
        targets = self.experts.whitened_targets.movedim(0, -2).unsqueeze(-3)
        each = (points.posterior.unflatten(-1, targets.shape[-2:]) * targets).sum(-1)
        return self.prior_mean + (each * points.prior).sum(-1)

    def cross_covariance(self, points: Points, others: Points) -> Tensor:
        """Compute ``Σ √(w_c w_c') cov_c``."""
        known = points.posterior @ others.posterior.mT
        return self._prior_covariance(points, others) - known

    def variance_at(self, points: Points) -> Tensor:
        """Compute ``Σ w_c var_c``."""
        prior = kernel_variance(self.kernel, points.X, self.outputs)
        return prior - points.posterior.square().sum(-1)

    def joint_at(self, points: Points) -> Joint:
        """Return the prior part as a residual, less what the models know."""
        residual = Residual(
            lambda: self._prior_covariance(points, points),
            lambda: kernel_variance(self.kernel, points.X, self.outputs),
        )
        known = points.posterior
        return Joint(self.mean_at(points), known[..., :0], known, residual)

    def _prior_covariance(self, points: Points, others: Points) -> Tensor:
        prior = kernel_matrix(self.kernel, points.X, others.X, self.outputs)
        return points.prior @ others.prior.mT * prior

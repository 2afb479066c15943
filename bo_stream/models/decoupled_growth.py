"""How the bases of a decoupled model grow with the data: algorithm 1 of Cheng and Boots (2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.numbers import checked_number
from bo_stream.models.decoupled_bound import Expanded
from bo_stream.models.decoupled_posterior import DecoupledPosterior, HybridSpread
from bo_stream.models.decoupled_spectral import SpectralSpread, with_eigenfunctions


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
        """Of numbers that a user gave.

        Raises:
            ValueError: One is negative or no whole number; a mean of fewer functions than the
                covariance; a span of fewer than the covariance or more than the mean.
        """
        if span is None:
            span = min(4 * covariance, mean)
        growth = cls(
            checked_number("num_mean", mean, 0),
            checked_number("num_covar", covariance, 0),
            checked_number("num_added", step),
            checked_number("num_span", span, 0),
        )
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
        return growth

    def finished(self, posterior: DecoupledPosterior) -> bool:
        """Whether both caps are reached."""
        spectral = isinstance(posterior.spread, SpectralSpread)
        full = spectral or len(posterior.beta) >= self.covariance
        return full and len(posterior.alpha) >= self.mean

    def grown(
        self, posterior: DecoupledPosterior, X: Tensor, kernel: Kernel, outputs: int
    ) -> DecoupledPosterior:
        """With values at some inputs as further functions, which change nothing at first.

        A direct parametrization takes the same inputs for both bases [A.2]; a hybrid one takes
        others for the mean, for β has a mean of its own; a spectral one for the mean alone, some of
        which :meth:`renewed` combines. Inputs that are points already are left.

        Args:
            posterior: Before.
            X: Of a minibatch, ``... x n x d``.
            kernel: The prior's.
            outputs: m.
        """
        if self.finished(posterior):
            return posterior
        if isinstance(posterior.spread, SpectralSpread):
            most = min(self.mean - len(posterior.alpha), self.step)
            return posterior.with_mean_values(_points(X, posterior, most))
        room = self.covariance - len(posterior.beta)
        points = _points(X, posterior, 2 * self.step)
        first = points[..., : min(room, self.step), :]
        grown = posterior.with_covariance_values(first, kernel, outputs)
        rest = points
        if isinstance(posterior.spread, HybridSpread):
            rest = points[..., first.shape[-2] :, :]
        more = rest[..., : min(self.mean - len(posterior.alpha), self.step), :]
        return grown.with_mean_values(more)

    def anew(
        self, nothing: DecoupledPosterior, before: DecoupledPosterior, kernel: Kernel, outputs: int
    ) -> DecoupledPosterior:
        """The functions of a posterior, of which nothing is known.

        Args:
            nothing: A posterior of no functions.
            before: Whose functions to take; those of a spectral covariance are still to be sought.
            kernel: The prior's.
            outputs: m.
        """
        if not isinstance(nothing.spread, SpectralSpread):
            nothing = nothing.with_covariance_values(before.beta.points, kernel, outputs)
        return nothing.with_mean_values(before.alpha.points)

    def spans_all(self, posterior: DecoupledPosterior) -> bool:
        """Whether a spectral parametrization combines as many functions as there are for it."""
        return len(posterior.beta) >= min(self.span, len(posterior.alpha))

    def spans_more(self, posterior: DecoupledPosterior) -> bool:
        """Whether it combines more functions than a step should: the best posterior's does."""
        return isinstance(posterior.spread, SpectralSpread) and len(posterior.beta) > self.span

    def renewed(self, now: Expanded, X: Tensor) -> DecoupledPosterior:
        """A spectral parametrization with the eigenfunctions of now, by some inputs."""
        return with_eigenfunctions(now, X, self.span, self.covariance)


def _points(X: Tensor, posterior: DecoupledPosterior, most: int) -> Tensor:
    """The first inputs that are not among the points, each once, ``... x m x k x d``."""
    beta, alpha = posterior.beta.points, posterior.alpha.points
    known = torch.cat((beta, alpha), -2)
    wide = X.unsqueeze(-3).expand(*known.shape[:-2], *X.shape[-2:])[..., : 2 * most, :]
    same = _equal(wide, wide).tril(-1).any(-1)
    there = _equal(wide, known).any(-1)
    old = (same | there).flatten(0, -2).any(0)
    return wide[..., torch.nonzero(~old).flatten()[:most], :]


def _equal(A: Tensor, B: Tensor) -> Tensor:
    """Which rows are the same, ``... x n x d`` and ``... x n' x d`` to ``... x n x n'``."""
    same = torch.ones(*A.shape[:-1], B.shape[-2], dtype=torch.bool, device=A.device)
    for a, b in zip(A.unbind(-1), B.unbind(-1), strict=True):
        same &= a.unsqueeze(-1) == b.unsqueeze(-2)
    return same

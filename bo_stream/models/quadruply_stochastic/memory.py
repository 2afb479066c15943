"""What a quadruply stochastic model remembers: data to draw from, and what steps made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bo_stream.bases.sampled import SampledBasis
from bo_stream.models.hyperparameters import subset_module, subset_moments
from bo_stream.models.quadruply_stochastic.choice import Layout
from bo_stream.models.quadruply_stochastic.sampled_gradient import ControlPoints
from bo_stream.models.quadruply_stochastic.weight_posterior import ChevronPosterior
from bo_stream.models.stochastic.replay import Batch, HoldsRows, Replay

_TINY = 1e-20


@dataclass(frozen=True)
class AdaGrad:
    """Steps along gradients, each number's over the root of its own sum of squares so far.

    Numbers whose gradient is not among those given stay, and so do their sums: a step costs what it
    moves. [Duchi2011; Evans2020, section 2.4]

    Attributes:
        squares: Sums of squared gradients, shaped as the numbers, ``m x p ...``; moved in place.
    """

    squares: Tensor

    @classmethod
    def on(cls, values: Tensor) -> AdaGrad:
        """With nothing seen so far."""
        return cls(torch.zeros_like(values))

    def ascend(
        self, values: Tensor, index: Tensor, gradient: Tensor, rate: Tensor | float
    ) -> Tensor:
        """Move some numbers up a gradient, in place; returns by how much, shaped as the gradient.

        Args:
            values: ``m x p ...``.
            index: Distinct, of the second dimension, ``k``.
            gradient: ``m x k ...``.
            rate: Of the first step; later ones are shorter. Broadcast against the gradient.
        """
        squares = self.squares.index_select(1, index) + gradient.square()
        self.squares.index_copy_(1, index, squares)
        moves = rate * gradient / (squares + _TINY).sqrt()
        values.index_add_(1, index, moves)
        return moves


@dataclass(frozen=True)
class Schedule:
    """How steps are taken.

    Attributes:
        functions: Basis functions m̃ of a draw.
        rate: AdaGrad's, of the weights.
        hyper_rate: Adam's, of the hyperparameters; 0: they stay.
        frozen: Steps before the hyperparameters begin to move.
        half_life: Steps in which both rates fall to half.
        seed: Of all draws.
    """

    functions: int
    rate: float
    hyper_rate: float
    frozen: int
    half_life: float
    seed: int

    def decay(self, step: int) -> float:
        """Of both rates at a step."""
        return float(0.5 ** (step / self.half_life))


@dataclass
class Progress:
    """What steps change, beside the hyperparameters.

    Attributes:
        posterior: Of the weights.
        moved: Of its coefficients, by AdaGrad.
        scaled: Of its learned scales, by AdaGrad.
        control: Support points, once there are any.
        precisions: Of functions that have their own, ``m x p``, else None.
        moments: Of Adam.
        steps: Taken so far.
    """

    posterior: ChevronPosterior
    moved: AdaGrad
    scaled: AdaGrad
    control: ControlPoints | None = None
    precisions: Tensor | None = None
    moments: dict[str, Any] | None = None
    steps: int = 0

    @classmethod
    def start(cls, posterior: ChevronPosterior, precisions: Tensor | None = None) -> Progress:
        """Before the first step."""
        moved, scaled = (AdaGrad.on(t) for t in (posterior.coefficients, posterior.log_scale))
        return cls(posterior, moved, scaled, precisions=precisions)

    def map(self, rule: Callable[[Tensor], Tensor]) -> Progress:
        """A rule for all tensors of the weights, ``m x ...``, without support points."""
        return replace(
            self,
            posterior=self.posterior.map(rule),
            moved=AdaGrad(rule(self.moved.squares)),
            scaled=AdaGrad(rule(self.scaled.squares)),
            control=None,
            precisions=None if self.precisions is None else rule(self.precisions),
        )

    def grown(self, first: Progress) -> Progress:
        """With further functions, as another progress has them before its first step."""
        old, new = self.precisions, first.precisions
        return replace(
            self,
            posterior=self.posterior.grown(first.posterior),
            moved=AdaGrad(torch.cat((self.moved.squares, first.moved.squares), 1)),
            scaled=AdaGrad(self._grown_scales(first)),
            precisions=new if old is None or new is None else torch.cat((old, new), 1),
        )

    def _grown_scales(self, first: Progress) -> Tensor:
        own, new = self.scaled.squares, first.scaled.squares
        return own if self.posterior.is_measured else torch.cat((own, new), 1)

    def clone(self) -> Progress:
        """A copy that stays."""
        copy = self.map(torch.clone)
        return replace(copy, control=None if self.control is None else self.control.clone())


@dataclass(frozen=True)
class QuadrupleMemory(HoldsRows):
    """A value, but that steps move the tensors of its progress in place.

    Attributes:
        replay: Observations in units of the process, ``n x d`` and ``n x m``.
        layout: The functions.
        progress: Of learning.
    """

    replay: Replay
    layout: Layout
    progress: Progress

    @property
    def _outputs(self) -> int:
        return self.progress.posterior.coefficients.shape[0]

    @property
    def counts(self) -> Tensor:
        """Number n of observations that came, ``m``."""
        like = self.progress.posterior.coefficients
        return like.new_full((self._outputs,), float(self.replay.count), dtype=torch.float64)

    def after(self, new: Batch) -> QuadrupleMemory:
        """With more observations to draw from, and a progress of its own. Cost O(p)."""
        return replace(self, replay=self.replay.plus(new), progress=self.progress.clone())

    def select(self, outputs: list[int]) -> QuadrupleMemory:
        """A copy for some of the outputs."""
        progress, of = self.progress, self._outputs
        chosen = progress.map(lambda t: t[outputs])
        moments = progress.moments
        if moments is not None:
            moments = subset_moments(moments, torch.Size(), of, outputs)
        control = None
        if progress.control is not None:
            control = _of_outputs(progress.control, of, outputs)
        return QuadrupleMemory(
            self.replay.select(outputs),
            self.layout.select(outputs),
            replace(chosen, moments=moments, control=control),
        )

    def to(self, device: torch.device) -> QuadrupleMemory:
        """On another device; Adam and the control variate begin anew there."""
        progress = self.progress.map(lambda t: t.to(device))
        return QuadrupleMemory(
            self.replay.to(device), self.layout.to(device), replace(progress, moments=None)
        )


def _of_outputs(control: ControlPoints, of: int, outputs: list[int]) -> ControlPoints:
    root = control.prior_root
    if root is not None and root.shape[0] == of:
        root = root[outputs]
    return replace(
        control,
        basis=_basis_of_outputs(control.basis, of, outputs),
        projection=control.projection.select(of, outputs),
        values=control.values[outputs],
        prior_root=root,
    )


def _basis_of_outputs(basis: SampledBasis, of: int, outputs: list[int]) -> SampledBasis:
    return basis.with_kernel(subset_module(basis.kernel, torch.Size(), of, outputs), len(outputs))

"""Memory of a quadruply stochastic model: observations to draw from, functions, and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.bases.sampled import (
    FourierBasis,
    PointBasis,
    RelevanceBasis,
    SampledBasis,
    check_spectral,
)
from bo_stream.models.outcomes.selection import (
    subset_module,
    subset_moments,
)
from bo_stream.models.quadruply_stochastic.choice import FourierFeatures, InducingAtData
from bo_stream.models.quadruply_stochastic.control_variate import ControlPoints
from bo_stream.models.quadruply_stochastic.weight_posterior import ChevronPosterior
from bo_stream.models.stochastic.replay import Batch, HoldsRows, Replay
from bo_stream.tensors import map_tensors

_TINY = 1e-20


@dataclass(frozen=True)
class QuadruplyStochasticMemory(HoldsRows):
    """Observations, functions, and weights; steps move the tensors of the progress in place.

    Attributes:
        replay: Observations in units of the process, ``n x d`` and ``n x m``.
        layout: The functions.
        progress: Of learning.
        begun: Whether there was a call to fit.
    """

    replay: Replay
    layout: Layout
    progress: Progress
    begun: bool = False

    def basis(self, kernel: Kernel) -> SampledBasis:
        """Return the functions of a kernel, and of their own precisions if they have any."""
        return self.layout.basis(kernel, self.progress.precisions)

    @property
    def _outputs(self) -> int:
        return self.progress.posterior.coefficients.shape[0]

    @property
    def counts(self) -> Tensor:
        """Number n of observations that came, ``m``."""
        like = self.progress.posterior.coefficients
        return like.new_full((self._outputs,), float(self.replay.count), dtype=torch.float64)

    def after(self, new: Batch) -> QuadruplyStochasticMemory:
        """Add observations to draw from, and copy the progress. Cost O(p)."""
        return replace(self, replay=self.replay.plus(new), progress=self.progress.clone())

    def select(self, outputs: list[int]) -> QuadruplyStochasticMemory:
        """Copy for some of the outputs."""
        progress, of = self.progress, self._outputs
        chosen = progress.map(lambda t: t[outputs])
        moments = progress.moments
        if moments is not None:
            moments = subset_moments(moments, torch.Size(), of, outputs)
        control = None
        if progress.control is not None:
            control = _of_outputs(progress.control, of, outputs)
        return replace(
            self,
            replay=self.replay.select(outputs),
            layout=self.layout.select(outputs),
            progress=replace(chosen, moments=moments, control=control),
        )

    def to(self, device: torch.device) -> QuadruplyStochasticMemory:
        """Move to another device; Adam and the control variate begin anew there."""
        progress = self.progress.map(lambda t: t.to(device))
        return replace(
            self,
            replay=self.replay.to(device),
            layout=self.layout.to(device),
            progress=replace(progress, moments=None),
        )


@dataclass(frozen=True)
class AdaGrad:
    """AdaGrad: each number moves along its gradient over the root of its sum of squares so far.

    Numbers whose gradient is not among those given stay, and so do their sums: a step costs what it
    moves. [Duchi2011; Evans2020, section 2.4]

    Attributes:
        squares: Sums of squared gradients, shaped as the numbers, ``m x p ...``; moved in place.
    """

    squares: Tensor

    @classmethod
    def on(cls, values: Tensor) -> AdaGrad:
        """Begin with nothing seen so far."""
        return cls(torch.zeros_like(values))

    def ascend(
        self, values: Tensor, index: Tensor, gradient: Tensor, rate: Tensor | float
    ) -> Tensor:
        """Move some numbers up a gradient, in place; return by how much, shaped as the gradient.

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


@dataclass
class Progress:
    """Weights and optimisers' state: what steps change, beside the hyperparameters.

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
        """Begin before the first step."""
        moved, scaled = (AdaGrad.on(t) for t in (posterior.coefficients, posterior.log_scale))
        return cls(posterior, moved, scaled, precisions=precisions)

    def map(self, rule: Callable[[Tensor], Tensor]) -> Progress:
        """Apply a rule to all tensors of the weights, ``m x ...``; support points are left out."""
        return map_tensors(replace(self, control=None), rule)

    def grown(self, first: Progress) -> Progress:
        """Add functions as another progress has them before its first step."""
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
        """Copy what steps move."""
        copy = self.map(torch.clone)
        return replace(copy, control=None if self.control is None else self.control.clone())


@dataclass(frozen=True)
class Layout:
    """The functions of a model, as they are now: Fourier features, or kernel functions at points.

    Attributes:
        choice: Of the user.
        points: Where kernel functions are, ``p x d``; none of Fourier features.
        outputs: m.
    """

    choice: FourierFeatures | InducingAtData
    points: Tensor
    outputs: int

    @property
    def size(self) -> int:
        """Number p of functions."""
        choice = self.choice
        return choice.count if isinstance(choice, FourierFeatures) else len(self.points)

    def basis(self, kernel: Kernel, precisions: Tensor | None) -> SampledBasis:
        """Return the functions of a kernel, with precisions ``m x p`` where they have their own."""
        if isinstance(self.choice, FourierFeatures):
            return FourierBasis(kernel, self.choice.count, self.choice.seed)
        if precisions is None:
            return PointBasis(kernel, self.points, self.outputs)
        return RelevanceBasis(kernel, self.points, self.outputs, precisions)

    def grown(self, X: Tensor) -> Layout:
        """Add inputs, ``n x d``, as points, as many as there is room for."""
        if isinstance(self.choice, FourierFeatures):
            return self
        room = max(0, self.choice.max_points - len(self.points))
        new = X[:room].to(self.points)
        return replace(self, points=torch.cat((self.points, new))) if room > 0 else self

    def since(self, start: int) -> Layout:
        """Return the functions from one on, as functions of their own; Fourier features all."""
        return replace(self, points=self.points[start:])

    def select(self, outputs: list[int]) -> Layout:
        """Keep the functions for some outputs."""
        return replace(self, outputs=len(outputs))

    def to(self, device: torch.device) -> Layout:
        """Move to another device."""
        return replace(self, points=self.points.to(device))


def first_layout(
    choice: FourierFeatures | InducingAtData, kernel: Kernel, X: Tensor, outputs: int
) -> Layout:
    """Choose the first functions.

    Args:
        choice: Of the user.
        kernel: Of the model.
        X: First inputs, ``n x d``, float64; none of them is a point yet.
        outputs: m.

    Raises:
        UnsupportedError: The kernel has no such features.
    """
    if isinstance(choice, FourierFeatures):
        check_spectral(kernel)
    return Layout(choice, X[:0], outputs)


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

"""What a quadruply stochastic model remembers: data to draw from, and what steps made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bo_stream.bases.sampled_basis import SampledBasis
from bo_stream.models.control_points import ControlPoints
from bo_stream.models.quadruple_progress import Progress
from bo_stream.models.replay import Batch, Replay
from bo_stream.models.rows_memory import HoldsRows
from bo_stream.models.subset import subset_module, subset_moments
from bo_stream.models.weight_layout import Layout


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

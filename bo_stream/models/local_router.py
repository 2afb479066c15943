"""Which local model an observation belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from bo_stream.allocation.oips import first_unlike
from bo_stream.bases.stacked_kernel import stacked_correlation
from bo_stream.models.local_memory import LocalMemory


@dataclass(frozen=True)
class Router:
    """An observation goes to the model whose centre is most like it, or begins a model.

    Attributes:
        w_gen: Correlation with the most similar centre below which a new model begins, in (0, 1).
        max_models: Largest number of models of a batch element and output; once there are so many,
            every observation goes to the most similar one.
    """

    w_gen: float
    max_models: int

    @torch.no_grad()
    def models_for(self, X: Tensor, memory: LocalMemory, kernel: Kernel, outputs: int) -> Tensor:
        """Number of the model for each of some inputs, ``batch_shape x m x n``.

        As one after the other, but for the centres, which stay until all have entered; a number
        from ``memory.alive.sum(0)`` on is of a new model. [NguyenTuong2008, algorithm 1]

        Args:
            X: ``batch_shape x m x n x d``.
            memory: Of the models.
            kernel: Of the correlations, in float64.
            outputs: m.
        """
        likeness = stacked_correlation(kernel, X, memory.centres, outputs)
        alive = memory.alive.movedim(0, -1)
        likeness = torch.where(alive.unsqueeze(-2), likeness, -torch.inf)
        pairs = stacked_correlation(kernel, X, X, outputs)
        n = X.shape[-2]
        each = zip(
            likeness.reshape(-1, n, likeness.shape[-1]),
            pairs.expand(*likeness.shape[:-1], n).reshape(-1, n, n),
            alive.sum(-1).flatten().tolist(),
            strict=True,
        )
        return torch.stack([self._one(*arguments) for arguments in each]).view(likeness.shape[:-1])

    def _one(self, likeness: Tensor, pairs: Tensor, models: int) -> Tensor:
        """Of one batch element and output, ``n``."""
        best, chosen = likeness.max(-1)
        strangers = (best < self.w_gen).nonzero().squeeze(-1)
        alike = pairs[strangers][:, strangers] >= self.w_gen
        founders = strangers[first_unlike(alike)][: self.max_models - models]
        if len(founders) == 0:
            return chosen
        to_founders, which = pairs[strangers][:, founders].max(-1)
        chosen[strangers] = torch.where(
            to_founders > best[strangers], models + which, chosen[strangers]
        )
        return chosen

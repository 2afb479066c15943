"""Data to put into models, in any shape and dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Observations:
    """Inputs in the unit cube, positive outcomes, and known noise variances where there are any.

    Attributes:
        X: ``... x n x d``.
        Y: ``... x n x m``.
        Yvar: ``... x n x m`` or None.
    """

    X: Tensor
    Y: Tensor
    Yvar: Tensor | None = None

    def __getitem__(self, rows: slice) -> Observations:
        """Some of the rows."""
        Yvar = None if self.Yvar is None else self.Yvar[..., rows, :]
        return Observations(self.X[..., rows, :], self.Y[..., rows, :], Yvar)

    def __len__(self) -> int:
        return self.X.shape[-2]

    def astuple(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """As a model's arguments."""
        return self.X, self.Y, self.Yvar

    def with_noise(self, kind: str) -> Observations:
        """Noise variances ``"learned"`` (none known), ``"known"`` or ``"mixed"``."""
        if kind == "learned":
            return replace(self, Yvar=None)
        Yvar = 0.01 + 0.05 * torch.rand_like(self.Y)
        if kind == "mixed":
            Yvar[..., ::2, :] = torch.nan
        return replace(self, Yvar=Yvar)


def observations(
    n: int,
    dim: int = 2,
    outputs: int = 1,
    batch_shape: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> Observations:
    """Noisy values of smooth positive functions, one per output, at uniform points."""
    X = torch.rand(*batch_shape, n, dim, dtype=torch.float64)
    phase = X.sum(-1, keepdim=True) + torch.arange(outputs)
    Y = 4.0 + torch.sin(3.0 * phase) + X[..., :1] ** 2 + 0.1 * torch.randn_like(phase)
    return Observations(X.to(dtype), Y.to(dtype))

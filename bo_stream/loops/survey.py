"""A data set split into points to choose from and points to be scored on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.loops.datasets import Dataset
from bo_stream.loops.settings import Settings


@dataclass(frozen=True)
class Survey:
    """Pool and test points in random order, inputs in the unit cube.

    Attributes:
        pool_X: Candidates, ``N x d``.
        pool_Y: Their outcomes, to be looked at only once chosen, ``N x 1``.
        pool_rows: Their rows in the data, ``N``.
        test_X: Held-out inputs, ``t x d``.
        test_Y: Held-out outcomes, ``t x 1``.
    """

    pool_X: Tensor
    pool_Y: Tensor
    pool_rows: Tensor
    test_X: Tensor
    test_Y: Tensor

    @classmethod
    def of(cls, data: Dataset, settings: Settings) -> Survey:
        """Split by the seed: the same split for every strategy.

        Args:
            data: Inputs are scaled to the unit cube by their box.
            settings: Resolved ones (:meth:`Settings.resolved`).
        """
        order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(settings.seed))
        test_rows, rest = order[: settings.test], order[settings.test :]
        pool_rows = rest[: settings.pool]
        like = torch.empty(0, dtype=settings.torch_dtype, device=settings.device)
        X = torch.from_numpy(data.unit_X).to(like)
        Y = torch.from_numpy(data.y).unsqueeze(-1).to(like)
        return cls(X[pool_rows], Y[pool_rows], pool_rows, X[test_rows], Y[test_rows])

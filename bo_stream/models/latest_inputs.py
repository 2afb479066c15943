"""Inputs of the latest observations, for those functions of BoTorch that read training inputs."""

from __future__ import annotations

from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from torch import Tensor

LATEST = 64
"""How many inputs of the latest observations a model holds."""


def latest(before: Tensor | None, X: Tensor) -> Tensor:
    """The last ``LATEST`` inputs of those before and new ones, ``... x k x d``. Cost O(k d).

    Args:
        before: ``... x k' x d``, or None for none.
        X: ``... x n x d``.
    """
    new = X.detach()[..., -LATEST:, :]
    room = LATEST - new.shape[-2]
    if before is None or room == 0:
        return new.clone()
    kept = before[..., max(0, before.shape[-2] - room) :, :]
    return torch.cat((kept.to(new), new), -2)


class WithoutLast(Tensor):
    """A tensor whose last row cannot be asked for, where it is not what BoTorch takes it for.

    Operations on it return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Tensor:
        """As of any tensor.

        Raises:
            UnsupportedError: The index is -1.
        """
        if isinstance(index, int) and index == -1:
            raise UnsupportedError(
                "ProximalAcquisitionFunction needs a model of one output without input_transform: "
                "transform X before it enters the model, or take PenalizedAcquisitionFunction with "
                "a GaussianPenalty around the last point."
            )
        return torch.Tensor.__getitem__(self, index)

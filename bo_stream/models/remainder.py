"""Whether what is left in memory, when observations are taken out, can be of observations."""

from __future__ import annotations

import torch
from botorch.exceptions.errors import InputDataError
from torch import Tensor

from bo_stream.models.memory import Whitened, WhitenedMemory

_ROUNDING = 1e-8
"""Negative part of the former statistics that counts as a rounding error."""


def check_remainder(after: WhitenedMemory, before: WhitenedMemory) -> None:
    """Check that statistics are those of some observations: ``[Φ, Y, 1]ᵀ D⁻¹ [Φ, Y, 1] ⪰ 0``.

    Cost O(r³) for dense grams, O(M) for diagonal ones.

    Args:
        after: What would be left.
        before: What is in memory.

    Raises:
        InputDataError: They are of none.
    """
    pairs = ((after.learned, before.learned), (after.known, before.known or after.known))
    for left, was in pairs:
        if left is not None and was is not None and not bool(_may_be_data(left, was).all()):
            raise never_in()


def never_in() -> InputDataError:
    """Build the error for observations without which the memory would hold less than nothing."""
    return InputDataError(
        "Expected X, Y and Yvar of observations in memory, as they were given to update, got some "
        "without which its statistics would be of no observations: they were never put in, or with "
        "other Y or Yvar, or forget has scaled them down since. The model is as it was."
    )


def _may_be_data(left: Whitened, was: Whitened) -> Tensor:
    """Say whether statistics can be of observations, up to rounding of ``was``: ``... x m``."""
    dense = left.gram.shape[-1] == left.gram.shape[-2]
    return _dense_may_be_data(left, was) if dense else _diagonal_may_be_data(left, was)


def _dense_may_be_data(left: Whitened, was: Whitened) -> Tensor:
    scale = _positive(_largest(was.gram.diagonal(dim1=-2, dim2=-1)))
    squares = was.energy.diagonal(dim1=-2, dim2=-1)
    columns = (scale.unsqueeze(-1) / _positive(squares)).sqrt()
    moment = left.moment * columns.unsqueeze(-2)
    energy = left.energy * columns.unsqueeze(-1) * columns.unsqueeze(-2)
    gram = left.gram.expand(*moment.shape[:-2], *left.gram.shape[-2:])
    upper, lower = torch.cat((gram, moment), -1), torch.cat((moment.mT, energy), -1)
    whole = torch.cat((upper, lower), -2) / scale[..., None, None]
    whole.diagonal(dim1=-2, dim2=-1).add_(_ROUNDING)
    return torch.linalg.cholesky_ex(whole)[1] == 0


def _diagonal_may_be_data(left: Whitened, was: Whitened) -> Tensor:
    rounding = _ROUNDING * _positive(_largest(was.gram.squeeze(-1)))
    gram = left.gram.squeeze(-1) + rounding.unsqueeze(-1)
    explained = (left.moment.square() / gram.unsqueeze(-1)).sum(-2)
    left_over = left.energy + _ROUNDING * was.energy
    room = left_over.diagonal(dim1=-2, dim2=-1)
    return (gram > 0.0).all(-1) & (explained <= room).all(-1)


def _largest(values: Tensor) -> Tensor:
    return values.amax(-1) if values.shape[-1] > 0 else values.sum(-1)


def _positive(values: Tensor) -> Tensor:
    return torch.where(values > 0.0, values, 1.0)

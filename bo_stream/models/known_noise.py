"""Which observations have a known noise variance, and how small one may be."""

from __future__ import annotations

import warnings

import torch
from botorch.exceptions.errors import InputDataError
from botorch.exceptions.warnings import InputDataWarning
from torch import Tensor

from bo_stream.models.warning_level import users_stack_level

NOISE_FLOOR = 1e-6
"""Smallest known noise variance, in parts of the first outcomes' variance."""


def known_noise(
    targets: Tensor, Yvar: Tensor | None, floor: Tensor, learns: bool
) -> tuple[Tensor, Tensor]:
    """Noise variances with 1 where unknown, ``batch x m x n``, and where known, ``batch x 1 x n``.

    Args:
        targets: ``batch x m x n``.
        Yvar: Variances, ``batch x n x m``; NaN in a row: unknown.
        floor: Smallest one, ``batch x m``; zeros are raised to it with a warning.
        learns: Whether the model has a noise level for the unknown ones.

    Raises:
        InputDataError: One is unknown and the model learns none.
    """
    if Yvar is None:
        known = torch.zeros_like(targets[..., :1, :], dtype=torch.bool)
        noise = torch.ones_like(targets)
    else:
        noise = Yvar.detach().to(torch.float64).mT
        known = ~noise.isnan().any(-2, keepdim=True)
        noise = torch.where(known, _floored(noise, floor), torch.ones_like(noise))
    if not learns and not bool(known.all()):
        raise InputDataError(
            "Expected Yvar for every observation: this model has no one noise level for others, "
            "for all its first observations had known noise, or its noise depends on the inputs. "
            "Pass Yvar, or build WISKI with NaN in train_Yvar."
        )
    return noise, known


def _floored(noise: Tensor, floor: Tensor) -> Tensor:
    if bool((noise == 0).any()):
        warnings.warn(
            f"Yvar holds zeros; they are raised to {NOISE_FLOOR:g} of the outcomes' variance.",
            InputDataWarning,
            stacklevel=users_stack_level(),
        )
    return torch.where(noise.isnan(), noise, noise.maximum(floor.unsqueeze(-1)))

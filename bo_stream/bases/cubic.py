"""Cubic convolution interpolation inside one cell, and products of its weights as polynomials."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

STENCIL = 4
"""Nodes that carry weight at a point, per dimension."""

PAIR_DEGREES = 7
"""Number of Legendre polynomials (degrees 0 to 6) that products of two weights need."""

# Rows: nodes −1, 0, 1, 2; columns: powers 0 to 3 of the position in the cell. [Keys1981, a = −1/2]
_KEYS = (
    (0.0, -0.5, 1.0, -0.5),
    (1.0, 0.0, -2.5, 1.5),
    (0.0, 0.5, 2.0, -1.5),
    (0.0, 0.0, -0.5, 0.5),
)


def weights(t: Tensor) -> Tensor:
    """Interpolation weights of the nodes −1, 0, 1, 2 at position t in [0, 1], ``... -> ... x 4``.

    They sum to one and reproduce quadratics. Source: Keys (1981), used by KISS-GP and WISKI.
    """
    powers = torch.stack((torch.ones_like(t), t, t * t, t * t * t), dim=-1)
    return powers @ _keys(t.dtype, t.device)


@cache
def _keys(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(_KEYS, dtype=dtype, device=device).mT


def legendre(t: Tensor, degrees: int = PAIR_DEGREES) -> Tensor:
    """Legendre polynomials of ``2 t − 1`` up to a degree, ``... -> ... x degrees``."""
    x = 2.0 * t - 1.0
    values = [torch.ones_like(x), x]
    for n in range(1, degrees - 1):
        values.append(((2 * n + 1) * x * values[n] - n * values[n - 1]) / (n + 1))
    return torch.stack(values[:degrees], dim=-1)


@cache
def pair_coefficients() -> Tensor:
    """Legendre coefficients c of products of weights: ``w_j(t) w_k(t) = Σ_l c[l, j, k] P_l``.

    A product of two cubics has degree 6, hence Gauss quadrature with 7 points is exact.
    """
    t, quadrature = gauss_legendre(PAIR_DEGREES)
    w = weights(t)
    norms = 2.0 * torch.arange(PAIR_DEGREES, dtype=torch.float64) + 1.0
    return torch.einsum("n,nl,l,nj,nk->ljk", quadrature, legendre(t), norms, w, w)


def gauss_legendre(points: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss–Legendre quadrature on [0, 1]."""
    nodes, quadrature = np.polynomial.legendre.leggauss(points)
    return torch.from_numpy((nodes + 1.0) / 2.0), torch.from_numpy(quadrature / 2.0)

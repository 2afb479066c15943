"""Random numbers that are functions of their place: any of millions is had without the others."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def normals(seed: int, rows: Tensor, width: int) -> Tensor:
    """Standard normal numbers of some rows of an endless table, ``k -> k x width``, float64.

    The same for a seed, a row and a column on every device, whatever else is asked for. Hashes by
    SplitMix64 (Steele, Lea and Flood, 2014). Cost O(k width).

    Args:
        seed: Of the table.
        rows: Whole numbers from 0, ``k``.
        width: Of the table; another width is another table.
    """
    columns = torch.arange(width, device=rows.device)
    counters = rows.unsqueeze(-1) * width + columns
    start = _mixed(torch.full_like(counters, seed))
    bits = _mixed(start + (counters + 1) * _GOLDEN)
    return torch.special.ndtri((_shifted(bits, 12) + 0.5) * 2.0**-52)


def _mixed(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64; products of int64 wrap around."""
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, places: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (z >> places) & ((1 << (64 - places)) - 1)

"""The interface of a basis of which some functions at a time are evaluated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from gpytorch.kernels import Kernel
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


@dataclass(frozen=True)
class Draw:
    """Some of many, each with how many it stands for.

    Law: ``Σ weight · a[index]`` is on average ``Σ a`` of all.

    Attributes:
        index: Distinct, in order, ``k``.
        weight: ``k``, float64.
        of: How many there are.
    """

    index: Tensor
    weight: Tensor
    of: int

    @property
    def is_all(self) -> bool:
        """Whether nothing is left out."""
        return len(self.index) == self.of

    @classmethod
    def all(cls, of: int, device: torch.device) -> Draw:
        """Everything."""
        index = torch.arange(of, device=device)
        return cls(index, torch.ones(of, dtype=torch.float64, device=device), of)


def draw(count: int, of: int, generator: torch.Generator, device: torch.device) -> Draw:
    """One at random from each of ``count`` equal strata of a line of ``of``. Cost O(count).

    Strata may cut one in two: it is then drawn up to twice, and its weight says so. All for
    ``count = of``.

    Args:
        count: From 1 to ``of``.
        of: How many there are.
        generator: On the CPU, whatever the device.
        device: Of the result.
    """
    if count == of:
        return Draw.all(of, device)
    places = torch.rand(count, dtype=torch.float64, generator=generator)
    places = (places + torch.arange(count)) * (of / count)
    drawn = places.long().clamp_max(of - 1)
    index, counts = torch.unique_consecutive(drawn, return_counts=True)
    weight = counts.to(torch.float64) * (of / count)
    return Draw(index.to(device), weight.to(device), of)


class SampledBasis(ABC):
    """Functions φ of a process ``f = φ w``, ``w ~ N(0, S⁻¹)``, any few of them at their own cost.

    ``k(x, x') ≈ φ(x) S⁻¹ φ(x')ᵀ``. [Evans2020, section 2]
    """

    kernel: Kernel

    @abstractmethod
    def with_kernel(self, kernel: Kernel, outputs: int) -> Self:
        """The same functions of another kernel, of m outputs; precisions of their own stay."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number p of functions."""

    @property
    @abstractmethod
    def is_diagonal(self) -> bool:
        """Whether S is diagonal."""

    @abstractmethod
    def functions(self, X: Tensor, index: Tensor) -> Tensor:
        """Some functions, ``... x n x d`` and ``k`` to ``... x m x n x k``.

        Differentiable in X and in the kernel's hyperparameters.
        """

    @abstractmethod
    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """``S[index, others]``, ``m x k x k'``, or with 1 for m where outputs share it."""

    @abstractmethod
    def precision_diagonal(self, index: Tensor) -> Tensor:
        """The diagonal of S at some functions, ``m x k``, or with 1 for m."""

    @abstractmethod
    def mean_squares(self, X: Tensor) -> Tensor:
        """About the mean of each function's square at inputs like X, ``m x p``, or with 1 for m.

        Cost O(p), times the number of inputs where there is no closed form.
        """

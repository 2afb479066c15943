"""Bases of which any few functions are evaluated: random Fourier features, kernel functions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream.bases.inducing import kernel_matrix, kernel_variance
from bo_stream.bases.spectral import degrees_of_freedom, student_frequencies

_CHUNK = 4096
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


class SampledBasis(ABC):
    """Functions φ of a process ``f = φ w``, ``w ~ N(0, S⁻¹)``, any few of them at their own cost.

    ``k(x, x') ≈ φ(x) S⁻¹ φ(x')ᵀ``. [Evans2020, section 2]

    Attributes:
        kernel: k.
        is_diagonal: Whether S is diagonal.
    """

    kernel: Kernel
    is_diagonal: ClassVar[bool]

    @abstractmethod
    def with_kernel(self, kernel: Kernel, outputs: int) -> Self:
        """Return the functions of another kernel, of m outputs; precisions of their own stay."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number p of functions."""

    @abstractmethod
    def functions(self, X: Tensor, index: Tensor) -> Tensor:
        """Evaluate some functions, ``... x n x d`` and ``k`` to ``... x m x n x k``.

        Differentiable in X and in the kernel's hyperparameters.
        """

    @abstractmethod
    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """Compute ``S[index, others]``, ``m x k x k'``, or with 1 for m where outputs share it."""

    @abstractmethod
    def precision_diagonal(self, index: Tensor) -> Tensor:
        """Compute the diagonal of S at some functions, ``m x k``, or with 1 for m."""

    @abstractmethod
    def mean_squares(self, X: Tensor) -> Tensor:
        """Approximate each function's mean square at inputs like X, ``m x p``, or with 1 for m.

        Cost O(p), times the number of inputs where there is no closed form.
        """


@dataclass(frozen=True)
class FourierBasis(SampledBasis):
    """Random Fourier features ``√(2/p) cos(ω x)`` and ``sin``, with ``S = I / output scale``.

    The frequencies ω are drawn from the kernel's spectral density: normal for RBF, Student-t with
    2ν degrees of freedom for Matérn-ν. They are functions of a seed and of the lengthscales, so
    that k functions take O(k d) numbers; ``φ φᵀ = 1`` at every input. [Rahimi2007; Evans2020,
    section 4]

    Attributes:
        kernel: RBF or Matérn, of batch shape ``m`` or none. Live where it is learned.
        count: Number p of functions, even.
        seed: Of the frequencies.
    """

    is_diagonal = True
    kernel: Kernel
    count: int
    seed: int

    def __post_init__(self) -> None:
        check_spectral(self.kernel)

    def with_kernel(self, kernel: Kernel, outputs: int) -> Self:
        """Return the functions of the same normal numbers."""
        return replace(self, kernel=kernel)

    @property
    def size(self) -> int:
        """Number p of functions."""
        return self.count

    @property
    def _stationary(self) -> Kernel:
        return self.kernel.base_kernel if isinstance(self.kernel, ScaleKernel) else self.kernel

    def functions(self, X: Tensor, index: Tensor) -> Tensor:
        """Evaluate some functions. Cost O(n k d)."""
        active = self.kernel.active_dims
        inputs = X if active is None else X.index_select(-1, active)
        frequencies = self.frequencies(index // 2, inputs.shape[-1])
        phase = ((index % 2) * (-0.5 * math.pi)).to(frequencies).reshape(1, -1, 1)
        turned = torch.cat((frequencies, phase.expand(len(frequencies), -1, 1)), -1).to(X)
        inputs = torch.cat((inputs, torch.ones_like(inputs[..., :1])), -1)  # once for the phase
        return (inputs.unsqueeze(-3) @ turned.mT).cos().mul_(math.sqrt(2.0 / self.count))

    def frequencies(self, pairs: Tensor, dim: int) -> Tensor:
        """Compute ω of some pairs of functions, ``k -> m x k x d``. Cost O(k d)."""
        kernel = self._stationary
        drawn = normals(self.seed, pairs, dim + degrees_of_freedom(kernel))
        frequencies = student_frequencies(kernel, drawn, dim) / kernel.lengthscale.double()
        return frequencies.reshape(-1, len(pairs), dim)

    def _scale(self) -> Tensor:
        """Return the output scale, ``m`` or 1."""
        if not isinstance(self.kernel, ScaleKernel):
            return self.kernel.lengthscale.new_ones(1).double()
        return self.kernel.outputscale.double().reshape(-1)

    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """Compute ``S[index, others]``."""
        same = (index.unsqueeze(-1) == others).double()
        return same / self._scale()[:, None, None]

    def precision_diagonal(self, index: Tensor) -> Tensor:
        """Return the diagonal of S."""
        return self._scale().reciprocal().unsqueeze(-1).expand(-1, len(index))

    def mean_squares(self, X: Tensor) -> Tensor:
        """Return ``1 / p``: the mean over all phases."""
        return torch.full((1, self.count), 1.0 / self.count, dtype=X.dtype, device=X.device)


def check_spectral(kernel: Kernel) -> None:
    """Check that a kernel's spectral density is known.

    Raises:
        UnsupportedError: It is not.
    """
    base = kernel.base_kernel if isinstance(kernel, ScaleKernel) else kernel
    if not isinstance(base, RBFKernel | MaternKernel):
        raise UnsupportedError(
            "Expected covar_module to be an RBFKernel or a MaternKernel, or a ScaleKernel of one, "
            f"for Fourier features, got {type(base).__name__}: their frequencies are drawn from "
            "its spectral density. For other kernels take basis=InducingAtData()."
        )


@dataclass(frozen=True)
class KernelFunctions(SampledBasis):
    """Kernel functions ``φ_r(x) = k(x, z_r)``, whatever their prior.

    Attributes:
        kernel: Any, of batch shape ``m`` for m > 1 outputs, or none.
        Z: ``p x d``.
        outputs: m.
    """

    kernel: Kernel
    Z: Tensor
    outputs: int

    def with_kernel(self, kernel: Kernel, outputs: int) -> Self:
        """Return the functions at the same points."""
        return replace(self, kernel=kernel, outputs=outputs)

    @property
    def size(self) -> int:
        """Number p of points."""
        return len(self.Z)

    def functions(self, X: Tensor, index: Tensor) -> Tensor:
        """Evaluate some functions."""
        return kernel_matrix(self.kernel, X, self.Z[index].to(X), self.outputs)

    def mean_squares(self, X: Tensor) -> Tensor:
        """Average over the inputs themselves, some points at a time. Cost O(n p)."""
        parts = torch.arange(self.size, device=X.device).split(_CHUNK)
        return torch.cat([self.functions(X, part).square().mean(-2) for part in parts], -1)


@dataclass(frozen=True)
class PointBasis(KernelFunctions):
    """Kernel functions with ``S = K_ZZ``: inducing points, and the exact prior at them.

    With Z = X it can represent the posterior mean of the exact GP. [Evans2020, section I.2]
    """

    is_diagonal = False

    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """Compute ``k(Z[index], Z[others])``, ``m x k x k'``."""
        return kernel_matrix(self.kernel, self.Z[index], self.Z[others], self.outputs)

    def precision_diagonal(self, index: Tensor) -> Tensor:
        """Compute ``k(z, z)``, ``m x k``."""
        return kernel_variance(self.kernel, self.Z[index], self.outputs)


@dataclass(frozen=True)
class RelevanceBasis(KernelFunctions):
    """Kernel functions with ``S = diag(s)``: each function has a precision of its own.

    [Tipping2001; Evans2020, section I.3]

    Attributes:
        precisions: s, ``m x p``.
    """

    is_diagonal = True
    precisions: Tensor

    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """Compute ``S[index, others]``."""
        same = index.unsqueeze(-1) == others
        return self.precisions[:, index].unsqueeze(-1) * same

    def precision_diagonal(self, index: Tensor) -> Tensor:
        """Return s, ``m x k``."""
        return self.precisions[:, index]


@dataclass(frozen=True)
class Draw:
    """Random subset of functions or data, each with the number that it stands for.

    Law: ``Σ weight · a[index]`` is on average ``Σ a`` of all.

    Attributes:
        index: Distinct, in order, ``k``.
        weight: ``k``, float64.
        of: Size of the whole.
    """

    index: Tensor
    weight: Tensor
    of: int

    @property
    def is_all(self) -> bool:
        """Whether everything was drawn."""
        return len(self.index) == self.of

    @classmethod
    def all(cls, of: int, device: torch.device) -> Draw:
        """Draw everything."""
        index = torch.arange(of, device=device)
        return cls(index, torch.ones(of, dtype=torch.float64, device=device), of)


def draw(count: int, of: int, generator: torch.Generator, device: torch.device) -> Draw:
    """Draw one at random from each of ``count`` equal strata of a line of ``of``. Cost O(count).

    Strata may cut one in two: it is then drawn up to twice, and its weight says so. All for
    ``count = of``. The generator is on the CPU, whatever the device.
    """
    if count == of:
        return Draw.all(of, device)
    places = torch.rand(count, dtype=torch.float64, generator=generator)
    places = (places + torch.arange(count)) * (of / count)
    drawn = places.long().clamp_max(of - 1)
    index, counts = torch.unique_consecutive(drawn, return_counts=True)
    weight = counts.to(torch.float64) * (of / count)
    return Draw(index.to(device), weight.to(device), of)


def normals(seed: int, rows: Tensor, width: int) -> Tensor:
    """Compute rows of an endless table of standard normal numbers, ``k -> k x width``, float64.

    The same for a seed, a row and a column on every device, whatever else is asked for; another
    width is another table. Hashes by SplitMix64 (Steele, Lea and Flood, 2014). Cost O(k width).
    """
    columns = torch.arange(width, device=rows.device)
    counters = rows.unsqueeze(-1) * width + columns
    start = _mixed(torch.full_like(counters, seed))
    bits = _mixed(start + (counters + 1) * _GOLDEN)
    return torch.special.ndtri((_shifted(bits, 12) + 0.5) * 2.0**-52)


def _mixed(z: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64; products of int64 wrap around."""
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, places: int) -> Tensor:
    """Shift to the right, with zeros from the left."""
    return (z >> places) & ((1 << (64 - places)) - 1)

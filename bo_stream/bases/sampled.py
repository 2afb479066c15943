"""Bases of which any few functions are evaluated: random Fourier features, kernel functions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream.bases.inducing import kernel_matrix, kernel_variance

_CHUNK = 4096
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


class SampledBasis(ABC):
    """Functions φ of a process ``f = φ w``, ``w ~ N(0, S⁻¹)``, any few of them at their own cost.

    ``k(x, x') ≈ φ(x) S⁻¹ φ(x')ᵀ``; S is diagonal, but that of :class:`PointBasis`. [Evans2020,
    section 2]

    Attributes:
        kernel: k.
    """

    kernel: Kernel

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

    The frequencies ω are drawn from the kernel's spectral density, as functions of a seed and of
    the lengthscales, so that k functions take O(k d) numbers; ``φ φᵀ = 1`` at every input.
    [Rahimi2007; Evans2020, section 4]

    Attributes:
        kernel: One that :func:`check_spectral` passes, of batch shape ``m`` or none. Live where it
            is learned.
        count: Number p of functions, even.
        seed: Of the frequencies.
    """

    kernel: Kernel
    count: int
    seed: int

    @property
    def size(self) -> int:
        """Number p of functions."""
        return self.count

    def functions(self, X: Tensor, index: Tensor) -> Tensor:
        """Evaluate some functions. Cost O(n k d)."""
        kernel, active = self.kernel, self.kernel.active_dims
        inputs = X if active is None else X.index_select(-1, active)
        base = kernel.base_kernel if isinstance(kernel, ScaleKernel) else kernel
        pairs, dim = index // 2, inputs.shape[-1]
        drawn = normals(self.seed, pairs, dim + degrees_of_freedom(base))
        frequencies = student_frequencies(drawn, dim) / base.lengthscale.double()
        frequencies = frequencies.reshape(-1, len(pairs), dim)
        phase = ((index % 2) * (-0.5 * math.pi)).to(frequencies).reshape(1, -1, 1)
        turned = torch.cat((frequencies, phase.expand(len(frequencies), -1, 1)), -1).to(X)
        inputs = torch.cat((inputs, torch.ones_like(inputs[..., :1])), -1)  # once for the phase
        return (inputs.unsqueeze(-3) @ turned.mT).cos().mul_(math.sqrt(2.0 / self.count))

    def precision_diagonal(self, index: Tensor) -> Tensor:
        """Return one over the output scale."""
        if isinstance(self.kernel, ScaleKernel):
            scale = self.kernel.outputscale.double().reshape(-1)
        else:
            scale = self.kernel.lengthscale.new_ones(1).double()
        return scale.reciprocal().unsqueeze(-1).expand(-1, len(index))

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

    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """Compute ``S[index, others]``, ``m x k x k'``."""
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

    precisions: Tensor

    def precision_diagonal(self, index: Tensor) -> Tensor:
        """Return s, ``m x k``."""
        return self.precisions[:, index]


def student_frequencies(drawn: Tensor, dim: int) -> Tensor:
    """Compute frequencies of an RBF or Matérn kernel of lengthscale 1 from normal numbers.

    Of ``dim + degrees_of_freedom(kernel)`` columns: as they are for RBF, Student-t for Matérn.
    """
    directions, chi = drawn[..., :dim], drawn[..., dim:]
    degrees = chi.shape[-1]
    if degrees == 0:
        return directions
    return directions * (degrees / chi.square().sum(-1, keepdim=True)).sqrt()


def degrees_of_freedom(kernel: Kernel) -> int:
    """Return 2ν of a Matérn kernel's spectral density, a Student-t; 0 for a normal one."""
    return round(2.0 * kernel.nu) if isinstance(kernel, MaternKernel) else 0


def normals(seed: int, rows: Tensor, width: int) -> Tensor:
    """Compute rows of an endless table of standard normal numbers, ``k -> k x width``, float64.

    The same for a seed, a row and a column on every device, whatever else is asked for; another
    width is another table. Hashes by SplitMix64 (Steele, Lea and Flood, 2014). Cost O(k width).
    """
    columns = torch.arange(width, device=rows.device)
    counters = rows.unsqueeze(-1) * width + columns
    z = torch.full_like(counters, seed)
    for step in (None, (counters + 1) * _GOLDEN):
        z = z if step is None else z + step
        # products of int64 wrap around, shifts to the right bring in zeros
        z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _FIRST
        z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _SECOND
        z = z ^ ((z >> 31) & ((1 << 33) - 1))
    return torch.special.ndtri((((z >> 12) & ((1 << 52) - 1)) + 0.5) * 2.0**-52)

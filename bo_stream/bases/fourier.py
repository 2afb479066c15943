"""Random Fourier features that are made anew from a seed wherever they are needed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

from bo_stream.bases.sampled import SampledBasis, normals
from bo_stream.bases.spectral import degrees_of_freedom, student_frequencies


@dataclass(frozen=True)
class FourierBasis(SampledBasis):
    """``φ_r(x) = √(2/p) cos(ω x)``, and ``sin`` for every second r; ``S = I / output scale``.

    The frequencies ω are drawn from the kernel's spectral density: normal for RBF, Student-t with
    2ν degrees of freedom for Matérn-ν. They are functions of a seed and of the lengthscales, so
    that O(k d) numbers are all that k functions take; ``φ φᵀ = 1`` at every input. [Rahimi2007;
    Evans2020, section 4]

    Attributes:
        kernel: RBF or Matérn, with ARD or not, with an output scale or not; of batch shape ``m``,
            or none. Live where it is to be learned.
        count: Number p of functions, even.
        seed: Of the frequencies.
    """

    kernel: Kernel
    count: int
    seed: int

    def __post_init__(self) -> None:
        check_spectral(self.kernel)

    def with_kernel(self, kernel: Kernel, outputs: int) -> Self:
        """Of the same normal numbers."""
        return replace(self, kernel=kernel)

    @property
    def size(self) -> int:
        """Number p of functions."""
        return self.count

    @property
    def is_diagonal(self) -> bool:
        """Always."""
        return True

    @property
    def _stationary(self) -> Kernel:
        return self.kernel.base_kernel if isinstance(self.kernel, ScaleKernel) else self.kernel

    def functions(self, X: Tensor, index: Tensor) -> Tensor:
        """``... x n x d`` and ``k`` to ``... x m x n x k``. Cost O(n k d)."""
        active = self.kernel.active_dims
        inputs = X if active is None else X.index_select(-1, active)
        frequencies = self.frequencies(index // 2, inputs.shape[-1])
        phase = ((index % 2) * (-0.5 * math.pi)).to(frequencies).reshape(1, -1, 1)
        turned = torch.cat((frequencies, phase.expand(len(frequencies), -1, 1)), -1).to(X)
        inputs = torch.cat((inputs, torch.ones_like(inputs[..., :1])), -1)  # once for the phase
        return (inputs.unsqueeze(-3) @ turned.mT).cos().mul_(math.sqrt(2.0 / self.count))

    def frequencies(self, pairs: Tensor, dim: int) -> Tensor:
        """ω of some pairs of functions, ``k -> m x k x d``. Cost O(k d)."""
        kernel = self._stationary
        drawn = normals(self.seed, pairs, dim + degrees_of_freedom(kernel))
        frequencies = student_frequencies(kernel, drawn, dim) / kernel.lengthscale.double()
        return frequencies.reshape(-1, len(pairs), dim)

    def _scale(self) -> Tensor:
        """The output scale, ``m`` or 1."""
        if not isinstance(self.kernel, ScaleKernel):
            return self.kernel.lengthscale.new_ones(1).double()
        return self.kernel.outputscale.double().reshape(-1)

    def precision(self, index: Tensor, others: Tensor) -> Tensor:
        """``S[index, others]``, ``m x k x k'``."""
        same = (index.unsqueeze(-1) == others).double()
        return same / self._scale()[:, None, None]

    def precision_diagonal(self, index: Tensor) -> Tensor:
        """The diagonal of S, ``m x k``."""
        return self._scale().reciprocal().unsqueeze(-1).expand(-1, len(index))

    def mean_squares(self, X: Tensor) -> Tensor:
        """``1 / p``: the mean over all phases."""
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

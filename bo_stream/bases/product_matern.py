"""Matérn kernels that are products over inputs, as grids have them, and how radial ones become so.

``MaternKernel`` of gpytorch is a function of the distance, ``k(|x − x'|)``. In several inputs it is
no product of one-dimensional kernels, as the squared-exponential kernel is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from gpytorch.kernels import AdditiveKernel, Kernel, MaternKernel, ProductKernel, ScaleKernel
from torch import Tensor


class ProductMatern(Kernel):
    """Product ``k(x, x') = Π_i c(|x_i − x'_i| / l_i)`` of one-dimensional Matérn correlations c.

    With ``s = √(2 ν) r``: ``c(r) = exp(−s)`` for ν = 1/2, ``(1 + s) exp(−s)`` for 3/2 and
    ``(1 + s + s² / 3) exp(−s)`` for 5/2 (Rasmussen and Williams, 2006, section 4.2.1). In one input
    it is gpytorch's ``MaternKernel``; in several, that one is ``c(√(Σ_i r_i²))`` instead. Both
    have the same hyperparameters under the same names: the state dict of one fits the other.

    Where to take which: a grid (:class:`~bo_stream.WISKI`) represents products only. For ν = 5/2,
    two inputs and one lengthscale in each the correlation is 0.275, and 0.317 of the radial kernel.

    Cost O(n n' d), memory O(n n').

    Args:
        nu: Smoothness ν: 0.5, 1.5 or 2.5.
        **kwargs: As of gpytorch's ``Kernel``: ``ard_num_dims`` for a lengthscale per input,
            ``batch_shape``, ``active_dims``, ``lengthscale_prior``, ``lengthscale_constraint``.

    Raises:
        RuntimeError: Another ν.

    Example:
        >>> kernel = ScaleKernel(ProductMatern(nu=2.5, ard_num_dims=2))
        >>> model = WISKI(train_X, train_Y, covar_module=kernel)
    """

    has_lengthscale = True

    def __init__(self, nu: float = 2.5, **kwargs: Any) -> None:
        if nu not in (0.5, 1.5, 2.5):
            raise RuntimeError(f"Expected nu to be 0.5, 1.5 or 2.5, got {nu}.")
        super().__init__(**kwargs)
        self.nu = nu

    def forward(
        self,
        x1: Tensor,
        x2: Tensor,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Tensor:
        """Evaluate at ``... x n x d`` and ``... x n' x d``: ``... x n x n'``, or the diagonal.

        Raises:
            UnsupportedError: ``last_dim_is_batch``: give a kernel for each input instead.
        """
        if last_dim_is_batch:
            raise UnsupportedError("Expected no last_dim_is_batch with ProductMatern.")
        a, b = (x * (math.sqrt(2.0 * self.nu) / self.lengthscale) for x in (x1, x2))
        if not diag:
            a, b = a.unsqueeze(-2), b.unsqueeze(-3)
        distances = [(p - q).abs() for p, q in zip(a.unbind(-1), b.unbind(-1), strict=True)]
        correlation = sum(distances[1:], distances[0]).neg().exp()
        for s in distances:
            if self.nu == 1.5:
                correlation = correlation * (s + 1.0)
            elif self.nu == 2.5:
                correlation = correlation * ((s / 3.0 + 1.0) * s + 1.0)
        return correlation


@dataclass(frozen=True)
class RadialPart:
    """A Matérn kernel of the distance between points of several inputs, as a part of a kernel.

    Attributes:
        kernel: The part.
        inputs: Which of the inputs it acts on.
    """

    kernel: MaternKernel
    inputs: tuple[int, ...]

    def correlations(self) -> tuple[float, float]:
        """Compute the correlation one lengthscale away in every input: as it is, and a product's.

        As they are for lengthscales of 1: ``c(√d)`` and ``c(1)^d``.
        """
        d = len(self.inputs)
        points = torch.tensor([[0.0] * d, [1.0] * d], dtype=torch.float64)
        found = []
        for kind in (MaternKernel, ProductMatern):
            kernel = kind(nu=self.kernel.nu).double().requires_grad_(False)
            kernel.lengthscale = 1.0
            found.append(float(kernel(points).to_dense()[0, 1]))
        return found[0], found[1]


def radial_parts(kernel: object, dim: int) -> list[RadialPart]:
    """Find the Matérn kernels of several inputs in sums, products and multiples of kernels.

    Args:
        kernel: Of ``dim`` inputs; what is no kernel has none.
        dim: Number of inputs.
    """
    return list(_radial(kernel, tuple(range(dim))))


def _radial(kernel: object, inputs: tuple[int, ...]) -> Iterator[RadialPart]:
    if not isinstance(kernel, Kernel):
        return
    active: Tensor | None = kernel.active_dims
    if active is not None:
        inputs = tuple(inputs[i] for i in active.tolist() if i < len(inputs))
    while isinstance(kernel, ScaleKernel):  # has its base's active_dims
        kernel = kernel.base_kernel
    if isinstance(kernel, AdditiveKernel | ProductKernel):
        for part in kernel.kernels:
            yield from _radial(part, inputs)
    elif isinstance(kernel, MaternKernel) and type(kernel).forward is MaternKernel.forward:
        yield from [RadialPart(kernel, inputs)] * (len(inputs) > 1)


def as_product(kernel: Kernel, dim: int) -> Kernel:
    """Copy a kernel of ``dim`` inputs with a :class:`ProductMatern` for each of its radial parts.

    Hyperparameters, priors, constraints, active dimensions and names stay. One without such parts
    is returned itself.
    """
    if not radial_parts(kernel, dim):
        return kernel
    copy = deepcopy(kernel)
    for part in radial_parts(copy, dim):
        part.kernel.__class__ = ProductMatern  # both are a Kernel with nu and no more
    return copy

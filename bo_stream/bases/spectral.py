"""Functions drawn from a Gaussian process prior, by random frequencies of its kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from botorch.exceptions.errors import UnsupportedError
from botorch.models.transforms.input import InputTransform
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    Kernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from torch import Size, Tensor
from torch.utils.checkpoint import checkpoint

from bo_stream.bases.functions import InducingFunctions
from bo_stream.bases.kernels import TransformedKernel
from bo_stream.bases.product_matern import ProductMatern
from bo_stream.bases.sampled import degrees_of_freedom, student_frequencies

FEATURES = 1024
"""Number of cosines in a function drawn from the prior; n times as many for a sum of n kernels."""

NUMBERS = 1 << 21
"""Number of cosines' values that are held at a time."""


def draw_prior(kernel: Kernel, dim: int, outputs: int, draws: RandomDraws) -> FourierFunctions:
    """Draw functions of d = ``dim`` inputs from the prior of a kernel, of mean zero.

    Of RBF, Matérn (of the distance, or a product), rational quadratic, periodic or constant
    kernels, their sums, products and multiples, and any of these at inputs that a learned transform
    changes. The kernel has batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
    Cost O(p d) a function.

    Raises:
        UnsupportedError: The spectral measure of a kernel is not known.
    """
    if isinstance(kernel, TransformedKernel):
        transformed = draw_prior(kernel.base_kernel, dim, outputs, draws)
        return replace(transformed, transform=kernel.input_transform)
    frequencies, power = _spectrum(kernel, _Space(tuple(range(dim)), dim, outputs, draws))
    p = frequencies.shape[-2]
    exponential = -torch.log1p(-draws.uniform(p))
    amplitudes = (2.0 * exponential * power / p).sqrt()
    phases = 2.0 * math.pi * draws.uniform(p)
    return FourierFunctions(frequencies.detach(), phases, amplitudes.detach())


@dataclass(frozen=True)
class FourierFunctions:
    """Drawn functions ``f(x) = Σ_j a_j cos(ω_jᵀ x + φ_j)``, one a draw, batch element and output.

    With frequencies ω drawn from the kernel's spectral measure anew for every function, uniform
    phases φ and Rayleigh amplitudes a, the covariance of f over all draws is the kernel, and f(x)
    is normal. [Rahimi2007]

    Attributes:
        frequencies: ω, ``shape x p x d``.
        phases: φ, ``shape x p``.
        amplitudes: a, ``shape x p``.
        transform: Input transform t that makes them functions of t(x), or None.
    """

    frequencies: Tensor
    phases: Tensor
    amplitudes: Tensor
    transform: InputTransform | None = None

    def __call__(self, X: Tensor) -> Tensor:
        """Evaluate at inputs ``... x n x d``, ``... x m x n``. Cost O(n p d) a function."""
        return self._summed(X.unsqueeze(-3), None)

    def of(self, functionals: InducingFunctions, kernel: Kernel, outputs: int) -> Tensor:
        """Evaluate linear functionals, ``shape x M``: values, or for an RBF kernel averages.

        An average whose lengthscale is ``c`` times the kernel's multiplies ``cos(ωᵀ z + φ)`` by
        ``Π_d √c_d exp(−¼ ω_d² s_d² (c_d² − 1))``, s the kernel's lengthscale: integrate.
        """
        if functionals.log_factors is None:
            return self._summed(functionals.points, None)
        base = kernel.base_kernel if isinstance(kernel, ScaleKernel) else kernel
        lengthscale = _per_output(base.lengthscale, outputs, 2)
        logs = functionals.log_factors
        excess = lengthscale.square() * torch.expm1(2.0 * logs)
        log_size = 0.5 * logs.sum(-1, keepdim=True)
        return self._summed(
            functionals.points, lambda w: (log_size - 0.25 * excess @ w.square().mT).exp()
        )

    def _summed(self, points: Tensor, damping: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Compute ``Σ_j a_j D_j cos(ω_jᵀ x + φ_j)`` at ``... x m x n x d`` points, part by part."""
        if self.transform is not None:
            points = self.transform.transform(points)

        def part(points: Tensor, w: Tensor, phases: Tensor, amplitudes: Tensor) -> Tensor:
            waves = (points @ w.mT + phases.unsqueeze(-2)).cos()
            if damping is not None:
                waves = waves * damping(w)
            return (waves @ amplitudes.unsqueeze(-1)).squeeze(-1)

        batch = torch.broadcast_shapes(points.shape[:-2], self.phases.shape[:-1])
        size = max(1, NUMBERS // max(1, batch.numel() * points.shape[-2]))
        splits = (self.frequencies.split(size, -2), self.phases.split(size, -1))
        parts = list(zip(*splits, self.amplitudes.split(size, -1), strict=True))
        rule: Callable[..., Tensor] = part
        if len(parts) > 1 and torch.is_grad_enabled() and points.requires_grad:
            # intermediate values are computed again in the backward pass, not held
            rule = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
        total: Any = sum(rule(points, *own) for own in parts)
        return total


@dataclass(frozen=True)
class RandomDraws:
    """Independent random numbers for every drawn function, batch element and output, in float64.

    Attributes:
        shape: ``sample_shape x batch_shape x m``.
        device: Of the numbers.
        generator: On that device, or None for torch's global one.
    """

    shape: Size
    device: torch.device
    generator: torch.Generator | None = None

    def normal(self, *after: int) -> Tensor:
        """Draw standard normal numbers, ``shape x after``."""
        return self._numbers(torch.randn, after)

    def uniform(self, *after: int) -> Tensor:
        """Draw numbers between 0 and 1, ``shape x after``."""
        return self._numbers(torch.rand, after)

    def _wide(self, value: Tensor, after: tuple[int, ...]) -> Tensor:
        return value.double().expand(*self.shape, *after).contiguous()

    def _numbers(self, rule: Callable[..., Tensor], after: tuple[int, ...]) -> Tensor:
        size = (*self.shape, *after)
        return rule(size, generator=self.generator, dtype=torch.float64, device=self.device)

    def gamma(self, concentration: Tensor, *after: int) -> Tensor:
        """Draw gamma numbers of rate 1, ``shape x after``; ``concentration`` broadcasts."""
        return torch._standard_gamma(self._wide(concentration, after), generator=self.generator)

    def poisson(self, rate: Tensor, *after: int) -> Tensor:
        """Draw Poisson counts, ``shape x after``; ``rate`` broadcasts."""
        return torch.poisson(self._wide(rate, after), generator=self.generator)

    def choice(self, count: int, of: int) -> Tensor:
        """Draw ``count`` different indices below ``of``, ``shape x count``."""
        return self.uniform(of).argsort(-1)[..., :count]


@dataclass(frozen=True)
class _Space:
    """Inputs that a kernel sees, and random numbers.

    Attributes:
        active: Which of the d inputs.
        dim: d.
        outputs: m.
        draws: Random numbers.
    """

    active: tuple[int, ...]
    dim: int
    outputs: int
    draws: RandomDraws

    def parameter(self, value: Tensor, after: int) -> Tensor:
        """Return a hyperparameter in float64 with m in its place; see :func:`_per_output`."""
        return _per_output(value.detach().double(), self.outputs, after)

    def spectrum(self, frequencies: Tensor) -> _Spectrum:
        """Make a spectrum of variance 1, zero along inputs that the kernel does not see."""
        wide = frequencies.new_zeros(*frequencies.shape[:-1], self.dim)
        wide[..., list(self.active)] = frequencies
        return wide, frequencies.new_ones(())


_Spectrum = tuple[Tensor, Tensor]
"""Frequencies ω, ``shape x p x d``, and powers, broadcastable to ``shape x p``: the prior variance
of each times p. ``k(x, x') = E[power cos(ωᵀ (x − x'))]``.
"""


def _per_output(value: Tensor, outputs: int, after: int) -> Tensor:
    """Reshape ``batch_shape (x m if m > 1) x after`` dimensions to ``batch_shape x m x after``."""
    return value if outputs > 1 else value.unsqueeze(-1 - after)


def _spectrum(kernel: Kernel, space: _Space) -> _Spectrum:
    dims = kernel.active_dims
    if dims is not None:
        space = replace(space, active=tuple(space.active[i] for i in dims.tolist()))
    return _rule_for(kernel)(kernel, space)


def _rule_for(kernel: Kernel) -> Callable[[Any, _Space], _Spectrum]:
    if type(kernel) in _RULES:
        return _RULES[type(kernel)]
    names = ", ".join(known.__name__ for known in _RULES)
    raise UnsupportedError(
        f"Functions can be drawn from the prior of {names}, got {type(kernel).__name__}: its "
        "spectral measure is not known. Draw values at points by model.posterior(X).rsample()."
    )


def _stationary(kernel: Kernel, space: _Space) -> _Spectrum:
    dim = len(space.active)
    drawn = space.draws.normal(FEATURES, dim + degrees_of_freedom(kernel))
    directions = student_frequencies(drawn, dim)
    return space.spectrum(directions / space.parameter(kernel.lengthscale, 2))


def _product_matern(kernel: Kernel, space: _Space) -> _Spectrum:
    """Draw the frequencies of each input from a Student-t distribution of its own."""
    drawn = space.draws.normal(FEATURES, len(space.active), 1 + round(2.0 * kernel.nu))
    directions = student_frequencies(drawn, 1).squeeze(-1)
    return space.spectrum(directions / space.parameter(kernel.lengthscale, 2))


def _rational_quadratic(kernel: Kernel, space: _Space) -> _Spectrum:
    """Mix squared-exponential kernels over a gamma distributed inverse square lengthscale."""
    alpha = space.parameter(kernel.alpha, 1)
    precision = space.draws.gamma(alpha, FEATURES) / alpha
    directions = space.draws.normal(FEATURES, len(space.active)) * precision.sqrt().unsqueeze(-1)
    return space.spectrum(directions / space.parameter(kernel.lengthscale, 2))


def _periodic(kernel: Kernel, space: _Space) -> _Spectrum:
    """Draw multiples of the base frequency: differences of two Poisson counts.

    ``exp((cos θ − 1) / l)`` is their characteristic function for rates ``1 / (2 l)``.
    """
    rate = 0.5 / space.parameter(kernel.lengthscale, 2)
    size = (FEATURES, len(space.active))
    multiples = space.draws.poisson(rate, *size) - space.draws.poisson(rate, *size)
    return space.spectrum(2.0 * math.pi * multiples / space.parameter(kernel.period_length, 2))


def _constant(kernel: Kernel, space: _Space) -> _Spectrum:
    still = space.draws.normal(FEATURES, len(space.active)) * 0.0
    return space.spectrum(still)[0], space.parameter(kernel.constant, 1)


def _multiple(kernel: Kernel, space: _Space) -> _Spectrum:
    inner = kernel.base_kernel
    # a ScaleKernel's active_dims are its base's already
    frequencies, power = _rule_for(inner)(inner, space)
    return frequencies, power * space.parameter(kernel.outputscale.unsqueeze(-1), 1)


def _sum(kernel: Kernel, space: _Space) -> _Spectrum:
    """Put the parts' frequencies side by side."""
    parts = [_spectrum(part, space) for part in kernel.kernels]
    total = sum(frequencies.shape[-2] for frequencies, _ in parts)
    powers = [w.expand(f.shape[:-1]) * (total / f.shape[-2]) for f, w in parts]
    return torch.cat([frequencies for frequencies, _ in parts], -2), torch.cat(powers, -1)


def _product(kernel: Kernel, space: _Space) -> _Spectrum:
    """Add independent frequencies of the factors."""
    drawn, powers = [], []
    for frequencies, power in [_spectrum(factor, space) for factor in kernel.kernels]:
        index = space.draws.choice(FEATURES, frequencies.shape[-2])
        drawn.append(torch.take_along_dim(frequencies, index.unsqueeze(-1), -2))
        powers.append(torch.take_along_dim(power.expand(frequencies.shape[:-1]), index, -1))
    return torch.stack(drawn).sum(0), torch.stack(powers).prod(0)


_RULES: dict[type[Kernel], Callable[[Any, _Space], _Spectrum]] = {
    RBFKernel: _stationary,
    MaternKernel: _stationary,
    ProductMatern: _product_matern,
    RQKernel: _rational_quadratic,
    PeriodicKernel: _periodic,
    ConstantKernel: _constant,
    ScaleKernel: _multiple,
    AdditiveKernel: _sum,
    ProductKernel: _product,
}

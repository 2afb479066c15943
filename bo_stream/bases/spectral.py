"""Random features of a kernel, sampled anywhere from a counter or drawn from its spectrum."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, singledispatch
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

from bo_stream.bases.inducing import InducingFunctions, kernel_matrix, kernel_variance
from bo_stream.bases.kernels import ProductMatern, TransformedKernel
from bo_stream.bases.radial import RadialKernel
from bo_stream.tensors import broadcast_shapes

_CHUNK = 4096
_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number
_FIRST = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


class SampledBasis(ABC):
    """Functions φ of a process ``f = φ w``, ``w ~ N(0, S⁻¹)``, any few of them at their own cost.

    ``k(x, x') ≈ φ(x) S⁻¹ φ(x')ᵀ``; S is diagonal, except in :class:`PointBasis`. [Evans2020,
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
        kernel: A kernel that :func:`check_spectral` passes, of batch shape ``m`` or none; the
            module itself, not a copy, where it is learned.
        count: Number p of functions, even.
        seed: Seed of the frequencies.
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
        drawn = normals(self.seed, pairs, dim + _degrees_of_freedom(base))
        frequencies = _student_frequencies(drawn, dim) / base.lengthscale.double()
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
    """Kernel functions ``φ_r(x) = k(x, z_r)`` with any prior.

    Attributes:
        kernel: Any kernel, of batch shape ``m`` for m > 1 outputs, or none.
        Z: The points z_r, ``p x d``.
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


def _student_frequencies(drawn: Tensor, dim: int) -> Tensor:
    """Compute frequencies of an RBF or Matérn kernel of lengthscale 1 from normal numbers.

    ``drawn`` has ``dim + _degrees_of_freedom(kernel)`` columns. Its first ``dim`` are the
    frequencies of an RBF kernel; a Matérn kernel's have a Student-t distribution.
    """
    directions, chi = drawn[..., :dim], drawn[..., dim:]
    degrees = chi.shape[-1]
    if degrees == 0:
        return directions
    return directions * (degrees / chi.square().sum(-1, keepdim=True)).sqrt()


def _degrees_of_freedom(kernel: Kernel) -> int:
    """Return 2ν of a Matérn kernel's spectral density, a Student-t; 0 for a normal one."""
    return round(2.0 * kernel.nu) if isinstance(kernel, MaternKernel) else 0


def normals(seed: int, rows: Tensor, width: int) -> Tensor:
    """Compute rows of an endless table of standard normal numbers, ``k -> k x width``, float64.

    A number depends on the seed, its row and its column alone, on every device; another width is
    another table. Hashes by SplitMix64 (Steele, Lea and Flood, 2014). Cost O(k width).
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


# --- functions drawn from a Gaussian process prior, by random frequencies of its kernel ----------


FEATURES = 1024
"""Number of cosines in a function drawn from the prior; n times as many for a sum of n kernels."""

NUMBERS = 1 << 21
"""Number of values of cosines that are in memory at a time."""


def draw_prior(kernel: Kernel, dim: int, outputs: int, draws: RandomDraws) -> FourierFunctions:
    """Draw functions of d = ``dim`` inputs from the prior of a kernel, of mean zero.

    The kernel may be RBF, Matérn (of the distance, or a product), rational quadratic, periodic or
    constant, a sum, product or multiple of these, and any of these at inputs that a learned
    transform changes. It has batch shape ``batch_shape``, or ``batch_shape x m`` for m > 1 outputs.
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

    With frequencies ω drawn from the kernel's spectral measure for every function, uniform phases φ
    and Rayleigh amplitudes a, the covariance of f over all draws is the kernel, and f(x) is normal.
    [Rahimi2007]

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
        known = RadialKernel.of(kernel, outputs)
        assert known is not None  # noqa: S101 (no other kernel's functionals have factors)
        logs = functionals.log_factors
        excess = known.lengthscale.square() * torch.expm1(2.0 * logs)
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

        batch = broadcast_shapes(points.shape[:-2], self.phases.shape[:-1])
        size = max(1, NUMBERS // max(1, batch.numel() * points.shape[-2]))
        splits = (self.frequencies.split(size, -2), self.phases.split(size, -1))
        parts = list(zip(*splits, self.amplitudes.split(size, -1), strict=True))
        rule: Callable[..., Tensor] = part
        if len(parts) > 1 and torch.is_grad_enabled() and points.requires_grad:
            # intermediate values are computed again in the backward pass, not stored
            rule = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
        total: Any = sum(rule(points, *own) for own in parts)
        return total


@dataclass(frozen=True)
class RandomDraws:
    """Independent random numbers for every drawn function, batch element and output, in float64.

    Attributes:
        shape: ``sample_shape x batch_shape x m``.
        device: Device of the numbers.
        generator: Generator on that device, or None for torch's global one.
        spread: Standard deviations of normal numbers, of the first dimension; None: 1.
    """

    shape: Size
    device: torch.device
    generator: torch.Generator | None = None
    spread: Tensor | None = None

    def normal(self, *after: int) -> Tensor:
        """Draw normal numbers, ``shape x after``."""
        size = (*self.shape, *after)
        options: dict[str, Any] = {"dtype": torch.float64, "device": self.device}
        numbers = torch.randn(size, generator=self.generator, **options)
        if self.spread is None:
            return numbers
        return numbers * self.spread.reshape(-1, *[1] * (len(size) - 1))

    def uniform(self, *after: int) -> Tensor:
        """Draw numbers between 0 and 1, ``shape x after``."""
        size = (*self.shape, *after)
        return torch.rand(size, generator=self.generator, dtype=torch.float64, device=self.device)

    def gamma(self, concentration: Tensor, *after: int) -> Tensor:
        """Draw gamma numbers of rate 1, ``shape x after``; ``concentration`` broadcasts."""
        wide = concentration.double().expand(*self.shape, *after).contiguous()
        return torch._standard_gamma(wide, generator=self.generator)

    def poisson(self, rate: Tensor, *after: int) -> Tensor:
        """Draw Poisson counts, ``shape x after``; ``rate`` broadcasts."""
        wide = rate.double().expand(*self.shape, *after).contiguous()
        return torch.poisson(wide, generator=self.generator)


@dataclass(frozen=True)
class _Space:
    """Inputs that a kernel sees, and random numbers.

    Attributes:
        active: Positions of these inputs among all d.
        dim: Number d of inputs.
        outputs: Number m of outputs.
        draws: Random numbers.
    """

    active: tuple[int, ...]
    dim: int
    outputs: int
    draws: RandomDraws

    def parameter(self, value: Tensor, after: int) -> Tensor:
        """Return a hyperparameter in float64 with a dimension m, before ``after`` others."""
        wide = value.detach().double()
        return wide if self.outputs > 1 else wide.unsqueeze(-1 - after)

    def spectrum(self, frequencies: Tensor) -> _Spectrum:
        """Make a spectrum of variance 1, zero along inputs that the kernel does not see."""
        wide = frequencies.new_zeros(*frequencies.shape[:-1], self.dim)
        wide[..., list(self.active)] = frequencies
        return wide, frequencies.new_ones(())


_Spectrum = tuple[Tensor, Tensor]
"""Frequencies ω, ``shape x p x d``, and powers, broadcastable to ``shape x p``: the prior variance
of each times p. ``k(x, x') = E[power cos(ωᵀ (x − x'))]``.
"""


def _spectrum(kernel: Kernel, space: _Space) -> _Spectrum:
    """Draw from the spectral measure of a kernel at its active inputs."""
    dims = kernel.active_dims
    if dims is not None:
        space = replace(space, active=tuple(space.active[i] for i in dims.tolist()))
    return _drawn(kernel, space)


def _drawn(kernel: Kernel, space: _Space) -> _Spectrum:
    """Draw by the rule for a kernel's own class: a derived class may compute another kernel."""
    if type(kernel) in _drawn_by_class.registry:
        return _drawn_by_class(kernel, space)
    names = ", ".join(k.__name__ for k in _drawn_by_class.registry if issubclass(k, Kernel))
    raise UnsupportedError(
        f"Functions can be drawn from the prior of {names}, got {type(kernel).__name__}: its "
        "spectral measure is not known. Draw functions at points, which needs none, by "
        "sample_paths(model, n, at=X)."
    )


@singledispatch
def _drawn_by_class(kernel: Kernel, space: _Space) -> _Spectrum:
    raise NotImplementedError


@_drawn_by_class.register
def _(kernel: RBFKernel | MaternKernel, space: _Space) -> _Spectrum:
    """Draw normal or Student-t frequencies: squared-exponential or Matérn of the distance."""
    dim = len(space.active)
    drawn = space.draws.normal(FEATURES, dim + _degrees_of_freedom(kernel))
    directions = _student_frequencies(drawn, dim)
    return space.spectrum(directions / space.parameter(kernel.lengthscale, 2))


@_drawn_by_class.register
def _(kernel: ProductMatern, space: _Space) -> _Spectrum:
    """Draw the frequencies of each input from a Student-t distribution of its own."""
    drawn = space.draws.normal(FEATURES, len(space.active), 1 + round(2.0 * kernel.nu))
    directions = _student_frequencies(drawn, 1).squeeze(-1)
    return space.spectrum(directions / space.parameter(kernel.lengthscale, 2))


@_drawn_by_class.register
def _(kernel: RQKernel, space: _Space) -> _Spectrum:
    """Mix squared-exponential kernels over a gamma distributed inverse square lengthscale."""
    alpha = space.parameter(kernel.alpha, 1)
    precision = space.draws.gamma(alpha, FEATURES) / alpha
    directions = space.draws.normal(FEATURES, len(space.active)) * precision.sqrt().unsqueeze(-1)
    return space.spectrum(directions / space.parameter(kernel.lengthscale, 2))


@_drawn_by_class.register
def _(kernel: PeriodicKernel, space: _Space) -> _Spectrum:
    """Draw multiples of the base frequency: differences of two Poisson counts.

    ``exp((cos θ − 1) / l)`` is their characteristic function for rates ``1 / (2 l)``.
    """
    rate = 0.5 / space.parameter(kernel.lengthscale, 2)
    size = (FEATURES, len(space.active))
    multiples = space.draws.poisson(rate, *size) - space.draws.poisson(rate, *size)
    return space.spectrum(2.0 * math.pi * multiples / space.parameter(kernel.period_length, 2))


@_drawn_by_class.register
def _(kernel: ConstantKernel, space: _Space) -> _Spectrum:
    """Return frequencies of zero, after as many draws as for other kernels."""
    still = space.draws.normal(FEATURES, len(space.active)) * 0.0
    return space.spectrum(still)[0], space.parameter(kernel.constant, 1)


@_drawn_by_class.register
def _(kernel: ScaleKernel, space: _Space) -> _Spectrum:
    """Multiply the power of the base kernel by the output scale."""
    inner = kernel.base_kernel
    # a ScaleKernel's active_dims are its base's already
    frequencies, power = _drawn(inner, space)
    return frequencies, power * space.parameter(kernel.outputscale.unsqueeze(-1), 1)


@_drawn_by_class.register
def _(kernel: AdditiveKernel, space: _Space) -> _Spectrum:
    """Put the parts' frequencies side by side."""
    parts = [_spectrum(part, space) for part in kernel.kernels]
    total = sum(frequencies.shape[-2] for frequencies, _ in parts)
    powers = [w.expand(f.shape[:-1]) * (total / f.shape[-2]) for f, w in parts]
    return torch.cat([frequencies for frequencies, _ in parts], -2), torch.cat(powers, -1)


@_drawn_by_class.register
def _(kernel: ProductKernel, space: _Space) -> _Spectrum:
    """Add independent frequencies of the factors, each of as many different ones."""
    drawn, powers = [], []
    for frequencies, power in [_spectrum(factor, space) for factor in kernel.kernels]:
        index = space.draws.uniform(frequencies.shape[-2]).argsort(-1)[..., :FEATURES]
        drawn.append(torch.take_along_dim(frequencies, index.unsqueeze(-1), -2))
        powers.append(torch.take_along_dim(power.expand(frequencies.shape[:-1]), index, -1))
    return torch.stack(drawn).sum(0), torch.stack(powers).prod(0)

"""Features by a network: the kernel that they make, and the basis of the process."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

import torch
from botorch.exceptions.errors import BotorchTensorDimensionError, UnsupportedError
from gpytorch.kernels import Kernel, ScaleKernel
from torch import Tensor
from torch.nn import Linear, Module, Sequential, Tanh

from bo_stream.bases.inducing import Basis
from bo_stream.models.checks import check_instance
from bo_stream.tensors import is_same

WIDTH = 64
"""Features, and hidden units, of the default network."""

_START = 2.0
"""Output scale to begin with: the features of the default network have squares of about a half."""

_PROBES = 4
_SEED = 0
_SAME = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest difference, relative to the features, that counts as rounding."""


def layer_features(network: Module, X: Tensor) -> Tensor:
    """Compute ``φ(x) = [network(x), 1]``, ``... x n x d -> ... x n x r``, float64."""
    values: Tensor = network(X.flatten(0, -2)).to(torch.float64)
    values = values.unflatten(0, X.shape[:-1])
    return torch.cat((values, torch.ones_like(values[..., :1])), -1)


def frozen_network(network: Module) -> Module:
    """Copy a network in float64 and evaluation mode, without gradients."""
    return deepcopy(network).to(torch.float64).eval().requires_grad_(False)


def is_as(network: Module, frozen: Module) -> bool:
    """Say whether a network computes what a frozen copy of it does."""
    mine, theirs = ((*n.parameters(), *n.buffers()) for n in (network, frozen))
    pairs = zip(mine, theirs, strict=True)
    return is_same(tuple(a.detach().to(b.dtype) for a, b in pairs), theirs)


class NetworkKernel(Kernel):
    """Kernel ``φ(x)ᵀ φ(x') / r`` of a network's features and the constant 1.

    The network is in evaluation mode always: what it says of an input depends on no other.
    """

    def __init__(self, network: Module) -> None:
        super().__init__()
        self.network = network.eval()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but the network."""
        super().train(mode)
        self.network.eval()
        return self

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        """Evaluate the kernel."""
        own, others = (layer_features(self.network, x).to(x) for x in (x1, x2))
        rank = own.shape[-1]
        return (own * others).sum(-1) / rank if diag else own @ others.mT / rank


def kernel_of(network: Module, shape: torch.Size) -> ScaleKernel:
    """Make the prior covariance of a layer's outputs, a scale for each of a batch shape."""
    kernel = ScaleKernel(NetworkKernel(network), batch_shape=shape)
    kernel.outputscale = torch.full_like(kernel.outputscale, _START)
    return kernel


@dataclass(frozen=True)
class LayerBasis(Basis):
    """Whitened features ``z(x) = s φ(x)``, which carry the whole prior.

    Attributes:
        network: Frozen.
        scale: s, prior standard deviation of the weights of φ, ``batch_shape x m``.
        size: Number r of features.
    """

    network: Module
    scale: Tensor
    size: int

    @property
    def rank(self) -> int:
        """Number r of features, the constant among them."""
        return self.size

    def features(self, X: Tensor) -> Tensor:
        """Compute ``s φ(x)``, ``... x n x d -> ... x m x n x r``."""
        return layer_features(self.network, X).unsqueeze(-3) * self.scale[..., None, None]


def default_network(dim: int, width: int = WIDTH) -> Sequential:
    """Make a perceptron of two hidden tanh layers of ``width`` units, the same at each call.

    The first layer's units change sign inside the unit cube; the second layer's variances are
    those of Glorot and Bengio (2010).
    """
    generator = torch.Generator().manual_seed(_SEED)
    layers = [torch.nn.utils.skip_init(Linear, n, width, dtype=torch.float64) for n in (dim, width)]
    with torch.no_grad():
        first, second = layers
        first.weight.normal_(0.0, 2.0 / dim**0.5, generator=generator)
        centres = torch.rand(width, dim, generator=generator, dtype=torch.float64)
        first.bias.copy_(-(first.weight * centres).sum(-1))
        second.weight.normal_(0.0, width**-0.5, generator=generator)
        second.bias.zero_()
    return Sequential(first, Tanh(), second, Tanh())


@torch.no_grad()
def check_network(network: Module, inputs: Tensor) -> int:
    """Count the features of a network, if it maps each input to features of its own.

    It is moved to the dtype and device of the first inputs, ``... x n x d``, and into evaluation
    mode. The constant feature is counted, too.
    """
    check_instance("network", network, Module, "torch.nn.Sequential(torch.nn.Linear(d, 64), ...)")
    dim, generator = inputs.shape[-1], torch.Generator().manual_seed(_SEED)
    inside = torch.rand(2 * _PROBES, dim, generator=generator).to(inputs)
    X = torch.cat((inputs.detach().reshape(-1, dim)[:_PROBES], inside))[: 2 * _PROBES]
    values = _values(network.to(inputs).eval(), X)
    if not bool(values.isfinite().all()):
        raise UnsupportedError(
            f"Expected network to return finite features, got NaN or infinity at {X.tolist()}."
        )
    one_by_one = torch.cat([_values(network, x) for x in X.split(1)])
    most = _SAME.get(X.dtype, 1e-2) * (1.0 + float(values.abs().max()))
    if not torch.allclose(one_by_one, values, rtol=0.0, atol=most):
        raise UnsupportedError(
            "Expected network to map each input to features of its own, got features that are "
            "random or depend on the other inputs of a batch, in evaluation mode. Take "
            "normalisations with running statistics, and Dropout as a module."
        )
    return values.shape[-1] + 1


def _values(network: Module, X: Tensor) -> Tensor:
    """Compute features at inputs, and check their shape."""
    try:
        values = network(X)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise BotorchTensorDimensionError(
            f"Expected network to map inputs `n x {X.shape[-1]}` to features `n x r`, got an error "
            f"at inputs of shape {tuple(X.shape)}: {error}"
        ) from error
    fits = isinstance(values, Tensor) and values.ndim == 2 and values.is_floating_point()
    if not fits or len(values) != len(X) or values.shape[-1] == 0:
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise BotorchTensorDimensionError(
            f"Expected network to map inputs of shape {tuple(X.shape)} to features of shape "
            f"`{len(X)} x r`, got {got}."
        )
    return values

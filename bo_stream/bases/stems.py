"""Learned projections ("stems") of many inputs to the one to three that a grid can take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from botorch.exceptions.errors import InputDataError, UnsupportedError
from torch import Tensor

_MAX_STEM_DIM = 3
"""Most dimensions that a stem projects to."""

LEAST_POINTS = 2
"""Fewest points on which a stem can be calibrated."""

_LEAST_SPREAD = 1e-6


class Stem(torch.nn.Module, ABC):
    """A projection ``h(x)`` of d inputs to k coordinates in the unit cube.

    ``h(x) = (1 + tanh(gain ∘ (project(x) − centre) / spread + offset)) / 2``: the batch norm and
    tanh of the WISKI paper (section 5.1). Centre and spread describe the points that the stem was
    calibrated on and stay until it is calibrated again, in training and evaluation mode alike.

    Cost of one point: O(d k), or one evaluation of the network.

    Args:
        d: Number of inputs.
        k: Number of coordinates, 1 to 3.
    """

    gain: Tensor
    offset: Tensor
    centre: Tensor
    spread: Tensor
    calibrated: Tensor

    def __init__(self, d: int, k: int) -> None:
        super().__init__()
        if not isinstance(k, int) or not 1 <= k <= min(_MAX_STEM_DIM, d):
            raise UnsupportedError(
                f"Expected a stem to project to k from 1 to {min(_MAX_STEM_DIM, d)} of {d} inputs, "
                f"a whole number, got {k}."
            )
        self.d, self.k = d, k
        self.gain = torch.nn.Parameter(torch.ones(k, dtype=torch.float64))
        self.offset = torch.nn.Parameter(torch.zeros(k, dtype=torch.float64))
        self.register_buffer("centre", torch.zeros(k, dtype=torch.float64))
        self.register_buffer("spread", torch.ones(k, dtype=torch.float64))
        self.register_buffer("calibrated", torch.tensor(False))

    @abstractmethod
    def project(self, X: Tensor) -> Tensor:
        """Project inputs, ``... x d -> ... x k``, before normalisation."""

    def forward(self, X: Tensor) -> Tensor:
        """Compute coordinates in the unit cube, ``... x d -> ... x k``, differentiable."""
        return self._squashed(self.project(X), self.centre, self.spread)

    def _squashed(self, projected: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
        normal = (projected - centre) / spread
        return 0.5 * (1.0 + torch.tanh(self.gain * normal + self.offset))

    def calibrate(self, X: Tensor) -> Self:
        """Put centre and spread where the projections of ``n x d`` points, two or more, lie."""
        with torch.no_grad():
            self.calibrated_forward(X)
        return self

    def calibrated_forward(self, X: Tensor) -> Tensor:
        """Calibrate on ``n x d`` points and project them; gradients flow through both."""
        projected = self.project(X)
        points = projected.reshape(-1, self.k)
        if points.shape[0] < LEAST_POINTS:
            raise InputDataError(
                f"Expected at least {LEAST_POINTS} points to calibrate a stem on, got "
                f"{points.shape[0]}. Give train_X more rows, or call stem.calibrate(X) before."
            )
        spread, centre = torch.std_mean(points, dim=0)
        spread = spread.clamp_min(_LEAST_SPREAD)
        self.centre, self.spread = centre.detach().clone(), spread.detach().clone()
        self.calibrated = torch.ones_like(self.calibrated)
        return self._squashed(projected, centre, spread)


class LinearStem(Stem):
    """``project(x) = W x`` with a learned W, ``k x d``; the stem of the WISKI paper's regressions.

    W starts as k random orthonormal directions, drawn by ``seed``.

    Example:
        >>> model = WISKI(train_X, train_Y, stem=LinearStem(d=18, k=2), grid_size=16)
        >>> pretrain(model, train_X, train_Y)
    """

    def __init__(self, d: int, k: int, seed: int = 0) -> None:
        super().__init__(d, k)
        self.weight = torch.nn.Parameter(_orthonormal_rows(d, k, seed))

    def project(self, X: Tensor) -> Tensor:
        """Compute ``W x``."""
        return X @ self.weight.mT


class MLPStem(Stem):
    """A multilayer perceptron with GELU between its layers, of the ``hidden`` widths.

    Weights start at random, drawn by ``seed``, with the variance of He et al. (2015).
    """

    def __init__(self, d: int, hidden: int | Sequence[int], k: int, seed: int = 0) -> None:
        super().__init__(d, k)
        widths = [hidden] if isinstance(hidden, int) else list(hidden)
        if not widths or min(widths) < 1:
            raise ValueError(f"Expected hidden widths of at least 1, got {hidden}.")
        generator = torch.Generator().manual_seed(seed)
        self.layers = torch.nn.ModuleList()
        for inputs, outputs in zip([d, *widths], [*widths, k], strict=True):
            layer = torch.nn.Linear(inputs, outputs, dtype=torch.float64)
            with torch.no_grad():
                layer.weight.normal_(0.0, (2.0 / inputs) ** 0.5, generator=generator)
                layer.bias.zero_()
            self.layers.append(layer)

    def project(self, X: Tensor) -> Tensor:
        """Apply the network."""
        for layer in self.layers[:-1]:
            X = torch.nn.functional.gelu(layer(X))
        projected: Tensor = self.layers[-1](X)
        return projected


class RandomProjection(Stem):
    """k random orthonormal directions, drawn by ``seed``, that stay (Delbridge et al., 2020)."""

    weight: Tensor

    def __init__(self, d: int, k: int, seed: int) -> None:
        super().__init__(d, k)
        self.register_buffer("weight", _orthonormal_rows(d, k, seed))
        self.requires_grad_(False)

    def project(self, X: Tensor) -> Tensor:
        """Compute ``W x``."""
        return X @ self.weight.mT


def _orthonormal_rows(d: int, k: int, seed: int) -> Tensor:
    """Draw random orthonormal rows, ``k x d``, float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, k, generator=generator, dtype=torch.float64)).Q.mT

"""Leaps out of a trust region: a trend over all outcomes that tells of other basins, by input.

A region finds the bottom of the basin that it is in. Which basin is best is often told by inputs
one at a time: the trend is a sum of one function of each input (Duvenaud et al., 2011), learned
from observations all over the cube, and a leap replaces one input or few of the best point by where
a function drawn from the trend's posterior has its maximum outside of the region.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NODES = 16
"""Most features of an input."""

MOST_FEATURES = 640
FEWEST_NODES = 6
"""Features in all, unless an input would have fewer than this."""

MOST_INPUTS = 300
"""Most inputs from which a trend is learned: in more it would take seconds."""

POINTS = 65
"""Values of an input among which a leap goes."""

NOISES = 10.0 ** torch.linspace(-5.0, 0.0, 11, dtype=torch.float64)
SCALES = torch.tensor([0.3, 1.0, 3.0, 10.0], dtype=torch.float64)
"""Noise variances and prior variances, over the outcomes' variance, that are compared."""

MORE = 0.5
"""Probability of each further input that leaps."""


class AdditiveTrend:
    """Posterior of ``Σ_j f_j(x_j)``: Bayesian regression on features of each input.

    Each f_j is a Gaussian process of Matérn-5/2 kernel, of lengthscale some two distances of its
    equidistant inducing points, in the features of the subset of regressors (Quiñonero-Candela and
    Rasmussen, 2005, section 5). Noise and prior variance are those of largest evidence on a grid,
    in closed form from one eigendecomposition. Cost O(n D² + D³) for D features in all.
    """

    def __init__(self, X: Tensor, y: Tensor) -> None:
        """Learn from outcomes.

        Args:
            X: Inputs in the unit cube, ``n x d``.
            y: Outcomes, ``n``.
        """
        d = X.shape[-1]
        nodes = max(FEWEST_NODES, min(NODES, MOST_FEATURES // d))
        self._nodes = torch.linspace(0.0, 1.0, nodes).to(X)
        self._length = 2.0 * 0.96 / nodes
        gram = self._kernel(self._nodes) + 1e-6 * torch.eye(nodes).to(X)
        self._root = torch.linalg.inv(torch.linalg.cholesky(gram))
        self._values = torch.linspace(0.0, 1.0, POINTS).to(X)
        features = self._features(X).reshape(len(X), -1) / math.sqrt(d)
        centred = y - y.mean()
        target = centred / centred.square().mean().sqrt().clamp_min(1e-12)
        spectrum, self._vectors = torch.linalg.eigh(features.mT @ features)
        spectrum = spectrum.clamp_min(0.0)
        projected = self._vectors.mT @ (features.mT @ target)
        noise, scale = _of_largest_evidence(spectrum, projected, target)
        precision = spectrum + noise / scale
        self._mean = self._vectors @ (projected / precision)
        self._sd = (noise / precision).sqrt()

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draw the f_j from their posterior at the ``values`` of each input, ``d x POINTS``."""
        e = torch.randn(len(self._mean), generator=generator, dtype=torch.float64).to(self._mean)
        weights = self._mean + self._vectors @ (self._sd * e)
        return weights.reshape(-1, len(self._nodes)) @ self._features(self._values).mT

    def leap(self, best: Tensor, bounds: Tensor, generator: torch.Generator) -> Tensor:
        """Move the best point, ``d``, in few inputs to where a draw is larger, outside of a box.

        Those inputs are taken that gain most: one, and each further one with probability ``MORE``
        while it gains at all. An input whose sides are all in the box stays.
        """
        drawn, values = self.draw(generator), self._values
        outside = (values < bounds[0].unsqueeze(-1)) | (values > bounds[1].unsqueeze(-1))
        reached, position = drawn.where(outside, -torch.inf).max(-1)
        here = (best * (POINTS - 1)).round().long().clamp(0, POINTS - 1)
        gain = reached - drawn.gather(-1, here.unsqueeze(-1)).squeeze(-1)
        order = gain.argsort(descending=True)
        leapt = best.clone()
        for count, j in enumerate(order.tolist()):
            first = count == 0 and bool(gain[j] > -torch.inf)
            more = gain[j] > 0.0 and float(torch.rand(1, generator=generator)) < MORE
            if not first and not more:
                break
            leapt[j] = values[position[j]]
        return leapt

    def _kernel(self, x: Tensor) -> Tensor:
        """Evaluate the kernel of an input at values and the nodes, ``... -> ... x nodes``."""
        r = math.sqrt(5.0) / self._length * (x.unsqueeze(-1) - self._nodes).abs()
        return (1.0 + r + r.square() / 3.0) * (-r).exp()

    def _features(self, x: Tensor) -> Tensor:
        return self._kernel(x) @ self._root.mT


def _of_largest_evidence(
    spectrum: Tensor, projected: Tensor, target: Tensor
) -> tuple[float, float]:
    """Choose noise and prior variance among ``NOISES x SCALES``.

    Args:
        spectrum: Eigenvalues of ``ΦᵀΦ``, Φ the features, ``n x D``.
        projected: ``Φᵀ y`` in the eigenvectors.
        target: Outcomes y, ``n``.
    """
    noise = NOISES.to(target).reshape(-1, 1, 1)
    scale = SCALES.to(target).reshape(1, -1, 1)
    total = scale * spectrum + noise
    explained = (scale * projected.square() / total).sum(-1)
    misfit = (target @ target - explained) / noise.squeeze(-1)
    free = len(target) - len(spectrum)
    volume = total.log().sum(-1) + free * noise.squeeze(-1).log()
    best = int((misfit + volume).argmin())
    row, column = divmod(best, len(SCALES))
    return float(NOISES[row]), float(SCALES[column])

"""Trust regions: a box about the best point that follows the search, and candidates in it.

In many inputs the points that a global search would try fill a space that no number of observations
covers. A trust region is a box about the best point, in which a model of the nearest observations
is good, that grows after successes and shrinks after failures (Eriksson et al., 2019). The parts
here take any model of one output over the unit cube, larger outcomes being better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bo_stream.acquisition import SamplePaths
from bo_stream.errors import check_whole
from bo_stream.loops.optimization.acquisition import climb
from bo_stream.models.base import StreamingGP

FIRST_LENGTH = 0.8
LONGEST = 1.6
SHORTEST = 0.5**7
"""Side lengths of a region, in the unit cube: at first, at most, and where it has collapsed."""

SUCCESSES = 3
"""Successes in sequence after which a region doubles."""

IMPROVEMENT = 1e-3
"""Least improvement that is a success, over the standard deviation of the values known before."""

SHAPE = 0.5
"""Exponent of the lengthscales in the sides of a region: 0 is a cube, 1 as in TuRBO."""

COORDINATES = 20
"""Mean number of inputs in which a candidate differs from the centre, of those that perturb it."""


@dataclass
class TrustRegion:
    """Length of a box about the best point, which successes double and failures halve.

    Attributes:
        dim: Number d of inputs.
        batch: Number q of points that are evaluated at a time.
        length: Mean side of the box in the unit cube.
        successes: Batches in sequence that were better than all before.
        failures: Batches in sequence that were not.

    Example:
        >>> region = TrustRegion(dim=20, batch=10)
        >>> region.update(means[newest], means[~newest])
        >>> low, high = region.bounds(model, X[means.argmax()])
    """

    dim: int
    batch: int
    length: float = FIRST_LENGTH
    successes: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        check_whole("dim", self.dim, 1)
        check_whole("batch", self.batch, 1)

    @property
    def patience(self) -> int:
        """Failures in sequence after which the region halves: of about d evaluations."""
        return math.ceil(max(4, self.dim) / self.batch)

    @property
    def has_collapsed(self) -> bool:
        """Whether the box is so small that the search in it has ended."""
        return self.length < SHORTEST

    def update(self, new: Tensor, known: Tensor) -> bool:
        """Grow after ``SUCCESSES`` batches in sequence that improve, shrink after failures.

        Args:
            new: Values of the last batch, best as posterior means: noise is no improvement then.
            known: Values, of the same model, of the points before.

        Returns:
            Whether the last batch has improved on those before.
        """
        improved = improves(new, known)
        self.successes = self.successes + 1 if improved else 0
        self.failures = 0 if improved else self.failures + 1
        if self.successes >= SUCCESSES:
            self.length, self.successes = min(2.0 * self.length, LONGEST), 0
        elif self.failures >= self.patience:
            self.length, self.failures = self.length / 2.0, 0
        return improved

    def restart(self) -> None:
        """Begin again with the first length."""
        self.length, self.successes, self.failures = FIRST_LENGTH, 0, 0

    def bounds(self, model: StreamingGP, centre: Tensor) -> Tensor:
        """Return the box within the unit cube, ``2 x d``.

        Its sides are ``length`` times powers of the kernel's lengthscales of geometric mean one,
        where it has one lengthscale for each input; else it is a cube.

        Args:
            model: Over the unit cube, without an input transform.
            centre: ``d``.
        """
        half = torch.full_like(centre, self.length / 2.0)
        scales = input_lengthscales(model)
        if scales is not None:
            logs = scales.to(centre).log()
            half = half * (SHAPE * (logs - logs.mean())).exp()
        return torch.stack((centre - half, centre + half)).clamp(0.0, 1.0)


def improves(new: Tensor, known: Tensor) -> bool:
    """Return whether the largest of new values is above the known ones, by ``IMPROVEMENT``."""
    return bool(new.max() > known.max() + IMPROVEMENT * known.std(correction=0))


def input_lengthscales(model: StreamingGP) -> Tensor | None:
    """Return a kernel's lengthscales, ``d``; None where it has no single one for each input."""
    found = [
        module.lengthscale.detach().reshape(-1)
        for module in model.covar_module.modules()
        if getattr(module, "has_lengthscale", False)
    ]
    return found[0] if len(found) == 1 and len(found[0]) == model.input_dim else None


def region_candidates(
    X: Tensor, bounds: Tensor, n: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw candidates in a box: half along differences of good points, half perturbations.

    A difference of two points, times a uniform number, is added to the best point (differential
    evolution); a perturbation replaces each input of the best point by a uniform one with
    probability ``min(1, 20 / d)``, and at least one (Regis and Shoemaker, 2013).

    Args:
        X: Good points, ``k x d``, the best one, about which the box is, first.
        bounds: The box, ``2 x d``.
        n: Number of candidates.
        generator: Of random numbers, on the CPU; torch's global one if omitted.

    Returns:
        ``n x d``.
    """
    d, (low, high), best = X.shape[-1], bounds, X[0]

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(X)

    steps = n // 2
    pairs = torch.randint(min(len(X), max(10, d)), (2, steps), generator=generator).to(X.device)
    moved = best + uniform(steps, 1) * (X[pairs[0]] - X[pairs[1]])
    anywhere = low + (high - low) * uniform(n - steps, d)
    changed = uniform(n - steps, d) <= COORDINATES / d
    one = torch.randint(d, (n - steps, 1), generator=generator).to(X.device)
    changed.scatter_(1, one, True)
    perturbed = torch.where(changed, anywhere, best)
    return torch.cat((moved.maximum(low).minimum(high), perturbed))


def maximize_paths(paths: SamplePaths, starts: Tensor, bounds: Tensor, iterations: int) -> Tensor:
    """Maximise n functions in a box, each from one point, all in one L-BFGS-B.

    Args:
        paths: Functions of one output.
        starts: ``n x d``.
        bounds: ``2 x d``, or of each function, ``2 x n x d``.
        iterations: Most iterations.

    Returns:
        ``n x d``; where a search has ended below its start, the start.
    """
    low, high = (side.expand(starts.shape).unsqueeze(-2) for side in bounds)
    if not bool((low < high).any()):
        return starts
    points, reached = climb(
        lambda X: paths(X).squeeze(-1), starts.unsqueeze(-2), low, high, {"maxiter": iterations}
    )
    with torch.no_grad():
        risen = reached >= paths(starts.unsqueeze(-2)).squeeze(-1)
    return torch.where(risen, points.squeeze(-2), starts)

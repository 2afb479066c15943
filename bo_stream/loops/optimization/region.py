"""Trust regions: a box about the best point that follows the search, and candidates in and outside.

In many inputs the points that a global search would try fill a space that no number of observations
covers. A trust region is a box about the best point, in which a model of the nearest observations
is good, that grows after successes and shrinks after failures (Eriksson et al., 2019). The model's
outcomes are on a logarithmic scale. A domain says which points can be evaluated. The parts here
take any model of one output over the unit cube, larger outcomes being better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from scipy.linalg import blas
from scipy.optimize import linprog
from torch import Tensor

from bo_stream.acquisition import SamplePaths
from bo_stream.bases.inducing import inputs_of_parts
from bo_stream.errors import UsageError, check_whole
from bo_stream.linalg import Array, Tridiagonal
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

ROUNDING = 1e-6
"""By how much a start may be outside of its box, for rounding in float32."""


@dataclass
class TrustRegion:
    """Length of a box about the best point, which successes double and failures halve.

    Attributes:
        dim: Number d of inputs.
        batch: Number q of points that are evaluated at a time.
        length: Mean side of the box in the unit cube.
        successes: Batches in sequence that were better than all before.
        failures: Evaluations in sequence, of whole batches, that were not.

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
        if not 0.0 < self.length < math.inf:
            raise ValueError(f"Expected length to be positive and finite, got {self.length}.")

    @property
    def patience(self) -> int:
        """Failures in sequence after which the region halves: d evaluations, and at least 4."""
        return max(4, self.dim)

    @property
    def has_collapsed(self) -> bool:
        """Whether the box is so small that the search in it has ended."""
        return self.length < SHORTEST

    def update(self, new: Tensor, known: Tensor) -> bool:
        """Grow after ``SUCCESSES`` batches in sequence that improve, shrink after ``patience``.

        Args:
            new: Values of the last batch, best as posterior means: noise is no improvement then.
            known: Values, of the same model, of the points before.

        Returns:
            Whether the last batch has improved on those before; if there are none, it has.

        Raises:
            ValueError: A value is NaN, or there is no new one.
        """
        if new.numel() == 0:
            raise ValueError("Expected new to have the values of the last batch, got none.")
        for name, values in (("new", new), ("known", known)):
            if bool(values.isnan().any()):
                raise ValueError(f"Expected {name} without NaN, got {values.tolist()}.")
        improved = known.numel() == 0 or improves(new, known)
        self.successes = self.successes + 1 if improved else 0
        self.failures = 0 if improved else self.failures + self.batch
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


def improves(new: Tensor, known: Tensor, by: float = IMPROVEMENT) -> bool:
    """Return whether the largest of new values is above the known ones, by so many deviations."""
    return bool(new.max() > known.max() + by * known.std(correction=0))


def input_lengthscales(model: StreamingGP) -> Tensor | None:
    """Return a kernel's lengthscales, ``d``; None where it has no single one for each input."""
    numbers = torch.arange(model.input_dim, dtype=torch.float64).unsqueeze(0)
    parts = list(inputs_of_parts(model.covar_module, numbers))
    if len(parts) != 1:
        return None
    seen, found = (each.reshape(-1) for each in parts[0])
    if len(found) != model.input_dim or not torch.equal(seen.sort().values, numbers[0]):
        return None
    return found[seen.argsort().to(found.device)]


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

    Raises:
        ValueError: There is no good point.
    """
    if len(X) == 0:
        raise ValueError("Expected X to have the best point at least, got no rows.")
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
        ``n x d``, a tensor of its own; where a search has ended below its start, the start.

    Raises:
        ValueError: The functions have several outputs, or a start lies outside of the bounds.
    """
    if paths.num_outputs != 1:
        raise ValueError(
            f"Expected paths of one output, got {paths.num_outputs}: take paths.subset_output([0])."
        )
    low, high = (side.expand(starts.shape).unsqueeze(-2) for side in bounds)
    beyond = torch.maximum(low.squeeze(-2) - starts, starts - high.squeeze(-2))
    if not bool((beyond <= ROUNDING).all()):
        raise ValueError(
            "Expected starts within the bounds, whose first row is the lower side, got some by "
            f"{float(beyond.max()):g} outside: clamp the starts."
        )
    if not bool((low < high).any()):
        return starts.clone()
    points, reached = climb(
        lambda X: paths(X).squeeze(-1), starts.unsqueeze(-2), low, high, {"maxiter": iterations}
    )
    with torch.no_grad():
        risen = reached >= paths(starts.unsqueeze(-2)).squeeze(-1)
    return torch.where(risen, points.squeeze(-2), starts)


def replace_repeated(points: Tensor, X: Tensor, candidates: Tensor, values: Tensor) -> None:
    """Replace, in place, points that repeat others: corners of the box, leaps to the same place.

    Each is replaced by the best candidate of its function that repeats none, if there is one.

    Args:
        points: ``q x d``.
        X: Further points that are not to be repeated, ``n x d``.
        candidates: ``N x d``.
        values: Of q functions at the candidates, ``q x N``.
    """
    for i in range(len(points)):
        others = torch.cat((X, points[:i]))
        if _repeats(points[i], others):
            order = values[i].argsort(descending=True).tolist()
            fresh = (candidates[j] for j in order if not _repeats(candidates[j], others))
            points[i] = next(fresh, points[i])


def _repeats(x: Tensor, others: Tensor) -> bool:
    """Tell whether a point is among others, ``n x d``, few of which share its first input."""
    near = others[others[:, 0] == x[0]]
    return bool((near == x).all(-1).any())


# --- outcomes -----------------------------------------------------------------------------------


FENCE = 1.5
"""Interquartile ranges below the lower quartile beyond which an outcome is an outlier."""

_EQUAL = 1e-6
"""Interquartile range, over that of all below the upper quartile, which is taken for none."""


@dataclass(frozen=True)
class LogScale:
    """Outcomes on a logarithmic scale below the best one, so that steep ones far off are near.

    ``−log(1 + (best − y) / unit)``, standardised; linear above the best. Outliers below all others
    are raised to ``floor``: ``FENCE`` interquartile ranges of the logarithms below their lower
    quartile (Tukey, Exploratory Data Analysis, 1977).

    Attributes:
        best: Largest outcome.
        unit: Difference of the largest and the median outcome.
        mean: Of the logarithms, after outliers were raised.
        sd: Of the logarithms, likewise.
        floor: Least value of the scale; None where the middle half of the outcomes is equal but for
            rounding.
    """

    best: float
    unit: float
    mean: float = 0.0
    sd: float = 1.0
    floor: float | None = None

    @classmethod
    def of(cls, Y: Tensor) -> LogScale:
        """Choose the scale of outcomes, ``n``; if they are all equal any unit will do."""
        best = float(Y.max())
        unit = best - float(Y.quantile(0.5))
        raw = cls(best, unit if unit > 0.0 else max(best - float(Y.min()), 1e-12))
        logs = raw.to_scale(Y)
        low, high = logs.quantile(0.25), logs.quantile(0.75)
        is_spread = bool(high - low > _EQUAL * (high - logs.min()))
        fence = float(low - FENCE * (high - low)) if is_spread else None
        logs = logs if fence is None else logs.clamp_min(fence)
        mean, sd = float(logs.mean()), float(logs.std(correction=0))
        sd = sd if sd > 0.0 else 1.0
        floor = None if fence is None else (fence - mean) / sd
        return replace(raw, mean=mean, sd=sd, floor=floor)

    def to_scale(self, Y: Tensor) -> Tensor:
        """Transform outcomes."""
        below = (self.best - Y) / self.unit
        logs = torch.where(below > 0.0, -below.clamp_min(0.0).log1p(), -below)
        values = (logs - self.mean) / self.sd
        return values if self.floor is None else values.clamp_min(self.floor)

    def noise_to_scale(self, Y: Tensor, Yvar: Tensor) -> Tensor:
        """Transform noise variances of outcomes, by the slope there (delta method); NaN stays."""
        below = ((self.best - Y) / self.unit).clamp_min(0.0)
        return Yvar / (self.unit * (1.0 + below) * self.sd) ** 2

    def to_outcome(self, value: float) -> float:
        """Transform a value of the scale to an outcome."""
        log = self.mean + self.sd * value
        return self.best + self.unit * (log if log > 0.0 else -math.expm1(-log))


# --- the domain: inputs of few values, and linear constraints ------------------------------------


TOLERANCE = 1e-9
"""By how much a linear constraint may be missed, for rounding."""

CHANGED = 2
"""Mean number of inputs of few values in which a candidate differs from the centre."""


@dataclass(frozen=True)
class Domain:
    """A part of the unit cube: some inputs have few values, and ``A x <= b``.

    A region search has its candidates and points admitted, and asks for the boxes of its searches.

    Attributes:
        levels: Ascending values of inputs that have few, by the input's position; a fixed input has
            one.
        A: ``k x d``.
        b: ``k``.

    Example:
        >>> domain = Domain({3: torch.tensor([0.25, 0.75])}, torch.ones(1, d), torch.tensor([2.0]))
        >>> domain.admit(X, inside)
    """

    levels: Mapping[int, Tensor] = field(default_factory=dict)
    A: Tensor | None = None
    b: Tensor | None = None

    def snap(self, X: Tensor) -> Tensor:
        """Move points, ``n x d``, to the nearest values of the inputs that have few."""
        snapped = X.clone()
        for j, values in self.levels.items():
            known = values.to(X)
            middles = (known[1:] + known[:-1]) / 2.0
            snapped[:, j] = known[torch.searchsorted(middles, X[:, j].contiguous())]
        return snapped

    def admit(self, X: Tensor, inside: Tensor) -> Tensor:
        """Move points into the domain, ``n x d``.

        A point that breaks a constraint is drawn along a line to a point of the domain. Where its
        inputs of few values then miss the constraint again, these become those of that point.

        Args:
            X: Points of the unit cube, ``n x d``.
            inside: A point of the domain, ``d``, or one for each, ``n x d``.
        """
        inside = inside.expand(X.shape)
        snapped = self.snap(self._drawn(X, inside))
        if self.A is None or self.b is None or not self.levels:
            return snapped
        few = torch.zeros(X.shape[-1], dtype=torch.bool, device=X.device)
        few[list(self.levels)] = True
        kept = self._drawn(torch.where(few, inside, snapped), inside)
        return torch.where(self._holds(snapped).unsqueeze(-1), snapped, kept)

    def nearest(self, x: Tensor) -> Tensor:
        """Move a point that keeps the constraints, ``d``, to the fixed values.

        Where it then breaks a constraint, its other inputs move by the least sum of distances that
        brings it into the domain (a mixed-integer program). Without fixed inputs it stays.

        Raises:
            UsageError: No point with the fixed values keeps the constraints.
        """
        if all(len(values) > 1 for values in self.levels.values()):
            return x
        near = self.snap(x.unsqueeze(0)).squeeze(0)
        if self.A is None or self.b is None or bool(self._holds(near)):
            return near
        # x = near + shifts of the inputs: to either end, in part, or to one of few values, in full
        A, b, start = (each.to("cpu", torch.float64) for each in (self.A, self.b, near))
        ends, some = torch.tensor([0.0, 1.0]), A.ne(0.0).any(0).nonzero().flatten().tolist()
        values = [self.levels.get(j, ends).to(A) for j in some]
        inputs = torch.cat([torch.full((len(v),), j) for j, v in zip(some, values, strict=True)])
        shifts = torch.cat(values) - start[inputs]
        is_of = (inputs == torch.arange(len(x)).unsqueeze(-1)).to(A)
        found = linprog(
            shifts.abs().numpy(),
            A_ub=torch.cat((A[:, inputs] * shifts, is_of)).numpy(),
            b_ub=torch.cat((b.reshape(-1) - A @ start, torch.ones(len(x)))).numpy(),
            bounds=(0.0, 1.0),
            integrality=[int(len(self.levels.get(j, ())) > 1) for j in inputs.tolist()],
            options={"primal_feasibility_tolerance": TOLERANCE / 10.0},
        )
        if found.x is not None:
            moved = (start + is_of @ (shifts * torch.as_tensor(found.x))).clamp(0.0, 1.0)
            reached = self.snap(moved.unsqueeze(0)).squeeze(0).to(x)
            if bool(self._holds(reached)):
                return reached
            # few values are taken but for 1e-6: the other inputs again, given them
            if any(len(known) > 1 for known in self.levels.values()):
                there = {j: reached[j : j + 1] for j in self.levels}
                return replace(self, levels=there).nearest(reached)
        raise UsageError("No point with the fixed values keeps the constraints.")

    def _holds(self, X: Tensor) -> Tensor:
        """Tell which points, ``n x d`` or ``d``, keep the constraints."""
        if self.A is None or self.b is None:
            return torch.ones(X.shape[:-1], dtype=torch.bool, device=X.device)
        return (X @ self.A.to(X).mT <= self.b.to(X).reshape(-1) + TOLERANCE).all(-1)

    def _drawn(self, X: Tensor, inside: Tensor) -> Tensor:
        """Draw points that break a constraint along a line to points that do not."""
        if self.A is None or self.b is None:
            return X
        A, b = self.A.to(X), self.b.to(X).reshape(-1)
        steps = (X - inside) @ A.mT
        room = (b - inside @ A.mT).clamp_min(0.0)
        shares = torch.where(steps > 0.0, room / steps.clamp_min(1e-300), torch.inf)
        share = shares.amin(-1, keepdim=True).clamp_max(1.0)
        return inside + share * (X - inside)

    def widened(self, bounds: Tensor, centre: Tensor) -> Tensor:
        """Widen a box, ``2 x d``, to the next values of inputs that have few, on both sides."""
        low, high = bounds.clone()
        for j, values in self.levels.items():
            known = values.to(bounds)
            at = int((known - centre[j]).abs().argmin())
            low[j] = low[j].minimum(known[max(at - 1, 0)])
            high[j] = high[j].maximum(known[min(at + 1, len(known) - 1)])
        return torch.stack((low, high))

    def pinned(self, bounds: Tensor, starts: Tensor) -> Tensor:
        """Return the boxes of searches, ``2 x n x d``, in which inputs of few values stay.

        Args:
            bounds: ``2 x d``.
            starts: Where the searches start, ``n x d``.
        """
        boxes = bounds.unsqueeze(-2).repeat(1, len(starts), 1)
        few = list(self.levels)
        boxes[..., few] = starts[:, few]
        return boxes

    def candidates(self, X: Tensor, centre: Tensor, generator: torch.Generator) -> Tensor:
        """Admit candidates about a centre, which differ from it in few inputs of few values.

        Args:
            X: ``n x d``.
            centre: A point of the domain, ``d``.
            generator: Of random numbers, on the CPU.

        Returns:
            At most ``n x d``, without repetitions where there are inputs of few values.
        """
        few = list(self.levels)
        if not few:
            return self.admit(X, centre)
        stays = torch.rand(len(X), len(few), generator=generator) * len(few) >= CHANGED
        moved = X.clone()
        moved[:, few] = torch.where(stays.to(X.device), centre[few], X[:, few])
        return self.admit(moved, centre).unique(dim=0)


# --- leaps out of a region, by a trend over all outcomes that tells of other basins --------------
# A region finds the bottom of the basin that it is in. Which basin is best is often told by inputs
# one at a time: the trend is a sum of one function of each input (Duvenaud et al., 2011), learned
# from observations all over the cube, and a leap replaces one input or few of the best point by
# where a function drawn from the trend's posterior has its maximum outside of the region.


NODES = 16
"""Most features of an input."""

MOST_FEATURES = 640
FEWEST_NODES = 6
"""Features in all, unless an input would have fewer than this."""

MOST_INPUTS = 300
"""Most inputs from which a trend is learned: in more it would take seconds."""

POINTS = 65
"""Values of an input among which a leap goes."""

NOISES = tuple(10.0 ** (exponent / 2.0) for exponent in range(-10, 1))
SCALES = (0.3, 1.0, 3.0, 10.0)
"""Noise variances and prior variances, over the outcomes' variance, that are compared."""

MORE = 0.5
"""Probability of each further input that leaps."""


class AdditiveTrend:
    """Posterior of ``Σ_j f_j(x_j)``: Bayesian regression on features of each input.

    Each f_j is a Gaussian process of Matérn-5/2 kernel, of lengthscale some two distances of its
    equidistant inducing points, in the features of the subset of regressors (Quiñonero-Candela and
    Rasmussen, 2005, section 5). Noise and prior variance are those of largest evidence on a grid.
    The Gram matrix ``ΦᵀΦ`` of the features is brought to tridiagonal form once, in which each of
    them costs O(D). Cost O(n D² + D³) for D features in all, on the CPU in float64.
    """

    def __init__(self, X: Tensor, y: Tensor) -> None:
        """Learn from outcomes.

        Args:
            X: Inputs in the unit cube, ``n x d``.
            y: Outcomes, ``n``.
        """
        X, y = X.to("cpu", torch.float64), y.to("cpu", torch.float64)
        d = X.shape[-1]
        nodes = max(FEWEST_NODES, min(NODES, MOST_FEATURES // d))
        self._nodes = torch.linspace(0.0, 1.0, nodes, dtype=torch.float64)
        self._length = 2.0 * 0.96 / nodes
        gram = self._kernel(self._nodes) + 1e-6 * torch.eye(nodes, dtype=torch.float64)
        self._root = torch.linalg.inv(torch.linalg.cholesky(gram))
        self._values = torch.linspace(0.0, 1.0, POINTS, dtype=torch.float64)
        features = self._features(X).reshape(len(X), -1).numpy() / math.sqrt(d)
        centred = y - y.mean()
        target = (centred / centred.square().mean().sqrt().clamp_min(1e-12)).numpy()
        self._gram = Tridiagonal(blas.dsyrk(1.0, features.T, lower=1))
        moments = self._gram.to_basis(features.T @ target)
        noise, scale = _of_largest_evidence(self._gram, moments, target)
        self._noise, self._precision = noise, self._gram.shifted(noise / scale)
        self._mean = self._precision.solve(moments)

    def weights(self, e: Tensor) -> Tensor:
        """Transform standard normal numbers, ``D``, into a draw of the features' weights."""
        deviation = self._precision.solve(self._precision.root_times(e.numpy()))
        return torch.as_tensor(
            self._gram.from_basis(self._mean + math.sqrt(self._noise) * deviation)
        )

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draw the f_j from their posterior at the ``values`` of each input, ``d x POINTS``."""
        weights = self.weights(
            torch.randn(len(self._mean), generator=generator, dtype=torch.float64)
        )
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


def _of_largest_evidence(gram: Tridiagonal, moments: Array, target: Array) -> tuple[float, float]:
    """Choose noise and prior variance among ``NOISES x SCALES``.

    Args:
        gram: ``ΦᵀΦ``, Φ the features, ``n x D``.
        moments: ``Φᵀ y`` in the basis of its tridiagonal form, ``D``.
        target: Outcomes y, ``n``.
    """
    n, D = len(target), len(moments)

    def loss(noise: float, scale: float) -> float:
        factor = gram.shifted(noise / scale)
        misfit = (target @ target - moments @ factor.solve(moments)) / noise
        volume = factor.log_determinant() + D * math.log(scale) + (n - D) * math.log(noise)
        return float(misfit + volume)

    return min(itertools.product(NOISES, SCALES), key=lambda pair: loss(*pair))

"""Choose the next trials by an acquisition function."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.analytic import _log_ei_helper
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.acquisition.monte_carlo import qSimpleRegret, qUpperConfidenceBound
from botorch.exceptions.errors import UnsupportedError
from botorch.exceptions.warnings import OptimizationWarning
from botorch.generation.gen import gen_candidates_scipy
from botorch.generation.sampling import MaxPosteriorSampling
from botorch.optim.optimize import optimize_acqf
from botorch.sampling.normal import SobolQMCNormalSampler
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor
from torch.quasirandom import SobolEngine

from bo_stream.acquisition import SamplePaths, evaluate_known_points_once, sample_paths
from bo_stream.acquisition.feature_nipv import in_weight_space
from bo_stream.errors import UsageError
from bo_stream.linalg import safe_cholesky, solve_lower
from bo_stream.loops.models import import_function
from bo_stream.loops.optimization.trials import ACQUISITIONS, OptimizationSettings
from bo_stream.loops.run import process_at
from bo_stream.models.base import StreamingGP
from bo_stream.process import PosteriorProcess
from bo_stream.tensors import map_tensors

BASELINE = 64
"""Most baseline points of qLogNEI, whose cost is cubic in them."""

MANY = 64
"""Points without an outcome, those to choose included, from which on a point is to cost less."""

_SAMPLES = 128
_THOMPSON_SAMPLES = 4096
_PATHS_AT_A_TIME = 16
_JOINT_SAMPLES = 1024
_CANDIDATES = 1024
_CANDIDATES_A_POINT = 4
_DRAWN = 64
_DISTANCES = (0.1, 0.03, 0.01, 0.003)
_NEAR = 0.03
_MAXITER = 100
_FEW_ITERATIONS = 20
_FEW_STARTS = 2
_SOBOL_BEFORE_DRAWS = 512
_BEST_BEFORE_DRAWS = 256
_DRAWS = 512
_FTOL = 2e-9
_ROUNDINGS = 100.0


def best_points(settings: OptimizationSettings, situation: Situation, q: int) -> Tensor:
    """Find the next points of the unit cube, ``q x d``.

    ``TS``: each maximises a function of its own drawn from the posterior, regardless of pending
    points; with local models, which have no functions to draw, a draw at ``_JOINT_SAMPLES``
    points. Others: one point after the other, each by a search of its own with those before as
    pending, whose cost is cubic in their number.

    From ``MANY`` points without an outcome on, pending ones and those to choose counted together,
    a point must cost less: hundreds of evaluations end while hundreds are chosen. ``TS`` then
    refines all functions together, from fewer starts and in fewer steps, and others choose among
    shared candidates, see :func:`choose_by_fantasies`. A builder of one's own is searched as
    before.
    """
    name, none = settings.acquisition, situation.X_baseline[:0]
    pending = none if situation.X_pending is None else situation.X_pending
    many = len(pending) + q >= MANY
    if name == "TS":
        return _thompson(settings, situation, q, many)
    if many and name in BUILDERS:
        drawn = situation.X_baseline[:BASELINE] if name == "qLogNEI" else none
        reached = situation.X_baseline[:1] if name == "qLogEI" else none
        utility = Utility(situation.beta if name == "qUCB" else None)
        count = max(settings.raw_samples, _CANDIDATES, _CANDIDATES_A_POINT * q)
        candidates = (
            situation.sobol_points(count),
            *(_near_best(situation, distance) for distance in _DISTANCES),
            _thompson(settings, situation, _DRAWN, many=True),
        )
        X = torch.cat(candidates).unique(dim=0)
        known = torch.cat((drawn, pending))
        seed = situation.seed
        return X[choose_by_fantasies(situation.model, utility, known, reached, X, q, seed)]
    builder = import_function(name, "acquisition") if ":" in name else BUILDERS[name]
    options: dict[str, Any] = {**_search_options(none.dtype), "factr": None}
    points = none
    with warnings.catch_warnings():
        # joint samples of points that nearly coincide need a jitter: no news for a user
        warnings.simplefilter("ignore", NumericalWarning)
        for _ in range(q):
            waiting = torch.cat((pending, points))
            now = replace(situation, X_pending=waiting if len(waiting) > 0 else None)
            acqf = builder(now)
            if ":" in name and len(points) > 0 and getattr(acqf, "X_pending", None) is None:
                acqf.set_X_pending(now.X_pending)  # which the user's builder has ignored
            point, _ = optimize_acqf(
                evaluate_known_points_once(acqf),
                bounds=none.new_tensor([[0.0] * settings.dim, [1.0] * settings.dim]),
                q=1,
                num_restarts=settings.num_restarts,
                raw_samples=settings.raw_samples,
                options=options,
                retry_on_optimization_warning=False,
            )
            points = torch.cat((points, point))
    return points


def check_acquisition(name: str) -> None:
    """Raise a ``UsageError`` unless an acquisition has the name, or a builder can be imported."""
    if ":" in name:
        import_function(name, "acquisition")
    elif name not in ACQUISITIONS:
        raise UsageError(
            f"Expected acquisition to be one of {', '.join(ACQUISITIONS)}, or a builder as "
            f"package.module:function, got {name!r}."
        )


@dataclass(frozen=True)
class Situation:
    """Input of an acquisition function; larger outcomes are better.

    Attributes:
        model: Model over the unit cube, of outcomes in units of about their spread; else see unit.
        X_baseline: Observed points, ``n x d``, those of the largest posterior means first.
        best_mean: Largest of those means.
        X_pending: Points without an outcome (pending, and lately failed), ``n x d``.
        beta: β of the bound ``mean + √β sd``.
        seed: Seed of samplers.
        centre: For ``TS``: value about which outcomes spread, as the search's tolerances are
            absolute.
        unit: For ``TS``: their spread.
    """

    model: StreamingGP
    X_baseline: Tensor
    best_mean: float
    X_pending: Tensor | None
    beta: float
    seed: int
    centre: float = 0.0
    unit: float = 1.0

    def sampler(self) -> SobolQMCNormalSampler:
        """Return a sampler of base samples that depend on the seed alone."""
        return SobolQMCNormalSampler(torch.Size([_SAMPLES]), seed=self.seed)

    def sobol_points(self, count: int) -> Tensor:
        """Draw points of the unit cube, ``count x d``, that depend on the seed alone."""
        engine = SobolEngine(self.X_baseline.shape[-1], scramble=True, seed=self.seed)
        return engine.draw(count, dtype=torch.float64).to(self.X_baseline)


Builder = Callable[[Situation], AcquisitionFunction]
"""Type of a builder of one's own, which gets the situation; large outcomes are good."""


def _monte_carlo(s: Situation) -> dict[str, Any]:
    return {"model": s.model, "sampler": s.sampler(), "X_pending": s.X_pending}


BUILDERS: dict[str, Builder] = {
    "qUCB": lambda s: qUpperConfidenceBound(beta=s.beta, **_monte_carlo(s)),
    # over the largest posterior mean of an observed point, as outcomes are noisy
    "qLogEI": lambda s: qLogExpectedImprovement(best_f=s.best_mean, **_monte_carlo(s)),
    "qLogNEI": lambda s: qLogNoisyExpectedImprovement(
        X_baseline=s.X_baseline[:BASELINE], prune_baseline=False, **_monte_carlo(s)
    ),
    "qSR": lambda s: qSimpleRegret(**_monte_carlo(s)),
}


def _search_options(dtype: torch.dtype, maxiter: int = _MAXITER) -> dict[str, Any]:
    """Return options of scipy's L-BFGS-B, which ends where the next digits would be rounding."""
    return {"maxiter": maxiter, "ftol": max(_FTOL, _ROUNDINGS * torch.finfo(dtype).eps)}


def _thompson(settings: OptimizationSettings, situation: Situation, q: int, many: bool) -> Tensor:
    """Maximise q drawn functions, if they are many all together, in fewer steps."""
    try:
        paths = sample_paths(situation.model, q, situation.seed)
    except UnsupportedError:  # a model, or a kernel, without functions in closed form
        points = situation.sobol_points(_JOINT_SAMPLES)
        X = torch.cat((points, _near_best(situation, _NEAR)))
        return MaxPosteriorSampling(situation.model, replacement=False)(X, num_samples=q)
    # four times as many points to start from on a grid, where all is cheap
    on_grid = in_weight_space(situation.model.process())
    count = _THOMPSON_SAMPLES if on_grid else _JOINT_SAMPLES
    points = situation.sobol_points(max(settings.raw_samples, count))
    X = torch.cat((points, situation.X_baseline))
    if many:
        if not on_grid:  # functions in random frequencies cost a thousand cosines a point: start
            # from the few points where joint draws have their maxima
            sobol = situation.sobol_points(_SOBOL_BEFORE_DRAWS)
            X = torch.cat((sobol, situation.X_baseline[:_BEST_BEFORE_DRAWS]))
            draws = MaxPosteriorSampling(situation.model, replacement=True)
            X = draws(X, num_samples=_DRAWS).unique(dim=0)
        return _maxima(situation, paths, _best_starts(paths, X, _FEW_STARTS), _FEW_ITERATIONS)
    starts = _best_starts(paths, X, settings.num_restarts)
    slices = [slice(i, i + _PATHS_AT_A_TIME) for i in range(0, q, _PATHS_AT_A_TIME)]
    return torch.cat(
        [_maxima(situation, paths.path(some), starts[some], _MAXITER) for some in slices]
    )


@torch.no_grad()
def _best_starts(paths: SamplePaths, X: Tensor, count: int) -> Tensor:
    """Return the best points for each of n functions, ``n x count x d``."""
    return X[paths(X).squeeze(-1).topk(min(count, len(X)), dim=-1).indices]


def _near_best(situation: Situation, distance: float) -> Tensor:
    """Draw normal points about the observed points of the largest means."""
    best = situation.X_baseline[:BASELINE]
    jitter = distance * torch.randn(BASELINE, best.shape[-1]).to(best)
    return (best.repeat(BASELINE // len(best) + 1, 1)[:BASELINE] + jitter).clamp(0.0, 1.0)


def _maxima(situation: Situation, paths: SamplePaths, starts: Tensor, iterations: int) -> Tensor:
    """Maximise each of n functions by L-BFGS-B from ``n x starts x d`` points, to ``n x d``."""

    def scaled(X: Tensor) -> Tensor:
        return (paths(X).squeeze(-1) - situation.centre) / situation.unit

    options = _search_options(starts.dtype, iterations)
    points, reached = climb(scaled, starts, 0.0, 1.0, options)
    return points[torch.arange(len(points), device=points.device), reached.argmax(-1)]


def climb(
    value: Callable[[Tensor], Tensor],
    starts: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Maximise a sum of functions in a box, each from points of its own, by one L-BFGS-B.

    A line search that stalls ends there, which is no news: its ``OptimizationWarning`` is dropped.

    Args:
        value: Functions of ``n x s x d`` points, ``n x s``.
        starts: ``n x s x d``.
        low: Lower sides, which broadcast with the points.
        high: Upper sides.
        options: Of L-BFGS-B.

    Returns:
        Points ``n x s x d``, and the values there. The sum is no less than at the starts; one of
        the values may be.
    """
    # BoTorch warns whatever the filters are
    with warnings.catch_warnings(record=True) as caught:
        points, reached = gen_candidates_scipy(
            starts,
            value,  # type: ignore[arg-type]  # any function will do
            lower_bounds=low,
            upper_bounds=high,
            options=options,
            use_parallel_mode=False,
        )
    for warning in caught:
        if not issubclass(warning.category, OptimizationWarning):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return points, reached


# --- batches of many points for an acquisition function ------------------------------------------
# Given pending points, BoTorch's Monte Carlo acquisition functions value a point x by ``E[(u(x) −
# max(b, max u(pending)))⁺]`` over the joint posterior of the utilities u, where b is the largest
# utility so far. Here the values at the pending points and at those chosen so far are drawn S
# times (Snoek, Larochelle and Adams, 2012, section 3.2). Given such a fantasy f(x) is normal, and
# the expectation has a closed form; the mean over the fantasies values a candidate.
#
# All candidates are conditioned on a chosen one together, by a further column of the partial
# Cholesky factor of their covariance. So with N candidates, k known points and a basis of r
# functions a choice costs O(N (r + k + S)), after O(k³ + N k²) once.


FANTASIES = 64
"""Number S of draws of the values at points without an outcome."""

LEAST_VARIANCE = 1e-10
"""Least conditional variance of a candidate, over its posterior variance."""

LEAST_BETA = 1e-12
"""Smaller ones count as this one, so that candidates have an order where β is 0."""

FAR = 8.0
"""Standard deviations below all means at which nothing is reached: every value is larger."""


@dataclass(frozen=True)
class Utility:
    """What a batch is to make large: a function u of values f, normal given a fantasy.

    Attributes:
        beta: β of ``mean + √(β π / 2) |f − mean|``, of expectation ``mean + √β sd``
            [Wilson2018, table 1]; None: u is f itself, as in expected improvement and simple
            regret.
    """

    beta: float | None = None

    @property
    def _factor(self) -> float:
        return math.sqrt(max(self.beta or 0.0, LEAST_BETA) * math.pi / 2.0)

    def of(self, values: Tensor, mean: Tensor) -> Tensor:
        """Compute utilities of values, whose posterior mean before all fantasies is given."""
        return values if self.beta is None else mean + self._factor * (values - mean).abs()

    def log_gain(self, fantasy: Tensor, sd: Tensor, mean: Tensor, reached: Tensor) -> Tensor:
        """Compute ``log E (u − reached)⁺``.

        That of ``c |f − mean|``, where ``c = √(β π / 2)``, over ``a = reached − mean`` is, for
        a > 0, that of ``c (f − mean)`` and of ``−c (f − mean)``; for a < 0 it is more by −a than
        for 0.

        Args:
            fantasy: Mean of f given a fantasy, ``S x N``.
            sd: Standard deviation given a fantasy, ``N``.
            mean: Posterior mean, ``N``.
            reached: Largest utility so far, ``S x 1``.
        """
        if self.beta is None:
            return _log_expected_excess(fantasy - reached, sd)
        above = (reached - mean).clamp_min(0.0)
        shift, spread = self._factor * (fantasy - mean), self._factor * sd
        both = torch.logaddexp(
            _log_expected_excess(shift - above, spread),
            _log_expected_excess(-shift - above, spread),
        )
        return torch.logaddexp(both, (mean - reached).clamp_min(0.0).log())


def _log_expected_excess(mean: Tensor, sd: Tensor) -> Tensor:
    """Compute ``log E z⁺`` of normal z, exact far into the tail. [Ament2023, eq. 8 and 9]."""
    return sd.log() + _log_ei_helper(mean / sd)


@torch.no_grad()
def choose_by_fantasies(
    model: StreamingGP,
    utility: Utility,
    drawn: Tensor,
    reached: Tensor,
    X: Tensor,
    q: int,
    seed: int,
) -> Tensor:
    """Choose q of N candidates one after the other, each given those before.

    Args:
        model: Model of one output.
        utility: What is to be large.
        drawn: Points whose values are drawn and then count as reached, ``k x d``: those without an
            outcome, maybe some with one.
        reached: Points whose posterior means count as reached, ``k' x d``.
        X: Candidates, ``N x d``.
        q: Number of points, at most N.
        seed: Seed of the fantasies.

    Returns:
        Rows of the chosen candidates, ``q``, in the order of choice.
    """
    process, inputs = process_at(model, X)
    candidates = Candidates(process, inputs, len(drawn) + q, seed)
    lowest = candidates.mean.min() - FAR * candidates.variance.max().sqrt()
    most = lowest.expand(FANTASIES, 1)
    for points, are_drawn in ((drawn, True), (reached, False)):
        if len(points) > 0:
            at = model.transform_inputs(points).double()
            mean = process.mean(at)[0]
            values = candidates.condition_on(at) if are_drawn else mean.unsqueeze(0)
            most = most.maximum(utility.of(values, mean).amax(-1, keepdim=True))
    free = torch.zeros_like(candidates.mean)
    chosen = []
    for _ in range(q):
        gains = utility.log_gain(candidates.fantasies, candidates.sd, candidates.mean, most)
        row = int((gains.logsumexp(0) + free).argmax())
        free[row] = -torch.inf
        values = candidates.choose(row).unsqueeze(-1)
        most = most.maximum(utility.of(values, candidates.mean[row]))
        chosen.append(row)
    return torch.tensor(chosen, device=X.device)


class Candidates:
    """N candidates, conditioned on S fantasies of the values at other points.

    Attributes:
        mean: Posterior means, ``N``.
        fantasies: Means given each fantasy, ``S x N``.
        variance: Variances given a fantasy, ``N``.
    """

    def __init__(self, process: PosteriorProcess, X: Tensor, room: int, seed: int) -> None:
        """Begin with the posterior itself.

        Args:
            process: The posterior.
            X: Candidates as the process takes them, ``N x d``.
            room: Number of points that will be conditioned on.
            seed: Seed of the fantasies.
        """
        self._process, self._points = process, process.at(X)
        self.mean = process.mean_at(self._points)[0]
        self.variance = process.variance_at(self._points)[0].clamp_min(0.0)
        self.fantasies = self.mean.expand(FANTASIES, -1).clone()
        self._least = LEAST_VARIANCE * self.variance.max()
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(room, FANTASIES, generator=generator, dtype=torch.float64)
        self._draws = draws.to(self.mean)
        # rows of the partial factor R, of which the explained covariance is R^T R
        self._factor = self.mean.new_zeros(room, len(self.mean))
        self._count = 0

    @property
    def sd(self) -> Tensor:
        """Standard deviations given a fantasy, ``N``."""
        return self.variance.clamp_min(self._least).sqrt()

    def condition_on(self, X: Tensor) -> Tensor:
        """Draw the values at k other points, the first ones, and return them, ``S x k``."""
        known = self._process.at(X)
        factor = safe_cholesky(self._process.cross_covariance(known, known))[0]
        rows = solve_lower(factor, self._process.cross_covariance(known, self._points)[0])
        draws = self._draws[: len(X)]
        self._add(rows)
        return self._process.mean_at(known)[0] + (factor @ draws).mT

    def choose(self, row: int) -> Tensor:
        """Draw the value at a candidate, and return it, ``S``."""
        point = map_tensors(self._points, lambda each: each[..., row : row + 1, :])
        before = self._factor[: self._count]
        covariance = self._process.cross_covariance(point, self._points)[0, 0]
        covariance = covariance - before[:, row] @ before
        self._add((covariance / self.sd[row]).unsqueeze(0))
        return self.fantasies[:, row]

    def _add(self, rows: Tensor) -> None:
        """Add rows of the factor. Cost O(N S) each."""
        now = slice(self._count, self._count + len(rows))
        self._factor[now] = rows
        self.fantasies += self._draws[now].mT @ rows
        self.variance = (self.variance - rows.square().sum(0)).clamp_min(0.0)
        self._count = now.stop

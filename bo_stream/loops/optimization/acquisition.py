"""Acquisition functions by name, and the search for their maxima."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from botorch.acquisition.acquisition import AcquisitionFunction
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
from bo_stream.acquisition.weight_space import lives_in_features
from bo_stream.errors import UsageError
from bo_stream.loops.optimization.settings import ACQUISITIONS, OptimizationSettings
from bo_stream.loops.own_functions import import_function
from bo_stream.models.base import StreamingGP

BASELINE = 64
"""Most baseline points of qLogNEI, whose cost is cubic in them."""

_SAMPLES = 128
_THOMPSON_SAMPLES = 4096
_PATHS_AT_A_TIME = 16
_JOINT_SAMPLES = 1024
_NEAR = 0.03
_MAXITER = 100
_FTOL = 2e-9
_ROUNDINGS = 100.0


def best_points(settings: OptimizationSettings, situation: Situation, q: int) -> Tensor:
    """Find the next points of the unit cube.

    ``TS``: each maximises a function of its own drawn from the posterior, whatever points are
    pending; with local models, which have no functions to draw, a draw at ``_JOINT_SAMPLES``
    points. Others: one point after the other, with those before as pending. They are ``q x d``.
    """
    if settings.acquisition == "TS":
        return _thompson(settings, situation, q)
    name = settings.acquisition
    builder = import_function(name, "acquisition") if ":" in name else BUILDERS[name]
    points = situation.X_baseline[:0]
    with warnings.catch_warnings():
        # joint samples of points that nearly coincide need a jitter: no news for a user
        warnings.simplefilter("ignore", NumericalWarning)
        for _ in range(q):
            now = situation.with_pending(points)
            acqf = builder(now)
            if ":" in name and len(points) > 0 and getattr(acqf, "X_pending", None) is None:
                acqf.set_X_pending(now.X_pending)  # which the user's builder has ignored
            point = _best_point(settings, evaluate_known_points_once(acqf), points)
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
        model: Model over the unit cube, of outcomes in units of about their spread.
        X_baseline: CentredRows points, ``n x d``, those of the largest posterior means first.
        best_mean: Largest of those means.
        X_pending: Points without an outcome (pending, and lately failed), ``n x d``.
        beta: Weight of the standard deviation in confidence bounds.
        seed: Seed of samplers.
    """

    model: StreamingGP
    X_baseline: Tensor
    best_mean: float
    X_pending: Tensor | None
    beta: float
    seed: int

    def with_pending(self, X: Tensor) -> Situation:
        """Return a copy with further pending points, ``n x d``."""
        before = X[:0] if self.X_pending is None else self.X_pending
        pending = torch.cat((before, X))
        return replace(self, X_pending=pending if len(pending) > 0 else None)

    def sampler(self) -> SobolQMCNormalSampler:
        """Return a sampler of base samples that depend on the seed alone."""
        return SobolQMCNormalSampler(torch.Size([_SAMPLES]), seed=self.seed)


Builder = Callable[[Situation], AcquisitionFunction]
"""Type of a builder of one's own, which gets the situation; large outcomes are good."""


def _monte_carlo(s: Situation) -> dict[str, Any]:
    return {"model": s.model, "sampler": s.sampler(), "X_pending": s.X_pending}


BUILDERS: dict[str, Builder] = {
    "qUCB": lambda s: qUpperConfidenceBound(beta=s.beta, **_monte_carlo(s)),
    # over the largest posterior mean of a told point, as outcomes are noisy
    "qLogEI": lambda s: qLogExpectedImprovement(best_f=s.best_mean, **_monte_carlo(s)),
    "qLogNEI": lambda s: qLogNoisyExpectedImprovement(
        X_baseline=s.X_baseline[:BASELINE], prune_baseline=False, **_monte_carlo(s)
    ),
    "qSR": lambda s: qSimpleRegret(**_monte_carlo(s)),
}


def _best_point(settings: OptimizationSettings, acqf: AcquisitionFunction, like: Tensor) -> Tensor:
    options: dict[str, Any] = {**_search_options(like.dtype), "factr": None}
    point, _ = optimize_acqf(
        acqf,
        bounds=like.new_tensor([[0.0] * settings.dim, [1.0] * settings.dim]),
        q=1,
        num_restarts=settings.num_restarts,
        raw_samples=settings.raw_samples,
        options=options,
        retry_on_optimization_warning=False,
    )
    return point


def _search_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return options of scipy's L-BFGS-B, which ends where the next digits would be rounding."""
    return {"maxiter": _MAXITER, "ftol": max(_FTOL, _ROUNDINGS * torch.finfo(dtype).eps)}


def _thompson(settings: OptimizationSettings, situation: Situation, q: int) -> Tensor:
    try:
        paths = sample_paths(situation.model, q, situation.seed)
    except UnsupportedError:  # a model, or a kernel, without functions in closed form
        return _thompson_among_points(settings, situation, q)
    # four times as many points to start from on a grid, where all is cheap
    many = _THOMPSON_SAMPLES if lives_in_features(situation.model) else _JOINT_SAMPLES
    points = _sobol_points(settings, situation, max(settings.raw_samples, many))
    X = torch.cat((points, situation.X_baseline))
    with torch.no_grad():
        starts = X[paths(X).squeeze(-1).topk(settings.num_restarts, dim=-1).indices]
    slices = [slice(i, i + _PATHS_AT_A_TIME) for i in range(0, q, _PATHS_AT_A_TIME)]
    return torch.cat([_maxima(paths.path(some), starts[some]) for some in slices])


def _thompson_among_points(settings: OptimizationSettings, situation: Situation, q: int) -> Tensor:
    """Sample jointly at Sobol points and near the told points of the largest means."""
    points = _sobol_points(settings, situation, _JOINT_SAMPLES)
    best = situation.X_baseline[:BASELINE]
    jitter = _NEAR * torch.randn(BASELINE, points.shape[-1]).to(points)
    near = (best.repeat(BASELINE // len(best) + 1, 1)[:BASELINE] + jitter).clamp(0.0, 1.0)
    rule = MaxPosteriorSampling(situation.model, replacement=False)
    return rule(torch.cat((points, near)), num_samples=q)


def _sobol_points(settings: OptimizationSettings, situation: Situation, count: int) -> Tensor:
    engine = SobolEngine(settings.dim, scramble=True, seed=situation.seed)
    return engine.draw(count, dtype=torch.float64).to(situation.X_baseline)


def _maxima(paths: SamplePaths, starts: Tensor) -> Tensor:
    """Maximise each of n functions by L-BFGS-B from ``n x starts x d`` points, to ``n x d``."""
    with warnings.catch_warnings():
        # a line search that stalls ends there: the best of the starts is taken anyway
        warnings.simplefilter("ignore", OptimizationWarning)
        points, reached = gen_candidates_scipy(
            starts,
            lambda X: paths(X).squeeze(-1),  # type: ignore[arg-type]  # any function will do
            lower_bounds=0.0,
            upper_bounds=1.0,
            options=_search_options(starts.dtype),
            use_parallel_mode=False,
        )
    return points[torch.arange(len(points), device=points.device), reached.argmax(-1)]

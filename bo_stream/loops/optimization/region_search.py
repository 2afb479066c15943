"""The search of an optimization in many inputs: a trust region, its local model, and leaps.

A step costs the same however many outcomes came before, but for a pass over them: the model is an
exact one of the nearest outcomes, and a trend over all inputs is learned from a bounded number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.priors import LogNormalPrior
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.acquisition import sample_paths
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.errors import UsageError
from bo_stream.loops.models import many_input_kernel, unit_cube
from bo_stream.loops.optimization.domain import Domain
from bo_stream.loops.optimization.leaps import AdditiveTrend
from bo_stream.loops.optimization.region import (
    IMPROVEMENT,
    TrustRegion,
    maximize_paths,
    region_candidates,
)
from bo_stream.loops.optimization.trials import Ledger, OptimizationSettings
from bo_stream.loops.run import predict_mean
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.fitting import fit_to_stall, hyperparameters, set_hyperparameters

FEWEST = 2
"""Number of outcomes from which a model can be built."""

ROWS = 300
"""Most outcomes of the local model."""

FAILED_ROWS = 32
"""Most failed trials of the local model, those nearest, as of its lowest outcome."""

CANDIDATES = 500
"""Candidates at which functions are drawn jointly."""

CLIMB = 20
"""Most iterations in which the drawn functions are maximised from their best candidates."""

COLDEST, HOTTEST = 0.5, 1.0
"""Least and largest factor of a drawn function's deviation from the posterior mean."""

FIRST_FIT, LATER_FIT = 20, 8
"""Most iterations of L-BFGS-B that learn hyperparameters, at first and again."""

GROWTH, OFTEN = 1.2, 50
"""They are learned again when the region's outcomes have grown by this factor or this number."""

SELDOM, OFTEN_LEAPS, BURST = 0.05, 0.2, 0.5
"""Shares of the points that leap: at most times, after a success of one, after a collapse."""

HOPE = 10
"""Batches for which leaps are more frequent after a success, and after a collapse."""

TREND_ROWS = 2000
"""Most outcomes that the trend is learned from: half the best ones, half the last ones."""

LEAST_NOISE = 1e-6
"""Least noise variance of the local model, over the variance of its outcomes."""


@dataclass
class RegionState:
    """All that the next points depend on, besides the settings and the trials; plain values.

    Attributes:
        region: Length and counts of the trust region.
        values: Hyperparameters of the local model, by name; None before they are learned.
        fitted: Number of the region's outcomes when they were learned last.
        begun: Key of the region's first trial.
        sobol: Number of Sobol trials that are due, of all regions.
        centre: Key of the trial about which the region is.
        rows: Keys of the local model's outcomes.
        ended: Number of trials in the ledger when outcomes were last taken in.
        waiting: Keys below it that had neither an outcome nor a failure then.
        newest: Keys of outcomes and failures since the region was last updated.
        leaps: Keys of leaps that the region was not updated by yet.
        asked: Number of points chosen.
        hopeful: Number of points chosen until which leaps are more frequent.
        burst: Number of points chosen until which half of them leap.
        reached: Value at the last collapse of the region; None before.
        found: Key and value of the best trial of each region before.
    """

    region: TrustRegion
    values: dict[str, list[float]] | None = None
    fitted: int = 0
    begun: int = 0
    sobol: int = 0
    centre: int | None = None
    rows: list[int] = field(default_factory=list)
    ended: int = 0
    waiting: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)
    leaps: list[int] = field(default_factory=list)
    asked: int = 0
    hopeful: int = 0
    burst: int = 0
    reached: float | None = None
    found: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class LogScale:
    """Outcomes on a logarithmic scale below the best one, so that steep ones far off are near.

    ``−log(1 + (best − y) / unit)``, standardised; linear above the best.

    Attributes:
        best: Largest outcome.
        unit: Difference of the largest and the median outcome.
        mean: Of the logarithms.
        sd: Of the logarithms.
    """

    best: float
    unit: float
    mean: float = 0.0
    sd: float = 1.0

    @classmethod
    def of(cls, Y: Tensor) -> LogScale:
        """Choose the scale of outcomes, ``n``; if they are all equal any unit will do."""
        best = float(Y.max())
        unit = best - float(Y.quantile(0.5))
        raw = cls(best, unit if unit > 0.0 else max(best - float(Y.min()), 1e-12))
        logs = raw.to_scale(Y)
        sd = float(logs.std(correction=0))
        return replace(raw, mean=float(logs.mean()), sd=sd if sd > 0.0 else 1.0)

    def to_scale(self, Y: Tensor) -> Tensor:
        """Transform outcomes."""
        below = (self.best - Y) / self.unit
        logs = torch.where(below > 0.0, -below.clamp_min(0.0).log1p(), -below)
        return (logs - self.mean) / self.sd

    def to_outcome(self, value: float) -> float:
        """Transform a value of the scale to an outcome."""
        log = self.mean + self.sd * value
        return self.best + self.unit * (log if log > 0.0 else -math.expm1(-log))


class RegionSurrogate:
    """A trust region with a model of its nearest outcomes, that follows a ledger.

    The model is exact, of at most ``ROWS`` outcomes: those nearest to the centre, by its
    lengthscales, and the newest. Failed trials near the centre are in it with the lowest outcome.
    When the region has collapsed it begins again, wide, about the best point, and half of the
    points leap for a while; if the next collapse is no better, a region begins elsewhere.

    Attributes:
        state: What the next points depend on.
        model: The local model, of outcomes on a ``LogScale``; None until there are enough.
        scale: That scale.
        held: Outcomes that the search has taken in, by key.
        refits: Numbers of outcomes at which hyperparameters were learned.
        validation: Record of how well the model predicted each outcome.
        domain: Part of the unit cube in which points are proposed; None: all of it.
        is_whole: True: the state is changed at once.
    """

    is_whole = True
    unit = 1.0

    def __init__(self, settings: OptimizationSettings, state: RegionState | None = None) -> None:
        """Begin, or go on with a state.

        Raises:
            UsageError: The settings name a model that cannot be a local one.
        """
        self.settings = settings
        self.state = RegionState(TrustRegion(settings.dim, settings.q)) if state is None else state
        self.model: AutoGP | None = None
        self.scale: LogScale | None = None
        self.held: dict[int, float] = {}
        self.refits: list[int] = []
        self.validation = ProgressiveValidation()
        self.domain: Domain | None = None
        self._X = torch.empty(0, settings.dim, dtype=torch.float64)
        self._keys: list[int] = []
        self._means = torch.empty(0, dtype=torch.float64)

    @classmethod
    def of_record(
        cls,
        settings: OptimizationSettings,
        record: Mapping[str, Any],
        validation: ProgressiveValidation,
    ) -> RegionSurrogate:
        """Go on with the plain values of a checkpoint."""
        content = dict(record["region"])
        region = TrustRegion(**content.pop("region"))
        found = [(key, value) for key, value in content.pop("found")]
        search = cls(settings, RegionState(region=region, found=found, **content))
        search.refits, search.validation = list(record["refits"]), validation
        return search

    # --- outcomes ------------------------------------------------------------------------------

    def follow(self, ledger: Ledger) -> AutoGP | None:
        """Take in the ledger's outcomes, learn and move where due, and return the local model."""
        told = {t.key: float(t.Y) for t in ledger if t.status == "told" and t.Y is not None}
        state = self.state
        over = set(told) | {trial.key for trial in ledger.with_status("failed")}
        waiting = set(state.waiting)
        new = [k for k in sorted(over) if k >= state.ended or k in waiting]
        if not new and told == self.held and self.model is not None:
            return self.model
        self._append_inputs(ledger)
        open_keys = [trial.key for trial in ledger.with_status("pending", "withdrawn")]
        newest = [k for k in state.newest if k in over] + new
        state = replace(
            state, region=replace(state.region), ended=len(ledger), waiting=open_keys, newest=newest
        )
        own = [key for key in told if key >= state.begun]
        if len(own) < FEWEST:
            self.state, self.held, self.model = state, told, None
            return None
        again = not new and bool(state.rows) and set(state.rows) <= set(told)
        state = self._with_model(state, told, own, ledger, again)
        if new and len(state.newest) >= min(self.settings.q, len(own)):
            state = self._updated(state, ledger)
        self.state, self.held = state, told
        if not state.rows:  # the region has ended
            self.model = None
        return self.model

    def _append_inputs(self, ledger: Ledger) -> None:
        """Cache inputs of trials, by key, in the unit cube."""
        missing = range(len(self._X), len(ledger))
        if missing:
            X = self.settings.to_unit_cube([ledger[key].X for key in missing])
            self._X = torch.cat((self._X, X.to("cpu", torch.float64)))

    def _with_model(
        self,
        state: RegionState,
        told: Mapping[int, float],
        own: list[int],
        ledger: Ledger,
        again: bool,
    ) -> RegionState:
        """Build the local model; ``again``: of the rows and hyperparameters that it had."""
        sign, settings = self.settings.sign, self.settings
        centre = state.centre
        if centre not in told:
            centre = max(own, key=lambda key: sign * told[key])
        rows = state.rows if again else self._nearest(state, own, centre)
        Y = sign * torch.tensor([told[key] for key in rows], dtype=torch.float64)
        self.scale = LogScale.of(Y)
        values = self.scale.to_scale(Y)
        failures = [t.key for t in ledger.with_status("failed") if t.key >= state.begun]
        failed = failures[-FAILED_ROWS:]
        keys = rows + failed
        values = torch.cat((values, values.min().expand(len(failed))))
        like = settings.to_unit_cube([])
        X, Z = self._X[keys].to(like), values.unsqueeze(-1).to(like)
        if self.model is None:
            self.model = _local_model(settings, X, Z)
        else:
            self.model.clear()
            self.model.update(X, Z)
        count = len(own)
        due = state.values is None or count >= min(GROWTH * state.fitted, state.fitted + OFTEN)
        if state.values is not None:
            _set_values(self.model, state.values)
        if due and not again:
            _learn(self.model, FIRST_FIT if state.values is None else LATER_FIT)
            state = replace(state, values=_values(self.model), fitted=count)
            self.refits.append(len(told))
        self._keys = rows
        self._means = predict_mean(self.model, X)[: len(rows)].to("cpu", torch.float64)
        return replace(state, rows=rows, centre=rows[int(self._means.argmax())])

    def _nearest(self, state: RegionState, own: list[int], centre: int | None) -> list[int]:
        """Return the keys of the newest outcomes, and of those nearest to the centre."""
        if len(own) <= ROWS:
            return own
        keys = torch.tensor(own)
        differences = self._X[keys] - self._X[centre]
        if state.values is not None:
            name = next(name for name in state.values if name.endswith("raw_lengthscale"))
            differences = differences / torch.tensor(state.values[name], dtype=torch.float64).exp()
        distances = differences.square().sum(-1)
        distances[torch.isin(keys, torch.tensor(state.newest, dtype=torch.long))] = -1.0
        return sorted(keys[distances.topk(ROWS, largest=False).indices].tolist())

    def _updated(self, state: RegionState, ledger: Ledger) -> RegionState:
        """Update the region by the newest outcomes; begin again where it has collapsed."""
        assert self.scale is not None
        keys = torch.tensor(self._keys)
        new = torch.isin(keys, torch.tensor(state.newest, dtype=torch.long))
        if bool(new.any()) and not bool(new.all()):
            known = self._means[~new]
            state.region.update(self._means[new], known)
            leapt = torch.isin(keys, torch.tensor(state.leaps, dtype=torch.long)) & new
            least = known.max() + IMPROVEMENT * known.std(correction=0)
            if bool(leapt.any()) and bool(self._means[leapt].max() > least):
                state.hopeful = state.asked + HOPE * self.settings.q
        elif not bool(new.any()):
            state.region.update(self._means[:1] - 1.0, self._means)  # all have failed
        best = int(self._means.argmax())
        leaps = [key for key in state.leaps if key not in state.newest]
        state = replace(state, newest=[], leaps=leaps)
        if not state.region.has_collapsed:
            return state
        value = self.scale.to_outcome(float(self._means[best]))
        if state.reached is None or value > state.reached + IMPROVEMENT * self.scale.unit:
            state.region.restart()
            until = state.asked + HOPE * self.settings.q
            return replace(state, reached=value, burst=until, hopeful=until)
        state.region.restart()
        drawn = sum(trial.origin == "sobol" for trial in ledger)
        return replace(
            state,
            values=None,
            fitted=0,
            begun=len(ledger),
            sobol=drawn + 2 * self.settings.dim,
            centre=None,
            rows=[],
            reached=None,
            found=[*state.found, (self._keys[best], value)],
        )

    # --- points --------------------------------------------------------------------------------

    def sobol_due(self, ledger: Ledger) -> float:
        """Return how many Sobol points come next: those of a new region, all without a model."""
        if self.follow(ledger) is None:
            return math.inf
        return max(0, self.state.sobol - sum(trial.origin == "sobol" for trial in ledger))

    def propose(self, ledger: Ledger, q: int, seed: int) -> Tensor:
        """Choose the next points of the unit cube, ``q x d``, once there is a model.

        Functions are drawn jointly at candidates in the region, some of them nearer to the
        posterior mean, and each is maximised in the region from its best candidate, regardless of
        pending points (Thompson sampling). Some points leap instead.
        """
        assert self.model is not None
        state, model, domain = self.state, self.model, self.domain
        generator = torch.Generator().manual_seed(seed)
        order = self._means.argsort(descending=True)
        X = self._X[self._keys][order].to(self.settings.to_unit_cube([]))
        bounds = state.region.bounds(model, X[0])
        if domain is not None:
            bounds = domain.widened(bounds, X[0])
        candidates = region_candidates(X, bounds, CANDIDATES, generator)
        if domain is not None:
            self._append_inputs(ledger)
            candidates = domain.nearer(candidates, X[0], generator)
            candidates = domain.new(candidates, X[0], self._X)
        share = torch.rand(1) if q == 1 else torch.linspace(0.0, 1.0, q)
        spread = COLDEST + (HOTTEST - COLDEST) * share
        paths = sample_paths(model, q, seed, at=candidates, spread=spread)
        values = paths(candidates).squeeze(-1)
        if domain is None:
            starts = candidates[values.argmax(-1)]
            points = maximize_paths(paths, starts, bounds, CLIMB)
        else:
            starts = candidates[domain.best_of_each(values)]
            boxes, points = domain.pinned(bounds, starts), starts
            if bool((boxes[0] < boxes[1]).any()):
                points = maximize_paths(paths, starts, boxes, CLIMB)
            points = domain.new_or(domain.admit(points, starts), starts, self._X)
        often = OFTEN_LEAPS if state.asked < state.hopeful else SELDOM
        share_of_leaps = BURST if state.asked < state.burst else often
        leaps = math.floor(q * share_of_leaps + float(torch.rand(1, generator=generator)))
        if leaps > 0:
            trend = AdditiveTrend(*self._trend_data(ledger))
            best, box = self._X[state.centre], bounds.to("cpu", torch.float64)
            climbed = points[q - leaps :].clone()
            for i in range(q - leaps, q):
                points[i] = trend.leap(best, box, generator).to(points)
            if domain is not None:
                leapt = domain.admit(points[q - leaps :], best.to(points))
                points[q - leaps :] = domain.new_or(leapt, climbed, self._X)
        first = len(ledger) + q - leaps
        state = replace(state, leaps=[*state.leaps, *range(first, first + leaps)])
        self.state = replace(state, asked=state.asked + q)
        return points

    def _trend_data(self, ledger: Ledger) -> tuple[Tensor, Tensor]:
        """Return inputs and scaled outcomes of the best trials and the last ones."""
        sign, half = self.settings.sign, TREND_ROWS // 2
        keys: Collection[int] = self.held
        if len(self.held) > TREND_ROWS:
            best = heapq.nlargest(half, self.held, key=lambda key: sign * self.held[key])
            keys = set(best) | set(sorted(self.held)[-half:])
        rows = sorted(keys)
        Y = sign * torch.tensor([self.held[key] for key in rows], dtype=torch.float64)
        return self._X[rows], LogScale.of(Y).to_scale(Y)

    def best(self, ledger: Ledger) -> tuple[int, float]:
        """Return key and value, larger being better, of the best trial of all regions.

        Raises:
            UsageError: There is no outcome.
        """
        self.follow(ledger)
        if not self.held:
            raise UsageError("There is no best point yet: no outcome was told.")
        found = [pair for pair in self.state.found if pair[0] in self.held]
        if self.model is not None and self.scale is not None:
            position = int(self._means.argmax())
            value = self.scale.to_outcome(float(self._means[position]))
            found.append((self._keys[position], value))
        if found:
            return max(found, key=lambda pair: pair[1])
        sign = self.settings.sign
        key = max(self.held, key=lambda key: sign * self.held[key])
        return key, sign * self.held[key]


# --- the local model -----------------------------------------------------------------------------


def _local_model(settings: OptimizationSettings, X: Tensor, Y: Tensor) -> AutoGP:
    """Build an exact model of outcomes on a ``LogScale``, ``n x 1``."""
    likelihood = GaussianLikelihood(
        noise_prior=LogNormalPrior(-4.0, 1.0),
        noise_constraint=GreaterThan(
            LEAST_NOISE, transform=torch.exp, inv_transform=torch.log, initial_value=math.exp(-5.0)
        ),
    )
    return AutoGP(
        X,
        Y,
        likelihood=likelihood.to(X),
        covar_module=many_input_kernel(settings.kernel, settings.dim).to(X),
        outcome_transform=None,
        bounds=unit_cube(X),
        families="exact",
    )


def _learn(model: AutoGP, iterations: int) -> None:
    """Learn hyperparameters in place; those from before stay where no matrix can be factorised."""
    former = hyperparameters(model)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    mll.train()
    try:
        fit_to_stall(mll, options={"maxiter": iterations, "ftol": 1e-7})
    except NotPSDError:
        set_hyperparameters(model, former)
        model.log_event("a refit that failed")
    mll.eval()


def _values(model: AutoGP) -> dict[str, list[float]]:
    """Return the hyperparameters as numbers."""
    return {name: each.reshape(-1).tolist() for name, each in hyperparameters(model).items()}


def _set_values(model: AutoGP, values: Mapping[str, list[float]]) -> None:
    """Give a model the hyperparameters of :func:`_values`."""
    like = hyperparameters(model)
    tensors = {name: torch.tensor(each).to(like[name]) for name, each in values.items()}
    shaped = {name: each.reshape(like[name].shape) for name, each in tensors.items()}
    set_hyperparameters(model, shaped)

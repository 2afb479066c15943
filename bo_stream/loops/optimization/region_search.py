"""The search of an optimization in many inputs: a trust region, its local model, and leaps.

A step costs the same however many outcomes came before, but for a pass over them: the model is an
exact one of the nearest outcomes, and a trend over all inputs is learned from a bounded number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from linear_operator.utils.errors import NotPSDError
from torch import Tensor

from bo_stream.acquisition import sample_paths
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.errors import UsageError
from bo_stream.loops.optimization.local_model import LEAST_NOISE, MOST_NOISE, LocalFit, TrialRows
from bo_stream.loops.optimization.region import (
    IMPROVEMENT,
    MOST_INPUTS,
    AdditiveTrend,
    Domain,
    LogScale,
    TrustRegion,
    improves,
    maximize_paths,
    region_candidates,
    replace_repeated,
)
from bo_stream.loops.optimization.trials import (
    FEWEST,
    Ledger,
    NoModelError,
    OptimizationSettings,
)
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.fitting import hyperparameters

ROWS = 300
"""Most outcomes of the local model."""

FAILED_ROWS = 32
"""Most failed trials of the local model, the last ones, as of its lowest outcome."""

CANDIDATES = 300
"""Candidates at which functions are drawn jointly."""

CLIMB = 12
"""Most iterations in which the drawn functions are maximised from their best candidates."""

COLDEST, HOTTEST = 0.5, 1.0
"""Least and largest factor of a drawn function's deviation from the posterior mean, without noise;
the largest grows by the deviation of the noise, over that of the outcomes, by 1 at most."""

MEANS = 0.1
"""Share of the functions that are the posterior mean itself."""

FOLDS = 5
"""Parts of the outcomes of the local model, each of which is predicted from the others."""

FIRST_FIT, LATER_FIT = 20, 8
"""Most iterations of L-BFGS-B that learn hyperparameters, at first and again."""

GROWTH, OFTEN = 1.2, 50
"""They are learned again when the region's outcomes have grown by this factor or this number."""

SELDOM, OFTEN_LEAPS, BURST = 0.05, 0.2, 0.5
"""Shares of the points that leap: at most times, after a success of one, after a collapse."""

HOPE = 10
"""Batches for which leaps are more frequent after a success, and after a collapse."""

PAIR = 2
"""Leaps that are taken from one trend, so that it is learned half as often."""

TREND_ROWS = 1000
"""Most outcomes that the trend is learned from: half the best ones, half the last ones."""

PROMISE, UNPROMISING = 0.01, 20
"""Improvement that a drawn function promises at least, as ``IMPROVEMENT``, and number of points in
sequence, none of whose functions promises it, after which a region is exhausted."""

LENGTHSCALES = "covar_module.base_kernel.raw_lengthscale"
"""Name of the logarithms of the local model's lengthscales."""


@dataclass(frozen=True)
class Excursion:
    """A region elsewhere, while one waits in which no drawn function promises an improvement.

    Attributes:
        begun: Key of the first trial of the one that waits.
        length: Its length.
        reached: Value at its last collapse; None before.
        until: Number of trials in the ledger at which it goes on at the latest: twice as many as
            when it was left, or as many more as two regions have Sobol points.
        is_over: Whether the better of the two has gone on.
    """

    begun: int
    length: float
    reached: float | None
    until: int
    is_over: bool = False


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
        failed: Keys of failed trials when outcomes were last taken in.
        late: Keys of trials before ``begun`` that came, or were raised above ``tops``, afterwards.
        leaps: Keys of leaps that the region was not updated by yet.
        asked: Number of points chosen.
        hopeful: Number of points chosen until which leaps are more frequent.
        burst: Number of points chosen until which half of them leap.
        unpromising: Number of points in sequence none of whose functions promised an improvement.
        excursion: The only one; None before.
        reached: Value at the last collapse of the region; None before.
        found: Key, value and outcome, larger being better, of the best trial of each region before;
            the outcome None: not known, of a former version.
        tops: Largest outcome, larger being better, of the regions before and of this one, when
            outcomes were last taken in; None where there was none.
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
    failed: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    leaps: list[int] = field(default_factory=list)
    asked: int = 0
    hopeful: int = 0
    burst: int = 0
    unpromising: int = 0
    excursion: Excursion | None = None
    reached: float | None = None
    found: list[tuple[int, float, float | None]] = field(default_factory=list)
    tops: list[float | None] = field(default_factory=lambda: [None, None])


class RegionSurrogate:
    """A trust region with a model of its nearest outcomes, that follows a ledger.

    The model is exact, of at most ``ROWS`` outcomes: those nearest to the centre, by its
    lengthscales, and the newest; where more than ``ROWS // 2`` come at once, those nearest to the
    centre and to the best one. The last failed trials are in it with the lowest outcome and, as
    outliers, with much noise. When the region has collapsed it begins again, wide, about the best
    point, and half of the points leap for a while; if the next collapse is no better, a region
    begins elsewhere. Once, one begins elsewhere sooner: where no function drawn from a model of all
    outcomes of the region promises an improvement. The better of the two then goes on.
    Hyperparameters are learned when the region's outcomes have grown by ``GROWTH`` or ``OFTEN``;
    once, if ``refit`` of the settings is 0.

    Attributes:
        state: What the next points depend on.
        local: The local model; None until there are enough outcomes.
        trials: The trials that it follows.
        refits: Numbers of outcomes at which hyperparameters were learned.
        domain: Where points are proposed: the unit cube, unless another is set.
        unit: 1: outcomes are on the scale of the local model.
    """

    unit = 1.0

    def __init__(
        self,
        settings: OptimizationSettings,
        state: RegionState | None = None,
        refits: Sequence[int] = (),
    ) -> None:
        """Begin, or go on with the content of a checkpoint."""
        self.settings = settings
        self.state = RegionState(TrustRegion(settings.dim, settings.q)) if state is None else state
        self.local: LocalFit | None = None
        self.trials = TrialRows(settings)
        self.refits = list(refits)
        self.domain = Domain()
        self._followed: tuple[Ledger, int] | None = None  # and how many changes it had then

    @property
    def model(self) -> AutoGP | None:
        """The local model, of outcomes on its ``LogScale``."""
        return None if self.local is None else self.local.model

    @property
    def validation(self) -> ProgressiveValidation:
        """Cross-validate the local model in ``FOLDS`` folds, at its hyperparameters, on its scale.

        Without failed trials. Empty for fewer than two outcomes a fold. Cost O(n³).
        """
        record, local = ProgressiveValidation(), self.local
        if local is None or len(local.keys) < 2 * FOLDS:
            return record
        keys = torch.tensor(local.keys)
        X = self.trials.X[keys].to(self.settings.to_unit_cube([]))
        Y = local.scale.to_scale(self.trials.Y[keys]).unsqueeze(-1).to(X)
        folds = torch.arange(len(keys), device=X.device) % FOLDS
        for fold in range(FOLDS):
            out = folds == fold
            Yvar = (None, None) if local.Yvar is None else (local.Yvar[~out], local.Yvar[out])
            others = X[~out], Y[~out], Yvar[0], keys[~out.cpu()].tolist(), local.scale
            fitted = LocalFit.of(self.settings, *others, self.state.values, iterations=0)
            record.add(fitted.model, X[out], Y[out], Yvar[1])
        return record

    # --- outcomes ------------------------------------------------------------------------------

    def follow(self, ledger: Ledger) -> AutoGP | None:
        """Take in the ledger's outcomes, learn and move where due, and return the local model."""
        trials, state, changes = self.trials, self.state, 0
        if self._followed is not None and self._followed[0] is ledger:
            changes = self._followed[1]
            if changes == ledger.changes:
                return self.model
        # what other threads tell from here on is taken in the next time
        following, count = (ledger, ledger.changes), len(ledger)
        changed = [key for key in ledger.changed_since(changes) if key < count]
        since = range(state.ended, count)
        unseen = {*state.waiting, *since, *changed}
        statuses = {key: ledger[key].status for key in (*unseen, *state.newest, *state.failed)}

        def are_over(keys: Iterable[int]) -> list[int]:
            return [key for key in keys if statuses[key] in ("told", "failed")]

        differ = trials.read(ledger, changed)
        failed = sorted(key for key, status in statuses.items() if status == "failed")
        if differ or failed != state.failed:
            self.local = None  # of other outcomes, also where what follows is interrupted
        over = are_over((*state.waiting, *since))
        over += [key for key in state.failed if statuses[key] == "told"]
        new, amended = [key for key in over if key >= state.begun], self._amended(over)
        late = [key for key in over + amended if key < state.begun]
        state = replace(
            state,
            ended=count,
            waiting=sorted(unseen.difference(are_over(unseen))),
            newest=[*dict.fromkeys(are_over(state.newest) + new)],
            failed=failed,
            late=[*dict.fromkeys(state.late + late)],
            tops=[_largest(trials.Y[: state.begun]), _largest(trials.Y[state.begun :])],
        )
        if not new and self.local is not None:
            self.state, self._followed = state, following
            return self.model
        state = replace(state, region=replace(state.region))
        own, local = trials.with_outcome(state.begun), None
        if len(own) >= FEWEST:
            # the same rows, unless there are new ones
            same = not new and bool(state.rows) and not bool(trials.Y[state.rows].isnan().any())
            if not same or amended:
                state = replace(state, rows=self._nearest(state, own, [*state.newest, *amended]))
            lost = [key for key in failed if key >= state.begun][-FAILED_ROWS:]
            local, state = self._fitted(state, lost, len(own), learns=not same)
            if new and len(state.newest) >= min(self.settings.q, len(own)):
                state = self._updated(state, local, ledger)
                local = local if state.rows else None  # the region has ended
        elif (away := state.excursion) is not None and not away.is_over and count >= away.until:
            state = self._back(state, away)  # from where next to nothing was to be had
        if state.begun < self.state.begun:  # back in a region that has waited
            self.state, self.local, self._followed = state, None, None
            return self.follow(ledger)
        self.state, self.local, self._followed = state, local, following
        return self.model

    def _amended(self, over: list[int]) -> list[int]:
        """Return the keys of outcomes that were taken in, and are above the largest one then.

        Amended since, that is; the others have come now, with the keys ``over``.
        """
        state, keys = self.state, self.trials.with_outcome()
        keys = keys[(keys < state.ended) & ~_are_in(keys, over)]
        former, own = (math.inf if top is None else top for top in state.tops)
        tops = torch.tensor((former, own), dtype=torch.float64)[(keys >= state.begun).long()]
        return list(keys[self.trials.Y[keys] > tops].tolist())

    def _nearest(self, state: RegionState, own: Tensor, fresh: list[int]) -> list[int]:
        """Return the keys of fresh outcomes, and of those nearest to the centre.

        Fresh ones beyond half of the rows count by their distance, also to the best outcome.
        """
        if len(own) <= ROWS:
            return list(own.tolist())
        X, Y, kept = self.trials.X, self.trials.Y, _are_in(own, fresh)
        centres = [] if state.centre is None or bool(Y[state.centre].isnan()) else [state.centre]
        too_many = int(kept.sum()) > ROWS // 2
        if too_many or not centres:
            centres.append(int(own[Y[own].argmax()]))
        if too_many:
            kept = _are_in(own, centres)
        weights = torch.ones(self.settings.dim, dtype=torch.float64)
        if state.values is not None:
            logs = torch.tensor(state.values[LENGTHSCALES], dtype=torch.float64)
            weights = (-2.0 * logs).exp()
        each = [(X - X[centre]).square_() @ weights for centre in centres]
        distances = torch.stack(each).amin(0)[own]
        distances[kept] = -1.0
        return sorted(own[distances.topk(ROWS, largest=False).indices].tolist())

    def _fitted(
        self, state: RegionState, lost: list[int], count: int, learns: bool
    ) -> tuple[LocalFit, RegionState]:
        """Build the local model of the rows of ``count``, and learn hyperparameters when due."""
        trials, rows, like = self.trials, state.rows, self.settings.to_unit_cube([])
        gains, variances = trials.Y[rows], trials.Yvar[rows]
        scale = LogScale.of(gains)
        values = scale.to_scale(gains).unsqueeze(-1).to(like)
        X = trials.X[rows + lost].to(like)
        values = torch.cat((values, values.min().expand(len(lost), 1)))
        Yvar = None
        if not bool(variances.isnan().all()):
            on_scale = scale.noise_to_scale(gains, variances)
            Yvar = on_scale.clamp(LEAST_NOISE, MOST_NOISE).unsqueeze(-1).to(like)
        grown = count >= min(GROWTH * state.fitted, state.fitted + OFTEN)
        iterations = LATER_FIT if learns and grown and self.settings.refit > 0.0 else 0
        if state.values is None:
            iterations = FIRST_FIT
        data = self.settings, X, values, Yvar, rows, scale
        try:
            local = LocalFit.of(*data, state.values, iterations)
        except NotPSDError:  # hyperparameters of other outcomes: begin with the first ones
            local, iterations = LocalFit.of(*data, None, FIRST_FIT), FIRST_FIT
        if iterations > 0:
            learned = hyperparameters(local.model)
            plain = {name: each.reshape(-1).tolist() for name, each in learned.items()}
            state = replace(state, values=plain, fitted=count)
            self.refits.append(len(trials.with_outcome()))
        return local, replace(state, centre=local.best)

    def _updated(self, state: RegionState, local: LocalFit, ledger: Ledger) -> RegionState:
        """Update the region by the newest outcomes; where it has ended, another one begins."""
        keys, means, region = torch.tensor(local.keys), local.means, state.region
        new, soon = _are_in(keys, state.newest), state.asked + HOPE * self.settings.q
        leapt = new & _are_in(keys, state.leaps)
        region.batch = len(state.newest)  # however many were to come together
        if not bool(new.any()):  # all have failed, or are of many and far off
            region.update(means.min(), means)
        elif not bool(new.all()):
            if region.update(means[new], means[~new]):
                state = replace(state, unpromising=0)
            if bool(leapt.any()) and improves(means[leapt], means[~new]):
                state = replace(state, hopeful=soon)
        leaps = [key for key in state.leaps if key not in state.newest]
        state = replace(state, newest=[], leaps=leaps)
        away, is_exhausted = state.excursion, state.unpromising >= UNPROMISING
        if away is None:
            if is_exhausted and len(self.trials.with_outcome(state.begun)) <= ROWS:
                until = len(ledger) + max(len(ledger), 4 * self.settings.dim)
                left = Excursion(state.begun, region.length, state.reached, until)
                return replace(self._elsewhere(state, local, ledger), excursion=left)
        elif not away.is_over and (
            is_exhausted or region.has_collapsed or len(ledger) >= away.until
        ):
            waits = self._best_of([], state, local, away.begun)
            if waits is not None and waits[1] > local.value:
                return self._back(state, away)
            state = replace(state, excursion=replace(away, is_over=True))
        if not region.has_collapsed:
            return state
        least = IMPROVEMENT * local.scale.unit
        if state.reached is None or local.value > state.reached + least:
            region.restart()
            return replace(state, reached=local.value, burst=soon, hopeful=soon, unpromising=0)
        return self._elsewhere(state, local, ledger)

    def _elsewhere(self, state: RegionState, local: LocalFit, ledger: Ledger) -> RegionState:
        """Begin a region elsewhere, with Sobol points."""
        state.region.restart()
        return replace(
            state,
            values=None,
            fitted=0,
            begun=len(ledger),
            sobol=ledger.count_from("sobol") + 2 * self.settings.dim,
            centre=None,
            rows=[],
            unpromising=0,
            reached=None,
            tops=[_largest(self.trials.Y), None],
            found=[*state.found, (local.best, local.value, float(self.trials.Y[local.best]))],
        )

    def _back(self, state: RegionState, away: Excursion) -> RegionState:
        """Go on with the region that waits, and the outcomes since."""
        state.region.restart()
        state.region.length = away.length
        Y, begun = self.trials.Y, away.begun
        waits = self._best_of([], state, None, begun)
        return replace(
            state,
            values=None,
            fitted=0,
            begun=begun,
            sobol=0,
            centre=None if waits is None else waits[0],
            rows=[],
            newest=[],
            late=[key for key in state.late if key < begun],
            unpromising=0,
            reached=away.reached,
            excursion=replace(away, is_over=True),
            tops=[_largest(Y[:begun]), _largest(Y[begun:])],
            found=state.found[:-1],
        )

    # --- points --------------------------------------------------------------------------------

    def sobol_due(self, ledger: Ledger) -> float:
        """Return how many Sobol points come next: those of a new region, all without a model."""
        if self.follow(ledger) is None:
            return math.inf
        due = self.state.sobol
        return max(0, due - ledger.count_from("sobol")) if due > 0 else 0

    def propose(self, ledger: Ledger, q: int, seed: int) -> Tensor:
        """Choose the next points of the unit cube, ``q x d``.

        Functions are drawn jointly at candidates in the region, some of them nearer to the
        posterior mean, and each is maximised in the region from its best candidate, regardless of
        pending points (Thompson sampling). Some points leap instead. What the ledger was told since
        :meth:`follow` is taken in the next time.

        Raises:
            NoModelError: There is none yet, or none any more.
        """
        state, local = self.state, self.local
        if local is None:
            raise NoModelError
        generator = torch.Generator().manual_seed(seed)
        order = local.means.argsort(descending=True)
        X = self.trials.X[local.keys][order].to(self.settings.to_unit_cube([]))
        X[0] = self.domain.nearest(X[0])
        bounds = self.domain.widened(state.region.bounds(local.model, X[0]), X[0])
        candidates = region_candidates(X, bounds, CANDIDATES, generator)
        candidates = self.domain.candidates(candidates, X[0], generator)
        hottest = HOTTEST + float(local.noise().clamp_max(1.0).mean().sqrt())
        means = math.floor(MEANS * q + float(torch.rand(1, generator=generator)))
        factors = torch.linspace(COLDEST, hottest, q - means)
        if len(factors) == 1:
            factors.uniform_(COLDEST, hottest, generator=generator)
        spread = torch.cat((torch.zeros(means), factors))
        paths = sample_paths(local.model, q, seed, at=candidates, spread=spread)
        values = paths(candidates).squeeze(-1)
        starts = candidates[values.argmax(-1)]
        points = maximize_paths(paths, starts, self.domain.pinned(bounds, starts), CLIMB)
        with torch.no_grad():
            tops = paths(points.unsqueeze(-2)).flatten().to(local.means)
        unpromising = 0 if improves(tops, local.means, PROMISE) else state.unpromising + q
        chance = BURST if state.asked < state.burst else SELDOM
        if state.burst <= state.asked < max(state.hopeful, HOPE * self.settings.q):
            chance = OFTEN_LEAPS
        some = min(PAIR, q)
        leaps = some * math.floor(q * chance / some + float(torch.rand(1, generator=generator)))
        leaps = leaps if self.settings.dim <= MOST_INPUTS else 0
        if leaps > 0:
            trend = AdditiveTrend(*self._trend_data())
            best, box = self.trials.X[local.best], bounds.to("cpu", torch.float64)
            for i in range(q - leaps, q):
                points[i] = trend.leap(best, box, generator).to(points)
        points = self.domain.admit(points, starts)
        near = self.trials.X[[*local.keys, *state.waiting]]
        known = self.domain.snap(self.trials.X) if self.domain.levels else near
        replace_repeated(points, known.to(points), candidates, values)
        first = len(ledger) + q - leaps
        waiting = [*state.leaps, *range(first, first + leaps)]
        asked = state.asked + q
        self.state = replace(state, leaps=waiting, asked=asked, unpromising=unpromising)
        return points

    def _trend_data(self) -> tuple[Tensor, Tensor]:
        """Return points and scaled outcomes of the best and the last trials, of all regions."""
        rows, half = self.trials.with_outcome(), TREND_ROWS // 2
        if len(rows) > TREND_ROWS:
            best = self.trials.Y[rows].topk(half).indices
            rows = torch.cat((rows[best], rows[-half:])).unique()
        gains = self.trials.Y[rows]
        return self.trials.X[rows], LogScale.of(gains).to_scale(gains)

    def best(self, ledger: Ledger) -> tuple[int, float]:
        """Return key and posterior median, larger being better, of the best trial of all regions.

        Outcomes of former regions that came late, or became their best one by an amendment, have no
        posterior: they count if they are better by two standard deviations of the noise. The only
        outcome of a region without a model counts as it is. Where the best trial of a former region
        is amended, the best outcome of them all takes its place.

        Raises:
            UsageError: There is no outcome.
        """
        self.follow(ledger)
        keys, state, local = self.trials.with_outcome(), self.state, self.local
        if len(keys) == 0:
            raise UsageError("There is no best point yet: no outcome was told.")
        own = [] if local is None else [(local.best, local.value)]
        first = keys[keys >= state.begun]  # too few for a model?
        if local is None and len(first) > 0:
            own = [self._largest_of(first)]
        return self._best_of(own, state, local, 0) or self._largest_of(keys)

    def _best_of(
        self,
        own: list[tuple[int, float]],
        state: RegionState,
        local: LocalFit | None,
        begun: int,
    ) -> tuple[int, float] | None:
        """Return key and value of the best trial of all former regions since a key, and of some.

        None where there is none. Outcomes that came late, or became a region's best one by an
        amendment, see :meth:`best`.
        """
        keys, Y, found = self.trials.with_outcome(), self.trials.Y, list(own)
        former = keys[(keys >= begun) & (keys < state.begun)]
        known = [entry for entry in state.found if entry[0] >= begun]
        found += [
            (key, value)
            for key, value, outcome in known
            if float(Y[key]) == outcome or (outcome is None and not bool(Y[key].isnan()))
        ]
        if len(former) > 0 and len(found) < len(known) + len(own):
            found.append(self._largest_of(former))
        late = former[_are_in(former, state.late)]
        if len(late) > 0:
            key, least = self._largest_of(late)
            if local is not None:
                noise = local.noise().mean().sqrt().to(Y)
                least = local.scale.to_outcome(float(local.scale.to_scale(Y[key]) - 2.0 * noise))
            if all(least > value for _, value in found):
                found.append((key, float(Y[key])))
        return max(found, key=lambda pair: pair[1], default=None)

    def _largest_of(self, keys: Tensor) -> tuple[int, float]:
        """Return the key of the largest outcome of some trials, and that outcome."""
        key = int(keys[self.trials.Y[keys].argmax()])
        return key, float(self.trials.Y[key])


def region_state(record: Mapping[str, Any]) -> RegionState:
    """Build a state from the plain values of a checkpoint."""
    region = TrustRegion(**record["region"])
    found = [(*entry, *[None] * (3 - len(entry))) for entry in record["found"]]
    left = record.get("excursion")
    excursion = None if left is None else Excursion(**left)
    return RegionState(**{**record, "region": region, "found": found, "excursion": excursion})


def _largest(Y: Tensor) -> float | None:
    """Return the largest outcome; None: there is none."""
    Y = Y[~Y.isnan()]
    return float(Y.max()) if len(Y) > 0 else None


def _are_in(keys: Tensor, some: list[int]) -> Tensor:
    """Tell of each key whether it is among some."""
    return torch.isin(keys, torch.tensor(some, dtype=torch.long))

"""Ask for points, tell outcomes: in any order, late, amended, withdrawn, or never."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.quasirandom import SobolEngine

from bo_stream.loops.errors import UsageError
from bo_stream.loops.optimization.acquisition import (
    Situation,
    best_points,
    check_acquisition,
)
from bo_stream.loops.optimization.settings import RANDOM, OptimizationSettings
from bo_stream.loops.optimization.surrogate import FEWEST, Surrogate
from bo_stream.loops.optimization.trials import Ledger, Trial
from bo_stream.loops.settings import check_at_least

SHORTLIST = 1024
"""Told points that may be the best: those of the best outcomes."""

AVOIDED_FAILURES = 32
"""Failed points, the last ones, that count as pending, so that they are not tried for ever."""


@dataclass(frozen=True)
class Best:
    """The point to use now.

    Attributes:
        trial: Of the best posterior mean, among the ``SHORTLIST`` best outcomes.
        mean: That posterior mean, in units of the outcomes; None where there is no model yet.
    """

    trial: Trial
    mean: float | None


class Optimizer:
    """Bayesian optimization of one outcome over a box; of one to four inputs for a model on a grid.

    ``ask`` gives trials with keys, ``tell`` takes their outcomes whenever they come. The model
    follows at the next ``ask`` or ``best``. The next points depend on the settings, the trials so
    far and the model, not on torch's global random state, so a run that was saved and loaded goes
    on to the same points.

    A point without an outcome counts as pending: others are chosen to be of use beside it. So do
    the last ``AVOIDED_FAILURES`` failed ones, which the model never sees.

    Cost of a step: that of the model's update and of the search, the same whatever came before;
    beside it a pass over the trials, some microseconds each.

    Example:
        >>> optimizer = Optimizer(OptimizationSettings(bounds=((-5.0, 10.0), (0.0, 15.0))))
        >>> for _ in range(30):
        ...     for trial in optimizer.ask(2):
        ...         optimizer.tell(trial.key, measure(trial.X))
        >>> optimizer.best().trial.X
    """

    def __init__(
        self,
        settings: OptimizationSettings,
        ledger: Ledger | None = None,
        surrogate: Surrogate | None = None,
    ) -> None:
        """Begin, or go on with the parts of an earlier optimizer (see ``load_optimizer``).

        Raises:
            UsageError: An acquisition that is not known.
        """
        check_acquisition(settings.acquisition)
        self.settings = settings
        self.ledger = Ledger() if ledger is None else ledger
        self.surrogate = Surrogate(settings) if surrogate is None else surrogate

    # --- points -------------------------------------------------------------------------------

    def ask(self, q: int | None = None) -> list[Trial]:
        """The next q points, as pending trials.

        Sobol points until ``initial`` trials are told or pending and two are told; then the
        acquisition's.

        Args:
            q: How many; default: as in the settings.

        Raises:
            UsageError: q is no whole number, or less than one.
        """
        count = self.settings.q if q is None else q
        check_at_least("q", count, 1)
        first = self._sobol_due(count)
        trials = self._ask_sobol(first) if first else []
        return trials + (self._ask_model(count - first) if count > first else [])

    def _sobol_due(self, count: int) -> int:
        told = len(self.ledger.with_status("told"))
        if self.settings.acquisition == RANDOM or told < FEWEST:
            return count
        alive = told + len(self.pending)
        return min(count, max(0, self.settings.initial - alive))

    def _ask_sobol(self, count: int) -> list[Trial]:
        drawn = sum(trial.origin == "sobol" for trial in self.ledger)
        engine = SobolEngine(self.settings.dim, scramble=True, seed=self.settings.seed)
        points = engine.fast_forward(drawn).draw(count, dtype=torch.float64)
        return [self.ledger.add(X, "sobol") for X in self.settings.from_unit_cube(points)]

    def _ask_model(self, count: int) -> list[Trial]:
        self.surrogate.follow(self.ledger)
        with self._own_randomness() as seed:
            points = best_points(self.settings, self._situation(seed), count)
        return [self.ledger.add(X, "model") for X in self.settings.from_unit_cube(points)]

    @contextmanager
    def _own_randomness(self) -> Iterator[int]:
        """Torch's random numbers from a seed made of the settings' and the number of trials."""
        seed = (self.settings.seed * 1_000_003 + len(self.ledger)) % 2**31
        device = torch.device(self.settings.device)
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=_accelerator(device)):
            torch.manual_seed(seed)
            yield seed

    def _situation(self, seed: int) -> Situation:
        model = self.surrogate.model
        if model is None:
            raise UsageError(f"There is no model yet: it needs {FEWEST} outcomes.")
        X = self.settings.to_unit_cube([trial.X for trial in self._shortlist()])
        means, order = self.surrogate.means(X).sort(descending=True, stable=True)
        open_points = [trial.X for trial in self._without_outcome()]
        pending = self.settings.to_unit_cube(open_points) if open_points else None
        beta = self.settings.beta
        return Situation(model, X[order], means[0].item(), pending, beta, seed)

    def _without_outcome(self) -> list[Trial]:
        return self.pending + self.ledger.with_status("failed")[-AVOIDED_FAILURES:]

    def _shortlist(self) -> list[Trial]:
        """The told trials of the best outcomes, by key."""
        told, sign = self.ledger.with_status("told"), self.settings.sign
        best = heapq.nlargest(SHORTLIST, told, key=lambda trial: sign * (trial.Y or 0.0))
        return sorted(best, key=lambda trial: trial.key)

    def register(self, X: Sequence[float]) -> Trial:
        """A point of one's own, as a pending trial.

        Raises:
            UsageError: It has the wrong length, lies outside the bounds, or holds no numbers.
        """
        bounds = self.settings.bounds
        try:
            values = tuple(float(x) for x in X)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"Expected {len(bounds)} numbers, got {X!r}.") from error
        inside = [low <= x <= high for x, (low, high) in zip(values, bounds, strict=False)]
        if len(values) != len(bounds) or not all(inside):
            raise UsageError(f"Expected {len(bounds)} numbers within {bounds}, got {values}.")
        return self.ledger.add(values, "hand")

    # --- outcomes -----------------------------------------------------------------------------

    def tell(self, key: int, Y: float, seconds: float | None = None) -> Trial:
        """Record the outcome of a pending (or failed) trial; see :meth:`Ledger.tell`."""
        return self.ledger.tell(key, Y, seconds)

    def fail(self, key: int, error: str, seconds: float | None = None) -> Trial:
        """Record that an evaluation came to nothing; see :meth:`Ledger.fail`."""
        return self.ledger.fail(key, error, seconds)

    def retry(self, key: int) -> Trial:
        """Make a failed trial pending again; see :meth:`Ledger.retry`."""
        return self.ledger.retry(key)

    def amend(self, key: int, Y: float) -> Trial:
        """Correct or set an outcome; see :meth:`Ledger.amend`."""
        return self.ledger.amend(key, Y)

    def withdraw(self, key: int) -> Trial:
        """Drop a trial, and its outcome from the model; see :meth:`Ledger.withdraw`."""
        return self.ledger.withdraw(key)

    @property
    def pending(self) -> list[Trial]:
        """Trials without an outcome yet."""
        return self.ledger.with_status("pending")

    def best(self) -> Best:
        """The told point of the best posterior mean; the best outcome while there is no model.

        Raises:
            UsageError: Nothing was told yet.
        """
        shortlist = self._shortlist()
        if not shortlist:
            raise UsageError("There is no best point yet: no outcome was told.")
        self.surrogate.follow(self.ledger)
        if self.surrogate.model is None:
            return Best(max(shortlist, key=lambda t: self.settings.sign * (t.Y or 0.0)), None)
        means = self.surrogate.means(self.settings.to_unit_cube([t.X for t in shortlist]))
        position = int(means.argmax())
        mean = self.settings.sign * means[position].item() * self.surrogate.unit
        return Best(shortlist[position], mean)


def _accelerator(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type

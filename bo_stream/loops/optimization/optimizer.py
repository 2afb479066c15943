"""Ask for points, tell outcomes: in any order, late, amended, withdrawn, or never."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.quasirandom import SobolEngine

from bo_stream.loops.errors import UsageError
from bo_stream.loops.models import KERNELS, MODELS, Options, build_model
from bo_stream.loops.optimization.acquisition import (
    Situation,
    best_points,
    check_acquisition,
)
from bo_stream.loops.optimization.settings import RANDOM, OptimizationSettings
from bo_stream.loops.optimization.trials import Ledger, Trial
from bo_stream.loops.refits import FEW_PER_INPUT, learn
from bo_stream.loops.sampling.loop import predict_mean
from bo_stream.loops.sampling.settings import check_at_least
from bo_stream.loops.units import is_off, unit_of
from bo_stream.models.base import StreamingGP
from bo_stream.models.refit import (
    Hyperparameters,
    hyperparameters,
    learned_values,
    set_hyperparameters,
)

FEWEST = 2
"""Outcomes from which a model can be built."""


class Surrogate:
    """A model over the unit cube that follows a ledger by differences.

    What was told since is put in by ``update``, what was withdrawn is taken out by ``retract``, an
    amended outcome is both. So a step costs the same whatever was told before. A model that cannot
    take outcomes out exactly is built anew from all that are left; so is any model when the spread
    of the outcomes turns out to be of another order. Outcomes enter in the order of keys, not of
    arrival.

    Attributes:
        model: None until there are enough outcomes.
        held: Key to outcome, of what is in the model's memory.
        refits: Numbers of outcomes at which the hyperparameters were learned.
        revision: Grows whenever the model changes.
        is_whole: False while the model is on its way to what the ledger says.
        unit: In which the model has the outcomes: acquisition functions have absolute tolerances.
    """

    def __init__(
        self,
        settings: OptimizationSettings,
        model: StreamingGP | None = None,
        held: dict[int, float] | None = None,
        refits: Sequence[int] = (),
        revision: int = 0,
    ) -> None:
        """Begin empty, or with what a checkpoint held.

        Raises:
            UsageError: A model cannot be built with these settings: said before any evaluation.
        """
        self.settings = settings
        self.model = model
        self.held = {} if held is None else dict(held)
        self.refits = list(refits)
        self.revision = revision
        self.unit = 1.0
        self.is_whole = True
        if model is None:
            self._built(*self._no_data())

    def follow(self, ledger: Ledger) -> None:
        """Bring the model to the ledger's told outcomes, and learn hyperparameters where due.

        Raises:
            UsageError: A model cannot be built with these settings.
        """
        wanted = {trial.key: trial.Y for trial in ledger.with_status("told")}
        stale = [key for key, Y in self.held.items() if wanted.get(key) != Y]
        fresh = [key for key, Y in wanted.items() if self.held.get(key) != Y]
        if not stale and not fresh:
            return
        self.revision += 1
        self.is_whole = False
        few = self.model is None or len(self.held) - len(stale) < FEWEST
        if few or is_off(self.unit, [_outcome(ledger, key) for key in wanted]):
            self._begin(ledger, sorted(wanted))
        elif stale and not MODELS[self.settings.model].retracts and self.model is not None:
            self._rebuild(ledger, sorted(wanted), self.model)
        else:
            self._take_out(ledger, sorted(stale))
            self._put_in(ledger, fresh)
        self._refit_if_due(ledger)
        self.is_whole = True

    def _begin(self, ledger: Ledger, keys: list[int]) -> None:
        self.model, self.held, self.refits = None, {}, []
        if len(keys) < FEWEST:
            return
        self.unit = unit_of([_outcome(ledger, key) for key in keys])
        self.model = self._built(*self._data(ledger, keys))
        self.held = {key: _outcome(ledger, key) for key in keys}

    def _rebuild(self, ledger: Ledger, keys: list[int], former: StreamingGP) -> None:
        """Of the outcomes of these keys, with the hyperparameters and the record of before."""
        self.model = self._built(*self._data(ledger, keys), deepcopy(former.covar_module))
        set_hyperparameters(self.model, hyperparameters(former))
        for event in former.numerical_log:
            self.model.log_event(event.what, event.size, event.jitter)
        self.held = {key: _outcome(ledger, key) for key in keys}

    def _built(
        self, X: Tensor, Y: Tensor, kernel: Kernel | None = None, more: Options | None = None
    ) -> StreamingGP:
        settings = self.settings
        if kernel is None:
            kernel = KERNELS[settings.kernel](settings.dim)
        options = {**settings.model_options, **(more or {})}
        return build_model(settings.model, options, X, Y, kernel.to(X), settings.grid)

    def _take_out(self, ledger: Ledger, keys: list[int]) -> None:
        if not keys or self.model is None:
            return
        X = self.settings.to_unit_cube([ledger[key].X for key in keys])
        self.model.retract(X, self._outcomes([self.held[key] for key in keys]))
        for key in keys:
            del self.held[key]

    def _put_in(self, ledger: Ledger, keys: list[int]) -> None:
        if not keys or self.model is None:
            return
        self.model.update(*self._data(ledger, keys))
        self.held |= {key: _outcome(ledger, key) for key in keys}

    def _data(self, ledger: Ledger, keys: list[int]) -> tuple[Tensor, Tensor]:
        X = self.settings.to_unit_cube([ledger[key].X for key in keys])
        return X, self._outcomes([_outcome(ledger, key) for key in keys])

    def _no_data(self) -> tuple[Tensor, Tensor]:
        return self.settings.to_unit_cube([]), self._outcomes([])

    def _outcomes(self, Y: list[float]) -> Tensor:
        return self.settings.tensor([y / self.unit for y in Y]).unsqueeze(-1) * self.settings.sign

    def _refit_if_due(self, ledger: Ledger) -> None:
        if self.model is None:
            return
        growth, count = self.settings.refit, len(self.held)
        if not self.refits or (growth > 0.0 and count >= growth * self.refits[-1]):
            learn(self.model, self._further_starts(ledger))
            self.refits.append(count)

    def _further_starts(self, ledger: Ledger) -> list[Hyperparameters]:
        if not self.refits or len(self.held) > FEW_PER_INPUT * self.settings.dim:
            return []
        data = self._data(ledger, sorted(self.held)[:FEWEST])
        draft = self._built(*data, more=MODELS[self.settings.model].unlearned)
        return [learned_values(draft)]

    @torch.no_grad()
    def means(self, X: Tensor) -> Tensor:
        """Posterior means at ``n x d`` points of the unit cube, ``n``; large: good; in ``unit``."""
        if self.model is None:
            raise UsageError(f"There is no model yet: it needs {FEWEST} outcomes.")
        return predict_mean(self.model, X)


def _outcome(ledger: Ledger, key: int) -> float:
    value = ledger[key].Y
    if value is None:
        raise UsageError(f"Trial {key} has no outcome.")
    return value


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

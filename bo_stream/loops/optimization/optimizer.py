"""The optimizer, which is asked for trials and told their outcomes, and its model."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.quasirandom import SobolEngine

from bo_stream.diagnostics.cross_validation import retracts_exactly
from bo_stream.diagnostics.validation import ProgressiveValidation
from bo_stream.errors import UsageError, as_real, check_whole
from bo_stream.loops.models import KERNELS, MODELS, build_model, refit_is_due
from bo_stream.loops.optimization.acquisition import Situation, best_points, check_acquisition
from bo_stream.loops.optimization.region_search import RegionSurrogate, region_state
from bo_stream.loops.optimization.trials import (
    FEWEST,
    FIRST_IN_BOX,
    Ledger,
    NoModelError,
    OptimizationSettings,
    Trial,
    journaled_trials,
    trial_of,
)
from bo_stream.loops.run import OPTIMIZATION, ModelFile, from_record, predict_mean
from bo_stream.models.auto.auto import AutoGP
from bo_stream.models.base import StreamingGP
from bo_stream.models.fitting import hyperparameters, relearn, set_hyperparameters
from bo_stream.models.wiski.wiski import WISKI

LEFT_OUT = 1e-4
"""Prior variance truncated from the model's features between refits, over the noise variance."""

MOST_NOISE = 1e12
"""Largest known noise variance in the model's units: float32 has no squares of larger ones."""

OFF = 1024.0
"""Factor by which the spread of the outcomes may differ from the unit."""


class Surrogate:
    """A model over the unit cube that follows a ledger by differences.

    New outcomes enter by ``update``, withdrawn ones leave by ``retract``, an amended one does both,
    so that a step costs the same however many outcomes came before. A model that cannot retract
    exactly is built again from all outcomes that are left; so is any model when the spread of the
    outcomes turns out to be of another order. Outcomes enter in the order of keys, not of arrival.

    Attributes:
        model: None until there are enough outcomes.
        held: Outcomes in the model's memory, by key.
        noise: Known noise variances of these outcomes, by key.
        refits: Numbers of outcomes at which the hyperparameters were learned.
        unit: Unit of the outcomes in the model: acquisition functions have absolute tolerances.
        is_whole: False while the model is being brought to the ledger.
        validation: Record of how well the model predicted each outcome, in its units; begun again
            with a model in other units.
    """

    def __init__(
        self,
        settings: OptimizationSettings,
        model: StreamingGP | None = None,
        held: Mapping[int, float] | None = None,
        noise: Mapping[int, float] | None = None,
        refits: Sequence[int] = (),
        unit: float = 1.0,
        validation: ProgressiveValidation | None = None,
    ) -> None:
        """Begin empty, or with the content of a checkpoint.

        Raises:
            UsageError: A model cannot be built with these settings: raised before any evaluation.
        """
        self.settings, self.model, self.unit = settings, model, unit
        self.held, self.noise, self.refits = dict(held or {}), dict(noise or {}), list(refits)
        self.is_whole = True
        self.validation = ProgressiveValidation() if validation is None else validation
        if model is None:
            self._built(*self._data(Ledger(), {}, {}))

    def follow(self, ledger: Ledger) -> StreamingGP | None:
        """Bring the model to the ledger's told outcomes, learn where due, and return the model."""
        if not self.is_whole:  # it was interrupted: the model may hold rows that ``held`` has not
            self.model, self.held, self.noise = None, {}, {}
        wanted, noise = ledger.outcomes()

        def stays(key: int) -> bool:
            same = self.held.get(key) == wanted.get(key)
            return same and self.noise.get(key) == noise.get(key)

        stale = {key: Y for key, Y in sorted(self.held.items()) if not stays(key)}
        fresh = {key: Y for key, Y in wanted.items() if not stays(key)}
        if not stale and not fresh:
            return self.model
        self.is_whole = False
        few = len(self.held) - len(stale) < FEWEST
        previous = self.model
        if previous is None or few or is_off(self.unit, list(wanted.values())):
            self.model, self.held, self.refits = None, {}, []
            self.validation = ProgressiveValidation()
            if len(wanted) >= FEWEST:
                self.unit = unit_of(list(wanted.values()))
                self.model = self._built(*self._data(ledger, wanted, noise))
                self.held = wanted
        elif stale and not retracts_exactly(previous):
            if fresh:
                self.validation.add(previous, *self._data(ledger, fresh, noise))
            # a model of the other outcomes, with hyperparameters and log of the previous one
            kernel = deepcopy(previous.covar_module)
            self.model = self._built(*self._data(ledger, wanted, noise), kernel)
            self.model._first_values = previous._first_values
            self.model._last_fit = previous._last_fit
            set_hyperparameters(self.model, hyperparameters(previous))
            for event in previous.numerical_log:
                self.model.log_event(event.what, event.size, event.jitter)
            self.held = wanted
        else:
            if stale:
                previous.retract(*self._data(ledger, stale, self.noise))
            self.held = {key: Y for key, Y in self.held.items() if key not in stale}
            if fresh:
                self.validation.observe(previous, *self._data(ledger, fresh, noise))
            self.held |= fresh
        self.noise = noise if self.held else {}
        count, last = len(self.held), self.refits[-1] if self.refits else 0
        if self.model is not None and refit_is_due(count, last, self.settings.refit):
            learn(self.model)
            self.refits.append(count)
        self.is_whole = True
        return self.model

    def _built(
        self, X: Tensor, Y: Tensor, Yvar: Tensor | None, kernel: Kernel | None = None
    ) -> StreamingGP:
        settings = self.settings
        if kernel is None:
            kernel = KERNELS[settings.kernel](settings.dim)
        kernel, options = kernel.to(X), settings.model_options
        return build_model(settings.model, options, X, Y, kernel, settings.grid, Yvar=Yvar)

    def _data(
        self, ledger: Ledger, outcomes: Mapping[int, float], noise: Mapping[int, float]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return inputs, outcomes and known noise variances, by key, as the model takes them."""
        X = self.settings.to_unit_cube([ledger[key].X for key in outcomes])
        Y = X.new_tensor([y / self.unit for y in outcomes.values()])
        # divided twice: the square of a tiny unit is 0
        units = [noise.get(key, math.nan) / self.unit / self.unit for key in outcomes]
        known = [min(variance, MOST_NOISE) for variance in units]
        Yvar = None if all(map(math.isnan, known)) else X.new_tensor(known).unsqueeze(-1)
        return X, Y.unsqueeze(-1) * self.settings.sign, Yvar


def learn(model: StreamingGP) -> None:
    """Learn hyperparameters in place (``relearn``).

    All features are used, as the noise may turn out to be smaller; then :func:`thin` is called.
    """
    if isinstance(model, AutoGP | WISKI):
        model.truncate(0.0)
    relearn(model)
    thin(model)


def thin(model: StreamingGP) -> None:
    """Truncate the features of a model on a grid, in place, to those that exceed the noise."""
    if isinstance(model, AutoGP | WISKI):
        model.truncate(LEFT_OUT)


def unit_of(Y: Sequence[float]) -> float:
    """Return a power of two near the spread of one or more outcomes: dividing by it is exact."""
    largest = max(abs(y) for y in Y)
    spread = max(max(Y) - min(Y), 1e-9 * largest)
    return float(2.0 ** round(math.log2(spread))) if spread > 0.0 else 1.0


def is_off(unit: float, Y: Sequence[float]) -> bool:
    """Return whether a unit is of another order than the spread of one or more outcomes."""
    return not 1.0 / OFF < unit_of(Y) / unit < OFF


# --- an optimizer that is asked for points and told outcomes: in any order, late, amended --------


SHORTLIST = 1024
"""Number of observed points, those of the best outcomes, among which the best is searched."""

AVOIDED_FAILURES = 32
"""Last failed points that count as pending in the box, so that they are not tried for ever."""


class Optimizer:
    """Bayesian optimization of one outcome over a box.

    The model is :class:`~bo_stream.AutoGP` unless the settings name another: exact at first, then
    on a grid in one to four inputs and at inducing points in more.

    ``ask`` gives trials with keys, ``tell`` takes their outcomes whenever they come. The model is
    updated at the next ``ask`` or ``best``. The next points depend on the settings, the trials so
    far and the model, not on torch's global random state, so a run that was saved and loaded goes
    on to the same points. What cannot be is a ``UsageError``, and changes nothing.

    A point without an outcome is pending. In the search of the box others are chosen given that it
    will have one, and the last ``AVOIDED_FAILURES`` failed ones too, which the model never sees. A
    region disregards pending points, and its model takes the last failed ones for its worst
    outcomes. A step costs the same however many came before, but for a pass over the trials, some
    microseconds each.

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
        surrogate: Surrogate | RegionSurrogate | None = None,
    ) -> None:
        """Begin, or go on with the parts of an earlier optimizer (see ``load_optimizer``)."""
        check_acquisition(settings.acquisition)
        self.settings = settings
        self.ledger = Ledger() if ledger is None else ledger
        if surrogate is None:
            in_region = settings.search == "region"
            surrogate = RegionSurrogate(settings) if in_region else Surrogate(settings)
        self.surrogate = surrogate

    # --- points -------------------------------------------------------------------------------

    @torch.enable_grad()
    def ask(self, q: int | None = None) -> list[Trial]:
        """Choose the next q points (default: as in the settings), and return pending trials.

        They are Sobol points until ``initial`` trials are told or pending and two are told; where
        a region is searched from the first, the middle of the box stands for the first of them.
        Then they maximise the acquisition, or are drawn in a region: of a search of both, from
        ``FIRST_IN_BOX`` outcomes on. Hundreds at once cost less each, see :func:`best_points`.
        """
        count = self.settings.q if q is None else check_whole("q", q, 1)
        told, due, former = self.ledger.count("told"), math.inf, self.surrogate
        is_over = self.settings.search == "both" and told >= FIRST_IN_BOX
        if is_over and isinstance(former, Surrogate):
            self.surrogate = RegionSurrogate(self.settings, refits=former.refits)
        if self.settings.acquisition != "random" and told >= FEWEST:
            due = max(0, self.settings.initial - told - self.ledger.count("pending"))
            if due < count and isinstance(self.surrogate, RegionSurrogate):
                due = max(due, self.surrogate.sobol_due(self.ledger))
        first = int(min(count, due))
        trials = self._sobol_trials(first) if first else []
        if count > first:
            try:
                points = self._model_points(count - first)
            except NoModelError:  # a region has ended by what another thread has told since
                return trials + self._sobol_trials(count - first)
            chosen = self.settings.from_unit_cube(points)
            trials += [self.ledger.add(x, "model") for x in chosen]
        return trials

    def _sobol_trials(self, count: int) -> list[Trial]:
        """Add the next points of the Sobol sequence as pending trials."""
        engine = SobolEngine(self.settings.dim, scramble=True, seed=self.settings.seed)
        drawn = self.ledger.count_from("sobol")
        points = engine.fast_forward(drawn).draw(count, dtype=torch.float64)
        if drawn == 0 and self.settings.search == "region":
            points[0] = 0.5  # better than most of the others where there are many inputs
        return [self.ledger.add(x, "sobol") for x in self.settings.from_unit_cube(points)]

    def _model_points(self, q: int) -> Tensor:
        """Choose the next points by the model, ``q x d`` in the unit cube.

        Raises:
            NoModelError: There is none.
        """
        settings, surrogate = self.settings, self.surrogate
        if isinstance(surrogate, RegionSurrogate):  # has followed when asked for Sobol points
            model: StreamingGP | None = surrogate.model
        else:
            model = surrogate.follow(self.ledger)
        if model is None:
            raise NoModelError
        seed = (settings.seed * 1_000_003 + len(self.ledger)) % 2**31
        device = torch.device(settings.device)
        on_cpu = device.type == "cpu"
        accelerator = "cuda" if on_cpu else device.type
        with torch.random.fork_rng([] if on_cpu else [device], device_type=accelerator):
            torch.manual_seed(seed)
            if isinstance(surrogate, RegionSurrogate):
                return surrogate.propose(self.ledger, q, seed)
            failed = self.ledger.with_status("failed")[-AVOIDED_FAILURES:]
            open_points = [trial.X for trial in self.pending + failed]
            pending = settings.to_unit_cube(open_points) if open_points else None
            X = settings.to_unit_cube([trial.X for trial in self._shortlist()])
            means, order = predict_mean(model, X).sort(descending=True, stable=True)
            best = means[0].item()
            situation = Situation(model, X[order], best, pending, settings.beta, seed)
            return best_points(settings, situation, q)

    def _shortlist(self) -> list[Trial]:
        """Return the told trials of the best outcomes, by key."""
        told, sign = self.ledger.with_status("told"), self.settings.sign
        best = heapq.nlargest(SHORTLIST, told, key=lambda trial: sign * (trial.Y or 0.0))
        return sorted(best, key=lambda trial: trial.key)

    def register(self, X: Sequence[float]) -> Trial:
        """Add a point of one's own, d numbers within the bounds, as a pending trial."""
        bounds = self.settings.bounds
        try:
            numbers = [None] if isinstance(X, str | Mapping) else [as_real(x) for x in X]
        except TypeError:  # what cannot be iterated over
            numbers = [None]
        values = tuple(x for x in numbers if x is not None)
        if len(values) < len(numbers):
            raise UsageError(f"Expected {len(bounds)} numbers, got {X!r}.")
        inside = [low <= x <= high for x, (low, high) in zip(values, bounds, strict=False)]
        if len(values) != len(bounds) or not all(inside):
            raise UsageError(f"Expected {len(bounds)} numbers within {bounds}, got {values}.")
        return self.ledger.add(values, "hand")

    # --- outcomes -----------------------------------------------------------------------------

    def tell(
        self, key: int, Y: float, seconds: float | None = None, Yvar: float | None = None
    ) -> Trial:
        """Record the outcome of a pending (or failed) trial; see :meth:`Ledger.tell`."""
        self._check_noise(Yvar)
        return self.ledger.tell(key, Y, seconds, Yvar)

    def fail(self, key: int, error: str | BaseException, seconds: float | None = None) -> Trial:
        """Record that an evaluation failed; see :meth:`Ledger.fail`."""
        return self.ledger.fail(key, error, seconds)

    def retry(self, key: int) -> Trial:
        """Make a failed trial pending again; see :meth:`Ledger.retry`."""
        return self.ledger.retry(key)

    def amend(self, key: int, Y: float, Yvar: float | None = None) -> Trial:
        """Correct or set an outcome; see :meth:`Ledger.amend`."""
        self._check_noise(Yvar)
        return self.ledger.amend(key, Y, Yvar)

    def _check_noise(self, Yvar: float | None) -> None:
        name = self.settings.model
        if Yvar is not None and not MODELS[name].knows_noise:
            raise UsageError(
                f"Model {name} has a likelihood of its own, which knows no noise of single "
                "outcomes: leave Yvar out, or name another model."
            )

    def withdraw(self, key: int) -> Trial:
        """Delete a trial, and its outcome from the model; see :meth:`Ledger.withdraw`."""
        return self.ledger.withdraw(key)

    @property
    def pending(self) -> list[Trial]:
        """Trials that wait for an outcome."""
        return self.ledger.with_status("pending")

    @torch.enable_grad()
    def best(self) -> Best:
        """Find the observed point of the best posterior mean, or outcome if there is no model."""
        if isinstance(self.surrogate, RegionSurrogate):
            key, value = self.surrogate.best(self.ledger)
            return Best(self.ledger[key], self.settings.sign * value)
        shortlist = self._shortlist()
        if not shortlist:
            raise UsageError("There is no best point yet: no outcome was told.")
        model = self.surrogate.follow(self.ledger)
        if model is None:  # of a single outcome
            return Best(shortlist[0], None)
        means = predict_mean(model, self.settings.to_unit_cube([t.X for t in shortlist]))
        position = int(means.argmax())
        mean = self.settings.sign * means[position].item() * self.surrogate.unit
        return Best(shortlist[position], mean)


@dataclass(frozen=True)
class Best:
    """The best point so far.

    Attributes:
        trial: Trial of the best posterior mean, among the ``SHORTLIST`` best outcomes.
        mean: That posterior mean, in units of the outcomes; None where there is no model yet.
    """

    trial: Trial
    mean: float | None


def save_optimizer(
    folder: Path,
    optimizer: Optimizer,
    run: Mapping[str, Any] | None = None,
    journal: str | None = None,
) -> None:
    """Write an optimizer; a complete one, the old or the new, is left even after an error.

    A model that is being changed is left out, and built again from the trials.

    Args:
        folder: Created if necessary.
        optimizer: The optimizer.
        run: Plain values to be stored with it.
        journal: Name of the journal of later trials, see :class:`Journal`, if there is one.

    Raises:
        OSError: The folder cannot be written, or the disk is full; the old files stand.
    """
    surrogate = optimizer.surrogate
    if isinstance(surrogate, RegionSurrogate):
        about: dict[str, Any] = {"region": asdict(surrogate.state), "refits": surrogate.refits}
        models: dict[str, StreamingGP] = {}
    else:
        if not surrogate.is_whole:
            surrogate = Surrogate(optimizer.settings)
        about = {
            "held": list(surrogate.held.items()),
            "noise": list(surrogate.noise.items()),
            "refits": surrogate.refits,
            "unit": surrogate.unit,
            "validation": surrogate.validation.state(),
        }
        models = {} if surrogate.model is None else {"surrogate": surrogate.model}
    content = {
        "settings": asdict(optimizer.settings),
        "trials": [vars(trial) for trial in optimizer.ledger],
        "surrogate": about,
        "run": None if run is None else dict(run),
        "journal": journal,
    }
    OPTIMIZATION.save(folder, content, models)


def load_optimizer(
    folder: Path, trusted: Collection[str] = ()
) -> tuple[Optimizer, dict[str, Any] | None]:
    """Read an optimizer and the values that were stored with it.

    Nothing in the folder is executed: models are read as :meth:`StreamingGP.load` does, and
    functions are imported only if they are trusted.

    Args:
        folder: Folder of :func:`save_optimizer`.
        trusted: Functions ``package.module:function`` that the folder may name.

    Raises:
        UsageError: There is none, it is damaged, another version wrote it, or it names a function
            that is not trusted.
    """
    with OPTIMIZATION.opened(folder) as content:
        return parsed_optimizer(folder, content, trusted), content["run"]


def parsed_optimizer(
    folder: Path, content: Mapping[str, Any], trusted: Collection[str]
) -> Optimizer:
    """Build the optimizer of an index's content; see :func:`load_optimizer`."""
    unknown = [name for name in _functions(content) if name not in trusted]
    if unknown:
        raise UsageError(
            f"The run in {folder} names {' and '.join(unknown)}, which would be imported and "
            "called. If you trust it, name it too: as FUNCTION or --acquisition of the command, or "
            "by trusted=[...]."
        )
    # runs of versions without a region are of the box
    settings = from_record(OptimizationSettings, {"search": "box", **content["settings"]})
    ledger = Ledger(map(trial_of, content["trials"]))
    if content["journal"] is not None:
        for trial in journaled_trials(folder, content["journal"]):
            ledger.put(trial)
    state, model = content["surrogate"], None
    if "region" in state:
        search = RegionSurrogate(settings, region_state(state["region"]), state["refits"])
        return Optimizer(settings, ledger, search)
    held = {int(key): float(Y) for key, Y in state["held"]}
    noise = {int(key): float(variance) for key, variance in state.get("noise", ())}
    if "surrogate" in content["models"]:
        file = from_record(ModelFile, content["models"]["surrogate"])
        if file.observations != len(held):
            raise UsageError(
                f"{folder / OPTIMIZATION.name} contradicts itself: {len(held):,} outcomes, a model "
                f"of {file.observations:,}."
            )
        model = file.read(folder, MODELS[settings.model].model, settings.device)
    validation = ProgressiveValidation.of_state(state["validation"])
    unit, refits = float(state["unit"]), state["refits"]
    surrogate = Surrogate(settings, model, held, noise, refits, unit, validation)
    return Optimizer(settings, ledger, surrogate)


def named_functions(folder: Path) -> list[str]:
    """Return the functions ``package.module:function`` that a folder's run imports and calls."""
    with OPTIMIZATION.opened(folder) as content:
        return _functions(content)


def _functions(content: Mapping[str, Any]) -> list[str]:
    objective = (content["run"] or {}).get("objective")
    names = [] if objective is None else [str(objective["function"])]
    return [name for name in (*names, str(content["settings"]["acquisition"])) if ":" in name]

"""A generator of the standard that libEnsemble, Xopt and Optimas share: the package gest-api."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import gest_api
import numpy as np
import pandas as pd
from botorch.acquisition.acquisition import AcquisitionFunction
from botorch.acquisition.active_learning import qNegIntegratedPosteriorVariance
from gest_api.vocs import (
    VOCS,
    ContextualVariable,
    ContinuousVariable,
    DiscreteVariable,
    ExploreObjective,
    MaximizeObjective,
)

from bo_stream.acquisition import FeatureNIPV
from bo_stream.acquisition.feature_nipv import in_weight_space
from bo_stream.errors import UsageError, as_real, check_whole, plain
from bo_stream.loops.optimization.acquisition import Situation
from bo_stream.loops.optimization.objectives import NoOutcomeError, as_number
from bo_stream.loops.optimization.optimizer import Optimizer, load_optimizer, save_optimizer
from bo_stream.loops.optimization.trials import LARGEST, OptimizationSettings

ID = "_id"
"""Key of a point's identifier, by the standard."""

EXPLORE = "bo_stream.gest:explore"
"""Acquisition of an objective that is to be explored."""

_INTEGRATION_POINTS = 128
_ROUNDING = 1e-6  # of float32, in which a driver may store points


class Generator(gest_api.Generator):
    """Bayesian optimization with a streaming model, as drivers of the standard call it.

    Its :class:`~bo_stream.loops.optimization.Optimizer` has a ledger of every point that was
    suggested or ingested, by its ``_id``. Results may come in any order, late, or never. One
    whose objective is missing, NaN, infinite or beyond 1e75 is a failure, and the point is avoided:
    in the search of the box the model does not see it, in that of a region it counts as the model's
    worst outcome. A second result of a point corrects the first. Points that were not suggested are
    ingested without an ``_id``; one without an ``_id`` that equals a point which waits for its
    result is that point.

    A call that it cannot serve raises a ``ValueError`` (:class:`~bo_stream.errors.UsageError`) and
    changes nothing.

    Attributes:
        vocs: Variables, objective, constants and observables.
        optimizer: Points, outcomes and model; ``optimizer.best()`` is the best point so far.

    Example:
        >>> generator = Generator(VOCS(variables={"x": [0, 1]}, objectives={"f": "MINIMIZE"}))
        >>> points = generator.suggest(4)
        >>> generator.ingest([{**point, "f": measure(point["x"])} for point in points])
    """

    returns_id = True

    def __init__(self, vocs: VOCS, folder: str | Path | None = None, **settings: Any) -> None:
        """Begin without results.

        Args:
            vocs: Continuous variables with finite bounds and one objective. ``MINIMIZE`` and
                ``MAXIMIZE`` look for the best point; ``EXPLORE`` learns the objective everywhere,
                by the integrated posterior variance. Constants are handed on, observables ignored.
            folder: Where ``finalize`` saves everything; None: nowhere.
            settings: Fields of :class:`~bo_stream.loops.optimization.OptimizationSettings` but
                ``bounds`` and ``maximize``, which are in the VOCS: ``q`` is the default number of
                points.

        Raises:
            UsageError: A VOCS that is not supported, with an alternative, or a setting that is
                unknown or out of range.
        """
        super().__init__(vocs)
        self.vocs, self._folder = vocs, None if folder is None else Path(folder)
        known = {field.name for field in fields(OptimizationSettings)} - {"bounds", "maximize"}
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise UsageError(
                f"Expected settings among {', '.join(sorted(known))}, got {', '.join(unknown)}. "
                "Bounds and direction are the VOCS's."
            )
        (objective,) = vocs.objectives.values()
        explores = isinstance(objective, ExploreObjective)
        if explores and settings.setdefault("acquisition", EXPLORE) not in (EXPLORE, "random"):
            raise UsageError(
                "An objective to EXPLORE has an acquisition of its own, got "
                f"{settings['acquisition']!r}: leave it out, or take 'random'."
            )
        self.optimizer = Optimizer(
            OptimizationSettings(
                bounds=tuple(tuple(variable.domain) for variable in vocs.variables.values()),
                maximize=isinstance(objective, MaximizeObjective),
                **settings,
            )
        )

    def _validate_vocs(self, vocs: VOCS) -> None:
        """Check that every variable has an interval and that there is one objective to follow."""
        if not vocs.variables:
            raise UsageError("Expected VOCS of at least one variable, got none.")
        for name, variable in vocs.variables.items():
            if isinstance(variable, DiscreteVariable):
                raise UsageError(
                    f"Expected continuous variables, got {name} of {len(variable.values)} values. "
                    "For discrete ones use Ax with bo_stream.ax; for a finite set of points "
                    "bo_stream.acquisition.select_from_pool."
                )
            is_contextual = isinstance(variable, ContextualVariable)
            if is_contextual or not isinstance(variable, ContinuousVariable):
                raise UsageError(
                    f"Expected continuous variables, got {name}, a {type(variable).__name__}: a "
                    "value that is observed instead of chosen. Update a bo_stream model with it "
                    "among the inputs, and fix it in BoTorch's optimize_acqf (fixed_features)."
                )
            if not all(map(math.isfinite, variable.domain)):
                raise UsageError(f"Expected finite bounds of {name}, got {variable.domain}.")
            if variable.dtype not in (None, float, "float", "float64", "f8"):
                raise UsageError(
                    f"Expected {name} to be a float, got dtype {variable.dtype!r}. Give an array "
                    "as one variable for each entry; for whole numbers use Ax with bo_stream.ax."
                )
        names = [*vocs.variables, *vocs.constants, *vocs.objectives, ID]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(
                f"Expected variables, constants and objectives with a name of their own each, none "
                f"of them {ID}, got {twice} twice. Give one of them another name."
            )
        if len(vocs.objectives) != 1:
            raise UsageError(
                f"Expected VOCS of one objective, got {len(vocs.objectives)}: "
                f"{', '.join(vocs.objectives) or 'none'}. For several objectives use Ax with "
                "bo_stream.ax, whose models take several outcomes; or give their weighted sum."
            )
        if vocs.constraints:
            raise UsageError(
                f"Expected VOCS without constraints, got {', '.join(vocs.constraints)}. For these "
                "use Ax with bo_stream.ax. Where a violation means that a point is of "
                "no use, leave them out and return NaN as its objective: it counts as a failure."
            )

    # --- the standard -------------------------------------------------------------------------

    def suggest(self, num_points: int | None = None) -> list[dict[str, Any]]:
        """Choose the next points to evaluate.

        Args:
            num_points: How many; None: ``q`` of the settings.

        Returns:
            Points as dictionaries of all variables and constants, and their ``_id``.

        Raises:
            UsageError: Not a whole number of at least 1.
        """
        count = None if num_points is None else _whole("num_points", num_points, 1)
        constants = {name: constant.value for name, constant in self.vocs.constants.items()}
        return [
            {**dict(zip(self.vocs.variables, trial.X, strict=True)), **constants, ID: trial.key}
            for trial in self.optimizer.ask(count)
        ]

    def ingest(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Take results of evaluations.

        Args:
            results: Dictionaries of all variables and the objective; with the ``_id`` of a point
                that was suggested, without one of others. Constants, if given, are checked.

        Raises:
            UsageError: They are no list of dictionaries; a variable is missing, not a number or out
                of bounds; an objective is not a number; a constant has another value; an ``_id`` is
                unknown or of another point. Nothing is ingested then.
        """
        are_rows = isinstance(results, Iterable) and not isinstance(results, Mapping | pd.DataFrame)
        rows = list(results) if are_rows else []
        strange = [type(row).__name__ for row in rows if not isinstance(row, Mapping)]
        if strange or not are_rows:
            within = f" with a {strange[0]} in it" if strange else ""
            raise UsageError(
                "Expected results as a list of dictionaries, one for each point, got a "
                f"{type(results).__name__}{within}. Of a DataFrame give to_dict('records')."
            )
        optimizer = self.optimizer
        for key, X, Y in [self._read(result) for result in rows]:
            if key is None:
                key = next((trial.key for trial in optimizer.pending if trial.X == X), None)
            if key is None:
                key = optimizer.register(X).key
            status = optimizer.ledger[key].status
            if Y is not None:
                if status in ("told", "withdrawn"):
                    optimizer.amend(key, Y)
                else:
                    optimizer.tell(key, Y)
            elif status == "told":  # the earlier outcome turned out to be of no use
                optimizer.withdraw(key)
            elif status != "withdrawn":
                optimizer.fail(key, "no finite objective")

    def finalize(self) -> None:
        """Bring the model up to date with all results, and save everything if there is a folder."""
        self.optimizer.surrogate.follow(self.optimizer.ledger)
        if self._folder is not None:
            self.save(self._folder)

    # --- files --------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write points, results and model; an earlier state in the folder is replaced at once.

        Raises:
            OSError: The folder cannot be written; the old state stands.
        """
        save_optimizer(Path(folder), self.optimizer, {"vocs": _outline(self.vocs)})

    @classmethod
    def load(cls, folder: str | Path, vocs: VOCS) -> Self:
        """Load a generator from a folder: it suggests the same points as without the stop.

        ``finalize`` saves to the same folder.

        Args:
            folder: Folder of :meth:`save`, or of the constructor.
            vocs: VOCS of the generator that was saved.

        Raises:
            UsageError: There is none, it is damaged, or it is of another VOCS.
        """
        optimizer, run = load_optimizer(Path(folder), trusted=[EXPLORE])
        saved = None if run is None else run.get("vocs")
        if saved is None:
            raise UsageError(
                f"{folder} holds no generator: it was saved by another run, which load_optimizer "
                "or bo-stream optimize --resume reads."
            )
        self = cls(vocs, folder)
        here, own = _outline(vocs), self.optimizer.settings
        if here != {**here, **saved} or own.bounds != optimizer.settings.bounds:
            raise UsageError(
                f"{folder} is of the VOCS {saved} with bounds {optimizer.settings.bounds}, got "
                f"{here} with bounds {own.bounds}."
            )
        self.optimizer = optimizer
        return self

    # --- results ------------------------------------------------------------------------------

    def _read(
        self, result: Mapping[str, Any]
    ) -> tuple[int | None, tuple[float, ...], float | None]:
        """Check a result, which changes nothing.

        Returns:
            The key of its trial (None: not known yet), the point, in the order of the variables,
            and its outcome (None: the evaluation failed).
        """
        for name, constant in self.vocs.constants.items():
            if name in result and not np.array_equal(result[name], constant.value):
                raise UsageError(
                    f"Expected the constant {name} to be {constant.value!r}, got {result[name]!r}: "
                    "a result of another problem."
                )
        coordinates = []
        for name in self.vocs.variables:
            if name not in result:
                raise UsageError(
                    f"Expected results with all of {', '.join(self.vocs.variables)}, got one "
                    f"without {name}: {dict(result)}."
                )
            try:
                coordinates.append(as_number(result[name]))
            except NoOutcomeError as error:
                raise UsageError(f"Variable {name} of a result: {error}.") from error
        X, given, key = tuple(coordinates), result.get(ID), None
        if not _is_missing(given):
            key, ledger = _whole(ID, plain(given), 0), self.optimizer.ledger
            if key >= len(ledger):
                raise UsageError(
                    f"No point with {ID} {key} was suggested or ingested. Leave out {ID} for "
                    "points of your own."
                )
            known, bounds = ledger[key].X, self.optimizer.settings.bounds
            widths = [max(high - low, abs(x)) for (low, high), x in zip(bounds, known, strict=True)]
            if any(abs(x - y) > _ROUNDING * w for x, y, w in zip(X, known, widths, strict=True)):
                raise UsageError(
                    f"Point {key} is {known}, got {X} with its {ID}. Leave out {ID} if another "
                    "point was evaluated."
                )
        else:
            for (name, variable), x in zip(self.vocs.variables.items(), X, strict=True):
                low, high = variable.domain
                if not low <= x <= high:
                    raise UsageError(
                        f"Expected {name} within [{low:g}, {high:g}], got {x:g}. Leave out results "
                        "from outside the bounds, or give a VOCS with wider ones."
                    )
        (objective,) = self.vocs.objectives
        return key, X, outcome_of(objective, result.get(objective))


def explore(situation: Situation) -> AcquisitionFunction:
    """Build minus the integrated posterior variance after a point, over the unit cube."""
    model, pending = situation.model, situation.X_pending
    points = situation.sobol_points(_INTEGRATION_POINTS)
    if in_weight_space(model.process()):
        return FeatureNIPV(model, mc_points=points, X_pending=pending)
    return qNegIntegratedPosteriorVariance(model, mc_points=points, X_pending=pending)


def _outline(vocs: VOCS) -> dict[str, Any]:
    """Return the parts of a VOCS that must be equal for results of the same problem, for JSON.

    Folders of earlier versions have no constants.
    """
    objectives = {name: type(one).__name__ for name, one in vocs.objectives.items()}
    values = {name: plain(constant.value) for name, constant in vocs.constants.items()}
    # arrays as lists, and of what JSON does not have the name of its class
    text = json.dumps(
        values,
        skipkeys=True,
        default=lambda one: one.tolist() if hasattr(one, "tolist") else type(one).__name__,
    )
    return {
        "variables": list(vocs.variables),
        "objectives": objectives,
        "constants": json.loads(text),
    }


def _is_missing(value: Any) -> bool:
    """Return whether a value stands for none: None, NaN, or what NumPy and pandas have for it."""
    if np.ma.is_masked(value):
        return True
    value = plain(value)
    return pd.api.types.is_scalar(value) and bool(pd.isna(value))


def outcome_of(name: str, value: Any) -> float | None:
    """Return an outcome, None if it is missing, infinite or too large, or raise a ``UsageError``.

    Unlike ``as_number`` it takes numbers of any class, as ``Decimal``.
    """
    if _is_missing(value):
        return None
    is_one = isinstance(value, list | tuple) and len(value) == 1
    number = as_real(value[0] if is_one else value)
    if number is None:
        raise UsageError(
            f"Expected the objective {name} of a result to be one number, got {value!r}. Leave it "
            "out, or give NaN, where the evaluation failed."
        )
    return number if abs(number) <= LARGEST else None


def _whole(name: str, value: Any, least: int) -> int:
    """Return a whole number, also one that came as a float, or raise a ``UsageError``."""
    value = plain(value)
    is_whole = isinstance(value, float) and value.is_integer()
    return check_whole(name, int(value) if is_whole else value, least)

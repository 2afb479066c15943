"""Settings of a survey, with the units of its positions, and of its replay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from bo_stream.errors import UsageError, check_one_of, check_whole, make_plain

if TYPE_CHECKING:  # settings are read without torch, for the command's help
    from torch import Tensor

    from bo_stream.mapping import Units


PositionUnits = Literal["degrees", "km", "m"]
Goal = Literal["exceedance", "map"]
CriterionName = Literal["entropy", "misclassification", "targeted", "variance"]

_GOALS: tuple[Goal, ...] = ("exceedance", "map")
CRITERIA: tuple[CriterionName, ...] = ("entropy", "misclassification", "targeted", "variance")
_USUAL: dict[Goal, CriterionName] = {"exceedance": "misclassification", "map": "variance"}
"""Criterion of each goal, unless another is chosen."""

_NUMBERS = (
    "threshold", "certainty", "miss_cost", "stop_when", "budget", "minimum_distance", "cost_per_km",
)  # fmt: skip

USUAL_TRIALS = 100
"""Number of people that a site is expected to examine before any result tells."""


@dataclass(frozen=True, kw_only=True)
class SurveySettings:
    """Settings that, with sites and results, determine every choice of a survey.

    A ``UsageError`` says what is out of range.

    Attributes:
        goal: ``exceedance``, to tell sites above the threshold from those below, where a survey
            settles its site; or ``map``, to know the prevalence everywhere.
        threshold: Prevalence in (0, 1) that a decision hangs on; the goal exceedance needs it.
        criterion: Uncertainty that the choices reduce: expected ``misclassification``, ``entropy``
            of being above the threshold, variance ``targeted`` at the threshold, or ``variance`` of
            the prevalence; None: misclassification for exceedance, variance for a map.
        loss: A programme's own loss in place of a criterion, ``package.module:function``: it maps
            probabilities of exceeding the threshold to losses of the best action, elementwise by
            torch; see :class:`~bo_stream.ExpectedLoss`.
        certainty: Probability of prevalence above (below) the threshold from which a site is
            called above (below); others are uncertain.
        miss_cost: Cost w of calling a site below that is above, in costs of the opposite mistake.
            The criterion misclassification is the expected cost of the cheaper calls, and where
            every site must be called, it is called above from the probability ``1 / (1 + w)`` on.
        stop_when: Expected share of wrong calls, if every site of the list were called by the
            cheaper call, at which the survey may end; None: there is no stopping rule.
        trials: Number of people that a site is expected to examine; None: the mean of those told.
        overdispersion: Whether counts vary more than binomial ones.
        id: Column of the ids; None: by its usual names, else the rows' numbers.
        x: Columns of longitude and latitude, or of east and north; None: by their usual names.
        units: Of these columns: ``degrees``, or ``km`` or ``m`` of a map projection, such as UTM.
        covariates: Columns of numbers that prevalence may depend on.
        examined: Column of people examined; None: by its usual names.
        positive: Column of people who tested positive; None: by its usual names.
        cost: Column of the cost of a survey of each site; None: 1 each.
        stratum: Column of the strata; None: there are none.
        reachable: Column that says whether a site can be reached; None: all can.
        budget: Most that a round may cost, travel included.
        minimum_distance: Least distance of a site from all others that are surveyed or asked for,
            in kilometres.
        quotas: Most sites of a round in each stratum; strata that it does not name have no limit.
        base: Place that a round starts from and returns to, as columns ``x`` of a site have it.
        cost_per_km: Cost of a kilometre of travel.
    """

    goal: Goal = "exceedance"
    threshold: float | None = None
    criterion: CriterionName | None = None
    loss: str | None = None
    certainty: float = 0.9
    miss_cost: float = 2.0
    stop_when: float | None = None
    trials: int | None = None
    overdispersion: bool = False
    id: str | None = None
    x: tuple[str, str] | None = None
    units: PositionUnits = "degrees"
    covariates: tuple[str, ...] = ()
    examined: str | None = None
    positive: str | None = None
    cost: str | None = None
    stratum: str | None = None
    reachable: str | None = None
    budget: float | None = None
    minimum_distance: float = 0.0
    quotas: Mapping[str, int] = field(default_factory=dict)
    base: tuple[float, float] | None = None
    cost_per_km: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self, _NUMBERS)
        check_one_of("overdispersion", self.overdispersion, (True, False))
        check_one_of("goal", self.goal, _GOALS)
        check_one_of("units", self.units, COORDINATES)
        if self.criterion is not None:
            check_one_of("criterion", self.criterion, CRITERIA)
        if self.threshold is None and self.chosen_criterion != "variance":
            raise UsageError(
                "Expected a threshold, the prevalence that a decision hangs on, such as 0.1. "
                "Or choose the goal map."
            )
        if self.threshold is not None and not 0.0 < self.threshold < 1.0:
            text = f"Expected threshold to be a prevalence between 0 and 1, got {self.threshold:g}."
            if 1.0 <= self.threshold < 100.0:
                text += (
                    f" Do you mean {self.threshold:g} %? Then say {self.threshold:g}% or "
                    f"{self.threshold / 100:g}."
                )
            raise UsageError(text)
        if self.loss is not None:
            if not all(self.loss.partition(":")):
                raise UsageError(f"Expected loss as package.module:function, got {self.loss!r}.")
            if self.criterion is not None:
                raise UsageError("A loss takes the place of a criterion: give one of them.")
            if self.threshold is None:
                raise UsageError(
                    "A loss is a function of the probability of exceeding a threshold: give "
                    "threshold, too."
                )
        if not 0.5 <= self.certainty < 1.0:
            raise UsageError(
                f"Expected certainty to be a probability from 0.5, below 1, got {self.certainty:g}."
            )
        if not 0.0 < self.miss_cost < math.inf:
            raise UsageError(f"Expected miss_cost above 0 and finite, got {self.miss_cost:g}.")
        if self.stop_when is not None:
            if self.threshold is None:
                raise UsageError(
                    "A stopping rule is about calls above and below a threshold: give threshold, "
                    "too."
                )
            if not 0.0 < self.stop_when < 0.5:
                raise UsageError(
                    "Expected stop_when to be a share of wrong calls above 0, below 0.5, such as "
                    f"0.05 (or 5%), got {self.stop_when:g}."
                )
        if self.trials is not None:
            check_whole("trials", self.trials, 1)
        self._check_columns()
        self._check_money()

    @property
    def chosen_criterion(self) -> CriterionName:
        """Criterion that is used."""
        return self.criterion or _USUAL[self.goal]

    @property
    def coordinates(self) -> Coordinates:
        """Units and names of positions."""
        return COORDINATES[self.units]

    @property
    def calls(self) -> tuple[float, float]:
        """Probabilities of being above at most, at least, with which a site is below, above."""
        return 1.0 - self.certainty, self.certainty

    @property
    def cheaper_above(self) -> float:
        """Probability of being above from which on that is the cheaper of the two calls."""
        return 1.0 / (1.0 + self.miss_cost)

    def unclaimed(self, names: Sequence[str]) -> list[str]:
        """Return the columns that are not covariates, cost, stratum or reachable.

        Only these are recognised by their usual names.
        """
        claimed = {*self.covariates, self.cost, self.stratum, self.reachable}
        return [name for name in names if name not in claimed]

    def _check_columns(self) -> None:
        object.__setattr__(self, "covariates", tuple(self.covariates))
        if self.x is not None:
            object.__setattr__(self, "x", tuple(self.x))
            if len(self.x) != 2:
                raise UsageError(
                    f"Expected x to be two columns, {' and '.join(self.coordinates.names)}, got "
                    f"{self.x}."
                )
        named = [*self.covariates, *(self.x or ())]
        others = (self.id, self.examined, self.positive, self.stratum, self.reachable)
        named += [name for name in others if name is not None]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise UsageError(
                f"Column {twice[0]!r} is named twice among id, x, covariates, examined, positive, "
                "stratum and reachable. Name each column once."
            )

    def _check_money(self) -> None:
        if self.budget is not None and not 0.0 < self.budget < math.inf:
            raise UsageError(f"Expected budget above 0, or none, got {self.budget:g}.")
        for name in ("minimum_distance", "cost_per_km"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise UsageError(f"Expected {name} of at least 0, got {value:g}.")
        if self.quotas and self.stratum is None:
            raise UsageError("Quotas are for strata: name their column by stratum, too.")
        for name, most in self.quotas.items():
            check_whole(f"quota of stratum {name!r}", most, 0)
        object.__setattr__(self, "quotas", {str(k): v for k, v in self.quotas.items()})
        if self.base is None:
            if self.cost_per_km:
                raise UsageError("Cost per km is of travel from a base: give base, too.")
            return
        x, y = self.base
        if not (math.isfinite(x) and math.isfinite(y)):
            raise UsageError(f"Expected base to be two finite numbers, got {x} and {y}.")
        if self.coordinates.are_degrees and not (-180.0 <= x <= 360.0 and abs(y) <= 90.0):
            raise UsageError(
                "Expected base to be longitude (-180 to 360) and latitude (-90 to 90) in degrees, "
                f"got {x:g} and {y:g}. Of a map projection: give units km or m."
            )
        object.__setattr__(self, "base", (x, y))


# --- units and names of positions -----------------------------------------------------------------


@dataclass(frozen=True)
class Coordinates:
    """Units and names of positions.

    Attributes:
        units: ``degrees``: longitude and latitude; ``km`` or ``m``: east and north on a map
            projection, such as UTM.
        mapping_units: The units as ``bo_stream.mapping`` names them.
        names: Names of the two columns in all tables that a survey writes.
        cell: Number that a cell of a position is expected to be, for messages.
        near: Some five kilometres, in these units.
        digits: Decimal places of about a metre.
    """

    units: PositionUnits
    mapping_units: Units
    names: tuple[str, str]
    cell: str
    near: float
    digits: int

    @property
    def are_degrees(self) -> bool:
        """Whether they are longitude and latitude."""
        return self.units == "degrees"

    def in_space(self, X: Tensor) -> Tensor:
        """Map positions, ``n x d``, to points whose distances are kilometres, ``n x 3`` or 2."""
        from bo_stream.mapping import places

        return places(X, (0, 1), self.mapping_units)

    def text(self, value: float) -> str:
        """Write a number of a position to about a metre."""
        return f"{value:.{self.digits}f}"

    def label(self, value: float, column: int) -> str:
        """Write a round number of a position at the edge of a map, as in ``35° E``.

        Args:
            value: Of the position.
            column: 0: longitude or east; 1: latitude or north.
        """
        if not self.are_degrees:
            return f"{1e-3 * value if self.units == 'm' else value:g} km"
        turned = (value + 180.0) % 360.0 - 180.0
        letters = ("EW", "NS")[column]
        letter = "" if turned == 0.0 else f" {letters[0] if turned > 0.0 else letters[1]}"
        return f"{abs(round(turned, 6)):g}°{letter}"


_ON_EARTH, _PROJECTED = ("longitude", "latitude"), ("east", "north")

COORDINATES: dict[PositionUnits, Coordinates] = {
    known.units: known
    for known in (
        Coordinates("degrees", "degrees", _ON_EARTH, "decimal degrees, such as -4.7264", 0.05, 5),
        Coordinates(
            "km", "kilometres", _PROJECTED, "kilometres of a map projection, such as 412.35", 5.0, 3
        ),
        Coordinates(
            "m", "metres", _PROJECTED, "metres of a map projection, such as 412350", 5000.0, 0
        ),
    )
}
"""Coordinates by their units."""

DEGREES = COORDINATES["degrees"]


# --- sizes and designs of the replay of a finished survey ----------------------------------------


Design = Literal["adaptive", "random"]

DESIGNS: tuple[Design, ...] = ("adaptive", "random")

SEEDS = 3
"""Number of replays of each design, unless another is asked for."""


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """Sizes of a replay; a ``UsageError`` says what is out of range.

    Attributes:
        start: Number of sites that are drawn at random and told first.
        q: Number of sites of a round.
        rounds: Number of rounds after the first sites.
    """

    start: int = 100
    q: int = 10
    rounds: int = 10

    def __post_init__(self) -> None:
        for name in ("start", "q", "rounds"):
            check_whole(name, getattr(self, name), 1)

    def check(self, sites: int, source: str) -> None:
        """Check that there are enough sites with results to leave at least one at the end.

        Args:
            sites: Number of sites with results.
            source: Name of their table, for messages.

        Raises:
            UsageError: They are too few.
        """
        if self.start + self.q * self.rounds < sites:
            return
        most = (sites - 1 - self.start) // self.q
        advice = (
            f"At most {most:,} rounds are possible (--rounds {most})."
            if most > 0
            else "Begin with fewer (--start), or choose fewer at a time (-q)."
        )
        raise UsageError(
            f"{source} has results of {sites:,} sites, too few for {self.start:,} first ones and "
            f"{self.rounds:,} rounds of {self.q:,}, after which one at least is to be left to "
            f"predict. {advice}"
        )

"""Choose the next villages, from sites or from rows that are added up to sites."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bo_stream.acquisition.constraints import Round, SiteConstraints
from bo_stream.acquisition.criteria import (
    Criterion,
    ExceedanceEntropy,
    ExpectedLoss,
    IntegratedVariance,
    Misclassification,
    TargetedVariance,
)
from bo_stream.acquisition.site_choice import SiteChoice, select_sites
from bo_stream.errors import UsageError
from bo_stream.loops.models import import_function
from bo_stream.loops.survey.cells import Array, Cells, first, read_counts
from bo_stream.loops.survey.columns import find_column, given_column, required_column, squeezed
from bo_stream.loops.survey.ledger import SurveyFacts
from bo_stream.loops.survey.places import position_columns
from bo_stream.loops.survey.settings import DEGREES, Coordinates, SurveySettings
from bo_stream.loops.survey.sites import SurveySites
from bo_stream.models.base import StreamingGP


@dataclass(frozen=True)
class Chosen:
    """A site that is chosen for a round.

    Attributes:
        index: Its position in the list.
        gain: Expected fall of the criterion's total, None in a first round.
        cost: Of the survey and of the travel that it adds.
    """

    index: int
    gain: float | None
    cost: float


class Choice:
    """The sites that may be asked for next, and how they are chosen.

    Args:
        sites: The list.
        facts: What is known.
        settings: Of the survey.
        criterion: Uncertainty to be reduced; None: the settings' one.
        trusted: Functions of others that may be imported; None: any that the settings name.
    """

    def __init__(
        self,
        sites: SurveySites,
        facts: SurveyFacts,
        settings: SurveySettings,
        criterion: Criterion | None = None,
        trusted: Collection[str] | None = None,
    ) -> None:
        self._sites, self._facts, self._settings = sites, facts, settings
        self._given, self._trusted = criterion, trusted
        self._surveyed = _positions(sites, list(facts.results))
        self._pending = _positions(sites, list(facts.pending))
        # Constraints of a round: those of the settings, and sites that were given up.
        strata, quotas, base = None, None, None
        if sites.strata is not None:
            labels, strata_numbers = np.unique(sites.strata.astype(str), return_inverse=True)
            strata = torch.from_numpy(strata_numbers)
            number = {label: index for index, label in enumerate(labels.tolist())}
            quotas = {number[label]: most for label, most in settings.quotas.items()}
        if settings.base is not None:
            base = sites.on_plane(torch.tensor([settings.base], dtype=sites.X.dtype))[0]
        unreachable = torch.from_numpy(~sites.reachable)
        unreachable[_positions(sites, list(facts.given_up))] = True
        self._constraints = SiteConstraints(
            costs=sites.costs,
            budget=settings.budget,
            positions=sites.kilometres,
            minimum_distance=settings.minimum_distance,
            earlier=sites.on_plane(facts.inputs(facts.surveyed)),
            strata=strata,
            quotas=quotas,
            unreachable=unreachable,
            base=base,
            cost_per_km=settings.cost_per_km,
        )

    def check(self) -> None:
        """Check that a site may be chosen, and by what.

        Raises:
            UsageError: There is none, or the loss cannot be imported or is no loss.
        """
        self._begin(self._pending)
        if self._trusted is not None:
            return
        criterion, mean = self._criterion, torch.linspace(-3.0, 3.0, 7, dtype=torch.float64)
        try:  # it out, for a loss may be any function
            criterion.current(mean, torch.ones_like(mean))
        except Exception as error:
            if self._settings.loss is None:
                raise
            raise UsageError(
                f"The loss {self._settings.loss} does not map probabilities to losses, elementwise "
                f"by torch: {error}"
            ) from error

    @cached_property
    def _criterion(self) -> Criterion:
        if self._given is not None:
            return self._given
        loss = self._settings.loss
        if loss is not None and self._trusted is not None and loss not in self._trusted:
            raise UsageError(
                f"The survey names the loss {loss}, which would be imported and called. If you "
                f"trust it, name it too: --loss {loss}, or trusted=[...]."
            )
        return criterion_of(self._settings)

    def first(self, q: int) -> list[Chosen]:
        """Choose up to q sites that are spread out, for lack of results.

        Raises:
            UsageError: No site may be chosen.
        """
        start = self._begin(self._pending)
        points = spread_coordinates(self._sites.X, self._sites.X, self._sites.coordinates)
        picks = spread_out(points, q, points[self._pending], start)
        return [Chosen(index, None, cost) for index, cost in picks]

    def next(self, model: StreamingGP, q: int, trials: int) -> tuple[list[Chosen], float]:
        """Choose up to q sites that reduce the criterion most, once all pending ones are surveyed.

        Args:
            model: Of all results.
            q: Most sites.
            trials: Number of people that a site is expected to examine.

        Returns:
            The sites, and the criterion's total before them, once all pending ones are surveyed.

        Raises:
            UsageError: No site may be chosen.
        """
        choice = self._select(model, q, trials, self._pending, self._criterion)
        values = (choice.indices.tolist(), choice.gains.tolist(), choice.costs.tolist())
        return [Chosen(*each) for each in zip(*values, strict=True)], choice.before

    def forecast(self, model: StreamingGP, rounds: int, q: int, trials: int) -> pd.DataFrame:
        """Predict the criterion's total after further rounds; arguments as :meth:`next`.

        Each round is chosen as if the rounds before it, and the pending sites, were surveyed. The
        table ends where no site is left; the total is NaN if none is left now.

        Raises:
            UsageError: The settings' loss is not trusted, or cannot be imported.
        """
        criterion, waiting = self._criterion, self._pending
        lines: list[tuple[int, int, float, float]] = []
        for number in range(1, rounds + 1):
            try:
                choice = self._select(model, q, trials, waiting, criterion)
            except UsageError:
                break
            if not lines:
                lines.append((0, 0, choice.before, 0.0))
            _, sites, _, cost = lines[-1]
            sites, cost = sites + len(choice.indices), cost + float(choice.costs.sum())
            lines.append((number, sites, choice.after, cost))
            waiting = torch.cat((waiting, choice.indices))
        columns = ["round", "sites", "total", "cost"]
        return pd.DataFrame(lines or [(0, 0, np.nan, 0.0)], columns=columns)

    def _select(
        self, model: StreamingGP, q: int, trials: int, pending: Tensor, criterion: Criterion
    ) -> SiteChoice:
        self._begin(pending)
        return select_sites(
            model,
            self._sites.X,
            q,
            criterion,
            exclude=self._surveyed,
            pending=pending,
            trials=trials,
            constraints=self._constraints,
            settles=self._settings.goal == "exceedance",
        )

    def _begin(self, pending: Tensor) -> Round:
        """Begin a round, and check that a site may be chosen."""
        available = torch.ones(len(self._sites), dtype=torch.bool)
        available[self._surveyed] = False
        available[pending] = False
        start = Round.begin(self._constraints, available, pending, self._sites.X)
        if not bool(start.allowed.any()):
            counts = {
                "surveyed": len(self._surveyed),
                "pending": len(self._pending),
                "given up": len(self._facts.given_up),
                "not reachable": int((~self._sites.reachable).sum()),
            }
            known = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
            others = ""
            if self._settings.minimum_distance or self._settings.quotas:
                others = (
                    ". Any others are nearer to surveyed or pending ones than the minimum "
                    "distance, or in strata with a quota of 0"
                )
            raise UsageError(
                f"No site is left to ask for: of {len(self._sites):,} sites, {known}{others}."
            )
        costs = start.costs()
        if costs is not None and not bool(start.feasible(costs).any()):
            least = int(costs.masked_fill(~start.allowed, torch.inf).argmin())
            raise UsageError(
                f"The budget of {self._settings.budget:g} pays for no site: the cheapest one, "
                f"{self._sites.ids[least]}, costs {float(costs[least]):.4g}, travel included. "
                "Raise the budget."
            )
        return start


def criterion_of(settings: SurveySettings) -> Criterion:
    """Build the criterion that settings name; thresholds and variances are of prevalence.

    Raises:
        UsageError: It is a loss that cannot be imported.
    """
    name, threshold = settings.chosen_criterion, settings.threshold
    if settings.loss is not None and threshold is not None:
        return ExpectedLoss(import_function(settings.loss, "loss"), threshold, "prevalence")
    if name == "variance" or threshold is None:
        return IntegratedVariance(scale="prevalence")
    if name == "misclassification":
        return Misclassification(threshold, "prevalence", settings.miss_cost)
    kind = {"entropy": ExceedanceEntropy, "targeted": TargetedVariance}[name]
    return kind(threshold=threshold, scale="prevalence")


def _positions(sites: SurveySites, ids: Sequence[str]) -> Tensor:
    """Return the positions in the list of sites, of those that are in it."""
    positions = sites.positions(ids)
    return torch.from_numpy(positions[positions >= 0])


# --- first sites of a survey: spread out over the map and over the covariates --------------------


def spread_coordinates(X: Tensor, sites: Tensor, coordinates: Coordinates = DEGREES) -> Tensor:
    """Map sites to coordinates in which position and covariates weigh the same, ``n x d``.

    Positions are in units of the root mean square distance of the sites from their middle. A
    covariate is replaced by its rank among the sites, so that a few extreme values do not draw all
    choices; all covariates together have the mean square of the position.

    Args:
        X: Positions and covariates without missing values, ``n x d``.
        sites: Those that define units and ranks, ``N x d``.
        coordinates: Units of positions.
    """
    transform = coordinates.plane(sites)
    places = transform.transform(sites)[:, :2]
    middle = places.mean(0)
    radius = (places - middle).square().sum(-1).mean().sqrt().clamp_min(1e-9)
    columns = [(transform.transform(X)[:, :2] - middle) / radius]
    covariates = sites.shape[-1] - 2
    for column in range(2, sites.shape[-1]):
        values, ordered = X[:, column].contiguous(), sites[:, column].sort().values
        low = torch.searchsorted(ordered, values, right=False)
        high = torch.searchsorted(ordered, values, right=True)
        # From -1/2 to 1/2; all ranks among equal values are 0.
        ranks = 0.5 * (low + high).to(values) / len(sites) - 0.5
        columns.append((12.0 / covariates) ** 0.5 * ranks.unsqueeze(-1))
    return torch.cat(columns, -1)


def spread_out(points: Tensor, q: int, taken: Tensor, start: Round) -> list[tuple[int, float]]:
    """Choose points one after the other, each the farthest from all others chosen and taken.

    The first one is the nearest to the mean if none is taken. Greedy maximin: without constraints
    the least distance is at least half of the largest possible one [Gonzalez, 1985, Clustering to
    minimize the maximum intercluster distance]. Costs O(N d) a point.

    Args:
        points: Candidates, ``N x d``.
        q: How many to choose at most.
        taken: Points that are taken already, ``k x d``.
        start: A round without sites, which says which candidates may be chosen.

    Returns:
        Positions in ``points`` and costs; fewer than q where no other point may be chosen.
    """
    distance = torch.full_like(points[:, 0], torch.inf)
    for point in taken:
        distance = torch.minimum(distance, _squared(points, point))
    priority = distance if len(taken) else -_squared(points, points.mean(0))
    chosen: list[tuple[int, float]] = []
    while len(chosen) < q:
        costs = start.costs()
        feasible = start.feasible(costs)
        if not bool(feasible.any()):
            break
        pick = int(priority.masked_fill(~feasible, -torch.inf).argmax())
        cost = 0.0 if costs is None else float(costs[pick])
        chosen.append((pick, cost))
        start = start.visiting(pick, cost)
        priority = distance = torch.minimum(distance, _squared(points, points[pick]))
    return chosen


def _squared(points: Tensor, point: Tensor) -> Tensor:
    return (points - point).square().sum(-1)


# --- rows of people or visits that are added up to sites -----------------------------------------


_OF_A_PERSON = (
    *("rdt", "tdr", "pcr", "result", "resultat", "resultado", "testresult", "outcome", "malaria"),
    *("microscopy", "diagnosis", "diagnostic", "diagnostico", "status"),
)
"""Usual names of the column of a person's result, without blanks, signs and accents."""

_POSITIVE = ("1", "pos", "positive", "positif", "positivo", "yes", "oui", "si", "sim", "true", "+")
_NEGATIVE = ("0", "neg", "negative", "negatif", "negativo", "no", "non", "nao", "false", "-")


def grouped_by_position(
    table: pd.DataFrame, settings: SurveySettings, source: str
) -> tuple[pd.DataFrame, list[str]]:
    """Add up the results of rows at one position, and keep the first of all other cells.

    A row may be a person: a result of 0 or 1 (or words such as positive) in a column, and none of
    people examined.

    Args:
        table: A row a person, a visit or a site.
        settings: Which columns mean what.
        source: Name of the table, for messages.

    Returns:
        A table of sites, numbered by their first rows, with columns of people examined and
        positive; and texts that say how many rows were added up, and in which columns they differ.

    Raises:
        UsageError: A position is missing, a result is no count, or one id is at two positions,
            named by row and column.
    """
    names = [str(name) for name in table.columns]
    cells = Cells(table.set_axis(names, axis=1), source)
    columns = position_columns(names, settings, source)
    places = np.column_stack([cells.numbers(name, settings.coordinates.cell) for name in columns])
    gap = first(np.isnan(places).any(axis=1))
    if gap is not None:
        column = columns[int(np.isnan(places[gap]).argmax())]
        raise cells.fault(gap, column, "it is empty. Every row needs a position.")
    result = _grouped(cells, pd.MultiIndex.from_arrays(list(places.T)), settings, "position")
    given = settings.id if settings.id in names else None
    id_column = find_column(settings.unclaimed(names), "id", given, source)
    if id_column is not None:
        sites = Cells(result[0], source)
        ids = pd.Series(sites.texts(id_column))
        again = first((ids.duplicated() & (ids != "")).to_numpy())
        if again is not None:
            earlier = first((ids == ids[again]).to_numpy()) or 0
            raise UsageError(
                f"{source}: {sites.row(earlier)} and {sites.row(again)} have the same id "
                f"{ids[again]!r} at different positions. Give all rows of a site its position, or "
                "every site an id of its own, or name another column by --id."
            )
    return result


def grouped_by_id(
    table: pd.DataFrame, settings: SurveySettings, source: str
) -> tuple[pd.DataFrame, list[str]]:
    """Add up the results of rows of one id, otherwise as :func:`grouped_by_position`."""
    names = [str(name) for name in table.columns]
    given = settings.id if settings.id in names else None
    column = required_column(settings.unclaimed(names), "id", given, source)
    cells = Cells(table.set_axis(names, axis=1), source, column)
    ids = cells.texts(column)
    empty = first(ids == "")
    if empty is not None:
        raise cells.fault(empty, column, "the id is missing. Which site is it?")
    return _grouped(cells, pd.Index(ids, dtype=object), settings, "id")


def _grouped(
    cells: Cells, keys: pd.Index, settings: SurveySettings, what: str
) -> tuple[pd.DataFrame, list[str]]:
    number, distinct = pd.factorize(keys)
    counts, told = _counts(cells, settings)
    others = [name for name in cells.names if name not in counts and name != told]
    firsts = pd.Series(range(len(cells))).groupby(number).first().to_numpy()
    table = cells.table[[name for name in cells.names if name != told]].iloc[firsts].copy()
    differing = []
    for name in others:
        texts = pd.Series(cells.texts(name))
        filled = texts != ""
        rows = pd.Series(np.arange(len(cells)))[filled].groupby(number[filled]).first()
        chosen = firsts.copy()
        chosen[rows.index.to_numpy()] = rows.to_numpy()
        table[name] = cells.table[name].to_numpy()[chosen]
        several = int((texts[filled].groupby(number[filled]).nunique() > 1).sum())
        if several:
            differing.append(f"{name!r} (in {several:,})")
    for name, values in counts.items():
        sums = pd.Series(values).groupby(number).sum(min_count=1)
        table[name] = sums.to_numpy()
    said = [f"{len(cells):,} rows were added up to {len(distinct):,} sites, one for each {what}."]
    if differing:
        said.append(
            "Where rows of a site differ, the value of the first is kept: "
            f"{', '.join(differing)} of {len(distinct):,} sites."
        )
    return table, said


def _counts(cells: Cells, settings: SurveySettings) -> tuple[dict[str, Array], str | None]:
    """Read people examined and positive of each row, NaN where there is no result, by column.

    Returns:
        The counts, and the column of people's results that they replace, if there is one.
    """
    names = settings.unclaimed(cells.names)
    given = {role: getattr(settings, role) for role in ("examined", "positive")}
    found = {
        role: find_column(names, role, name if name in names else None, cells.source)
        for role, name in given.items()
    }
    e, p = found["examined"], found["positive"]
    if e is not None and (p is not None or given["examined"] is not None):
        counts = read_counts(cells, settings)
        read = {e: np.full(len(cells), np.nan), str(p): np.full(len(cells), np.nan)}
        for row, count in counts.items():
            read[e][row], read[str(p)][row] = count.examined, count.positive
        return read, None
    column = p
    if column is None and given["positive"] is not None:
        column = given_column(names, given["positive"], cells.source, "--positive")
    elif column is None:
        usual = [name for name in names if squeezed(name) in _OF_A_PERSON]
        if len(usual) > 1:
            raise UsageError(
                f"{cells.source}: columns {', '.join(map(repr, usual))} could each be that of "
                "results. Say which by --positive."
            )
        if not usual:
            return {}, None
        column = usual[0]
    results = _results(cells, column)
    taken = "examined" in cells.names or given["examined"] not in (None, "examined")
    if taken and given["examined"] is None:
        raise UsageError(
            f"{cells.source}: column {column!r} has a result of a person a row, but there is a "
            "column 'examined', too. Say which are meant: --examined NAME --positive NAME."
        )
    examined = np.where(np.isnan(results), np.nan, 1.0)
    names_of_counts = given["examined"] or "examined", given["positive"] or "positive"
    summed = dict(zip(names_of_counts, (examined, results), strict=True))
    return summed, column if column not in summed else None


def _results(cells: Cells, column: str) -> Array:
    """Read a person's results: 1 positive, 0 negative, NaN not examined."""
    texts = [squeezed(text) or text for text in cells.texts(column)]
    read = np.full(len(cells), np.nan)
    for row, text in enumerate(texts):
        if text in _POSITIVE:
            read[row] = 1.0
        elif text in _NEGATIVE:
            read[row] = 0.0
        elif text:
            raise cells.fault(
                row,
                column,
                f"expected a person's result, 0 or 1, got {text!r}. There is no column of people "
                "examined: is it numbers of people? Then name that one, too: --examined NAME.",
            )
    return read

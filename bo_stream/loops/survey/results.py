"""Results as they come back from the field: checked, and compared with what is known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import pandas as pd

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Array, Cells, Mask, Texts, first
from bo_stream.loops.survey.columns import required_column
from bo_stream.loops.survey.counts import Counts, read_counts
from bo_stream.loops.survey.dates import find_dates, read_dates
from bo_stream.loops.survey.facts import SiteResult
from bo_stream.loops.survey.places import check_places, position_columns_if_any
from bo_stream.loops.survey.remarks import far_sites, moved_sites, odd_covariates
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.sites import SurveySites, read_inputs

MOST_COMPARED = 5000
"""Number of sites up to which an unknown id is compared with all ids, letter by letter."""


@dataclass(frozen=True)
class Told:
    """What a table of results brought.

    Attributes:
        new: Ids of sites that had no result.
        corrected: Ids whose numbers, place or date replace others.
        unchanged: Ids whose result was known already.
        unasked: Ids of the new ones that are in the list but were not pending.
        outside: Ids of the new ones that are not in the list.
        empty: Number of rows without numbers, which were passed over.
        warnings: Texts for the coordinator.
    """

    new: tuple[str, ...]
    corrected: tuple[str, ...]
    unchanged: tuple[str, ...]
    unasked: tuple[str, ...]
    outside: tuple[str, ...]
    empty: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ResultsTable:
    """Results of a table, which are right as far as one can tell.

    Attributes:
        counts: By id.
        places: Position and covariates, NaN where missing, of those sites of other ids than the
            list's that the table has a position of.
        empty: Number of rows without numbers.
        warnings: Texts for the coordinator.
        dates: By id, in ISO 8601, of those sites that the table has a date of.
    """

    counts: Mapping[str, Counts]
    places: Mapping[str, Array]
    empty: int
    warnings: tuple[str, ...]
    dates: Mapping[str, str]

    @classmethod
    def of(
        cls,
        table: pd.DataFrame,
        settings: SurveySettings,
        sites: SurveySites,
        known: Mapping[str, SiteResult],
        source: str,
    ) -> ResultsTable:
        """Check a table and read it.

        Args:
            table: Columns of id, examined, positive and perhaps date; rows without numbers are
                passed over. Sites that are not in the list and not known bring position and
                covariates.
            settings: Which columns mean what.
            sites: The list.
            known: Results by id.
            source: Name of the table, for messages.

        Raises:
            UsageError: A fault, named by row and column.
        """
        names = [str(name) for name in table.columns]
        if table.empty:
            raise UsageError(f"{source} has no rows.")
        given = settings.id if settings.id in names else None
        id_column = required_column(settings.unclaimed(names), "id", given, source)
        whole = Cells(table.set_axis(names, axis=1), source, id_column)
        counts = read_counts(whole, settings)
        cells = whole.rows(list(counts))
        ids = cells.texts(id_column)
        _check_ids(cells, id_column, ids)
        places, warnings = _read_places(cells, ids, settings, sites, known)
        column = find_dates(cells, settings)
        dates = [""] * len(cells) if column is None else read_dates(cells, column)
        return cls(
            dict(zip(ids.tolist(), counts.values(), strict=True)),
            places,
            len(whole) - len(cells),
            tuple(warnings),
            {site: day for site, day in zip(ids.tolist(), dates, strict=True) if day},
        )

    def records(self, sites: SurveySites, known: Mapping[str, SiteResult]) -> list[dict[str, Any]]:
        """Return the results that are new or changed, as a ledger keeps them."""
        return [
            _record(site, counts, self.places.get(site), self.dates.get(site), sites)
            for site, counts in self.counts.items()
            if not self._is_known(site, known)
        ]

    def compared(
        self, sites: SurveySites, known: Mapping[str, SiteResult], pending: Mapping[str, object]
    ) -> Told:
        """Compare the results with those known, and with the sites that are asked for."""
        new = [site for site in self.counts if site not in known]
        unchanged = [site for site in self.counts if self._is_known(site, known)]
        listed = sites.positions(new) >= 0
        return Told(
            tuple(new),
            tuple(site for site in self.counts if site not in {*new, *unchanged}),
            tuple(unchanged),
            tuple(s for s, there in zip(new, listed, strict=True) if there and s not in pending),
            tuple(s for s, there in zip(new, listed, strict=True) if not there),
            self.empty,
            self.warnings,
        )

    def _is_known(self, site: str, known: Mapping[str, SiteResult]) -> bool:
        former = known.get(site)
        if former is None or former.counts != self.counts[site]:
            return False
        if self.dates.get(site, former.date) != former.date:
            return False
        place = self.places.get(site)
        return place is None or np.array_equal(place, np.array(former.place), equal_nan=True)


def _check_ids(cells: Cells, column: str, ids: Texts) -> None:
    """Check that each row with a result has an id, and no two rows the same one."""
    empty = first(ids == "")
    if empty is not None:
        raise cells.fault(empty, column, "the id is missing. Which site is it?")
    again = first(pd.Series(ids).duplicated().to_numpy())
    if again is None:
        return
    earlier = first(ids == ids[again]) or 0
    rows = [cells.table.index[row] for row in (earlier, again)]
    raise UsageError(
        f"{cells.source}: rows {rows[0]} and {rows[1]} both have the id {ids[again]!r}. Keep one "
        "row for each site: add the numbers up if both surveys count."
    )


def _read_places(
    cells: Cells,
    ids: Texts,
    settings: SurveySettings,
    sites: SurveySites,
    known: Mapping[str, SiteResult],
) -> tuple[dict[str, Array], list[str]]:
    """Read positions and covariates of the sites that are not in the list.

    Returns:
        Those by id; and warnings about them, and about listed sites that are told to lie elsewhere.
    """
    listed = sites.positions(ids.tolist())
    columns = position_columns_if_any(cells, settings)
    places = np.full((len(cells), 2), np.nan)
    if columns is not None:
        places = np.column_stack([cells.numbers(column) for column in columns])
    gaps: Mask = np.asarray(np.isnan(places).any(axis=1))
    strange = first(np.array([site not in known for site in ids]) & (listed < 0) & gaps)
    if strange is not None:
        raise _unknown_site(cells, sites, str(ids[strange]), strange)
    warnings = moved_sites(cells, places, sites, listed)
    rows = np.flatnonzero((listed < 0) & ~gaps).tolist()
    if columns is None or not rows:
        return {}, warnings
    others = cells.rows(rows)
    missing = [name for name in settings.covariates if name not in cells.names]
    if missing:
        raise UsageError(
            f"{cells.source} has no column {missing[0]!r}, a covariate, and {others.row(0)} is not "
            "in the list of sites. Add the column; a cell may be empty."
        )
    warnings += check_places(others, places[rows], columns, settings.coordinates)
    read = read_inputs(others, columns, settings)
    warnings += far_sites(others, read, sites) + odd_covariates(read, sites)
    return dict(zip(ids[rows].tolist(), read, strict=True)), warnings


def _unknown_site(cells: Cells, sites: SurveySites, site: str, row: int) -> UsageError:
    """Say that a site is not in the list, and which id may be meant."""
    bare = _bare(site)
    like: Sequence[str] = [other for other in sites.ids if _bare(other) == bare]
    if not like and len(sites) <= MOST_COMPARED:
        like = get_close_matches(site, sites.ids.tolist(), n=1)
    hint = f" Is it {like[0]!r}?" if like else ""
    return cells.fault(
        row,
        cells.id_column,
        f"there is no site {site!r} in the list.{hint} A site outside the list needs its "
        f"{', '.join(sites.coordinates.names)} and covariates in this table.",
    )


def _bare(site: str) -> str:
    """Reduce an id to small letters and numbers without leading zeros."""
    return re.sub(r"(?<!\d)0+(?=\d)", "", re.sub(r"[^a-z0-9]+", "", site.casefold()))


def _record(
    site: str, counts: Counts, place: Array | None, day: str | None, sites: SurveySites
) -> dict[str, Any]:
    """Return a result as a ledger keeps it."""
    record: dict[str, Any] = {
        "id": site, "positive": counts.positive, "examined": counts.examined
    }  # fmt: skip
    if day is not None:
        record["date"] = day
    if place is None:
        return record
    values = [None if np.isnan(value) else float(value) for value in place]
    named = dict(zip(sites.covariates, values[2:], strict=True))
    position = dict(zip(sites.coordinates.names, values[:2], strict=True))
    return {**record, **position, "covariates": named}

"""Read the results of visits, also of single people, and say what looks wrong in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.spatial import cKDTree

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import (
    DASHES,
    DATE,
    Array,
    Cells,
    Counts,
    Mask,
    Texts,
    as_listed,
    count_columns,
    first,
    meant,
    number_columns,
    read_counts,
    read_dates,
)
from bo_stream.loops.survey.columns import (
    find_column,
    given_column,
    listed_as,
    required_column,
    squeezed,
    unaccented,
)
from bo_stream.loops.survey.findings import FORM
from bo_stream.loops.survey.ledger import SiteResult
from bo_stream.loops.survey.places import (
    check_places,
    position_columns,
    position_columns_if_any,
)
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.sites import SurveySites, read_inputs

_MOVED = 10.0
"""Distance from a site's position in the list, in kilometres, from which a remark is made."""

_FACTOR = 20.0
"""Factor between typical values of a covariate that may be one between units."""

_HERE = 0.05
"""Distance, in kilometres, up to which a position is taken for a listed site's."""


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
        warnings: Texts for the coordinator, which stand until the results are corrected.
        remarks: Texts about how the table was read.
    """

    new: tuple[str, ...]
    corrected: tuple[str, ...]
    unchanged: tuple[str, ...]
    unasked: tuple[str, ...]
    outside: tuple[str, ...]
    empty: int
    warnings: tuple[str, ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResultsTable:
    """Results of a table, which are right as far as one can tell.

    Attributes:
        counts: By id.
        places: Position and covariates, NaN where missing, of those sites of other ids than the
            list's that the table has a position of.
        empty: Number of rows without numbers.
        warnings: Texts for the coordinator, which stand until the results are corrected.
        remarks: Texts about how the table was read: ids that lost their zeros, columns not used.
        dates: By id, in ISO 8601, of those sites that the table has a date of.
    """

    counts: Mapping[str, Counts]
    places: Mapping[str, Array]
    empty: int
    warnings: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    dates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        table: pd.DataFrame,
        settings: SurveySettings,
        sites: SurveySites,
        known: Mapping[str, SiteResult],
        source: str,
        exact_ids: bool = False,
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
            exact_ids: Whether ids are those of the list, which no spreadsheet made numbers of.

        Raises:
            UsageError: A fault, named by row and column.
        """
        names = [str(name) for name in table.columns]
        if table.empty:
            raise UsageError(f"{source} has no rows.")
        settings = _as_in_form(settings, names)
        id_column = _id_column(names, settings, source)
        numeric = number_columns(names, settings, source)
        whole = Cells(table, source, id_column, numeric=numeric)
        counted = count_columns(whole, settings)
        counts = read_counts(whole, counted)
        cells = whole.rows(list(counts))
        columns = position_columns_if_any(cells, settings)
        positions = np.full((len(cells), 2), np.nan)
        if columns is not None:
            positions = np.column_stack([cells.numbers(column) for column in columns])
        ids, remarks = _read_ids(cells, id_column, positions, sites, known, exact_ids)
        places, warnings = _read_places(cells, ids, columns, positions, settings, sites, known)
        dated = find_column(settings.unclaimed(names), DATE, None, source)
        dates = [""] * len(cells) if dated is None else read_dates(cells, dated)
        # Columns of the list and of the form to fill in come along; others deserve a remark.
        expected = {id_column, *counted, *(columns or ()), *([] if dated is None else [dated])}
        expected |= {*FORM, *sites.names, *listed_as(sites.names, FORM).values()}
        expected |= {*settings.covariates}
        unused = [name for name in names if name not in expected]
        if unused:
            remarks.append(f"Columns not used: {', '.join(map(repr, unused))}.")
        return cls(
            dict(zip(ids.tolist(), counts.values(), strict=True)),
            places,
            len(whole) - len(cells),
            tuple(warnings),
            tuple(remarks),
            {site: day for site, day in zip(ids.tolist(), dates, strict=True) if day},
        )

    def records(self, sites: SurveySites, known: Mapping[str, SiteResult]) -> list[dict[str, Any]]:
        """Return the results that are new or changed, as a ledger stores them."""
        records = []
        for site, counts in self.counts.items():
            if self._is_known(site, known):
                continue
            record: dict[str, Any] = {
                "id": site, "positive": counts.positive, "examined": counts.examined
            }  # fmt: skip
            if site in self.dates:
                record["date"] = self.dates[site]
            if site in self.places:
                values = [None if np.isnan(v) else float(v) for v in self.places[site]]
                record |= dict(zip(sites.coordinates.names, values[:2], strict=True))
                record["covariates"] = dict(zip(sites.covariates, values[2:], strict=True))
            records.append(record)
        return records

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
            self.remarks,
        )

    def _is_known(self, site: str, known: Mapping[str, SiteResult]) -> bool:
        previous = known.get(site)
        if previous is None or previous.counts != self.counts[site]:
            return False
        if self.dates.get(site, previous.date) != previous.date:
            return False
        place = self.places.get(site)
        return place is None or np.array_equal(place, np.array(previous.place), equal_nan=True)


def _as_in_form(settings: SurveySettings, names: Sequence[str]) -> SurveySettings:
    """Rename the columns that settings name as a form does, if the table is one.

    A form has columns of its own, such as ``id``; one of the list is ``listed_id`` there.
    """
    is_form = {"id", *settings.coordinates.names} <= set(names)  # some may have been deleted
    is_form = is_form and not {"reason", "gain"}.isdisjoint(names)

    def renamed(name: str) -> str:
        name = f"listed_{name}" if is_form else name
        while f"listed_{name}" in names:
            name = f"listed_{name}"
        return name

    roles = {role: getattr(settings, role) for role in ("cost", "stratum", "reachable")}
    found: dict[str, Any] = {role: renamed(name) for role, name in roles.items() if name in FORM}
    found["covariates"] = tuple(
        renamed(name) if name in FORM else name for name in settings.covariates
    )
    own: dict[str, Any] = {"id": "id", "x": settings.coordinates.names} if is_form else {}
    return replace(settings, **found, **own)


def _id_column(names: Sequence[str], settings: SurveySettings, source: str) -> str:
    """Find the column of ids: ``id`` where no other is, even if the list's is a stratum."""
    free = settings.unclaimed(names)
    given = settings.id if settings.id in names else None
    if "id" in names and find_column(free, "id", given, source) is None:
        return "id"
    return required_column(free, "id", given, source)


def _read_ids(
    cells: Cells,
    column: str,
    positions: Array,
    sites: SurveySites,
    known: Mapping[str, SiteResult],
    exact: bool,
) -> tuple[Texts, list[str]]:
    """Read ids, with the leading zeros that they have in the list and lost in a spreadsheet.

    Of two sites that an id could be, it is the one at the row's position. Exact ids stay as they
    are.

    Returns:
        The ids, ``n``, and a remark if some were changed.

    Raises:
        UsageError: An id is missing or there twice, or could be two sites' and its row has no
            position that decides.
    """
    ids = cells.texts(column)
    listed = [*sites.ids, *(site for site in known if sites.positions([site])[0] < 0)]
    like = {} if exact else as_listed(ids, listed)
    in_space = sites.coordinates.in_space
    keeps_zeros = any(re.match("0[0-9]", site) for site in ids)
    restored, changed = ids.copy(), []
    for row, site in enumerate(ids):
        others = like.get(site, [site])
        sure = site in others and (keeps_zeros or site.startswith("0"))
        if not others or sure or others == [site]:
            continue
        if len(others) > 1 and not np.isnan(positions[row]).any():
            here = in_space(torch.from_numpy(positions[row : row + 1]))
            near = [  # those of the list at this position
                other
                for other, place in zip(others, sites.positions(others), strict=True)
                if place >= 0
                and float((in_space(sites.X[place : place + 1, :2]) - here).norm()) <= _HERE
            ]
            others = near or others
        if len(others) > 1:
            named = " or ".join(repr(other) for other in others)
            raise cells.fault(
                row,
                cells.id_column,
                f"id {site!r} could be {named} of the list: a spreadsheet drops leading zeros. "
                f"Write the id as text, or add columns {' and '.join(sites.coordinates.names)}.",
            )
        restored[row] = others[0]
        if others[0] != site:
            changed.append(f"{site!r} is {others[0]!r}")
    cells.refuse(restored == "", column, "the id is missing. Which site is it?")
    again = first(pd.Series(restored).duplicated().to_numpy())
    if again is not None:
        earlier = first(restored == restored[again]) or 0
        rows = [cells.table.index[row] for row in (earlier, again)]
        raise UsageError(
            f"{cells.source}: rows {rows[0]} and {rows[1]} both have the id {restored[again]!r}. "
            "Keep one row for each site: add the numbers up if both surveys count."
        )
    if not changed:
        return restored, []
    more = f", and {len(changed) - 5:,} more" if len(changed) > 5 else ""
    return restored, [
        f"Ids that a spreadsheet made numbers of are those of the list: {', '.join(changed[:5])}"
        f"{more}."
    ]


def _read_places(
    cells: Cells,
    ids: Texts,
    columns: tuple[str, str] | None,
    places: Array,
    settings: SurveySettings,
    sites: SurveySites,
    known: Mapping[str, SiteResult],
) -> tuple[dict[str, Array], list[str]]:
    """Read positions and covariates of the sites that are not in the list.

    Returns:
        Positions and covariates by id; and warnings about these sites, and about listed sites whose
        position is another one than in the list.
    """
    listed = sites.positions(ids.tolist())
    gaps: Mask = np.asarray(np.isnan(places).any(axis=1))
    strange = first(np.array([site not in known for site in ids], dtype=bool) & (listed < 0) & gaps)
    if strange is not None:
        like = meant(str(ids[strange]), sites.ids.tolist())
        hint = "" if like is None else f" Is it {like!r}?"
        raise cells.fault(
            strange,
            cells.id_column,
            f"there is no site {str(ids[strange])!r} in the list.{hint} A site outside the list "
            f"needs its {', '.join(sites.coordinates.names)} and covariates in this table.",
        )
    in_space = sites.coordinates.in_space
    at = np.flatnonzero((listed >= 0) & ~gaps)
    apart = in_space(torch.from_numpy(places[at])) - in_space(sites.X[listed[at], :2])
    warnings = [
        f"{cells.row(row)} lies {distance:,.0f} km from where the list has this site: is the id "
        "right? The list's position is used."
        for row, distance in zip(at.tolist(), apart.norm(dim=-1).tolist(), strict=True)
        if distance > _MOVED
    ]
    rows = np.flatnonzero((listed < 0) & ~gaps).tolist()
    if columns is None or not rows:
        return {}, warnings
    others = cells.rows(rows)
    if bool((listed >= 0).any()):  # else the table has ids of its own, of other sites
        # An id of the list may have been changed on the way, as by a spreadsheet that made a date
        # of it: no other row may be at the position of a site of the list.
        tree = cKDTree(in_space(sites.X[:, :2]).numpy())
        distances, nearest = tree.query(in_space(torch.from_numpy(places[rows])).numpy())
        strangers = np.array([ids[row] not in known for row in rows], dtype=bool)
        others.refuse(
            (distances <= _HERE) & strangers,
            others.id_column,
            lambda row: (
                f"this site is not in the list, but is where {sites.ids[nearest[row]]!r} "
                "of the list is. If it is that site, give its id; else correct the position."
            ),
        )
    missing = [name for name in settings.covariates if name not in cells.names]
    if missing:
        raise UsageError(
            f"{cells.source} has no column {missing[0]!r}, a covariate, and {others.row(0)} is not "
            "in the list of sites. Add the column; a cell may be empty."
        )
    positions = sites.X[:, :2]
    warnings += check_places(others, places[rows], columns, settings.coordinates, positions)
    read = read_inputs(others, columns, settings)
    warnings += _odd_new_sites(others, read, sites)
    return dict(zip(ids[rows].tolist(), read, strict=True)), warnings


def _odd_new_sites(cells: Cells, read: Array, sites: SurveySites) -> list[str]:
    """Remark on new sites far from the list's, and on covariates that may be in another unit.

    Args:
        cells: The table of new sites.
        read: Positions and covariates, NaN where missing, ``n x d``.
        sites: The list.
    """
    remarks = []
    in_space, (first_name, second_name) = sites.coordinates.in_space, sites.coordinates.names
    listed = in_space(sites.X[:, :2])
    middle = listed.mean(0)
    reach = (listed - middle).norm(dim=-1).max()
    apart = (in_space(torch.from_numpy(read[:, :2])) - middle).norm(dim=-1)
    far = first((apart > 1.5 * reach + 10.0).numpy())
    if far is not None:
        remarks.append(
            f"{cells.row(far)} lies {float(apart[far]):,.0f} km from the middle of the list: is "
            f"its position right, and {first_name} not taken for {second_name}?"
        )
    for column, name in enumerate(sites.covariates, start=2):
        values, known = read[:, column], sites.X[:, column].numpy()
        values = values[~np.isnan(values)]
        if not values.size:
            continue
        low, high = known.min(), known.max()
        margin = 0.5 * (high - low)
        typical, usual = np.median(values), np.median(known)
        is_inside = low <= typical <= high
        is_far = not low - margin <= typical <= high + margin
        is_scaled = usual != 0.0 and not 1.0 / _FACTOR < typical / usual < _FACTOR
        if not is_inside and (is_far or is_scaled):
            remarks.append(
                f"{name}: the new sites have {_span(values)}, the list has {_span(known)}. Is it "
                "in the same unit? Per cent and shares are easily mixed."
            )
    return remarks


def _span(values: Array) -> str:
    low, high = np.min(values), np.max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


# --- rows of people or visits that are added up to sites -----------------------------------------


_OF_A_PERSON = (
    *("rdt", "tdr", "pcr", "result", "resultat", "resultado", "testresult", "outcome", "malaria"),
    *("microscopy", "diagnosis", "diagnostic", "diagnostico", "status"),
)
"""Usual names of the column of a person's result, without blanks, signs and accents."""

_POSITIVE = ("1", "pos", "positive", "positif", "positivo", "yes", "oui", "si", "sim", "true", "+")
_NEGATIVE = ("0", "neg", "negative", "negatif", "negativo", "no", "non", "nao", "false")


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
    columns = position_columns(names, settings, source)
    cells = Cells(table, source, numeric=number_columns(names, settings, source))
    places = np.column_stack([cells.numbers(name, settings.coordinates.cell) for name in columns])
    for column, values in zip(columns, places.T, strict=True):
        cells.refuse(np.isnan(values), column, "it is empty. Every row needs a position.")
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
    settings = _as_in_form(settings, names)
    column = _id_column(names, settings, source)
    cells = Cells(table, source, column, numeric=number_columns(names, settings, source))
    ids = cells.texts(column)
    cells.refuse(ids == "", column, "the id is missing. Which site is it?")
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
        columns = count_columns(cells, settings)
        read = {name: np.full(len(cells), np.nan) for name in columns}
        for row, count in read_counts(cells, columns).items():
            for name, number in zip(columns, (count.examined, count.positive), strict=True):
                read[name][row] = number
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
    """Read a person's results: 1 positive, 0 negative, NaN not examined.

    A dash is negative in a column that has plus signs, and an empty cell in others.
    """
    texts = cells.texts(column)
    dashes: Mask = cells.table[column].astype(str).str.strip().isin(DASHES).to_numpy(bool)
    words = [re.sub(r"\s*\([a-z ]+\)$", "", unaccented(text)).rstrip(".") for text in texts]
    has_plus = "+" in words
    is_clear = has_plus or any(word in _NEGATIVE for word in words)
    cells.refuse(
        dashes & np.bool_(not is_clear),
        column,
        "does a dash mean negative, or not examined? No cell of the column is negative otherwise. "
        "Write 0 for negative; leave cells of people who were not examined empty.",
    )
    read = np.full(len(cells), np.nan)
    read[dashes & has_plus] = 0.0
    for row, (text, word) in enumerate(zip(texts, words, strict=True)):
        if word in _POSITIVE:
            read[row] = 1.0
        elif word in _NEGATIVE:
            read[row] = 0.0
        elif text:
            raise cells.fault(
                row,
                column,
                f"expected a person's result, 0 or 1, got {text!r}. There is no column of people "
                "examined: is it numbers of people? Then name that one, too: --examined NAME.",
            )
    return read

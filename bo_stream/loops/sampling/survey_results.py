"""Results as they come back from the field: checked, and compared with what is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from bo_stream.loops.errors import UsageError
from bo_stream.loops.sampling.cells import Array, Cells, Texts, first
from bo_stream.loops.sampling.columns import find_column, required_column
from bo_stream.loops.sampling.counts import Counts, read_counts
from bo_stream.loops.sampling.survey_facts import SurveyFacts
from bo_stream.loops.sampling.survey_settings import SurveySettings
from bo_stream.loops.sampling.survey_sites import SurveySites, check_places, read_inputs
from bo_stream.mapping.positions import chords

MOVED = 10.0
"""Distance from a site's place in the list, in kilometres, from which a result is remarked on."""


@dataclass(frozen=True)
class Told:
    """What a table of results brought.

    Attributes:
        new: Ids of sites that had no result.
        corrected: Ids whose numbers replace others.
        unchanged: Ids whose numbers were known already.
        unasked: Ids of the new ones that are in the list but had not been asked for.
        outside: Ids of the new ones that are not in the list.
        empty: Number of rows without numbers, which were passed over.
        warnings: Texts for the coordinator.
    """

    new: tuple[str, ...] = ()
    corrected: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    empty: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reading:
    """A table of results, read.

    Attributes:
        told: What it brings.
        records: Results that are new or changed, as the ledger keeps them.
    """

    told: Told
    records: list[dict[str, Any]] = field(default_factory=list)


def read_results(
    table: pd.DataFrame,
    settings: SurveySettings,
    sites: SurveySites,
    facts: SurveyFacts,
    source: str,
) -> Reading:
    """Check a table of results and compare it with the facts, which do not change.

    Args:
        table: Columns of id, examined and positive; rows without numbers are passed over. Sites
            that are not in the list bring longitude, latitude and covariates.
        settings: Which columns mean what.
        sites: The list.
        facts: What is known.
        source: Name of the table, for messages.

    Raises:
        UsageError: A fault, named by row and column.
    """
    names = [str(name) for name in table.columns]
    if not len(table):
        raise UsageError(f"{source} has no rows.")
    table = table.set_axis(names, axis=1)
    given = settings.id if settings.id in names else None
    id_column = required_column(settings.unclaimed(names), "id", given, source)
    cells = Cells(table, source, id_column)
    counts = read_counts(cells, settings)
    ids = cells.texts(id_column)
    told_rows = list(counts)
    _check_ids(cells, id_column, ids, told_rows)
    places, warnings = _places(cells, settings, sites, facts, ids, told_rows)
    new, corrected, unchanged, records = [], [], [], []
    for row in told_rows:
        site, count = str(ids[row]), counts[row]
        former = facts.results.get(site)
        record = _record(site, count, places.get(row), sites)
        moved = former is not None and row in places and _differs(places[row], former.place)
        if former is not None and former.counts == count and not moved:
            unchanged.append(site)
            continue
        (new if former is None else corrected).append(site)
        records.append(record)
    listed = dict(zip(new, sites.positions(new).tolist(), strict=True))
    unasked = [site for site in new if listed[site] >= 0 and site not in facts.pending]
    outside = [site for site in new if listed[site] < 0]
    told = Told(
        tuple(new), tuple(corrected), tuple(unchanged), tuple(unasked), tuple(outside),
        len(table) - len(told_rows), tuple(warnings),
    )  # fmt: skip
    return Reading(told, records)


def _check_ids(cells: Cells, column: str, ids: Texts, rows: Sequence[int]) -> None:
    """Check that each row with a result has an id, and no two the same."""
    told = pd.Series(ids[rows], dtype=object)
    empty = first((told == "").to_numpy())
    if empty is not None:
        raise UsageError(
            f"{cells.source}, row {cells.table.index[rows[empty]]}, column {column!r}: the id is "
            "missing. Which site is it?"
        )
    again = first(told.duplicated().to_numpy())
    if again is not None:
        earlier = first((told == told[again]).to_numpy()) or 0
        rows_of = [cells.table.index[rows[place]] for place in (earlier, again)]
        raise UsageError(
            f"{cells.source}: rows {rows_of[0]} and {rows_of[1]} both have the id {told[again]!r}. "
            "Keep one row for each site: add the numbers up if both surveys count."
        )


def _places(
    cells: Cells,
    settings: SurveySettings,
    sites: SurveySites,
    facts: SurveyFacts,
    ids: Texts,
    rows: Sequence[int],
) -> tuple[dict[int, Array], list[str]]:
    """Read longitude, latitude and covariates of the rows that are not in the list.

    Returns:
        By row; and warnings about these and about listed sites that are told to lie elsewhere.
    """
    listed = sites.positions([str(ids[row]) for row in rows])
    outside = [row for row, place in zip(rows, listed.tolist(), strict=True) if place < 0]
    names = cells.names
    x = settings.x if settings.x is not None and set(settings.x) <= set(names) else None
    columns = x or tuple(
        find_column(names, role, None, cells.source) for role in ("longitude", "latitude")
    )
    unknown = [row for row in outside if str(ids[row]) not in facts.results]
    if None in columns:
        if unknown:
            _stranger(cells, sites, str(ids[unknown[0]]), unknown[0])
        return {}, []
    place = np.column_stack([cells.numbers(str(column)) for column in columns])
    for row in unknown:
        if np.isnan(place[row]).any():
            _stranger(cells, sites, str(ids[row]), row)
    there = [row for row in outside if not np.isnan(place[row]).any()]
    moved = _moved(cells, sites, ids, rows, listed, place)
    if not there:
        return {}, moved
    part = cells.rows(there)
    missing = [name for name in settings.covariates if name not in names]
    if missing:
        raise UsageError(
            f"{cells.source} has no column {missing[0]!r}, a covariate, and {cells.row(there[0])} "
            "is not in the list of sites. Add the column: a cell may be empty."
        )
    check_places(part, place[there], (str(columns[0]), str(columns[1])))
    read = np.column_stack(read_inputs(part, settings))
    moved += _odd_covariates(part, sites, read)
    moved += _far_places(part, sites, read)
    return dict(zip(there, read, strict=True)), moved


def _stranger(cells: Cells, sites: SurveySites, site: str, row: int) -> None:
    """Say that a site is not in the list, and which id may be meant."""
    like = get_close_matches(site, list(sites.ids[:100_000]), n=1)
    same = [other for other in like if other]
    hint = f" Is it {same[0]!r}?" if same else ""
    cells.fault(
        row, cells.id_column, f"there is no site {site!r} in the list.{hint} A site outside the "
        "list needs its longitude, latitude and covariates in this table.",
    )  # fmt: skip


def _moved(
    cells: Cells,
    sites: SurveySites,
    ids: Texts,
    rows: Sequence[int],
    listed: NDArray[np.intp],
    place: Array,
) -> list[str]:
    """Remark on sites of the list whose position in the table is another."""
    there = [
        (row, at) for row, at in zip(rows, listed.tolist(), strict=True)
        if at >= 0 and not np.isnan(place[row]).any()
    ]  # fmt: skip
    if not there:
        return []
    told = torch.from_numpy(place[[row for row, _ in there]])
    known = sites.X[[at for _, at in there], :2]
    apart = (chords(told, (0, 1)) - chords(known, (0, 1))).norm(dim=-1)
    return [
        f"{cells.row(row)} lies {distance:,.0f} km from where the list has site {ids[row]}: is the "
        "id right? The list's position is used."
        for (row, _), distance in zip(there, apart.tolist(), strict=True)
        if distance > MOVED
    ]


def _odd_covariates(cells: Cells, sites: SurveySites, read: Array) -> list[str]:
    """Remark on covariates of new sites that look to be in another unit than the list's."""
    warnings = []
    for column, name in enumerate(sites.covariates, start=2):
        values, known = read[:, column], sites.X[:, column].numpy()
        values = values[~np.isnan(values)]
        if values.size and _another_unit(values, known):
            warnings.append(
                f"{name}: the new sites have {_span(values)}, the list has {_span(known)}. Is it "
                "in the same unit, such as per cent or shares?"
            )
    return warnings


def _another_unit(values: Array, known: Array) -> bool:
    """Tell whether values are outside a sample, and far from it by difference or by factor."""
    low, high = known.min(), known.max()
    typical, usual = np.median(values), np.median(known)
    if low <= typical <= high:
        return False
    if not low - 0.5 * (high - low) <= typical <= high + 0.5 * (high - low):
        return True
    ratio = typical / usual if usual else np.inf
    return not 0.05 < ratio < 20.0


def _far_places(cells: Cells, sites: SurveySites, read: Array) -> list[str]:
    """Remark on new sites that are farther from the list than its sites are from their middle."""
    known = chords(sites.X[:, :2], (0, 1))
    middle = known.mean(0)
    reach = (known - middle).norm(dim=-1).max()
    apart = (chords(torch.from_numpy(read[:, :2]), (0, 1)) - middle).norm(dim=-1)
    far = first((apart > 1.5 * reach + 10.0).numpy())
    if far is None:
        return []
    return [
        f"{cells.row(far)} lies {float(apart[far]):,.0f} km from the middle of the list: is its "
        "position right, longitude first?"
    ]


def _span(values: Array) -> str:
    low, high = values.min(), values.max()
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _record(site: str, counts: Counts, place: Array | None, sites: SurveySites) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": site, "positive": counts.positive, "examined": counts.examined
    }  # fmt: skip
    if place is None:
        return record
    values = [None if np.isnan(value) else float(value) for value in place]
    return {
        **record,
        "longitude": values[0],
        "latitude": values[1],
        "covariates": dict(zip(sites.covariates, values[2:], strict=True)),
    }


def _differs(place: Array, former: Sequence[float]) -> bool:
    return not np.array_equal(place, np.array(former), equal_nan=True)

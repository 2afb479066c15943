"""Rows of people or visits that are added up to sites."""

from __future__ import annotations

import numpy as np
import pandas as pd

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import Array, Cells, first
from bo_stream.loops.survey.columns import find_column, given_column, required_column, squeezed
from bo_stream.loops.survey.counts import read_counts
from bo_stream.loops.survey.places import position_columns
from bo_stream.loops.survey.settings import SurveySettings

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
        They, and the column of people's results whose place they take, if there is one.
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
    column = p if p is not None else _of_a_person(names, given["positive"], cells.source)
    if column is None:
        return {}, None
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


def _of_a_person(names: list[str], given: str | None, source: str) -> str | None:
    if given is not None:
        return given_column(names, given, source, "--positive")
    found = [name for name in names if squeezed(name) in _OF_A_PERSON]
    if len(found) > 1:
        listed = ", ".join(map(repr, found))
        raise UsageError(
            f"{source}: columns {listed} could each be that of results. Say which by --positive."
        )
    return found[0] if found else None


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

"""The list of candidate sites of a survey, checked and complete."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np
import pandas as pd
import torch
from botorch.exceptions.errors import InputDataError
from botorch.models.transforms.input import InputTransform
from numpy.typing import NDArray
from torch import Tensor

from bo_stream.errors import UsageError
from bo_stream.loops.survey.cells import (
    DATE,
    Array,
    Cells,
    Counts,
    Mask,
    Texts,
    count_columns,
    first,
    number_columns,
    read_counts,
    read_dates,
    spreadsheet_number,
)
from bo_stream.loops.survey.columns import (
    find_column,
    given_column,
    look_like_counts,
    rate_column,
)
from bo_stream.loops.survey.places import check_places, position_columns
from bo_stream.loops.survey.settings import DEGREES, Coordinates, SurveySettings
from bo_stream.mapping import REACH, fill_missing, kilometres

_YES = ("yes", "y", "true", "t", "1")
_NO = ("no", "n", "false", "f", "0")

_MISSING_CODE = -9999.0
"""Number that stands for a missing covariate, as in rasters."""


@dataclass(frozen=True)
class SurveySites:
    """Candidate sites in the order of their table.

    Attributes:
        ids: Texts, ``N``, all different.
        X: Position and covariates, missing ones filled from the nearest site, ``N x d``.
        covariates: Names of the d - 2 covariates.
        costs: Of a survey of each, ``N``.
        strata: Labels, ``N``, if there are strata.
        reachable: Whether each can be reached, ``N``.
        earlier: Results that came with the table, by id.
        notes: Texts for the coordinator about what was filled in or looks odd.
        names: Names of all columns of the table.
        columns: Which column of the table is what: ``id``, the two of positions, and ``examined``
            and ``positive`` where there are results.
        id_column: Column of the ids; None: the rows' numbers are the ids.
        coordinates: Units and names of positions.
        labels: Columns that are none of these, such as name and district.
        dates: Of the results that came with the table, in ISO 8601, by id, where there are any.
    """

    ids: Texts
    X: Tensor
    covariates: tuple[str, ...]
    costs: Tensor
    strata: Texts | None
    reachable: Mask
    earlier: Mapping[str, Counts] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    id_column: str | None = None
    coordinates: Coordinates = DEGREES
    labels: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    dates: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(
        cls, table: pd.DataFrame, settings: SurveySettings, source: str = "The table of sites"
    ) -> SurveySites:
        """Check a table and read it.

        Args:
            table: A row a site; see :class:`SurveySettings` for its columns. Earlier results may
                come along in columns examined and positive, empty where there are none.
            settings: Which columns mean what.
            source: Name of the table, for messages.

        Raises:
            UsageError: A fault, named by row and column.
        """
        names = [str(name) for name in table.columns]
        if not len(table):
            raise UsageError(f"{source} has no rows.")
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise UsageError(f"{source}: two columns have the name {twice[0]!r}. Rename one.")
        id_column = find_column(settings.unclaimed(names), "id", settings.id, source)
        if id_column is None and "id" in names:
            roles = ("cost", "stratum", "reachable")
            use = next((role for role in roles if getattr(settings, role) == "id"), "covariates")
            raise UsageError(
                f"{source}: column 'id' is that of --{use}, and no other column has ids. Name the "
                "column of ids by --id, or rename 'id'."
            )
        columns = position_columns(names, settings, source)
        numeric = number_columns(names, settings, source)
        cells = Cells(table, source, id_column, numeric=numeric)
        ids = _ids(cells, id_column)
        coordinates = settings.coordinates
        raw = torch.from_numpy(read_inputs(cells, columns, settings))
        filled, notes = _checked_inputs(cells, raw, columns, settings)
        strata, without_quota = _strata(cells, settings)
        earlier, dates, remarks, counted = _earlier(cells, settings, ids)
        named = {"id": id_column, "date": counted.pop("date", None)}
        used = dict(zip(coordinates.names, columns, strict=True)) | counted
        used |= {role: column for role, column in named.items() if column is not None}
        # Labels are the columns that mean nothing to the survey, and the stratum.
        known = {*used.values(), *settings.covariates, settings.cost, settings.reachable}
        labels = tuple(name for name in names if name not in known)
        notes += [*remarks, *without_quota, *_alike(cells, ids, raw)]
        unused = [name for name in look_like_counts(labels) if _has_counts(cells, name)]
        if unused and not counted:
            notes.append(
                f"{' and '.join(repr(name) for name in unused)} may be numbers of people, but are "
                "not used: no result was read. If they are results, say which: --examined NAME "
                "--positive NAME."
            )
        sites = cls(
            ids,
            filled,
            settings.covariates,
            torch.from_numpy(_costs(cells, settings)),
            strata,
            _reachable(cells, settings),
            MappingProxyType(earlier),
            tuple(notes),
            id_column,
            coordinates,
            labels,
            MappingProxyType(used),
            tuple(names),
            MappingProxyType(dates),
        )
        if settings.base is not None:
            try:
                sites.plane.transform(torch.tensor([settings.base], dtype=raw.dtype))
            except InputDataError as error:
                x, y = settings.base
                raise UsageError(
                    f"Expected base within {REACH:,.0f} km of the middle of the sites, got "
                    f"{x:.10g} and {y:.10g}. Are {' and '.join(coordinates.names)} right?"
                ) from error
        return sites

    def positions(self, ids: Sequence[str]) -> NDArray[np.intp]:
        """Return the positions of ids in the list, -1 for one that is not in it."""
        return self._index.get_indexer(pd.Index(ids, dtype=object))

    @cached_property
    def _index(self) -> pd.Index[str]:
        return pd.Index(self.ids, dtype=object)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of ids and inputs."""
        digest = hashlib.sha256("\x1f".join(self.covariates).encode())
        digest.update("\x1f".join(self.ids).encode())
        digest.update(np.ascontiguousarray(self.X.numpy(), dtype="<f8").tobytes())
        return digest.hexdigest()

    @cached_property
    def plane(self) -> InputTransform:
        """Transform of positions, ``n x 2``, to kilometres on a plane."""
        return kilometres(self.X[:, :2], units=self.coordinates.mapping_units)

    @cached_property
    def kilometres(self) -> Tensor:
        """Positions on that plane, ``N x 2``."""
        return self.plane.transform(self.X[:, :2])


def _has_counts(cells: Cells, column: str) -> bool:
    """Return whether all cells of a column that are not empty are whole numbers from 0."""
    try:
        values = cells.numbers(column)
    except UsageError:
        return False
    filled = values[~np.isnan(values)]
    return bool(filled.size) and bool(((filled >= 0.0) & (filled == np.floor(filled))).all())


def _alike(cells: Cells, ids: Texts, raw: Tensor) -> list[str]:
    """Remark on sites that share a position, and on ids that a spreadsheet cannot tell apart."""
    remarks, count = [], len(raw)
    positions = pd.DataFrame(raw[:, :2].numpy())
    shared = int(positions.duplicated(keep=False).sum())
    if shared:
        distinct = count - int(positions.duplicated().sum())
        remarks.append(
            f"{shared:,} of {count:,} rows share their position with another: there are "
            f"{distinct:,} positions. If rows are people or visits of one village, add them up: "
            "--group."
        )
    keys = pd.Series([spreadsheet_number(site) for site in ids], dtype=object)
    twice = first((keys.duplicated() & keys.notna()).to_numpy())
    if twice is not None:
        other = first((keys == keys[twice]).to_numpy()) or 0
        remarks.append(
            f"{cells.row(other)} and {cells.row(twice)} have ids that are one number to a "
            "spreadsheet, which drops leading zeros. Results whose id could be either are refused, "
            "unless they bring the position."
        )
    return remarks


def read_inputs(cells: Cells, columns: Sequence[str], settings: SurveySettings) -> Array:
    """Read positions and covariates, ``n x d``, NaN where missing.

    Args:
        cells: The table.
        columns: The two columns of positions.
        settings: Units of positions, and columns of covariates, in which -9999 stands for missing,
            too.

    Raises:
        UsageError: A column is not there, or a cell is no number.
    """
    read = [cells.numbers(name, settings.coordinates.cell) for name in columns]
    for name in settings.covariates:
        given_column(cells.names, name, cells.source, "--covariates")
        try:
            values = cells.numbers(name)
        except UsageError as error:
            raise UsageError(f"{error} Covariates are numbers: code groups as 0 and 1.") from error
        read.append(np.where(values == _MISSING_CODE, np.nan, values))
    return np.column_stack(read)


def _ids(cells: Cells, column: str | None) -> Texts:
    """Return the ids; without a column of them the rows' numbers."""
    ids = cells.labels if column is None else cells.texts(column)
    cells.refuse(ids == "", column, "the id is missing. Every site needs one.")
    again = first(pd.Series(ids).duplicated().to_numpy())
    if again is not None:
        earlier = cells.table.index[first(ids == ids[again]) or 0]
        raise UsageError(
            f"{cells.source}: rows {earlier} and {cells.table.index[again]} have the same id "
            f"{ids[again]!r}. Keep one row for each site. If rows are people or visits of one "
            "site, add them up: --group."
        )
    return ids


def _checked_inputs(
    cells: Cells, raw: Tensor, columns: tuple[str, str], settings: SurveySettings
) -> tuple[Tensor, list[str]]:
    """Check positions and covariates, and fill missing covariates from the nearest site.

    Args:
        cells: The table.
        raw: Of :func:`read_inputs`, ``N x d``.
        columns: The two columns of positions.
        settings: Names of the covariates, units of positions.

    Returns:
        Positions and covariates without missing ones, ``N x d``, and notes about odd positions and
        about what was filled.

    Raises:
        UsageError: A position is none, a covariate has no value at all, or two sites at one
            position have different covariates.
    """
    notes = check_places(cells, raw[:, :2].numpy(), columns, settings.coordinates)
    frame = pd.DataFrame(raw.numpy())
    shared = frame[frame.duplicated([0, 1], keep=False)]
    differs = first(~shared.duplicated(keep=False).to_numpy())
    if differs is not None:
        row = int(shared.index[differs])
        there = (frame[0] == frame.loc[row, 0]) & (frame[1] == frame.loc[row, 1])
        partner = int(np.flatnonzero(there.to_numpy() & (np.arange(len(frame)) != row))[0])
        upper, lower = sorted((row, partner))
        raise UsageError(
            f"{cells.source}: {cells.row(upper)} and {cells.row(lower)} are at the same place with "
            "different covariates. If they are one site, keep one row, or add them up: --group; "
            "else correct one."
        )
    for name, gaps in zip(settings.covariates, raw[:, 2:].isnan().unbind(-1), strict=True):
        count = int(gaps.sum())
        if count == len(raw):
            raise UsageError(
                f"{cells.source}, column {name!r}: every cell is empty. Leave it out of the "
                "covariates."
            )
        if count:
            notes.append(
                f"{name}: {count:,} of {len(raw):,} sites have no value; that of the nearest site "
                "is used."
            )
    return fill_missing(raw, units=settings.coordinates.mapping_units), notes


def _costs(cells: Cells, settings: SurveySettings) -> Array:
    if settings.cost is None:
        return np.ones(len(cells))
    column = given_column(cells.names, settings.cost, cells.source, "--cost")
    costs = cells.numbers(column, "a cost above 0")
    cells.refuse(
        ~(costs > 0.0),
        column,
        lambda row: (
            "the cost is missing. Every site needs one."
            if np.isnan(costs[row])
            else f"expected a cost above 0, got {costs[row]:g}."
        ),
    )
    return costs


def _strata(cells: Cells, settings: SurveySettings) -> tuple[Texts | None, list[str]]:
    """Read the strata, and remark on those without a quota: their names may be misspelt."""
    if settings.stratum is None:
        return None, []
    column = given_column(cells.names, settings.stratum, cells.source, "--stratum")
    labels = cells.texts(column)
    cells.refuse(labels == "", column, "the stratum is missing.")
    unknown = sorted(set(settings.quotas) - set(labels))
    if unknown:
        raise UsageError(
            f"There is a quota for stratum {unknown[0]!r}, which no site is in. The strata: "
            f"{', '.join(sorted(set(labels)))}."
        )
    without = set(labels) - set(settings.quotas) if settings.quotas else ()
    return labels, [
        f"{cells.row(first(labels == name) or 0)}, column {column!r}: stratum {name!r} has no "
        f"quota, so that a round may have any number of its {int((labels == name).sum()):,} sites."
        for name in sorted(without)
    ]


def _reachable(cells: Cells, settings: SurveySettings) -> Mask:
    if settings.reachable is None:
        return np.ones(len(cells), dtype=bool)
    column = given_column(cells.names, settings.reachable, cells.source, "--reachable")
    words = np.array([word.casefold() for word in cells.texts(column)], dtype=object)
    cells.refuse(
        ~np.isin(words, [*_YES, *_NO]),
        column,
        lambda row: (
            f"expected yes or no, {f'got {words[row]!r}' if words[row] else 'it is empty'}."
        ),
    )
    return np.isin(words, _YES)


def _earlier(
    cells: Cells, settings: SurveySettings, ids: Texts
) -> tuple[dict[str, Counts], dict[str, str], list[str], dict[str, str]]:
    """Read results that came along and their dates, if there are columns of them.

    Returns:
        Results by id, dates by id, remarks on a lone column and on dates that are not understood,
        and the columns that were read, by ``examined``, ``positive`` and ``date``.
    """
    roles = ("examined", "positive")
    names = settings.unclaimed(cells.names)
    columns = {
        role: find_column(names, role, getattr(settings, role), cells.source) for role in roles
    }
    used = {role: column for role, column in columns.items() if column is not None}
    if not used:
        return {}, {}, [], {}
    lone = next(iter(used))
    is_named = getattr(settings, lone) is not None or used[lone] == lone
    if len(used) == 1 and not is_named and rate_column(names) is None:
        other = roles[1 - roles.index(lone)]
        remark = (
            f"Column {used[lone]!r} is not taken for people {lone}: there is no column "
            f"{other!r}. If another one is, say which: --{other} NAME."
        )
        return {}, {}, [remark], {}
    counts = read_counts(cells, count_columns(cells, settings))
    results = {str(ids[row]): count for row, count in counts.items()}
    rows = [row for row, site in enumerate(ids) if site in results]
    dated = cells.rows(rows)
    try:
        column = find_column(names, DATE, None, cells.source) if rows else None
        days = [] if column is None else read_dates(dated, column)
    except UsageError as error:
        return results, {}, [f"Dates of results are left out. {error}"], used
    if column is None:
        return results, {}, [], used
    dates = {str(ids[row]): day for row, day in zip(rows, days, strict=True) if day}
    return results, dates, [], used | {"date": column}

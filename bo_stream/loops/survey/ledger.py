"""The ledger of a survey: what was planned and reported, and the facts that follow from it.

A line of ``results.jsonl`` is one verb, as one object in JSON with a number, the time, the values
and a digest. It is on the disk before the verb returns. A process that is killed leaves whole lines
and at most one that is cut short, which was never confirmed to anyone.

At the end the folder itself, and the table of sites that it begins with.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bo_stream.errors import UsageError
from bo_stream.loops.run import HOLDER, LOCK, hold_folder
from bo_stream.loops.survey.cells import Counts
from bo_stream.loops.survey.settings import SurveySettings
from bo_stream.loops.survey.sites import SurveySites
from bo_stream.loops.survey.tables import TableFormat, read_table
from bo_stream.mapping import fill_missing
from bo_stream.storage.archive import AppendOnlyFile, atomic_write

Verb = Literal["ask", "tell", "withdraw"]

_VERBS: tuple[Verb, ...] = ("ask", "tell", "withdraw")

RESULTS = "results.jsonl"
"""Name of the file."""

TORN = "results.torn"
"""Name of the file to which lines go that were cut short."""


@dataclass(frozen=True)
class Event:
    """A verb and its values.

    Attributes:
        sequence: Number, from 1.
        time: In UTC, as in ``2026-01-31T09:30:00Z``.
        verb: The verb.
        values: Plain values of JSON.
    """

    sequence: int
    time: str
    verb: Verb
    values: Mapping[str, Any]

    def line(self) -> str:
        """Return the line of the file, with a digest of all else in it."""
        content = asdict(self)
        return json.dumps({**content, "sha256": _digest(content)}, allow_nan=False) + "\n"

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Read a line.

        Raises:
            ValueError: It is damaged.
        """
        content = json.loads(line)
        if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
            raise ValueError("its digest is another")
        if content.get("verb") not in _VERBS:
            raise ValueError(f"unknown verb {content.get('verb')!r}")
        return cls(**content)


class SurveyLedger:
    """All events of a survey, in memory and, once it has a folder, in a file.

    Attributes:
        events: In their order.
        torn: Text of a last line that was cut short, empty if there is none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Begin without events, or read those of a folder's file; nothing is written.

        Raises:
            UsageError: A line other than the last is damaged.
        """
        self.events: list[Event] = []
        self.torn = ""
        self._file: AppendOnlyFile | None = None
        if folder is not None:
            self._file = AppendOnlyFile(folder / RESULTS, folder / TORN)
            self._read_new(self._file)

    @property
    def notes(self) -> tuple[str, ...]:
        """Texts for the coordinator: of a last line that was cut short."""
        if not self.torn:
            return ()
        return (
            f"The last entry of {RESULTS} was cut short when a run was interrupted, and is left "
            f"out: {self.torn[:100]!r}. Tell those results again, or ask again.",
        )

    def move_to(self, folder: Path) -> None:
        """Write all events to a file of a folder that is locked, to which later ones go, too.

        Raises:
            UsageError: The folder has such a file.
            OSError: It cannot be written.
        """
        if (folder / RESULTS).exists():
            raise UsageError(f"{folder} holds a survey already.")
        file = AppendOnlyFile(folder / RESULTS, folder / TORN)
        file.write("".join(event.line() for event in self.events).encode())
        try:  # to make the new file's name durable
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:  # Windows opens no folders
            pass
        else:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._file = file

    @contextmanager
    def writing(self) -> Iterator[list[Event]]:
        """Keep other processes out while the block runs, and return what they have written before.

        Raises:
            UsageError: Another process is writing.
        """
        if self._file is None:
            yield []
            return
        with hold_folder(self._file.path.parent, "Wait until it has finished, then try again."):
            yield self._read_new(self._file)

    def append(self, verb: Verb, values: Mapping[str, Any]) -> Event:
        """Add an event within :meth:`writing`; it is on the disk when this returns.

        Raises:
            OSError: The disk is full or the file cannot be written; nothing is added.
        """
        time = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        event = Event(len(self.events) + 1, time, verb, values)
        if self._file is not None:
            self._file.append(event.line().encode())
            self.torn = ""
        self.events.append(event)
        return event

    def _read_new(self, file: AppendOnlyFile) -> list[Event]:
        """Read the events behind those that are known."""
        try:
            lines, rest = file.read()
        except FileNotFoundError as error:
            raise UsageError(
                f"{file.path.parent} has no {RESULTS}, which holds all results of a survey. "
                "Restore it from a copy."
            ) from error
        except EOFError as error:
            raise UsageError(f"{error}. Restore it from a copy.") from error
        new: list[Event] = []
        for line in lines:
            number = len(self.events) + len(new) + 1
            try:
                event = Event.parse(line)
                if event.sequence != number:
                    raise ValueError(f"it has the number {event.sequence}")
            except (ValueError, TypeError) as error:
                raise UsageError(
                    f"{file.path}, line {number}, is damaged ({error}). Restore the file from a "
                    "copy: the lines before are whole."
                ) from error
            new.append(event)
        file.end += sum(len(line) + 1 for line in lines)
        self.torn = rest.decode(errors="replace")
        self.events += new
        return new


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# --- what is known of a survey: results, sites that are asked for --------------------------------


@dataclass(frozen=True)
class SiteResult:
    """Result of a site as it was told last.

    Attributes:
        counts: Positives of examined.
        time: When it was told; empty: it came along with the sites.
        asked: Whether the site had been asked for.
        corrected: How many times its numbers changed.
        place: Position and covariates, NaN where missing, of a site outside the list; empty: the
            site is in the list.
        date: Of the survey, in ISO 8601; empty: it was not told.
    """

    counts: Counts
    time: str = ""
    asked: bool = False
    corrected: int = 0
    place: tuple[float, ...] = ()
    date: str = ""


@dataclass(frozen=True)
class Request:
    """A site that is asked for.

    Attributes:
        round: Number of the call that asked for it, from 1.
        time: When.
        reason: Why this one.
        gain: Expected fall of the criterion's total, as a share of that before the round; None in a
            first round, and where the total was not written down.
        cost: Of the survey and of the travel that it adds.
    """

    round: int
    time: str
    reason: str
    gain: float | None
    cost: float


class SurveyFacts:
    """State of a survey: the sum of its sites and its events.

    Facts about different sites commute: in whichever order results come, the state is the same but
    for the times.

    Attributes:
        results: By id.
        pending: Requests by id, in the order of asking.
        given_up: Ids of sites of the list that are not to be asked for again.
        rounds: Number of rounds asked for.
        doubts: What looked odd in tables of results, a pair a table: the sites whose results are
            still those of that table, and texts. It is gone once all were corrected or withdrawn.
    """

    def __init__(self, sites: SurveySites) -> None:
        self._sites = sites
        self.results = {
            site: SiteResult(counts, date=sites.dates.get(site, ""))
            for site, counts in sites.earlier.items()
        }
        self.pending: dict[str, Request] = {}
        self.given_up: set[str] = set()
        self.rounds = 0
        self.doubts: list[tuple[frozenset[str], tuple[str, ...]]] = []

    def apply(self, events: Iterable[Event]) -> None:
        """Take events in, in their order."""
        for event in events:
            if event.verb == "ask":
                self.rounds += 1
                total = event.values.get("total")
                for site in event.values["sites"]:
                    gain = site["gain"] / total if total and site["gain"] is not None else None
                    request = Request(self.rounds, event.time, site["reason"], gain, site["cost"])
                    self.pending[site["id"]] = request
            elif event.verb == "tell":
                self._tell(event)
            else:
                sites = frozenset(event.values["ids"])
                self.doubts = [(left, texts) for ids, texts in self.doubts if (left := ids - sites)]
                for site in event.values["ids"]:
                    self.pending.pop(site, None)
                    self.results.pop(site, None)
                    listed = bool(self._sites.positions([site])[0] >= 0)
                    if listed and not event.values["ask_again"]:
                        self.given_up.add(site)

    def _tell(self, event: Event) -> None:
        sites = frozenset(told["id"] for told in event.values["results"])
        self.doubts = [(left, texts) for ids, texts in self.doubts if (left := ids - sites)]
        if event.values.get("warnings"):
            self.doubts.append((sites, tuple(event.values["warnings"])))
        names = self._sites.coordinates.names
        for told in event.values["results"]:
            site, counts = told["id"], Counts(told["positive"], told["examined"])
            asked = self.pending.pop(site, None) is not None
            self.given_up.discard(site)
            place: tuple[float, ...] = ()
            if names[0] in told:  # a site outside the list
                covariates = [told["covariates"].get(name) for name in self._sites.covariates]
                values = [*(told[name] for name in names), *covariates]
                place = tuple(np.nan if value is None else float(value) for value in values)
            previous = self.results.get(site) or SiteResult(counts, asked=asked, place=place)
            changed = counts != previous.counts or bool(place and place != previous.place)
            self.results[site] = replace(
                previous,
                counts=counts,
                time=event.time,
                corrected=previous.corrected + changed,
                place=place or previous.place,
                date=told.get("date") or previous.date,
            )

    @property
    def surveyed(self) -> list[str]:
        """Ids of sites with results: listed sites in the order of the list, then others by name."""
        positions = self._sites.positions(list(self.results))
        order = sorted(
            zip(positions.tolist(), self.results, strict=True),
            key=lambda pair: (pair[0] < 0, pair[0], pair[1]),
        )
        return [site for _, site in order]

    def inputs(self, ids: Iterable[str]) -> Tensor:
        """Return positions and covariates of sites, without missing ones, ``n x d``."""
        ids = list(ids)
        positions = torch.from_numpy(self._sites.positions(ids))
        X = self._sites.X[positions.clamp_min(0)]
        outside = [row for row, position in enumerate(positions.tolist()) if position < 0]
        if outside:
            inputs = [self.results[ids[row]].place for row in outside]
            units = self._sites.coordinates.mapping_units
            X[outside] = fill_missing(
                torch.tensor(inputs, dtype=X.dtype), self._sites.X, units=units
            )
        return X

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all results but their dates, regardless of the order in which they came."""
        rows = [
            (site, one.counts.positive, one.counts.examined, [repr(v) for v in one.place])
            for site, one in sorted(self.results.items())
        ]
        return hashlib.sha256(json.dumps([self._sites.fingerprint, rows]).encode()).hexdigest()


# --- the folder: made, and the table of sites in it ----------------------------------------------


@contextmanager
def hold_new_folder(folder: Path, advice: str) -> Iterator[None]:
    """Make a folder if it is missing and hold it; remove it if the block refuses to use it."""
    missing = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with hold_folder(folder, advice):
        try:
            yield
        except UsageError:
            if missing and {file.name for file in folder.iterdir()} <= {LOCK, HOLDER}:
                with suppress(OSError):  # no file that is held can be removed on Windows
                    for name in (HOLDER, LOCK):
                        (folder / name).unlink(missing_ok=True)
                    folder.rmdir()
            raise


def store_sites(
    path: Path, table: pd.DataFrame, sites: SurveySites, settings: SurveySettings
) -> None:
    """Write the table of sites of a survey, and check that it is read again as the survey has it.

    Ids and strata of times are written as texts, covariates that are true or false as 1 and 0.

    Args:
        path: Of the file, which ends in ``.csv`` or ``.parquet``.
        table: The sites, with a column of ids.
        sites: As the survey reads them.
        settings: Of the survey.

    Raises:
        UsageError: A column cannot be written, or would be read otherwise; no file is left.
        OSError: It cannot be written.
    """
    table = table.rename(columns=str)
    changed: dict[str, Any] = {
        name: table[name].astype("Int8")
        for name in settings.covariates
        if table[name].dtype.kind == "b"
    }
    if settings.stratum is not None and table[settings.stratum].dtype.kind == "M":
        changed[settings.stratum] = sites.strata
    table = table.assign(**{**changed, sites.id_column or "id": sites.ids})
    with atomic_write(path) as file:
        if path.suffix == ".csv":
            file.write(TableFormat().write(table))
        else:
            try:
                table.to_parquet(file, index=False)
            except (ValueError, TypeError, NotImplementedError, OverflowError) as error:
                raise UsageError(
                    f"The table of sites: {len(table):,} sites are kept as parquet, which cannot "
                    f"hold one of its columns. {'. '.join(map(str, error.args))}. Give it a name "
                    "of its own, and cells that are all texts, or all numbers."
                ) from error
    try:
        kept = TableFormat.of(table).given_to(read_table(path))  # as it is opened again
        read = SurveySites.of(kept, settings, str(path))
        places = [sites.columns[name] for name in sites.coordinates.names]
        columns: list[tuple[str | None, Any, Any]] = [
            (sites.id_column or "id", sites.ids, read.ids),
            *zip((*places, *settings.covariates), sites.X.mT, read.X.mT, strict=True),
            (settings.cost, sites.costs, read.costs),
            (settings.stratum, sites.strata, read.strata),
            (settings.reachable, sites.reachable, read.reachable),
            (sites.columns.get("positive"), dict(sites.earlier), dict(read.earlier)),
            (sites.columns.get("date"), dict(sites.dates), dict(read.dates)),
        ]
        for name, before, after in columns:
            if not np.array_equal(before, after):
                raise UsageError(
                    f"Column {name!r} has cells that are read as others. Write them in plain "
                    "letters and numbers."
                )
    except UsageError as error:
        path.unlink()
        raise UsageError(
            "The table of sites cannot be kept in a folder, for it would be read otherwise, or not "
            f"at all. {error}"
        ) from error

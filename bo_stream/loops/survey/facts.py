"""What is known of a survey: results, sites that are asked for, sites that were given up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bo_stream.loops.survey.counts import Counts
from bo_stream.loops.survey.ledger import Event
from bo_stream.loops.survey.sites import SurveySites


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
            {"ask": self._ask, "tell": self._tell, "withdraw": self._withdraw}[event.verb](event)

    def _ask(self, event: Event) -> None:
        self.rounds += 1
        total = event.values.get("total")
        for site in event.values["sites"]:
            gain = site["gain"] / total if total and site["gain"] is not None else None
            request = Request(self.rounds, event.time, site["reason"], gain, site["cost"])
            self.pending[site["id"]] = request

    def _tell(self, event: Event) -> None:
        sites = frozenset(told["id"] for told in event.values["results"])
        self._settle_doubts(sites)
        if event.values.get("warnings"):
            self.doubts.append((sites, tuple(event.values["warnings"])))
        for told in event.values["results"]:
            site, counts = told["id"], Counts(told["positive"], told["examined"])
            former = self.results.get(site)
            asked = self.pending.pop(site, None) is not None
            self.given_up.discard(site)
            place, day = placed(told, self._sites), told.get("date", "")
            if former is None:
                self.results[site] = SiteResult(counts, event.time, asked, 0, place, day)
                continue
            changed = counts != former.counts or bool(place and place != former.place)
            self.results[site] = replace(
                former,
                counts=counts,
                time=event.time,
                corrected=former.corrected + changed,
                place=place or former.place,
                date=day or former.date,
            )

    def _withdraw(self, event: Event) -> None:
        self._settle_doubts(frozenset(event.values["ids"]))
        for site in event.values["ids"]:
            self.pending.pop(site, None)
            self.results.pop(site, None)
            listed = bool(self._sites.positions([site])[0] >= 0)
            if listed and not event.values["ask_again"]:
                self.given_up.add(site)

    def _settle_doubts(self, sites: frozenset[str]) -> None:
        """Take away doubts about results that are corrected or withdrawn."""
        left = [(about - sites, texts) for about, texts in self.doubts]
        self.doubts = [(about, texts) for about, texts in left if about]

    @property
    def surveyed(self) -> list[str]:
        """Ids that have results: those of the list in its order, then others by name."""
        places = self._sites.positions(list(self.results))
        order = sorted(
            zip(places.tolist(), self.results, strict=True),
            key=lambda pair: (pair[0] < 0, pair[0], pair[1]),
        )
        return [site for _, site in order]

    @property
    def outcomes(self) -> Tensor:
        """Positives and examined, ``n x 2``, in the order of :attr:`surveyed`."""
        counts = [self.results[site].counts for site in self.surveyed]
        rows = [[float(count.positive), float(count.examined)] for count in counts]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)

    def inputs(self, ids: Iterable[str]) -> Tensor:
        """Return positions and covariates of sites, without missing ones, ``n x d``."""
        ids = list(ids)
        places = torch.from_numpy(self._sites.positions(ids))
        X = self._sites.X[places.clamp_min(0)]
        outside = [row for row, place in enumerate(places.tolist()) if place < 0]
        if outside:
            places_told = [self.results[ids[row]].place for row in outside]
            X[outside] = self._sites.fill(torch.tensor(places_told, dtype=X.dtype))
        return X

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all results but their dates, whatever the order in which they came."""
        rows = [
            (site, one.counts.positive, one.counts.examined, [repr(v) for v in one.place])
            for site, one in sorted(self.results.items())
        ]
        return hashlib.sha256(json.dumps([self._sites.fingerprint, rows]).encode()).hexdigest()


def placed(told: Mapping[str, Any], sites: SurveySites) -> tuple[float, ...]:
    """Return the place of a result of a ledger, empty for a site of the list."""
    names = sites.coordinates.names
    if names[0] not in told:
        return ()
    covariates = [told["covariates"].get(name) for name in sites.covariates]
    values = [*(told[name] for name in names), *covariates]
    return tuple(np.nan if value is None else float(value) for value in values)

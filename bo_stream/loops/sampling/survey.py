"""Adaptive survey of prevalence: ask for sites, tell results, in any order, for weeks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from bo_stream.likelihoods.prevalence import prevalence
from bo_stream.loops.errors import UsageError, check_whole
from bo_stream.loops.sampling.ledger import Ledger
from bo_stream.loops.sampling.spread import spread_coordinates, spread_out
from bo_stream.loops.sampling.survey_facts import SurveyFacts
from bo_stream.loops.sampling.survey_results import Told, read_results
from bo_stream.loops.sampling.survey_settings import USUAL_TRIALS, SurveySettings
from bo_stream.loops.sampling.survey_sites import SurveySites
from bo_stream.loops.sampling.survey_stub import SurveyModelSettings, select_sites, survey_model
from bo_stream.models.base import StreamingGP

ROWS = 4096
"""Number of sites that are predicted at a time."""

MOST_POINTS = 2000
"""Largest number of sites over which the criterion is summed; of more a random part stands for
all."""

ASKED_COLUMNS = ("id", "longitude", "latitude", "reason", "gain", "cost")


class Survey:
    """Sites to choose from, what was asked and told so far, and a model of it.

    Sites that were asked for are pending until their result comes or they are withdrawn. Results
    may come late, in part, in any order, again if they were wrong, and from sites that nobody
    asked for. The state depends on the facts and not on their order, and so does the model, which
    is built anew from all results when it is needed.

    A survey that has a folder (:func:`bo_stream.loops.sampling.survey_folder.save_survey`) writes
    each verb to it before the verb returns, and takes in what other processes wrote.

    Attributes:
        settings: As given.
        ledger: Record of all verbs.
        notes: Texts for the coordinator about sites and results.

    Example:
        >>> survey = Survey(read_table("villages.csv"), SurveySettings(threshold=0.1))
        >>> round = survey.ask(10)
        >>> survey.tell(read_table("results.csv")).new
    """

    def __init__(
        self,
        sites: pd.DataFrame,
        settings: SurveySettings,
        ledger: Ledger | None = None,
        source: str = "The table of sites",
    ) -> None:
        """Begin a survey, or go on with the ledger of one.

        Args:
            sites: A row a site, with columns of position, covariates, cost and so on, as the
                settings name them; earlier results may come along in columns examined and
                positive.
            settings: Of the survey.
            ledger: Of a survey of the same sites; default: an empty one.
            source: Name of the table, for messages.

        Raises:
            UsageError: A fault of the table, named by row and column, or a budget that pays for no
                site.
        """
        self.settings = settings
        self.table = sites
        self._sites = SurveySites.of(sites, settings, source)
        self.ledger = Ledger() if ledger is None else ledger
        self._facts = SurveyFacts(self._sites)
        self._facts.apply(self.ledger.events)
        self.notes = self._sites.notes
        self._model: tuple[str, StreamingGP] | None = None
        self.on_model: Callable[[str, StreamingGP], None] = lambda facts, model: None

    # --- verbs ---------------------------------------------------------------------------------

    def ask(self, q: int) -> pd.DataFrame:
        """Choose up to q sites for the next round; they are pending from now on.

        Without any result they are spread out over the map and the covariates; else they reduce
        the criterion most, given that all pending sites will be surveyed.

        Returns:
            A row a site, in the order of choice: id, longitude, latitude, reason, gain (expected
            fall of the criterion's total, NaN in a first round), cost.

        Raises:
            UsageError: No site is left that can be asked for, or none that the budget pays for.
        """
        check_whole("q", q, 1)
        with self._writing():
            picks = self._choose(q)
            values = [
                {"id": site, "reason": reason, "gain": gain, "cost": cost}
                for site, reason, gain, cost in picks
            ]
            event = self.ledger.append("ask", {"sites": values})
            self._facts.apply([event])
        return self.pending.tail(len(picks)).reset_index(drop=True)[list(ASKED_COLUMNS)]

    def tell(self, results: pd.DataFrame, source: str = "The table of results") -> Told:
        """Take in results, all of the table or, if there is a fault in it, none.

        Args:
            results: Columns of id, examined and positive; rows without numbers are passed over.
                The numbers of a site replace earlier ones. Sites that are not in the list bring
                longitude, latitude and covariates.
            source: Name of the table, for messages.

        Raises:
            UsageError: A fault of the table, named by row and column.
        """
        with self._writing():
            reading = read_results(results, self.settings, self._sites, self._facts, source)
            if reading.records:
                event = self.ledger.append("tell", {"results": reading.records})
                self._facts.apply([event])
        return reading.told

    def withdraw(self, ids: Iterable[str | int], ask_again: bool = False) -> None:
        """Give up pending sites, or take results back that were wrong.

        Args:
            ids: Of sites that are pending or have a result.
            ask_again: Whether the sites may be asked for again. A result that is told is taken in
                either way.

        Raises:
            UsageError: A site is neither pending nor has a result.
        """
        names = list(dict.fromkeys(str(site) for site in ids))
        with self._writing():
            for site in names:
                if site not in self._facts.pending and site not in self._facts.results:
                    raise UsageError(
                        f"Site {site!r} is not pending and has no result: nothing to withdraw."
                    )
            event = self.ledger.append("withdraw", {"ids": names, "ask_again": ask_again})
            self._facts.apply([event])

    # --- what is known -------------------------------------------------------------------------

    @property
    def sites(self) -> pd.DataFrame:
        """Listed sites: id, longitude, latitude, covariates (filled), reachable."""
        X = self._sites.X.numpy()
        columns = ("longitude", "latitude", *self._sites.covariates)
        table = pd.DataFrame(X, columns=list(columns))
        table.insert(0, "id", self._sites.ids)
        return table.assign(cost=self._sites.costs.numpy(), reachable=self._sites.reachable)

    @property
    def pending(self) -> pd.DataFrame:
        """Sites that are asked for: id, longitude, latitude, round, asked (time), reason, gain, cost."""
        requests = self._facts.pending
        table = self._positions(list(requests))
        for name in ("round", "time", "reason", "gain", "cost"):
            table[name] = [getattr(request, name) for request in requests.values()]
        table["gain"] = table["gain"].astype(float)
        return table.rename(columns={"time": "asked"})

    @property
    def results(self) -> pd.DataFrame:
        """Results: id, longitude, latitude, examined, positive, told (time), asked, corrected, listed.

        In the order of the list, then other sites by id. Those that came along with the sites have
        no time.
        """
        ids = self._facts.surveyed
        rows = [self._facts.results[site] for site in ids]
        table = self._positions(ids)
        table["examined"] = [row.counts.examined for row in rows]
        table["positive"] = [row.counts.positive for row in rows]
        table["told"] = [row.time for row in rows]
        table["asked"] = [row.asked for row in rows]
        table["corrected"] = [row.corrected for row in rows]
        table["listed"] = self._sites.positions(ids) >= 0
        return table

    def _positions(self, ids: Sequence[str]) -> pd.DataFrame:
        places = self._facts.inputs(ids)[:, :2].numpy()
        return pd.DataFrame({"id": list(ids), "longitude": places[:, 0], "latitude": places[:, 1]})

    def status(self) -> SurveyStatus:
        """Return how far the survey is, without building a model."""
        counts = [one.counts for one in self._facts.results.values()]
        torn = self.ledger.torn
        notes = list(self.notes)
        if torn:
            notes.append(
                f"The last entry of the ledger was cut short by an interrupted run and is left "
                f"out: {torn[:80]!r}. Tell those results again."
            )
        listed = int((self._sites.positions(list(self._facts.results)) >= 0).sum())
        return SurveyStatus(
            sites=len(self._sites),
            surveyed=listed,
            outside=len(counts) - listed,
            pending=len(self._facts.pending),
            given_up=len(self._facts.given_up),
            rounds=self._facts.rounds,
            examined=sum(count.examined for count in counts),
            positive=sum(count.positive for count in counts),
            last=self.ledger.events[-1].time if self.ledger.events else "",
            notes=tuple(notes),
        )

    @property
    def table_with_ids(self) -> pd.DataFrame:
        """Table of the sites as it was given, with a column of ids in front if it had none."""
        if self._sites.id_column is not None:
            return self.table
        table = self.table.copy()
        table.insert(0, "id", self._sites.ids)
        return table

    # --- model ---------------------------------------------------------------------------------

    @property
    def model(self) -> StreamingGP:
        """Model of all results, built when they have changed.

        Raises:
            UsageError: There is no result yet.
        """
        if not self._facts.results:
            raise UsageError("There is no result yet to learn from. Tell some first.")
        facts = self._facts.fingerprint
        if self._model is None or self._model[0] != facts:
            X, Y = self._facts.inputs(self._facts.surveyed), self._facts.outcomes
            chosen = SurveyModelSettings(overdispersion=self.settings.overdispersion)
            self._model = facts, survey_model(self._sites.X, X, Y, chosen)
            self.on_model(*self._model)
        return self._model[1]

    def use_model(self, facts: str, model: StreamingGP) -> None:
        """Take a model that was built from facts of a fingerprint, to be used if they are these."""
        self._model = facts, model

    @property
    def trials(self) -> int:
        """Number of people that a site is expected to examine."""
        if self.settings.trials is not None:
            return self.settings.trials
        examined = [one.counts.examined for one in self._facts.results.values()]
        return max(1, round(float(np.mean(examined)))) if examined else USUAL_TRIALS

    def predictions(self) -> pd.DataFrame:
        """Predict prevalence at all sites of the list, then at surveyed sites outside it.

        Returns:
            id, longitude, latitude, prevalence (mean), sd, lower, q25, q75, upper (quantiles of
            95 % and 50 % intervals); with a threshold exceedance (probability of being above) and
            class (above, below, uncertain); examined, positive where surveyed.

        Raises:
            UsageError: There is no result yet.
        """
        outside = [site for site in self._facts.surveyed if self._sites.positions([site])[0] < 0]
        ids = [*self._sites.ids, *outside]
        X = torch.cat((self._sites.X, self._facts.inputs(outside)))
        table = pd.DataFrame(X[:, :2].numpy(), columns=["longitude", "latitude"])
        table.insert(0, "id", ids)
        table = pd.concat((table, self._predicted(X)), axis=1)
        results = self.results.set_index("id")[["examined", "positive"]].reindex(ids)
        return table.assign(
            examined=results["examined"].to_numpy(float),
            positive=results["positive"].to_numpy(float),
        )

    @torch.no_grad()
    def _predicted(self, X: Tensor) -> pd.DataFrame:
        parts = [self._part(part) for part in X.split(ROWS)]
        return pd.concat(parts, ignore_index=True)

    def _part(self, X: Tensor) -> pd.DataFrame:
        rates, threshold = prevalence(self.model, X), self.settings.threshold
        low, q25, q75, high = rates.quantile(torch.tensor([0.025, 0.25, 0.75, 0.975]))
        values = {
            "prevalence": rates.mean, "sd": rates.variance.clamp_min(0.0).sqrt(),
            "lower": low, "q25": q25, "q75": q75, "upper": high,
        }  # fmt: skip
        if threshold is not None:
            values["exceedance"] = rates.exceedance(threshold)
        table = pd.DataFrame({name: v.reshape(-1).numpy() for name, v in values.items()})
        if threshold is not None:
            table["class"] = self._classes(table["exceedance"].to_numpy())
        return table

    def _classes(self, exceedance: np.ndarray) -> np.ndarray:
        certainty = self.settings.certainty
        return np.select(
            [exceedance >= certainty, exceedance <= 1.0 - certainty],
            ["above", "below"],
            "uncertain",
        )

    def forecast(self, rounds: int, q: int) -> pd.DataFrame:
        """Predict how the criterion's total will fall over further rounds of q sites.

        Returns:
            round (0: now), sites (further ones so far), total (of the criterion), cost.

        Raises:
            UsageError: There is no result yet.
        """
        check_whole("rounds", rounds, 1)
        taken, lines = self._taken_mask(), []
        for number in range(1, rounds + 1):
            choice = select_sites(self.model, self._sites.X, q, None, exclude=taken)
            if not lines:
                lines.append((0, 0, choice.before, 0.0))
            taken[choice.indices] = True
            sites, total, cost = lines[-1][1:]
            fall, paid = float(choice.gains.sum()), float(choice.costs.sum())
            lines.append((number, sites + len(choice.indices), total - fall, cost + paid))
        return pd.DataFrame(lines, columns=["round", "sites", "total", "cost"])

    # --- choices -------------------------------------------------------------------------------

    def _choose(self, q: int) -> list[tuple[str, str, float | None, float]]:
        taken = self._taken_mask()
        if bool(taken.all()):
            raise UsageError("No site is left to ask for.")
        if not self._facts.results:
            return self._spread(q, taken)
        choice = select_sites(
            self.model, self._sites.X, q, None, exclude=taken, trials=self.trials,
        )  # fmt: skip
        picks = choice.indices.tolist()
        reasons = self._reasons(picks)
        return [
            (str(self._sites.ids[i]), reason, gain, cost)
            for i, reason, gain, cost in zip(
                picks, reasons, choice.gains.tolist(), choice.costs.tolist(), strict=True
            )
        ]

    def _taken_mask(self) -> Tensor:
        mask = torch.from_numpy(~self._sites.reachable)
        places = self._sites.positions(self._facts.taken)
        mask[torch.from_numpy(places[places >= 0])] = True
        return mask

    def _spread(self, q: int, taken: Tensor) -> list[tuple[str, str, float | None, float]]:
        points = spread_coordinates(self._sites.X, self._sites.X)
        former = spread_coordinates(self._facts.inputs(self._facts.pending), self._sites.X)

        def admissible(chosen: Sequence[int]) -> Tensor:
            allowed = ~taken
            allowed[list(chosen)] = False
            return allowed

        picks = spread_out(points, q, former, admissible)
        return [
            (str(self._sites.ids[i]), "first round: spread out", None, float(self._sites.costs[i]))
            for i in picks
        ]

    def _reasons(self, picks: Sequence[int]) -> list[str]:
        table = self._predicted(self._sites.X[list(picks)])
        return [_reason(row, self.settings.threshold) for row in table.itertuples(index=False)]

    def _writing(self):
        return _Writing(self)


class _Writing:
    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._context = survey.ledger.writing()

    def __enter__(self) -> None:
        self._survey._facts.apply(self._context.__enter__())

    def __exit__(self, *error) -> None:
        self._context.__exit__(*error)


def _reason(row, threshold: float | None) -> str:
    span = f"prevalence {_percent(row.prevalence)} ({_percent(row.lower)} to {_percent(row.upper)})"
    if threshold is None:
        return span
    return f"{span}; above {_percent(threshold)} with probability {row.exceedance:.2f}"


def _percent(share: float) -> str:
    return f"{100.0 * share:.2g} %"


@dataclass(frozen=True)
class SurveyStatus:
    """How far a survey is.

    Attributes:
        sites: Number of sites in the list.
        surveyed: Number of these with a result.
        outside: Number of results of other sites.
        pending: Number of sites that are asked for.
        given_up: Number of sites that are not to be asked for again.
        rounds: Number of rounds asked for.
        examined: People examined in all.
        positive: People who tested positive in all.
        last: Time of the last verb, empty if there was none.
        notes: Texts for the coordinator.
    """

    sites: int
    surveyed: int
    outside: int
    pending: int
    given_up: int
    rounds: int
    examined: int
    positive: int
    last: str
    notes: tuple[str, ...]

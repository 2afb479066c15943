"""Adaptive survey of prevalence: ask for sites, tell results, in any order, for weeks.

Its folder has the sites as given, the settings, the ledger, and a model as a cache.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from bo_stream.acquisition.criteria import Criterion
from bo_stream.errors import UsageError, check_whole
from bo_stream.likelihoods.binomial import MOST_EXAMINED
from bo_stream.loops.run import ASKING, OPTIMIZATION, REPLAY, SAMPLING, SURVEY
from bo_stream.loops.survey.cells import Counts, as_ids
from bo_stream.loops.survey.choice import Choice
from bo_stream.loops.survey.ledger import (
    RESULTS,
    SurveyFacts,
    SurveyLedger,
    hold_new_folder,
    store_sites,
)
from bo_stream.loops.survey.model import (
    ModelCache,
    Stopping,
    SurveyModelSettings,
    calls_table,
    chances_of_wrong_calls,
    exceedances,
    predict_prevalence,
    reasons,
    survey_model,
)
from bo_stream.loops.survey.results import ResultsTable, Told
from bo_stream.loops.survey.settings import USUAL_TRIALS, SurveySettings
from bo_stream.loops.survey.sites import SurveySites
from bo_stream.loops.survey.tables import TableFormat, read_table
from bo_stream.models.base import StreamingGP

_SPREAD_OUT = "first round: spread out over the map and the covariates"


class Survey:
    """Sites to choose from, what was asked and told so far, and a model of it.

    Sites that were asked for are pending until their result comes or they are withdrawn. Results
    may come late, in part, in any order, again if they were wrong, and from sites that nobody
    asked for. The state depends on the facts and not on their order, and so does the model, which
    is built again from all results when it is needed.

    A survey that has a folder (:func:`save_survey`) writes each verb to it
    before the verb returns, and first takes in what other processes wrote there.

    Attributes:
        table: Sites as given.
        table_format: Format of their file, in which a coordinator's tables are written.
        settings: As given.
        ledger: Record of all verbs.
        cache: Keeper of the model.
        criterion: As given.

    Example:
        >>> survey = Survey(read_table("villages.csv"), SurveySettings(threshold=0.1))
        >>> sites = survey.ask(10)
        >>> survey.tell(read_table("results.csv")).new
    """

    def __init__(
        self,
        sites: pd.DataFrame,
        settings: SurveySettings,
        source: str = "The table of sites",
        criterion: Criterion | None = None,
        ledger: SurveyLedger | None = None,
        cache: ModelCache | None = None,
        trusted: Collection[str] | None = None,
    ) -> None:
        """Begin a survey, or go on with the ledger of one.

        Args:
            sites: A row a site, with columns of position, covariates, cost and so on, as the
                settings name them; earlier results may come along in columns examined and
                positive.
            settings: Of the survey.
            source: Name of the table, for messages.
            criterion: Uncertainty to be reduced, of your own; default: the settings' one. Such a
                survey cannot be saved: for a loss name it in the settings.
            ledger: Of a survey of the same sites; default: an empty one.
            cache: Keeper of the model; default: in memory.
            trusted: Losses ``package.module:function`` that may be imported; default: the one
                in the settings, which you wrote.

        Raises:
            UsageError: A fault of the table, named by row and column, a budget that pays for no
                site, or trials beyond what a survey can examine.
        """
        if settings.trials is not None and settings.trials > MOST_EXAMINED:
            raise UsageError(
                f"Expected trials of at most {MOST_EXAMINED:,} people, got {settings.trials:,}."
            )
        self.table, self.settings, self.table_format = sites, settings, TableFormat.of(sites)
        self.ledger = SurveyLedger() if ledger is None else ledger
        self.cache = ModelCache() if cache is None else cache
        self.criterion, self._trusted = criterion, trusted
        self._sites = SurveySites.of(sites, settings, source)
        self._facts = SurveyFacts(self._sites)
        if not self.ledger.events and len(self._facts.results) < len(self._sites):
            self._choice().check()
        self._facts.apply(self.ledger.events)

    # --- verbs -----------------------------------------------------------------------------------

    def ask(self, q: int) -> pd.DataFrame:
        """Choose up to q sites for the next round; they are pending from now on.

        Without any result they are spread out over the map and the covariates; else they reduce
        the criterion most, given that all pending sites will be surveyed. There are fewer than q
        where budget, quotas or distances end the round.

        Returns:
            A row a site, in the order of choice: id, longitude and latitude (or east and north, as
            in all tables), reason, gain (share of the uncertainty left, once earlier pending sites
            are surveyed, that the site is expected to take away, NaN in a first round), cost.

        Raises:
            UsageError: No site is left that may be asked for, or none that the budget pays for, or
                another process is writing to the folder.
        """
        q = check_whole("q", q, 1)
        with self.ledger.writing() as new:
            self._facts.apply(new)
            choice = self._choice()
            total: float | None = None
            if self._facts.results:
                picks, total = choice.next(self.model, q, self.trials)
                X = self._sites.X[[index for index, _, _ in picks]]
                predictions = predict_prevalence(self.model, X, self.settings)
                why = reasons(predictions, self.settings.threshold)
            else:
                picks = choice.first(q)
                why = [_SPREAD_OUT] * len(picks)
            sites = [
                {"id": str(self._sites.ids[index]), "reason": reason, "gain": gain, "cost": cost}
                for (index, gain, cost), reason in zip(picks, why, strict=True)
            ]
            self._facts.apply([self.ledger.append("ask", {"sites": sites, "total": total})])
        return self.pending.tail(len(sites)).reset_index(drop=True).drop(columns=["round", "asked"])

    def tell(
        self,
        results: pd.DataFrame,
        source: str = "The table of results",
        exact_ids: bool = False,
    ) -> Told:
        """Take in results, all of a table or, if there is a fault in it, none.

        Args:
            results: Columns of id, examined, positive and perhaps date; rows without numbers are
                passed over. The numbers of a site replace earlier ones. Sites that are not in the
                list bring position and covariates.
            source: Name of the table, for messages.
            exact_ids: Whether ids are written as in the list. By default those of which a
                spreadsheet makes one number, such as 7 and 007 or 1.1 and 1.10, are told apart by
                position; without positions they are refused.

        Raises:
            UsageError: A fault of the table, named by row and column, or another process is writing
                to the folder.
        """
        with self.ledger.writing() as new:
            self._facts.apply(new)
            known = self._facts.results
            table = ResultsTable.of(results, self.settings, self._sites, known, source, exact_ids)
            told = table.compared(self._sites, known, self._facts.pending)
            records = table.records(self._sites, known)
            if records:
                warnings = [f"{source}: {text}" for text in table.warnings]
                values = {"results": records, "warnings": warnings}
                self._facts.apply([self.ledger.append("tell", values)])
        return told

    def untold(self, form: pd.DataFrame, source: str) -> list[str]:
        """Return the sites of a table of results whose numbers were never told.

        Numbers that came along with the sites, and those that were corrected or withdrawn, were.

        Raises:
            UsageError: A fault of the table, named by row and column.
        """
        table = ResultsTable.of(form, self.settings, self._sites, self._facts.results, source)
        told = set(self._sites.earlier.items())
        for event in self.ledger.events:
            for row in event.values["results"] if event.verb == "tell" else ():
                told.add((row["id"], Counts(row["positive"], row["examined"])))
        return [site for site, counts in table.counts.items() if (site, counts) not in told]

    def withdraw(self, ids: str | int | Iterable[str | int], ask_again: bool = False) -> None:
        """Give up pending sites, or take results back that were wrong.

        Args:
            ids: Of sites that are pending or have a result; a text or a number is one site's.
            ask_again: Whether the sites may be asked for again. A result that is told later is
                taken in either way.

        Raises:
            UsageError: A site is neither pending nor has a result, or another process is writing to
                the folder.
        """
        names = list(dict.fromkeys(as_ids(ids)))
        with self.ledger.writing() as new:
            self._facts.apply(new)
            known = {**self._facts.pending, **self._facts.results}
            strange = next((site for site in names if site not in known), None)
            if strange is not None:
                raise UsageError(
                    f"Site {strange!r} is not pending and has no result: nothing to withdraw."
                )
            if names:
                values = {"ids": names, "ask_again": ask_again}
                self._facts.apply([self.ledger.append("withdraw", values)])

    def _choice(self) -> Choice:
        return Choice(self._sites, self._facts, self.settings, self.criterion, self._trusted)

    # --- what is known ---------------------------------------------------------------------------

    @property
    def sites(self) -> pd.DataFrame:
        """Listed sites: id, longitude, latitude, covariates (filled in), cost, reachable."""
        columns = (*self.settings.coordinates.names, *self._sites.covariates)
        table = pd.DataFrame(self._sites.X.numpy(), columns=list(columns))
        table.insert(0, "id", self._sites.ids)
        return table.assign(cost=self._sites.costs.numpy(), reachable=self._sites.reachable)

    @property
    def pending(self) -> pd.DataFrame:
        """Sites asked for: id, longitude, latitude, round, asked (time), reason, gain, cost.

        The gain is a share of the uncertainty expected to be left, before the round, once all
        sites of earlier rounds are surveyed; 0.01 is 1 %.
        """
        requests = self._facts.pending
        table = self._placed(list(requests))
        for name in ("round", "time", "reason", "gain", "cost"):
            table[name] = [getattr(request, name) for request in requests.values()]
        return table.rename(columns={"time": "asked"}).astype({"gain": float, "cost": float})

    @property
    def results(self) -> pd.DataFrame:
        """Results in the order of the list, then results of other sites by id.

        Columns: id, longitude, latitude, examined, positive, told (time, empty for those that came
        along with the sites), date (of the survey, in ISO 8601, empty if not told), asked (whether
        the site was), corrected (how many times), listed.
        """
        ids = self._facts.surveyed
        rows = [self._facts.results[site] for site in ids]
        table = self._placed(ids)
        table["examined"] = [row.counts.examined for row in rows]
        table["positive"] = [row.counts.positive for row in rows]
        table["told"] = [row.time for row in rows]
        table["date"] = [row.date for row in rows]
        table["asked"] = [row.asked for row in rows]
        table["corrected"] = [row.corrected for row in rows]
        table["listed"] = self._sites.positions(ids) >= 0
        return table

    def _placed(self, ids: Sequence[str]) -> pd.DataFrame:
        """Begin a table of sites with ids and positions."""
        places = self._facts.inputs(ids)[:, :2].numpy()
        positions = dict(zip(self.settings.coordinates.names, places.T, strict=True))
        return pd.DataFrame({"id": list(ids), **positions}).astype({"id": object})

    @property
    def fingerprint(self) -> str:
        """SHA-256 of sites and results, regardless of the order in which results came."""
        return self._facts.fingerprint

    @property
    def labels(self) -> pd.DataFrame:
        """Other columns of the list, such as name and district, as given, indexed by id.

        All but ids, positions, covariates, cost, reachable and counts.
        """
        labels = self.table.rename(columns=str)[list(self._sites.labels)]
        return labels.set_axis(pd.Index(self._sites.ids, name="id"))

    def others(self, ids: str | int | Iterable[str | int]) -> pd.DataFrame:
        """Return all columns of the list but ids, positions and counts, of some sites.

        Returns:
            A row an id, in their order, as given; empty cells for sites outside the list.
        """
        kept = self.table.rename(columns=str).drop(columns=list(self._sites.columns.values()))
        positions = self._sites.positions(as_ids(ids))
        rows = kept.iloc[positions.clip(0)].astype(object)
        rows[positions < 0] = ""
        return rows.reset_index(drop=True)

    @property
    def columns(self) -> dict[str, str]:
        """Columns of the list by their meaning: id, positions, examined, positive, cost, ..."""
        named = {role: getattr(self.settings, role) for role in ("cost", "stratum", "reachable")}
        known = {role: column for role, column in named.items() if column is not None}
        return {**self._sites.columns, **known}

    def status(self) -> SurveyStatus:
        """Return how far the survey is, without building a model."""
        facts, events = self._facts, self.ledger.events
        counts = [one.counts for one in facts.results.values()]
        listed = int((self._sites.positions(list(facts.results)) >= 0).sum())
        return SurveyStatus(
            sites=len(self._sites),
            surveyed=listed,
            outside=len(counts) - listed,
            pending=len(facts.pending),
            given_up=len(facts.given_up),
            rounds=facts.rounds,
            examined=sum(count.examined for count in counts),
            positive=sum(count.positive for count in counts),
            last=events[-1].time if events else "",
            notes=self.notes,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Texts for the coordinator: what looks odd in the tables of sites and results."""
        doubts = (text for _, texts in self._facts.doubts for text in texts)
        return (*self._sites.notes, *doubts, *self.ledger.notes)

    # --- model -----------------------------------------------------------------------------------

    @property
    def model(self) -> StreamingGP:
        """Model of all results, built when they have changed.

        Raises:
            UsageError: There is no result yet.
        """
        if not self._facts.results:
            raise UsageError("There is no result yet to learn from. Tell some first.")
        return self.cache.model(self._facts.fingerprint, lambda: self.fit(*self.observations))

    @property
    def observations(self) -> tuple[Tensor, Tensor]:
        """Inputs, ``n x d``, and positives and examined, ``n x 2``, in the order of results."""
        ids = self._facts.surveyed
        counts = [self._facts.results[site].counts for site in ids]
        rows = [[float(count.positive), float(count.examined)] for count in counts]
        return self.inputs(ids), torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)

    def inputs(self, ids: str | int | Iterable[str | int]) -> Tensor:
        """Return positions and covariates of listed or surveyed sites, without missing values.

        Returns:
            ``n x d``, in the order of the ids.
        """
        return self._facts.inputs(as_ids(ids))

    def fit(self, X: Tensor, Y: Tensor, former: StreamingGP | None = None) -> StreamingGP:
        """Fit a model of this survey to any results, such as all but those to be predicted.

        Args:
            X: Positions and covariates, without missing values, ``n x d``.
            Y: Positives and examined, ``n x 2``.
            former: Model of this survey from whose hyperparameters the fit starts, such as that of
                all results; the default starts afresh, and takes some three times as long.
        """
        chosen = SurveyModelSettings(
            trials=self.settings.trials,
            overdispersion=self.settings.overdispersion,
            units=self.settings.coordinates.mapping_units,
        )
        return survey_model(self._sites.X, X, Y, chosen, former)

    @property
    def trials(self) -> int:
        """Number of people that a site is expected to examine."""
        examined = [one.counts.examined for one in self._facts.results.values()]
        usual = round(sum(examined) / len(examined)) if examined else USUAL_TRIALS
        return self.settings.trials or usual

    def predictions(self) -> pd.DataFrame:
        """Predict prevalence at all sites of the list, then at surveyed sites outside it.

        Returns:
            id, longitude, latitude, prevalence (mean), sd, lower, q25, q75, upper (quantiles of
            95 % and 50 % intervals); with a threshold exceedance (probability of being above) and
            class (above, below, uncertain); examined and positive, NaN where not surveyed, and
            date (of the survey, in ISO 8601), empty where not surveyed or not told.

        Raises:
            UsageError: There is no result yet.
        """
        surveyed = self._facts.surveyed
        positions = self._sites.positions(surveyed)
        outside = [site for site, index in zip(surveyed, positions, strict=True) if index < 0]
        X = torch.cat((self._sites.X, self._facts.inputs(outside)))
        table = pd.DataFrame(X[:, :2].numpy(), columns=list(self.settings.coordinates.names))
        table.insert(0, "id", [*self._sites.ids, *outside])
        predicted = predict_prevalence(self.model, X, self.settings)
        counts = self.results[["id", "examined", "positive", "date"]]
        whole = pd.concat((table, predicted), axis=1).merge(counts, on="id", how="left")
        return whole.fillna({"date": ""})

    def calls(self, predictions: pd.DataFrame | None = None) -> pd.DataFrame:
        """List the sites that are called above, then uncertain ones, then those called below.

        Args:
            predictions: Of :meth:`predictions`; None: computed here.

        Returns:
            Of :func:`~bo_stream.loops.survey.model.calls_table`; empty without a threshold.

        Raises:
            UsageError: There is no result yet.
        """
        if self.settings.threshold is None:
            return pd.DataFrame()
        predicted = self.predictions() if predictions is None else predictions
        return calls_table(predicted, self.labels)

    def stopping(
        self, stop_when: float | None = None, predictions: pd.DataFrame | None = None
    ) -> Stopping:
        """Predict how many more sites the stopping rule needs; see :class:`Stopping`.

        Args:
            stop_when: Expected share of wrong calls to be reached; None: that of the settings.
            predictions: Of :meth:`predictions`; None: what is needed of them is computed here.

        Raises:
            UsageError: There is no result yet, no threshold, or no stopping rule.
        """
        settings, facts = self.settings, self._facts
        if stop_when is not None:
            settings = replace(settings, stop_when=stop_when)  # which checks it
        target, threshold = settings.stop_when, settings.threshold
        if target is None or threshold is None:
            raise UsageError("The survey has no stopping rule: give stop_when, such as 0.05.")
        if predictions is None:
            chances = exceedances(self.model, self._sites.X, threshold)
        else:
            chances = predictions["exceedance"].to_numpy()[: len(self._sites)]
        share = float(chances_of_wrong_calls(chances, settings.cheaper_above).mean())
        barred = {*facts.results, *facts.given_up, *self._sites.ids[~self._sites.reachable]}
        left = len(set(self._sites.ids) - barred)
        return Stopping(target, share, len(facts.results), len(facts.pending), left)

    def forecast(self, rounds: int, q: int) -> pd.DataFrame:
        """Predict how the criterion's total will fall over further rounds of q sites.

        Each round is chosen as if the rounds before it, and all pending sites, were surveyed.

        Returns:
            round (0: now, once the pending sites are surveyed), sites (further ones so far), total
            (of the criterion, expected), cost (so far).

        Raises:
            UsageError: There is no result yet.
        """
        check_whole("rounds", rounds, 1)
        check_whole("q", q, 1)
        return self._choice().forecast(self.model, rounds, q, self.trials)


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
        last: Time of the last verb in UTC, empty if there was none.
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


# --- the folder of a survey -----------------------------------------------------------------------


SITES = "sites.csv"
_MANY_SITES = "sites.parquet"
MANY = 50_000
"""Number of sites from which they are stored as parquet."""


def save_survey(folder: str | Path, survey: Survey) -> None:
    """Begin the folder of a survey, to which each further verb is written before it returns.

    It holds ``sites.csv`` (``sites.parquet`` from 50,000 sites), ``survey.json`` (settings, and the
    format of the list, in which later tables are written),
    ``results.jsonl`` (all that was asked, told and withdrawn; it only grows) and the last model,
    which is built again if it is missing. It is a survey's folder once ``survey.json`` is there,
    which is written last.

    Raises:
        UsageError: The folder holds a survey or a run, or another process is writing to it; the
            survey has a criterion of your own, which a folder cannot store; or its table would be
            read otherwise, or not at all, from there.
        OSError: It cannot be written.
    """
    if survey.criterion is not None:
        raise UsageError(
            f"A folder cannot keep {type(survey.criterion).__name__}(...), which was given as an "
            "object: later rounds would be chosen by another criterion. Name one in the settings "
            "(criterion), or a loss of your own: loss='package.module:function'."
        )
    if "id" in survey.settings.covariates:
        raise UsageError(
            "Column 'id' cannot be a covariate, as tables of a survey have ids in a column of this "
            "name. Rename it."
        )
    folder = Path(folder)
    with hold_new_folder(folder, "Give another folder."):
        if holds_survey(folder):
            raise UsageError(f"{folder} holds a survey already. Give another folder.")
        for kind in (SAMPLING, ASKING, OPTIMIZATION, REPLAY):
            if kind.is_in(folder):
                raise UsageError(f"{folder} holds a run ({kind.name}). Give another folder.")
        ledger = folder / RESULTS
        if ledger.exists() and ledger.stat().st_size:
            raise UsageError(
                f"{folder} holds results of a survey ({RESULTS}) whose {SURVEY.name} is missing. "
                "Restore that file from a copy, or give another folder."
            )
        ledger.unlink(missing_ok=True)  # an empty one of a survey just begun
        table, many = survey.table, len(survey.table) >= MANY
        if survey._sites.id_column is None:
            table = table.copy()
            table.insert(0, "id", survey._sites.ids)
        for name in (SITES, _MANY_SITES):
            (folder / name).unlink(missing_ok=True)
        path = folder / (_MANY_SITES if many else SITES)
        store_sites(path, table, survey._sites, survey.settings)
        survey.ledger.move_to(folder)
        content = {"settings": asdict(survey.settings), "sites": survey._sites.fingerprint}
        content["table_format"] = asdict(survey.table_format)
        SURVEY.save(folder, content, {})
    survey.cache.move_to(folder)


def load_survey(folder: str | Path, trusted: Collection[str] = ()) -> Survey:
    """Go on with the survey of a folder. Nothing is written, and nothing in it is executed.

    A loss that the survey names is imported when sites are chosen, if it is trusted.

    Args:
        folder: Of the survey.
        trusted: Losses ``package.module:function`` that the folder may name.

    Raises:
        UsageError: There is no survey, or its files are damaged or were changed.
    """
    folder = Path(folder)
    with SURVEY.opened(folder) as content:
        settings = SurveySettings(**content["settings"])
        fingerprint = content["sites"]
        written = TableFormat(**content.get("table_format", {}))
    path = next((folder / name for name in (SITES, _MANY_SITES) if (folder / name).exists()), None)
    if path is None:
        raise UsageError(f"{folder} has no {SITES}. Restore it from a copy.")
    ledger, cache = SurveyLedger(folder), ModelCache(folder)
    table = written.given_to(read_table(path))
    survey = Survey(table, settings, str(path), None, ledger, cache, trusted)
    if survey._sites.fingerprint != fingerprint:
        raise UsageError(
            f"{path} is not the table that the survey began with. Restore it from a copy, or start "
            "another survey with it in another folder."
        )
    return survey


def holds_survey(folder: Path) -> bool:
    """Return whether a folder is one of a survey."""
    return SURVEY.is_in(folder)

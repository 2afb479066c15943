"""Replay a survey on the results of an earlier one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from bo_stream.errors import UsageError, check_one_of, check_seed, check_whole
from bo_stream.loops.run import REPLAY, from_record, write_files
from bo_stream.loops.survey.cells import Cells
from bo_stream.loops.survey.choice import check_loss
from bo_stream.loops.survey.columns import given_column
from bo_stream.loops.survey.model import log_scores
from bo_stream.loops.survey.settings import DESIGNS, Design, ReplayPlan, SurveySettings
from bo_stream.loops.survey.sites import SurveySites
from bo_stream.loops.survey.survey import Survey


@dataclass(frozen=True)
class RoundScore:
    """Predictions after a round of a replay, scored at the sites that are not surveyed by then.

    Attributes:
        design: Of the replay.
        seed: Of the first sites and of the random design.
        round: Number of rounds so far; 0: only the first sites.
        surveyed: Number of sites surveyed so far.
        left: Number of the other sites.
        accuracy: Share of these that are called right: above where the threshold is exceeded, else
            below; each site is called by the side that is expected to cost less. NaN without a
            threshold.
        sensitivity: Share of those above that are called above; NaN if none is.
        log_score: Mean log probability of their counts, in nats.
        rmse: Root mean squared error of their prevalence.
        sites: Ids of the sites of this round, in the order of choice.
    """

    design: Design
    seed: int
    round: int
    surveyed: int
    left: int
    accuracy: float
    sensitivity: float
    log_score: float
    rmse: float
    sites: tuple[str, ...]


@dataclass(frozen=True)
class FinishedSurvey:
    """Sites whose results are known, separate from the results.

    Attributes:
        sites: Their table as given, with empty results.
        results: By id: ``examined``, ``positive``, and ``prevalence``, which predictions are
            compared with.
        settings: Of the survey.
        source: Name of the table, for messages.
        notes: Texts for the coordinator.
    """

    sites: pd.DataFrame
    results: pd.DataFrame
    settings: SurveySettings
    source: str
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        table: pd.DataFrame,
        settings: SurveySettings,
        truth: str | None = None,
        source: str = "The table of sites",
    ) -> FinishedSurvey:
        """Take the results out of a table; rows without them are left out.

        Args:
            table: A row a site, with columns examined and positive; see :class:`SurveySettings`
                for the others.
            settings: Of the survey.
            truth: Column of the true prevalence, where it is known; None: the share of positives
                stands for it.
            source: Name of the table, for messages.

        Raises:
            UsageError: A fault of the table, named by row and column; it has no results; or a
                budget pays for no site.
        """
        listed = SurveySites.of(table, settings, source)
        if not listed.earlier:
            raise UsageError(
                f"{source} has no results, of which there is nothing to replay. Expected columns "
                "of people examined and positive, with numbers in the rows that were surveyed."
            )
        there = np.isin(listed.ids.astype(str), list(listed.earlier))
        results = pd.DataFrame(
            {
                "examined": [counts.examined for counts in listed.earlier.values()],
                "positive": [counts.positive for counts in listed.earlier.values()],
            },
            index=pd.Index(listed.ids[there], name="id", dtype=object),
        )
        read = () if truth is None else (truth,)
        cells = Cells(table, source, listed.id_column, numeric=read)
        if truth is None:
            results["prevalence"] = (results["positive"] / results["examined"]).to_numpy()
        else:
            given_column(cells.names, truth, source, "--truth")
            if truth in settings.covariates:
                raise UsageError(
                    f"Column {truth!r} is both the truth and a covariate: a model that is told the "
                    "truth proves nothing. Leave it out of the covariates."
                )
            rates = cells.numbers(truth, "a prevalence between 0 and 1")
            cells.refuse(
                there & np.isnan(rates),
                truth,
                "the true prevalence is missing, but the site has a result.",
            )
            cells.refuse(
                there & ((rates < 0.0) | (rates > 1.0)),
                truth,
                lambda row: (
                    f"expected a prevalence between 0 and 1, got {rates[row]:g}."
                    + (
                        f" From per cent: {rates[row]:g} % is {rates[row] / 100.0:g}."
                        if 1.0 < rates[row] <= 100.0
                        else ""
                    )
                ),
            )
            results["prevalence"] = rates[there]
        counted = [listed.columns[role] for role in ("examined", "positive")]
        emptied = cells.table[there].assign(**dict.fromkeys(counted, np.nan))
        notes = Survey(emptied, settings, source).notes
        if missing := int((~there).sum()):
            without = f"{missing:,} of {len(there):,} sites have no result"
            notes = (f"{without}: they are neither chosen nor scored.", *notes)
        return cls(emptied, results, settings, source, notes)

    def __len__(self) -> int:
        return len(self.results)

    def begin(self) -> Survey:
        """Begin the survey again, without any result."""
        return Survey(self.sites, self.settings, self.source)

    def shuffled(self, seed: int) -> list[str]:
        """Return all ids in random order."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).tolist()
        return [self.results.index[row] for row in order]

    def told(self, ids: Sequence[str]) -> pd.DataFrame:
        """Return the results of sites, as a survey is told them."""
        return self.results.loc[list(ids), ["examined", "positive"]].reset_index()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of sites and results."""
        tables = self.sites.to_csv() + self.results.to_csv()
        return hashlib.sha256(tables.encode()).hexdigest()


def replay_survey(
    finished: FinishedSurvey, plan: ReplayPlan, design: Design, seed: int
) -> Iterator[RoundScore]:
    """Survey the sites again, round by round, by a design.

    The first sites are drawn at random, the same ones for both designs. Then the adaptive design
    asks a :class:`Survey` for each round, as a client does, and the random one goes on with the
    order that the first sites were drawn in, regardless of the settings' constraints. The survey
    is told the results of the sites of each round, and of no others. Costs a fit of the model and
    a choice a round.

    Args:
        finished: The survey.
        plan: Number of first sites, rounds, and sites of a round.
        design: ``adaptive`` or ``random``.
        seed: Of the order in which sites are drawn.

    Returns:
        Scores after the first sites and after each round, which are played as they are drawn. A
        round may have fewer than q sites where the settings allow no more, and raises a
        ``UsageError`` where they allow none.

    Raises:
        UsageError: The design is unknown, or there are too few sites.
    """
    check_one_of("design", design, DESIGNS)
    seed = check_seed(seed)
    plan.check(len(finished), finished.source)
    return _rounds(finished, plan, design, seed)


def _rounds(
    finished: FinishedSurvey, plan: ReplayPlan, design: Design, seed: int
) -> Iterator[RoundScore]:
    survey, order = finished.begin(), finished.shuffled(seed)
    sites, order = order[: plan.start], order[plan.start :]
    for number in range(plan.rounds + 1):
        if number and design == "adaptive":
            sites = survey.ask(plan.q)["id"].tolist()
        elif number:
            sites, order = order[: plan.q], order[plan.q :]
        survey.tell(finished.told(sites), exact_ids=True)
        predicted = survey.predictions().set_index("id")
        left = predicted[predicted["examined"].isna()]
        results = finished.results.loc[left.index]
        rate = results["prevalence"].to_numpy()
        accuracy = sensitivity = np.nan
        threshold, cut = finished.settings.threshold, finished.settings.cheaper_above
        if threshold is not None:
            above, called = rate > threshold, left["exceedance"].to_numpy() >= cut
            accuracy = float((called == above).mean())
            sensitivity = float(called[above].mean()) if above.any() else np.nan
        Y = torch.tensor(results[["positive", "examined"]].to_numpy().tolist(), dtype=torch.float64)
        errors = left["prevalence"].to_numpy() - rate
        yield RoundScore(
            design=design,
            seed=seed,
            round=number,
            surveyed=len(predicted) - len(left),
            left=len(left),
            accuracy=accuracy,
            sensitivity=sensitivity,
            log_score=float(log_scores(survey.model, survey.inputs(left.index), Y).mean()),
            rmse=float(np.sqrt(np.square(errors).mean())),
            sites=tuple(sites),
        )


# --- replays of a finished survey by several designs and seeds, in one folder --------------------


_SCORES, _PICKS = "replay.csv", "picks.csv"

MEASURES = ("accuracy", "sensitivity", "log_score", "rmse")


class ReplayRun:
    """Replays of a finished survey; a pair of design and seed is stored once it is finished.

    Attributes:
        finished_survey: The survey.
        plan: Sizes of each replay.
        designs: To be compared; each seed's begin with the same sites.
        seeds: Number of seeds, from 0.
        truth: Column of the true prevalence, if it was named.
        scores: So far, in the order of playing.
        ended: Why a design and seed ended before the last round, by both.
        seconds: Time spent, over all parts of the run.
        steps: Number of scores at the end.
    """

    def __init__(
        self,
        finished_survey: FinishedSurvey,
        plan: ReplayPlan,
        designs: Sequence[Design],
        seeds: int,
        truth: str | None = None,
        scores: Sequence[RoundScore] = (),
        ended: Mapping[tuple[Design, int], str] | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Begin, or go on after the pairs that are finished.

        Raises:
            UsageError: There are too few sites, or no seeds.
        """
        check_whole("seeds", seeds, 1)
        plan.check(len(finished_survey), finished_survey.source)
        self.finished_survey, self.plan, self.truth = finished_survey, plan, truth
        self.designs, self.seeds, self.seconds = tuple(designs), seeds, seconds
        self._pairs = [(design, seed) for seed in range(seeds) for design in self.designs]
        self.steps = len(self._pairs) * (plan.rounds + 1)
        self.ended = dict(ended or {})
        self.scores = list(scores)
        self.scores = [one for one in scores if self._is_done(one.design, one.seed)]

    @classmethod
    def resume(
        cls,
        folder: Path,
        table: pd.DataFrame | Callable[[SurveySettings], pd.DataFrame],
        source: str,
        seeds: int | None,
        trusted: Collection[str] = (),
    ) -> ReplayRun:
        """Go on with the run of :meth:`save`.

        Args:
            folder: Of the run.
            table: Of the sites with their results, which the run began with; or what reads it by
                the settings.
            source: Name of the table, for messages.
            seeds: New number of seeds, not below the previous one; None: the previous one.
            trusted: Losses ``package.module:function`` that the folder may name.

        Raises:
            UsageError: There is no run, or a damaged one, one of another table or version, or its
                loss is not trusted.
        """
        with REPLAY.opened(folder) as content:
            settings = SurveySettings(**content["settings"])
            plan = ReplayPlan(**content["plan"])
            truth, fingerprint = content["truth"], content["sites"]
            designs, previous = content["designs"], int(content["seeds"])
            scores = [from_record(RoundScore, each) for each in content["scores"]]
            ended = {(design, int(seed)): text for design, seed, text in content["ended"]}
            seconds = float(content["seconds"])
        check_loss(settings, trusted)
        read = table(settings) if callable(table) else table
        finished = FinishedSurvey.of(read, settings, truth, source)
        if finished.fingerprint != fingerprint:
            raise UsageError(
                f"{source} is not the table that the replay in {folder} began with. Give that one, "
                "or start again in another folder."
            )
        if seeds is not None and seeds < previous:
            raise UsageError(
                f"The replay has {previous:,} seeds: expected seeds of at least that, got "
                f"{seeds:,}."
            )
        return cls(finished, plan, designs, seeds or previous, truth, scores, ended, seconds)

    def save(self, folder: Path) -> None:
        """Write the scores and the choices so far as tables, and what :meth:`resume` needs."""
        rows = [
            (score.design, score.seed, score.round, site)
            for score in self.scores
            for site in score.sites
        ]
        picks = pd.DataFrame(rows, columns=["design", "seed", "round", "id"])
        tables = {_SCORES: self.table, _PICKS: picks}
        written = {
            name: table.to_csv(index=False, lineterminator="\n").encode()
            for name, table in tables.items()
        }
        write_files(folder, written)
        content = {
            "settings": asdict(self.finished_survey.settings),
            "plan": asdict(self.plan),
            "truth": self.truth,
            "sites": self.finished_survey.fingerprint,
            "designs": self.designs,
            "seeds": self.seeds,
            "scores": [asdict(score) for score in self.scores],
            "ended": [[*pair, text] for pair, text in self.ended.items()],
            "seconds": self.seconds,
        }
        REPLAY.save(folder, content, {})

    # --- steps ------------------------------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """Number of scores so far."""
        return len(self.scores)

    @property
    def finished(self) -> bool:
        """Whether all designs and seeds are."""
        return all(self._is_done(*pair) for pair in self._pairs)

    def run(self) -> Iterator[RoundScore]:
        """Play the pairs of design and seed that are left; a score a round."""
        started = time.monotonic() - self.seconds
        for design, seed in self._pairs:
            if self._is_done(design, seed):
                continue
            try:
                for score in replay_survey(self.finished_survey, self.plan, design, seed):
                    self.scores.append(score)
                    self.seconds = time.monotonic() - started
                    yield score
            except UsageError as error:  # the settings allow no further site
                self.ended[design, seed] = str(error)

    def _is_done(self, design: Design, seed: int) -> bool:
        """Return whether a pair is complete."""
        rounds = sum((one.design, one.seed) == (design, seed) for one in self.scores)
        return rounds > self.plan.rounds or (design, seed) in self.ended

    # --- results ----------------------------------------------------------------------------------

    @property
    def notes(self) -> tuple[str, ...]:
        """Texts for the coordinator: about the table, and why a design ended early."""
        early = (
            f"The {design} design, seed {seed}, ended early. {text}"
            for (design, seed), text in self.ended.items()
        )
        return (*self.finished_survey.notes, *early)

    @property
    def table(self) -> pd.DataFrame:
        """Scores, a row a round: see :class:`RoundScore`; no calls where there is no threshold."""
        rows = pd.DataFrame([asdict(score) for score in self.scores], columns=_COLUMNS)
        without = self.finished_survey.settings.threshold is None
        return rows.drop(columns=["accuracy", "sensitivity"]) if without else rows


_COLUMNS = ("design", "seed", "round", "surveyed", "left", *MEASURES)


def mean_curves(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Average the scores of a run over its seeds.

    Args:
        table: Of :attr:`ReplayRun.table`.

    Returns:
        By ``design`` and ``round``: the means of the other columns but ``seed``, and the standard
        errors of these means, NaN of one seed.
    """
    curves = table.drop(columns="seed").groupby(["design", "round"], sort=False)
    return curves.mean(), curves.sem()


def sites_needed(means: pd.DataFrame) -> tuple[str, float, float, float] | None:
    """Compare how many sites the designs need: the adaptive one for the random one's last score.

    Args:
        means: Of :func:`mean_curves`, without their errors.

    Returns:
        The measure (``accuracy``, or without a threshold ``rmse``), its value at the end of the
        random design, the sites that took it, and the sites after which the adaptive design was
        first as good, NaN if it never was. None unless there are both designs.
    """
    if not {"adaptive", "random"} <= set(means.index.get_level_values("design")):
        return None
    measure, sign = ("accuracy", 1.0) if "accuracy" in means else ("rmse", -1.0)
    last, adaptive = means.loc["random"].iloc[-1], means.loc["adaptive"]
    reached = adaptive[sign * adaptive[measure] >= sign * last[measure]]
    needed = float(reached["surveyed"].iloc[0]) if len(reached) else np.nan
    return measure, float(last[measure]), float(last["surveyed"]), needed

"""Replays of a finished survey by several designs and seeds, kept in one folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from bo_stream.errors import UsageError, check_whole
from bo_stream.loops.results import write_files, write_picture
from bo_stream.loops.run import REPLAY, from_record
from bo_stream.loops.survey.charts import draw_replay
from bo_stream.loops.survey.replay import FinishedSurvey, RoundScore, replay_survey
from bo_stream.loops.survey.replay_plan import Design, ReplayPlan
from bo_stream.loops.survey.settings import SurveySettings

SCORES, PICKS, PICTURE = "replay.csv", "picks.csv", "replay.png"

MEASURES = ("accuracy", "sensitivity", "log_score", "rmse")


class ReplayRun:
    """Replays of a finished survey, of which a pair of design and seed is kept once it is finished.

    Attributes:
        finished_survey: The survey.
        plan: Sizes of each replay.
        designs: To be compared; each seed's begin with the same sites.
        seeds: Number of seeds, from 0.
        truth: Column of the true prevalence, if it was named.
        scores: So far, in the order of playing.
        ended: Why a design and seed ended before the last round, by both.
        seconds: Time spent, over all parts of the run.
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
    ) -> ReplayRun:
        """Go on with the run of :meth:`save`.

        Args:
            folder: Of the run.
            table: Of the sites with their results, which the run began with; or what reads it by
                the settings.
            source: Name of the table, for messages.
            seeds: New number of seeds, not below the former; None: that one.

        Raises:
            UsageError: There is no run, or a damaged one, one of another table or version.
        """
        with REPLAY.opened(folder) as content:
            settings = SurveySettings(**content["settings"])
            plan = ReplayPlan(**content["plan"])
            truth, fingerprint = content["truth"], content["sites"]
            designs, former = content["designs"], int(content["seeds"])
            scores = [from_record(RoundScore, each) for each in content["scores"]]
            ended = {(design, int(seed)): text for design, seed, text in content["ended"]}
            seconds = float(content["seconds"])
        read = table(settings) if callable(table) else table
        finished = FinishedSurvey.of(read, settings, truth, source)
        if finished.fingerprint != fingerprint:
            raise UsageError(
                f"{source} is not the table that the replay in {folder} began with. Give that one, "
                "or start anew in another folder."
            )
        if seeds is not None and seeds < former:
            raise UsageError(
                f"The replay has {former:,} seeds: expected seeds of at least that, got {seeds:,}."
            )
        return cls(finished, plan, designs, seeds or former, truth, scores, ended, seconds)

    def save(self, folder: Path) -> None:
        """Write the scores and the choices so far as tables, and what :meth:`resume` needs."""
        write_files(folder, {SCORES: _as_csv(self.table), PICKS: _as_csv(self._picks())})
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

    def draw(self, folder: Path) -> None:
        """Write the picture."""
        write_picture(folder / PICTURE, lambda: draw_replay(self.table))

    # --- steps ------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of scores at the end."""
        return len(self.designs) * self.seeds * (self.plan.rounds + 1)

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

    @property
    def _pairs(self) -> list[tuple[Design, int]]:
        return [(design, seed) for seed in range(self.seeds) for design in self.designs]

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

    def _picks(self) -> pd.DataFrame:
        rows = [
            (score.design, score.seed, score.round, site)
            for score in self.scores
            for site in score.sites
        ]
        return pd.DataFrame(rows, columns=["design", "seed", "round", "id"])


_COLUMNS = ("design", "seed", "round", "surveyed", "left", *MEASURES)


def _as_csv(table: pd.DataFrame) -> bytes:
    return table.to_csv(index=False, lineterminator="\n").encode()


def mean_curves(table: pd.DataFrame) -> pd.DataFrame:
    """Average the scores of a run over its seeds.

    Args:
        table: Of :attr:`ReplayRun.table`.

    Returns:
        By ``design`` and ``round``: the means of the other columns but ``seed``.
    """
    return table.drop(columns="seed").groupby(["design", "round"], sort=False).mean()


def standard_errors(table: pd.DataFrame) -> pd.DataFrame:
    """Compute the standard errors of those means over seeds, NaN of one seed."""
    return table.drop(columns="seed").groupby(["design", "round"], sort=False).sem()


def sites_needed(means: pd.DataFrame) -> tuple[str, float, float, float] | None:
    """Compare how many sites the designs need: those of the adaptive one for the random one's end.

    Args:
        means: Of :func:`mean_curves`.

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

"""Work of ``bo-stream survey replay``: begin or resume replays, run them, compare the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import typer
from rich.table import Table

from bo_stream.cli import running
from bo_stream.cli.app import OUT, escape
from bo_stream.cli.surveying import parse_settings, say_columns
from bo_stream.errors import UsageError
from bo_stream.loops.run import run_with_checkpoints
from bo_stream.loops.survey.choice import grouped_by_position
from bo_stream.loops.survey.findings import goal_in_words
from bo_stream.loops.survey.model import per_cent
from bo_stream.loops.survey.replay import (
    MEASURES,
    FinishedSurvey,
    ReplayRun,
    mean_curves,
    sites_needed,
    standard_errors,
)
from bo_stream.loops.survey.settings import DESIGNS, SEEDS, ReplayPlan, SurveySettings
from bo_stream.loops.survey.survey import holds_survey
from bo_stream.loops.survey.tables import read_table

_HEADINGS = {
    "accuracy": "called right, %",
    "sensitivity": "of those above, %",
    "log_score": "log score, nats",
    "rmse": "RMSE",
}
_SHARES = ("accuracy", "sensitivity")


def run(
    ctx: typer.Context,
    sites: Path,
    settings: dict[str, Any],
    sizes: Mapping[str, int],
    compare: str | None,
    seeds: int | None,
    truth: str | None,
    out: Path | None,
    resume: bool,
    group: bool = False,
) -> None:
    """Carry out the command with its options; ``ctx`` tells which of them were given."""

    def table(chosen: SurveySettings) -> pd.DataFrame:
        read = read_table(sites)
        if not group:
            return read
        grouped, said = grouped_by_position(read, chosen, str(sites))
        for text in said:
            OUT.print(escape(text), soft_wrap=True)
        return grouped

    def begin() -> ReplayRun:
        if compare not in (None, "random"):
            raise UsageError(f"Expected --compare random, got {compare!r}.")
        if out is not None and holds_survey(out):
            raise UsageError(f"{out} holds a survey. Give another folder.")
        plan, chosen = ReplayPlan(**sizes), SurveySettings(**settings)
        finished = FinishedSurvey.of(table(chosen), chosen, truth, str(sites))
        designs = DESIGNS if compare else DESIGNS[:1]
        return ReplayRun(finished, plan, designs, SEEDS if seeds is None else seeds, truth)

    def go_on(folder: Path) -> ReplayRun:
        former = ReplayRun.resume(folder, table, str(sites), seeds)
        given = {**settings, **sizes, "truth": truth, "compare": compare}
        running.check_unchanged(ctx, _options(former), {**given, "quota": settings["quotas"]})
        return former

    with running.reported_problems() as caught:
        parse_settings(settings)
        with running.campaign_in_folder(out, resume, begin, go_on) as (replays, folder):
            _run_and_report(replays, folder, sites, caught)


def _options(former: ReplayRun) -> dict[str, Any]:
    """Return the values of the options that a run began with."""
    settings = asdict(former.finished_survey.settings)
    other = "random" if "random" in former.designs else None
    others = {"truth": former.truth, "compare": other, "quota": settings["quotas"]}
    return {**settings, **asdict(former.plan), **others}


def _run_and_report(replays: ReplayRun, folder: Path, sites: Path, caught: running.Caught) -> None:
    _announce(replays, folder)
    steps = partial(run_with_checkpoints, replays.run(), partial(replays.save, folder))
    stopped = running.run_with_bar(
        replays, replays.steps, partial(_last_score, replays), steps, "Stopping after this round"
    )
    replays.draw(folder)
    for note in replays.notes:
        OUT.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if replays.scores:
        OUT.print(_final_table(replays.table))
    if replays.finished:
        _compare(replays.table)
    files = "replay.csv, picks.csv, replay.png and replay.json"
    running.show_end(folder, files, caught, [], stopped, ["survey", "replay", str(sites)])


def _announce(replays: ReplayRun, folder: Path) -> None:
    finished, plan = replays.finished_survey, replays.plan
    say_columns(finished.begin(), replays.truth)
    OUT.print(
        f"{escape(finished.source)}: {len(finished):,} sites with results, to find "
        f"{goal_in_words(finished.settings)}. {plan.start:,} first sites, then {plan.rounds:,} "
        f"rounds of {plan.q:,}; {' and '.join(replays.designs)}, {replays.seeds:,} times each; "
        f"results in {escape(str(folder))}.",
        soft_wrap=True,
    )
    if replays.steps_done:
        kept = len({(score.design, score.seed) for score in replays.scores})
        OUT.print(f"Going on after {kept:,} finished replays.")


def _last_score(replays: ReplayRun) -> str:
    """Return the last score as text."""
    if not replays.scores:
        return "learning from the first sites"
    last = replays.scores[-1]
    value = f"RMSE {last.rmse:.3f}"
    if not math.isnan(last.accuracy):
        value = f"{per_cent(last.accuracy)} called right"
    return f"{last.design}, seed {last.seed}, {last.surveyed:,} surveyed: {value}"


def _final_table(scores: pd.DataFrame) -> Table:
    """Show mean scores after the first sites and at the end of each design, with their errors."""
    means, errors = mean_curves(scores), standard_errors(scores)
    measures = [measure for measure in MEASURES if measure in means]
    table = Table(title="Scores at the sites that are not surveyed", title_justify="left")
    for heading in ("design", "surveyed", *(_HEADINGS[measure] for measure in measures)):
        table.add_column(heading, justify="left" if heading == "design" else "right")
    designs = list(scores["design"].unique())
    ends = [("first sites", designs[0], 0), *((design, design, -1) for design in designs)]
    for name, design, row in ends:
        mean, error = means.loc[design].iloc[row], errors.loc[design].iloc[row]
        cells = (_cell(measure, mean[measure], error[measure]) for measure in measures)
        table.add_row(name, f"{mean['surveyed']:,.0f}", *cells)
    return table


def _cell(measure: str, mean: float, error: float) -> str:
    if math.isnan(mean):
        return "none"
    scale, digits = (100.0, 1) if measure in _SHARES else (1.0, 3)
    spread = "" if math.isnan(error) else f" ± {scale * error:.{digits}f}"
    return f"{scale * mean:.{digits}f}{spread}"


def _compare(scores: pd.DataFrame) -> None:
    """Say how many sites the adaptive design needs to be as good as the random one at its end."""
    means = mean_curves(scores)
    found = sites_needed(means)
    if found is None:
        return
    measure, value, taken, needed = found
    last = _cell(measure, value, math.nan)
    text = f"an RMSE of {last}" if measure == "rmse" else f"{last} % called right"
    reached = f"the adaptive design had that after {needed:,.0f}: {taken - needed:,.0f} fewer."
    if math.isnan(needed):
        reached = "the adaptive design did not reach that."
    elif needed == means["surveyed"].min():
        reached = f"the first {needed:,.0f} sites had that, before there was anything to choose."
    OUT.print(f"Random sites came to {text} after {taken:,.0f} surveyed; {reached}", soft_wrap=True)

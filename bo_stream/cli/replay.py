"""The command ``bo-stream survey replay``: begin or resume replays, run them, compare the scores.

Whatever loads torch or pandas is imported in the functions: the help pages do without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bo_stream.cli import running
from bo_stream.cli.running import OUT, escape, option, say, with_survey_settings
from bo_stream.cli.survey import (
    Group,
    SurveyCommand,
    check_used,
    commands,
    parse_settings,
    say_columns,
)
from bo_stream.errors import UsageError
from bo_stream.loops.survey.settings import DESIGNS, SEEDS, ReplayPlan, SurveySettings

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

    from bo_stream.loops.survey.replay import ReplayRun

_HEADINGS = {
    "accuracy": "called right, %",
    "sensitivity": "of those above, %",
    "log_score": "log score, nats",
    "rmse": "RMSE",
}
_SHARES = ("accuracy", "sensitivity")


@commands.command(cls=SurveyCommand)
@with_survey_settings
def replay(
    ctx: typer.Context,
    sites: Annotated[
        Path,
        typer.Argument(
            metavar="SITES",
            show_default=False,
            help="Table of the sites of a finished survey, .csv, .xlsx or .parquet, with their "
            "results in columns examined and positive.",
        ),
    ],
    start: Annotated[
        int, option("Replay", "Sites drawn at random to begin with.", "--start")
    ] = ReplayPlan.start,
    q: Annotated[int, option("Replay", "Sites of a round.", "--batch", "-q")] = ReplayPlan.q,
    rounds: Annotated[int, option("Replay", "Rounds after the first sites.")] = ReplayPlan.rounds,
    compare: Annotated[
        str | None,
        option(
            "Replay", "Draw sites at random beside it, whatever the constraints.", metavar="random"
        ),
    ] = None,
    group: Group = False,
    seeds: Annotated[
        int | None,
        option("Replay", f"Replays of each design, with other first sites ({SEEDS})."),
    ] = None,
    truth: Annotated[
        str | None,
        option(
            "Replay",
            "True prevalence, if it is known (the share of positives stands for it).",
            metavar="NAME",
        ),
    ] = None,
    out: running.Out = None,
    resume: Annotated[
        bool,
        option(
            "Files",
            "Go on with the replays in --out: finished ones are kept; --seeds may ask for more.",
            "--resume",
        ),
    ] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Replay a finished survey: would it have needed fewer villages?

    Begins with some villages at random, chooses the others round by round as `bo-stream survey
    next` does, looks their results up, and scores what it says of all villages that it has not
    surveyed by then.

    Writes replay.csv (scores), picks.csv (villages of each round), replay.png and replay.json.
    Ctrl-C stops after the round at hand; `--resume` does the unfinished replays again.

    - `bo-stream survey replay last.csv --threshold 0.1 --compare random --out old`
    - `bo-stream survey replay last.csv --out old --resume --seeds 9`
    """
    from bo_stream.loops.survey.replay import FinishedSurvey, ReplayRun
    from bo_stream.loops.survey.results import grouped_by_position
    from bo_stream.loops.survey.tables import read_table

    sizes = {"start": start, "q": q, "rounds": rounds}

    def table(chosen: SurveySettings) -> pd.DataFrame:
        read = read_table(sites)
        if not group:
            return read
        grouped, said = grouped_by_position(read, chosen, str(sites))
        for text in said:
            say(text)
        return grouped

    def begin() -> ReplayRun:
        if compare not in (None, "random"):
            raise UsageError(f"Expected --compare random, got {compare!r}.")
        plan, chosen = ReplayPlan(**sizes), SurveySettings(**settings)
        check_used(chosen)
        finished = FinishedSurvey.of(table(chosen), chosen, truth, str(sites))
        designs = DESIGNS if compare else DESIGNS[:1]
        return ReplayRun(finished, plan, designs, SEEDS if seeds is None else seeds, truth)

    def go_on(folder: Path) -> ReplayRun:
        trusted = [settings["loss"]] if settings["loss"] else []
        replays = ReplayRun.resume(folder, table, str(sites), seeds, trusted)
        began = asdict(replays.finished_survey.settings)
        other = "random" if "random" in replays.designs else None
        previous = {**began, **asdict(replays.plan), "truth": replays.truth, "compare": other}
        given = {**settings, **sizes, "truth": truth, "compare": compare}
        running.check_unchanged(ctx, previous, given)
        return replays

    with running.reported_problems() as caught:
        parse_settings(settings)
        with running.campaign_in_folder(out, resume, begin, go_on) as (replays, folder):
            again = ["survey", "replay", str(sites), *(["--group"] if group else [])]
            if loss := replays.finished_survey.settings.loss:  # files run nothing
                again += ["--loss", loss]
            _run_and_report(replays, folder, again, caught)


def _run_and_report(
    replays: ReplayRun, folder: Path, again: Sequence[str], caught: running.Caught
) -> None:
    from bo_stream.loops.run import run_with_checkpoints, write_picture
    from bo_stream.loops.survey.findings import goal_in_words
    from bo_stream.loops.survey.maps import draw_replay

    finished, plan = replays.finished_survey, replays.plan
    say_columns(finished.begin(), replays.truth)
    say(
        f"{finished.source}: {len(finished):,} sites with results, to find "
        f"{goal_in_words(finished.settings)}. {plan.start:,} first sites, then {plan.rounds:,} "
        f"rounds of {plan.q:,}; {' and '.join(replays.designs)}, {replays.seeds:,} times each; "
        f"results in {folder}."
    )
    if replays.steps_done:
        done = len({(score.design, score.seed) for score in replays.scores})
        OUT.print(f"Going on after {done:,} finished replays.")
    steps = partial(run_with_checkpoints, replays.run(), partial(replays.save, folder))
    stopped = running.run_with_bar(
        replays, replays.steps, partial(_last_score, replays), steps, "Stopping after this round"
    )
    write_picture(folder / "replay.png", lambda: draw_replay(replays.table))
    for note in replays.notes:
        OUT.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    if replays.scores:
        OUT.print(_final_table(replays.table))
    if replays.finished:
        _compare(replays.table)
    files = "replay.csv, picks.csv, replay.png and replay.json"
    running.show_end(folder, files, caught, [], stopped, again)


def _last_score(replays: ReplayRun) -> str:
    """Return the last score as text."""
    from bo_stream.loops.survey.model import per_cent

    if not replays.scores:
        return "learning from the first sites"
    last = replays.scores[-1]
    value = f"RMSE {last.rmse:.3f}"
    if not math.isnan(last.accuracy):
        value = f"{per_cent(last.accuracy)} called right"
    return f"{last.design}, seed {last.seed}, {last.surveyed:,} surveyed: {value}"


def _final_table(scores: pd.DataFrame) -> Table:
    """Show mean scores after the first sites and at the end of each design, with their errors."""
    from rich.table import Table

    from bo_stream.loops.survey.replay import MEASURES, mean_curves

    means, errors = mean_curves(scores)
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
    from bo_stream.loops.survey.replay import mean_curves, sites_needed

    means, _ = mean_curves(scores)
    result = sites_needed(means)
    if result is None:
        return
    measure, value, taken, needed = result
    last = _cell(measure, value, math.nan)
    text = f"an RMSE of {last}" if measure == "rmse" else f"{last} % called right"
    reached = f"the adaptive design had that after {needed:,.0f}: {taken - needed:,.0f} fewer."
    if math.isnan(needed):
        reached = "the adaptive design did not reach that."
    elif needed == means["surveyed"].min():
        reached = f"the first {needed:,.0f} sites had that, before there was anything to choose."
    say(f"Random sites came to {text} after {taken:,.0f} surveyed; {reached}")

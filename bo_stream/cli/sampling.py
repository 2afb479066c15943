"""Work of ``bo-stream sample``: begin or resume a campaign, run it, and show the scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from bo_stream.cli import running
from bo_stream.cli.app import OUT, escape
from bo_stream.cli.options import parse_settings
from bo_stream.errors import UsageError
from bo_stream.loops.results import Score
from bo_stream.loops.run import run_with_checkpoints
from bo_stream.loops.sampling.campaign import Campaign
from bo_stream.loops.sampling.results import write_results
from bo_stream.loops.sampling.settings import STRATEGIES, Settings, Strategy, strategy_name


def run(
    ctx: typer.Context,
    options: dict[str, Any],
    data: Path | None,
    x: list[str] | None,
    y: str | None,
    compare: str | None,
    out: Path | None,
    resume: bool,
) -> None:
    """Carry out the command with its options; ``ctx`` tells which of them were given."""

    def begin() -> Campaign:
        if data is None and (x or y):
            raise UsageError("--x and --y name columns of DATA: give DATA, before --x.")
        if compare not in (None, "random"):
            raise UsageError(f"Expected --compare random, got {compare!r}.")
        strategies = STRATEGIES if compare else STRATEGIES[:1]
        return Campaign.begin(data, x, y, Settings(**options), strategies)

    def go_on(folder: Path) -> Campaign:
        campaign = Campaign.resume(folder, data, options.pop("steps"))
        settings, origin = asdict(campaign.main.settings), campaign.origin
        other = "random" if "random" in campaign.loops else None
        former = {**settings, "x": origin.x, "y": origin.y, "compare": other}
        given = {**options, "x": tuple(x or ()), "y": y, "compare": compare}
        running.check_unchanged(ctx, former, given)
        return campaign

    with running.reported_problems() as caught:
        options["model_options"] = parse_settings(options["model_options"])
        with running.campaign_in_folder(out, resume, begin, go_on) as (campaign, folder):
            _run_and_report(campaign, folder, caught)


def _run_and_report(campaign: Campaign, folder: Path, caught: running.Caught) -> None:
    _announce(campaign, folder)
    steps = partial(run_with_checkpoints, campaign.run(), partial(campaign.save, folder))
    total = campaign.main.settings.steps
    stopped = running.run_with_bar(campaign, total, partial(_last_errors, campaign), steps)
    finals, means, trust = write_results(campaign, folder, running.notes(caught))
    OUT.print(_final_table(finals, means, campaign))
    _show_outliers(campaign)
    running.show_alarms(trust)
    logs = [loop.model.numerical_log for loop in campaign.begun.values()]
    files = "picks.csv, curve.csv, map.png, curve.png, trust.png, trust.json and run.json"
    running.show_end(folder, files, caught, logs, stopped, ["sample"])


def _announce(campaign: Campaign, folder: Path) -> None:
    data, settings = campaign.data, campaign.main.settings
    if campaign.origin.path is None:
        OUT.print("No DATA given: sampling a simulated prevalence map.")
    OUT.print(
        f"{escape(data.source)}: {len(data.y):,} sites, target {escape(data.target)}. "
        f"{settings.steps:,} choices of {settings.q} from {settings.pool:,} sites, scored on "
        f"{settings.test:,} others; results in {escape(str(folder))}.",
        soft_wrap=True,
    )
    if campaign.steps_done:
        OUT.print(f"Going on after step {campaign.steps_done:,}.")


def _last_errors(campaign: Campaign) -> str:
    """Return the last error of each strategy as text."""
    parts = [
        f"{'RMSE' if name != 'random' else 'random'} {loop.curve[-1].rmse_sd:.3f} sd"
        if loop.curve[-1].wrong is None
        else f"{'wrong calls' if name != 'random' else 'random'} {100 * loop.curve[-1].wrong:.1f} %"
        for name, loop in campaign.begun.items()
    ]
    return ", ".join(parts) or "learning the first hyperparameters"


def _final_table(
    finals: Mapping[Strategy, Score], means: Mapping[Strategy, Score], campaign: Campaign
) -> Table:
    """Return a table of two lines a strategy: at the end, and the mean over the run."""
    table = Table(title=f"Held-out error after {campaign.seconds:.0f} s", title_justify="left")
    threshold, goal = campaign.main.settings.threshold, campaign.main.settings.goal
    calls = () if threshold is None else ("wrong calls",)
    errors = ("RMSE", "RMSE / sd", "MAE", "NLL", "95 % coverage")
    for heading in ("strategy", "sites", *calls, *errors):
        first = heading == "strategy"
        table.add_column(heading, justify="left" if first else "right", no_wrap=first)
    for name, final in finals.items():
        lines = ((strategy_name(name, goal), f"{final.observations:,}", final),)
        for label, observations, score in (*lines, ("", "mean", means[name])):
            wrong = () if score.wrong is None else (f"{100 * score.wrong:.1f} %",)
            table.add_row(
                label,
                observations,
                *wrong,
                f"{score.rmse:.4g}",
                f"{score.rmse_sd:.3f}",
                f"{score.mae:.4g}",
                f"{score.nll:.3f}",
                f"{100 * score.coverage:.1f} %",
            )
    return table


def _show_outliers(campaign: Campaign) -> None:
    goal = campaign.main.settings.goal
    for name, loop in campaign.begun.items():
        rows = loop.outlying_rows()
        if rows:
            OUT.print(
                f"Left out as outliers by {strategy_name(name, goal)} (--outliers 0 keeps them): "
                f"rows {', '.join(map(str, rows))} of the data.",
                soft_wrap=True,
            )

"""What the command shows: a first line, a progress bar, warnings, a last table."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from bo_stream.cli.app import ERR, OUT
from bo_stream.loops.sampling.campaign import Campaign
from bo_stream.loops.sampling.loop import Score, Step
from bo_stream.loops.sampling.settings import STRATEGY_NAMES, Strategy
from bo_stream.models.numerical_log import NumericalLog
from bo_stream.models.wiski.resolution import GridResolutionWarning


def notes(caught: list[warnings.WarningMessage]) -> list[str]:
    """The last warning of each kind."""
    return list({(note.category, note.lineno): _note(note) for note in caught}.values())


def _note(warning: warnings.WarningMessage) -> str:
    hint = " Here: --grid." if issubclass(warning.category, GridResolutionWarning) else ""
    return " ".join(str(warning.message).split()) + hint


def announce(campaign: Campaign, folder: Path) -> None:
    """Say what will be done."""
    data, settings = campaign.data, campaign.main.settings
    if campaign.origin.path is None:
        OUT.print("No DATA given: sampling a simulated prevalence map.")
    OUT.print(
        f"{escape(data.source)}: {len(data.y):,} sites, target {escape(data.target)}. "
        f"{settings.steps:,} choices of {settings.q} from {settings.pool:,} sites, scored on "
        f"{settings.test:,} others; results in {escape(str(folder))}.",
        soft_wrap=True,
    )
    if campaign.main.steps_done:
        OUT.print(f"Going on after step {campaign.main.steps_done:,}.")


def progress_bar(field: str) -> Progress:
    """A bar over steps with what a task's field of this name says."""
    return Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn(f"{{task.fields[{field}]}}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=ERR,
    )


def show_step(progress: Progress, task: TaskID, campaign: Campaign, step: Step) -> None:
    """Move the bar on by a step."""
    progress.update(task, completed=campaign.main.steps_done)
    if step.score is not None:
        progress.update(task, error=current_errors(campaign))


def current_errors(campaign: Campaign) -> str:
    """The last error of each strategy."""
    parts = [
        f"{'RMSE' if name != 'random' else 'random'} {loop.state.curve[-1].rmse_sd:.3f} sd"
        for name, loop in campaign.loops.items()
        if loop.state.curve
    ]
    return ", ".join(parts) or "learning the first hyperparameters"


def say_stopping(progress: Progress) -> None:
    """Answer a first Ctrl-C."""
    progress.console.print("Stopping after this step; Ctrl-C again to stop at once.")


def final_table(finals: Mapping[Strategy, Score], campaign: Campaign) -> Table:
    """The last scores."""
    table = Table(title=f"Held-out error after {campaign.seconds:.0f} s", title_justify="left")
    for heading in ("strategy", "observations", "RMSE", "RMSE / sd", "NLL", "95 % coverage"):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for name, score in finals.items():
        table.add_row(
            STRATEGY_NAMES[name],
            f"{score.observations:,}",
            f"{score.rmse:.4g}",
            f"{score.rmse_sd:.3f}",
            f"{score.nll:.3f}",
            f"{100 * score.coverage:.1f} %",
        )
    return table


def show_outliers(campaign: Campaign) -> None:
    """Say which sites the models are without, if any."""
    for name, loop in campaign.loops.items():
        rows = loop.outlying_rows()
        if rows:
            OUT.print(
                f"Left out as outliers by {STRATEGY_NAMES[name]} (--outliers 0 keeps them): rows "
                f"{', '.join(map(str, rows))} of the data.",
                soft_wrap=True,
            )


def show_numerical_record(logs: Iterable[NumericalLog]) -> None:
    """Say in a line which jitters and fallbacks a run's models used, if any."""
    events = [str(event) for log in logs for event in log]
    if events:
        OUT.print(escape(f"Numerical record: {'; '.join(events)}."), soft_wrap=True)


def resume_command(folder: Path) -> str:
    """What to type to go on with a run."""
    return f"bo-stream sample --out {shlex.quote(str(folder))} --resume"

"""What the options of ``bo-stream sample`` mean for a campaign."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from bo_stream.cli.app import ERR, OUT, STOPPED, one_line_errors
from bo_stream.cli.display import (
    announce,
    current_errors,
    final_table,
    notes,
    progress_bar,
    resume_command,
    say_stopping,
    show_numerical_record,
    show_outliers,
    show_step,
)
from bo_stream.cli.options import (
    as_recorded,
    check_new_folder,
    folder_to_resume,
    new_folder,
    parse_settings,
    was_said,
)
from bo_stream.loops.errors import UsageError
from bo_stream.loops.sampling.campaign import Campaign
from bo_stream.loops.sampling.results import write_results
from bo_stream.loops.sampling.settings import Settings, Strategy
from bo_stream.loops.sitting import StopRequest, sit


def run(
    ctx: typer.Context,
    options: dict[str, Any],
    data: Path | None,
    x: list[str] | None,
    y: str | None,
    compare: str | None,
    *,
    model_set: list[str] | None,
    out: Path | None,
    resume: bool,
) -> None:
    """Begin or resume a campaign, and see it through.

    Args:
        ctx: Knows which options were said.
        options: Of the settings.
        data: File of the map; None: a simulated one.
        x: Names of the input columns.
        y: Name of the target column.
        compare: ``random`` or None.
        model_set: Texts ``name=value``.
        out: Folder.
        resume: Whether the folder holds the run.
    """
    with (
        one_line_errors(),
        warnings.catch_warnings(record=True) as caught,
        ExitStack() as held,
    ):
        warnings.simplefilter("default")
        options["model_options"] = parse_settings(model_set)
        if resume:
            folder = held.enter_context(folder_to_resume(out))
            campaign = Campaign.resume(folder, data, options["steps"])
            _check_unchanged(campaign, _given(ctx, options, x, y, compare))
        else:
            _check_names_have_data(data, x, y)
            check_new_folder(out)
            campaign = Campaign.begin(data, x, y, Settings(**options), _strategies(compare))
            folder = held.enter_context(new_folder(out))
        _sit_and_report(campaign, folder, caught)


def _strategies(compare: str | None) -> tuple[Strategy, ...]:
    if compare not in (None, "random"):
        raise UsageError(f"Expected --compare random, got {compare!r}.")
    return ("nipv",) if compare is None else ("nipv", "random")


def _check_names_have_data(data: Path | None, x: list[str] | None, y: str | None) -> None:
    if data is None and (x or y):
        raise UsageError("--x and --y name columns of DATA: give DATA, before --x.")


def _given(
    ctx: typer.Context,
    options: Mapping[str, object],
    x: list[str] | None,
    y: str | None,
    compare: str | None,
) -> dict[str, object]:
    """What was said on the command line, steps aside: setting to value."""
    named = {"batch": "q", "model_set": "model_options"}
    said = {named.get(name, name) for name in ctx.params if was_said(ctx, name)}
    every = {**options, "x": tuple(x or ()), "y": y, "compare": compare}
    return {name: value for name, value in every.items() if name in said - {"steps"}}


def _check_unchanged(campaign: Campaign, given: Mapping[str, object]) -> None:
    former: dict[str, object] = {
        **campaign.main.settings.as_record(),
        "x": campaign.origin.x,
        "y": campaign.origin.y,
        "compare": "random" if "random" in campaign.loops else None,
    }
    for name, value in given.items():
        if as_recorded(name, value, former) != former[name]:
            named = {"q": "batch", "model_options": "set"}
            option = named.get(name, name).replace("_", "-")
            raise UsageError(
                f"The run began with --{option} {former[name]}, got {value}. A run goes on with "
                f"its own settings: leave out --{option}, or start anew in another folder."
            )


def _sit_and_report(
    campaign: Campaign, folder: Path, caught: list[warnings.WarningMessage]
) -> None:
    announce(campaign, folder)
    stopped = _sit(campaign, folder)
    finals = write_results(campaign, folder, notes(caught))
    for note in notes(caught):
        ERR.print(f"[yellow]warning:[/] {escape(note)}", soft_wrap=True)
    OUT.print(final_table(finals, campaign))
    show_outliers(campaign)
    show_numerical_record(loop.state.model.numerical_log for loop in campaign.loops.values())
    place = f"[bold]{escape(str(folder))}[/]"
    OUT.print(f"picks.csv, curve.csv, map.png, curve.png and run.json are in {place}.")
    if stopped:
        OUT.print(f"Stopped. To go on: [bold]{escape(resume_command(folder))}[/]", soft_wrap=True)
        raise typer.Exit(STOPPED)


def _sit(campaign: Campaign, folder: Path) -> bool:
    """Run with a progress bar.

    Returns:
        Whether the user stopped it before its end.
    """
    with progress_bar("error") as progress, StopRequest(lambda: say_stopping(progress)) as stop:
        task = progress.add_task(
            "", total=campaign.main.settings.steps, completed=campaign.main.steps_done, error=""
        )
        progress.update(task, error=current_errors(campaign))
        sit(campaign, folder, stop, lambda _, step: show_step(progress, task, campaign, step))
    return stop.made and not campaign.finished

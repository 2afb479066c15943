"""What the options of ``bo-stream optimize`` mean for a campaign."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.progress import (
    Progress,
    TaskID,
)
from rich.table import Table

from bo_stream.cli.app import ERR, OUT, STOPPED, one_line_errors
from bo_stream.cli.display import notes, progress_bar, say_stopping, show_numerical_record
from bo_stream.cli.options import (
    as_recorded,
    check_new_folder,
    folder_to_resume,
    new_folder,
    parse_settings,
    was_said,
)
from bo_stream.loops.errors import UsageError
from bo_stream.loops.optimization import OptimizationSettings, Optimizer
from bo_stream.loops.optimization.campaign import OptimizationCampaign, Plan
from bo_stream.loops.optimization.evaluation import PointEvaluator
from bo_stream.loops.optimization.objectives import find_objective
from bo_stream.loops.optimization.results import counts, sit_optimizing, write_optimization
from bo_stream.loops.optimization.store import named_functions
from bo_stream.loops.optimization.trials import HISTORIES, History
from bo_stream.loops.sitting import StopRequest


def announce(campaign: OptimizationCampaign, folder: Path) -> None:
    """Say what will be done."""
    settings = campaign.settings
    verb = "Maximising" if settings.maximize else "Minimising"
    box = " x ".join(f"[{low:g}, {high:g}]" for low, high in settings.bounds)
    OUT.print(
        escape(
            f"{verb} {campaign.objective.name} over {box}: {settings.initial} initial points, then "
            f"{campaign.plan.total} steps of {settings.q} by {settings.acquisition}; results in "
            f"{folder}."
        ),
        soft_wrap=True,
    )
    if campaign.steps:
        OUT.print(f"Going on after step {campaign.steps_done}.")


def show(progress: Progress, task: TaskID, campaign: OptimizationCampaign) -> None:
    """Move the bar on."""
    progress.update(task, completed=campaign.steps_done, best=best_so_far(campaign))


def best_so_far(campaign: OptimizationCampaign) -> str:
    """The best value of the last step, and how many trials failed."""
    count = counts(campaign)
    failed = f", {count['failed']} failed" if count["failed"] else ""
    last = campaign.steps[-1] if campaign.steps else None
    if last is None or last.best is None:
        return f"{count['told']} initial points{failed}"
    value = campaign.optimizer.ledger[last.best].Y if last.mean is None else last.mean
    return f"best {value:.5g}{failed}"


def best_table(campaign: OptimizationCampaign) -> Table:
    """Where to go now, and how good it is there."""
    table = Table()
    table.add_column("what")
    table.add_column("value", justify="right")
    last = campaign.steps[-1] if campaign.steps else None
    if last is not None and last.best is not None:
        trial = campaign.optimizer.ledger[last.best]
        rows: dict[str, float | None] = {f"x{i}": x for i, x in enumerate(trial.X)}
        rows |= {"posterior mean": last.mean, "outcome": trial.Y, "noiseless": last.noiseless}
        rows |= {"known minimum": campaign.objective.optimum}
        for name, value in rows.items():
            if value is not None:
                table.add_row(name, f"{value:.6g}")
    return table


def summary(campaign: OptimizationCampaign) -> str:
    """How much was done."""
    count = counts(campaign)
    others = ", ".join(f"{n} {status}" for status, n in count.items() if n and status != "told")
    return f"{count['told']} outcomes{f' ({others})' if others else ''} in {campaign.seconds:.0f} s"


def resume_command(folder: Path, campaign: OptimizationCampaign) -> str:
    """What to type to go on with a run; functions of one's own are named again."""
    function, acquisition = campaign.objective.name, campaign.settings.acquisition
    named = [function] if ":" in function else []
    chosen = ["--acquisition", acquisition] if ":" in acquisition else []
    return shlex.join(["bo-stream", "optimize", *named, *chosen, "--out", str(folder), "--resume"])


_WORDS = {"q": "--batch", "function": "FUNCTION", "model_options": "--set"}
"""Of settings whose option has another name."""


def run(
    ctx: typer.Context,
    options: dict[str, Any],
    *,
    target: Mapping[str, Any],
    plan: Mapping[str, Any],
    model_set: list[str] | None,
    out: Path | None,
    history: str,
    resume: bool,
) -> None:
    """Begin or resume a campaign, and see it through.

    Args:
        ctx: Knows which options were said.
        options: Of the settings.
        target: Arguments of ``find_objective``.
        plan: Those of ``Plan``; these may change when a run goes on.
        model_set: Texts ``name=value``.
        out: Folder.
        history: Kind of the history file.
        resume: Whether the folder holds the run.
    """
    with (
        one_line_errors(),
        warnings.catch_warnings(record=True) as caught,
        ExitStack() as held,
    ):
        warnings.simplefilter("default")
        kind = _history_kind(history)
        options["model_options"] = parse_settings(model_set)
        if resume:
            folder = held.enter_context(folder_to_resume(out))
            campaign = _resumed(ctx, folder, options, target, plan)
        else:
            check_new_folder(out)
            campaign = _begin(target, options, Plan(**plan))
            folder = held.enter_context(new_folder(out))
        with campaign.evaluator() as evaluating:
            _sit_and_report(campaign, folder, evaluating, kind, caught)


def _resumed(
    ctx: typer.Context,
    folder: Path,
    options: Mapping[str, Any],
    target: Mapping[str, Any],
    plan: Mapping[str, Any],
) -> OptimizationCampaign:
    changes = {name: v for name, v in plan.items() if was_said(ctx, _OPTIONS.get(name, name))}
    trusted = _trusted(folder, (target["function"], options["acquisition"]))
    campaign = OptimizationCampaign.resume(folder, trusted, **changes)
    _check_unchanged(campaign, _said(ctx, {**options, **target}))
    return campaign


_OPTIONS = {"total": "steps", "q": "batch", "model_options": "model_set"}
"""Of settings and of a plan's attributes, the options of another name."""


def _history_kind(name: str) -> History:
    for kind in HISTORIES:
        if name == kind:
            return kind
    raise UsageError(f"Expected --history csv or parquet, got {name!r}.")


def _trusted(folder: Path, given: Collection[str | None]) -> list[str]:
    """Of the functions that a run names, those given on the command line or agreed to now."""
    return [name for name in named_functions(folder) if name in given or _agreed(folder, name)]


def at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def _agreed(folder: Path, name: str) -> bool:
    question = f"The run in {folder} names {name}. Import and call it?"
    return at_terminal() and typer.confirm(question, err=True)


def _begin(
    target: Mapping[str, Any], options: Mapping[str, Any], plan: Plan
) -> OptimizationCampaign:
    if target["function"] is None:
        raise UsageError("Say which FUNCTION to optimise, as in: bo-stream optimize Branin.")
    objective = find_objective(**target, seed=options["seed"])
    settings = OptimizationSettings(bounds=objective.bounds, **options)
    return OptimizationCampaign(objective, Optimizer(settings), plan)


def _said(ctx: typer.Context, values: Mapping[str, object]) -> dict[str, object]:
    return {n: v for n, v in values.items() if was_said(ctx, _OPTIONS.get(n, n))}


def _check_unchanged(campaign: OptimizationCampaign, given: Mapping[str, object]) -> None:
    former = {**campaign.settings.as_record(), **campaign.objective.as_record()}
    for name, value in given.items():
        if _plain(as_recorded(name, value, former)) != _plain(former[name]):
            word = _WORDS.get(name, f"--{name}")
            raise UsageError(
                f"The run began with {word} {former[name]}, got {value}. A run goes on with its "
                f"own settings: leave out {word}, or start anew in another folder."
            )


def _plain(value: object) -> object:
    return value.lower() if isinstance(value, str) and ":" not in value else value


def _sit_and_report(
    campaign: OptimizationCampaign,
    folder: Path,
    evaluating: PointEvaluator,
    kind: History,
    caught: list[warnings.WarningMessage],
) -> None:
    announce(campaign, folder)
    try:
        stopped = _sit(campaign, folder, evaluating)
    finally:
        write_optimization(campaign, folder, notes(caught), kind)
    for note in notes(caught):
        ERR.print(f"[yellow]warning:[/] {escape(note)}", soft_wrap=True)
    OUT.print(f"The best of {summary(campaign)}:")
    OUT.print(best_table(campaign))
    model = campaign.optimizer.surrogate.model
    show_numerical_record([] if model is None else [model.numerical_log])
    OUT.print(f"history.{kind}, trace.png and run.json are in [bold]{escape(str(folder))}[/].")
    if stopped:
        OUT.print(
            f"Stopped. To go on: [bold]{escape(resume_command(folder, campaign))}[/]",
            soft_wrap=True,
        )
        raise typer.Exit(STOPPED)


def _sit(campaign: OptimizationCampaign, folder: Path, evaluating: PointEvaluator) -> bool:
    """Run with a progress bar.

    Returns:
        Whether the user stopped it before its end.
    """
    with progress_bar("best") as progress, StopRequest(lambda: say_stopping(progress)) as stop:
        task = progress.add_task(
            "", total=campaign.plan.total, completed=campaign.steps_done, best=best_so_far(campaign)
        )
        sit_optimizing(campaign, folder, evaluating, stop, lambda _: show(progress, task, campaign))
    return stop.made and not campaign.finished

"""Work of ``bo-stream optimize``: begin or resume a campaign, run it, and show the best point."""

from __future__ import annotations

import sys
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
from bo_stream.loops.optimization import OptimizationSettings, Optimizer
from bo_stream.loops.optimization.campaign import (
    HISTORIES,
    History,
    OptimizationCampaign,
    Plan,
    counts,
    write_optimization,
)
from bo_stream.loops.optimization.objectives import find_objective
from bo_stream.loops.optimization.optimizer import named_functions


def run(
    ctx: typer.Context,
    options: dict[str, Any],
    target: dict[str, Any],
    plan: dict[str, Any],
    history: str,
    out: Path | None,
    resume: bool,
) -> None:
    """Carry out the command with its options; ``ctx`` tells which of them were given.

    ``target`` holds the arguments of ``find_objective``, ``plan`` those of ``Plan``, which may
    change when a run goes on, and ``options`` the settings.
    """

    def begin() -> OptimizationCampaign:
        planned = Plan(**{**plan, "resources": plan["resources"] or {}})
        if target["function"] is None:
            raise UsageError("Say which FUNCTION to optimise, as in: bo-stream optimize Branin.")
        objective = find_objective(**target, seed=options["seed"])
        settings = OptimizationSettings(bounds=objective.bounds, **options)
        return OptimizationCampaign(objective, Optimizer(settings), planned)

    def go_on(folder: Path) -> OptimizationCampaign:
        given = (target["function"], options["acquisition"])
        named = named_functions(folder)
        trusted = [name for name in named if name in given or _agreed(folder, name)]
        campaign = OptimizationCampaign.resume(folder, trusted, **_changes(running.said(ctx, plan)))
        former = {**asdict(campaign.settings), **asdict(campaign.objective)}
        if former["function"].lower() == str(given[0]).lower():
            target["function"] = former["function"]
        running.check_unchanged(ctx, former, {**options, **target})
        return campaign

    with running.reported_problems() as caught:
        if {"executor", "workers"} <= set(running.said(ctx, plan)):
            raise UsageError(
                "--executor says where evaluations run, and how many at a time: leave out "
                "--workers, or --executor."
            )
        if history not in HISTORIES:
            raise UsageError(f"Expected --history csv or parquet, got {history!r}.")
        options["model_options"] = parse_settings(options["model_options"])
        with running.campaign_in_folder(out, resume, begin, go_on) as (campaign, folder):
            _run_and_report(campaign, folder, history, caught)


def _changes(said: dict[str, Any]) -> dict[str, Any]:
    """Return the changes of a plan: what --workers or --synchronous puts an end to is left."""
    left: dict[str, Any] = {"executor": None, "resources": {}} if "workers" in said else {}
    if said.get("asynchronous") is False:
        left |= {"at_once": None, "ahead": None}
    return left | said


def _agreed(folder: Path, name: str) -> bool:
    question = f"The run in {folder} names {name}. Import and call it?"
    return at_terminal() and typer.confirm(question, err=True)


def at_terminal() -> bool:
    """Return whether somebody can be asked."""
    return sys.stdin.isatty()


def _run_and_report(
    campaign: OptimizationCampaign, folder: Path, kind: History, caught: running.Caught
) -> None:
    _announce(campaign, folder)
    total, status = campaign.plan.total, partial(best_so_far, campaign)
    with campaign.evaluator() as evaluating:
        steps = partial(campaign.run_in, folder, evaluating)
        try:
            stopped = running.run_with_bar(campaign, total, status, steps, _stopping(campaign))
        finally:
            trust = write_optimization(campaign, folder, running.notes(caught), kind)
    OUT.print(f"The best of {summary(campaign)}:")
    OUT.print(_best_table(campaign))
    running.show_alarms(trust)
    model = campaign.optimizer.surrogate.model
    logs = [] if model is None else [model.numerical_log]
    files = f"history.{kind}, trace.png, trust.png, trust.json and run.json"
    function, acquisition = campaign.objective.function, campaign.settings.acquisition
    named = [function] if ":" in function else []
    chosen = ["--acquisition", acquisition] if ":" in acquisition else []
    plan = campaign.plan
    place = ["--executor", str(plan.executor)] if plan.names_address else []
    again = ["optimize", *named, *chosen, *place]
    running.show_end(folder, files, caught, logs, stopped, again)


def _stopping(campaign: OptimizationCampaign) -> str:
    if campaign.plan.asynchronous:
        return "Stopping when the evaluations under way have ended"
    return "Stopping after this step"


def _announce(campaign: OptimizationCampaign, folder: Path) -> None:
    settings = campaign.settings
    verb = "Maximising" if settings.maximize else "Minimising"
    box = " x ".join(f"[{low:g}, {high:g}]" for low, high in settings.bounds)
    steps = f"{campaign.plan.total} steps of {settings.q}"
    if campaign.plan.asynchronous:
        steps = f"{campaign.plan.total * settings.q}, each when a worker is free,"
    OUT.print(
        escape(
            f"{verb} {campaign.objective.function} over {box}: {settings.initial} initial points, "
            f"then {steps} by {settings.acquisition}; results in {folder}."
        ),
        soft_wrap=True,
    )
    if campaign.steps:
        OUT.print(f"Going on after step {campaign.steps_done}.")


def best_so_far(campaign: OptimizationCampaign) -> str:
    """Return the best value of the last step and the number of failed trials as text."""
    count = counts(campaign)
    failed = f", {count['failed']} failed" if count["failed"] else ""
    last = campaign.steps[-1] if campaign.steps else None
    if last is None or last.best is None:
        return f"{count['told']} initial points{failed}"
    value = campaign.optimizer.ledger[last.best].Y if last.mean is None else last.mean
    return f"best {value:.5g}{failed}"


def summary(campaign: OptimizationCampaign) -> str:
    """Return the numbers of trials and the time as text."""
    count = counts(campaign)
    others = ", ".join(f"{n} {status}" for status, n in count.items() if n and status != "told")
    return f"{count['told']} outcomes{f' ({others})' if others else ''} in {campaign.seconds:.0f} s"


def _best_table(campaign: OptimizationCampaign) -> Table:
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

"""What ``bo-stream optimize`` shows."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.markup import escape
from rich.progress import (
    Progress,
    TaskID,
)
from rich.table import Table

from bo_stream.cli.consoles import OUT
from bo_stream.loops.optimization.campaign import OptimizationCampaign
from bo_stream.loops.optimization.records import counts


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

"""The command ``bo-stream sample``: begin or resume a campaign, run it, and show the scores.

Whatever loads torch is imported in the functions: the help pages do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bo_stream.cli import running
from bo_stream.cli.running import OUT, app, option, parse_settings, say, spreading
from bo_stream.errors import UsageError
from bo_stream.loops.models import KERNELS
from bo_stream.loops.sampling.settings import STRATEGIES, Settings, Strategy, strategy_name

if TYPE_CHECKING:
    from rich.table import Table

    from bo_stream.loops.run import Score
    from bo_stream.loops.sampling.campaign import Campaign

_DEFAULT = Settings


@app.command(cls=spreading("--x"))
def sample(
    ctx: typer.Context,
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA",
            show_default=False,
            help="Map to sample: .npz (arrays X and y; names in columns and target), .csv, .xlsx "
            "or .parquet. None: a simulated prevalence map.",
        ),
    ] = None,
    x: Annotated[
        list[str] | None, option("Data", "Input columns.", "--x", metavar="NAME...")
    ] = None,
    y: Annotated[str | None, option("Data", "Target column.", "--y", metavar="NAME")] = None,
    pool: Annotated[
        int | None, option("Data", "Sites to choose from (12,000, or all not held out).")
    ] = None,
    test: Annotated[
        int | None,
        option("Data", "Held-out sites, where the error is measured (10,000, at most a quarter)."),
    ] = None,
    q: Annotated[int, option("Sampling", "Sites chosen at a time.", "--batch", "-q")] = _DEFAULT.q,
    steps: Annotated[
        int | None,
        option(
            "Sampling", "Choices to make (500, or as many as the pool allows; 50 without DATA)."
        ),
    ] = None,
    initial: Annotated[int, option("Sampling", "Random sites to start with.")] = _DEFAULT.initial,
    goal: Annotated[
        str,
        option(
            "Sampling",
            "What sites are chosen for: map, the least variance of the values; exceedance, the "
            "fewest sites called on the wrong side of --threshold.",
            metavar="map|exceedance",
        ),
    ] = _DEFAULT.goal,
    threshold: Annotated[
        float | None,
        option("Sampling", "Value that sites are above or below, in the target's units."),
    ] = None,
    compare: Annotated[
        str | None, option("Sampling", "Run random choice beside it.", metavar="random")
    ] = None,
    score_every: Annotated[
        int | None, option("Sampling", "Steps between scores (a 25th of all).")
    ] = None,
    seed: Annotated[
        int, option("Sampling", "Of the split, the first sites and random choice.")
    ] = _DEFAULT.seed,
    model: running.Model = _DEFAULT.model,
    model_options: running.Set = None,
    kernel: Annotated[
        str,
        option(
            "Model",
            f"Kernel: {', '.join(KERNELS)}, or learned, the smoothness of these by marginal "
            "likelihood at refits.",
            metavar="NAME",
        ),
    ] = _DEFAULT.kernel,
    grid: running.Grid = None,
    refit: running.Refit = _DEFAULT.refit,
    outliers: Annotated[
        float | None,
        option(
            "Model",
            "Sites more than so many predictive standard deviations from what all others predict "
            "are left out until a refit takes them in, from 20 sites on and at most one, or one in "
            "a hundred; 0: none (8 in up to four inputs, else 0).",
        ),
    ] = None,
    device: running.Device = _DEFAULT.device,
    dtype: running.Dtype = _DEFAULT.dtype,
    out: running.Out = None,
    resume: running.Resume = False,
) -> None:
    """Choose sites of a map, a few at a time, where they teach the most.

    A Gaussian process starts from a few random sites. Again and again it picks the sites that
    leave the least uncertainty about the held-out ones, or about which of them exceed a threshold,
    looks them up, and learns. Inputs are scaled to the unit cube by their range and the target is
    standardised.

    Counts, positives of people examined, are replayed by `bo-stream survey replay`.

    Writes picks.csv, curve.csv, map.png, curve.png, trust.png (can the model be trusted?), run.json
    and a checkpoint. Ctrl-C stops after the step at hand; `--resume` goes on to the same choices.

    - `bo-stream sample`
    - `bo-stream sample survey.csv --x lon lat --y prevalence --compare random --out run`
    - `bo-stream sample --compare random --goal exceedance --threshold 0.3`
    - `bo-stream sample --out run --resume`
    """
    from bo_stream.loops.sampling.campaign import Campaign

    settings: dict[str, Any] = {
        "q": q, "steps": steps, "pool": pool, "test": test, "initial": initial,
        "kernel": kernel, "grid": grid, "seed": seed, "device": device, "dtype": dtype,
        "refit": refit, "outliers": outliers, "score_every": score_every, "model": model,
        "model_options": model_options, "goal": goal, "threshold": threshold,
    }  # fmt: skip

    def begin() -> Campaign:
        if data is None and (x or y):
            raise UsageError("--x and --y name columns of DATA: give DATA, before --x.")
        if compare not in (None, "random"):
            raise UsageError(f"Expected --compare random, got {compare!r}.")
        strategies = STRATEGIES if compare else STRATEGIES[:1]
        return Campaign.begin(data, x, y, Settings(**settings), strategies)

    def go_on(folder: Path) -> Campaign:
        campaign = Campaign.resume(folder, data, settings.pop("steps"))
        origin, other = campaign.origin, "random" if "random" in campaign.loops else None
        columns = {"x": origin.x, "y": origin.y}
        previous = {**asdict(campaign.main.settings), **columns, "compare": other}
        given = {**settings, "x": tuple(x or ()), "y": y, "compare": compare}
        running.check_unchanged(ctx, previous, given)
        return campaign

    with running.reported_problems() as caught:
        settings["model_options"] = parse_settings(model_options)
        with running.campaign_in_folder(out, resume, begin, go_on) as (campaign, folder):
            _run_and_report(campaign, folder, caught)


def _run_and_report(campaign: Campaign, folder: Path, caught: running.Caught) -> None:
    from bo_stream.loops.run import run_with_checkpoints
    from bo_stream.loops.sampling.results import write_results

    data, settings = campaign.data, campaign.main.settings
    if campaign.origin.path is None:
        OUT.print("No DATA given: sampling a simulated prevalence map.")
    say(
        f"{data.source}: {len(data.y):,} sites, target {data.target}. {settings.steps:,} choices "
        f"of {settings.q} from {settings.pool:,} sites, scored on {settings.test:,} others; "
        f"results in {folder}."
    )
    if campaign.steps_done:
        OUT.print(f"Going on after step {campaign.steps_done:,}.")
    steps = partial(run_with_checkpoints, campaign.run(), partial(campaign.save, folder))
    status = partial(_last_errors, campaign)
    stopped = running.run_with_bar(campaign, settings.steps, status, steps)
    finals, means, trust = write_results(campaign, folder, running.notes(caught))
    OUT.print(_final_table(finals, means, campaign))
    for name, loop in campaign.begun.items():
        rows = loop.outlying_rows()
        if rows:
            say(
                f"Left out as outliers by {strategy_name(name, settings.goal)} (--outliers 0 keeps "
                f"them): rows {', '.join(map(str, rows))} of the data."
            )
    logs = [loop.sampling.model.numerical_log for loop in campaign.begun.values()]
    files = "picks.csv, curve.csv, map.png, curve.png, trust.png, trust.json and run.json"
    running.show_end(folder, files, caught, logs, stopped, ["sample"], trust)


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
    from rich.table import Table

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

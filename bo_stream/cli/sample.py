"""The command ``bo-stream sample``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bo_stream.cli import options
from bo_stream.cli.app import app
from bo_stream.cli.options import option, spreading
from bo_stream.loops.models import KERNELS
from bo_stream.loops.sampling.settings import Settings as _DEFAULT


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
    model: options.Model = _DEFAULT.model,
    model_options: options.Set = None,
    kernel: Annotated[
        str,
        option(
            "Model",
            f"Kernel: {', '.join(KERNELS)}, or learned, the smoothness of these by marginal "
            "likelihood at refits.",
            metavar="NAME",
        ),
    ] = _DEFAULT.kernel,
    grid: options.Grid = None,
    refit: options.Refit = _DEFAULT.refit,
    outliers: Annotated[
        float | None,
        option(
            "Model",
            "Sites more than so many predictive standard deviations from what all others predict "
            "are left out until a refit takes them in; 0: none (8 in up to four inputs, else 0).",
        ),
    ] = None,
    device: options.Device = _DEFAULT.device,
    dtype: options.Dtype = _DEFAULT.dtype,
    out: options.Out = None,
    resume: options.Resume = False,
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
    settings = {
        "q": q, "steps": steps, "pool": pool, "test": test, "initial": initial,
        "kernel": kernel, "grid": grid, "seed": seed, "device": device, "dtype": dtype,
        "refit": refit, "outliers": outliers, "score_every": score_every, "model": model,
        "model_options": model_options, "goal": goal, "threshold": threshold,
    }  # fmt: skip
    from bo_stream.cli.sampling import run  # which imports torch: help does without

    run(ctx, settings, data, x, y, compare, out, resume)

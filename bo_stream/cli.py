"""The command ``bo-stream``: arguments in, progress and tables out; the work is in ``loops``."""

from __future__ import annotations

import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from botorch.exceptions.errors import BotorchError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn
from rich.table import Table
from typer.core import TyperCommand

from bo_stream import __version__
from bo_stream.loops.active_sampling import Step
from bo_stream.loops.campaign import Campaign
from bo_stream.loops.checkpoint import FILE_NAME
from bo_stream.loops.errors import UsageError
from bo_stream.loops.kernels import KERNELS
from bo_stream.loops.results import write_results
from bo_stream.loops.scoring import Score
from bo_stream.loops.settings import Settings, Strategy

BAD_INPUT = 2
STOPPED = 130

_SECONDS_BETWEEN_CHECKPOINTS = 15.0
_DEFAULTS = Settings()
_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)

app = typer.Typer(
    name="bo-stream",
    help="Streaming Gaussian processes: choose where to measure next, at the same cost each time.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        _out.print(f"bo-stream {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Streaming Gaussian processes: choose where to measure next, at the same cost each time."""


class _SpreadNames(TyperCommand):
    """Lets ``--x`` take all names up to the next option: ``--x lon lat --y prevalence``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write ``--x lon lat`` as ``--x lon --x lat``."""
        return super().parse_args(ctx, _spread("--x", args))


def _spread(option: str, args: list[str]) -> list[str]:
    result: list[str] = []
    inside = False
    for arg in args:
        inside = arg == option or (inside and not arg.startswith("-"))
        if inside and arg != option and result[-1] != option:
            result.append(option)
        result.append(arg)
    return result


def _grid(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"expected 72, or 72,60 for two inputs, got {text!r}") from error


@app.command(cls=_SpreadNames)
def sample(
    ctx: typer.Context,
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DATA]",
            help="A map to sample: .npz (arrays X, y; columns and target if named), .csv or .parquet. "
            "Without it, a simulated prevalence map.",
            show_default=False,
        ),
    ] = None,
    x: Annotated[
        list[str] | None,
        typer.Option("--x", metavar="NAME...", help="Input columns: --x lon lat.", rich_help_panel="Data"),
    ] = None,
    y: Annotated[
        str | None,
        typer.Option("--y", metavar="NAME", help="Target column.", rich_help_panel="Data"),
    ] = None,
    pool: Annotated[
        int | None,
        typer.Option(
            help="Sites to choose from. [default: 12,000, or all that are not held out]",
            rich_help_panel="Data",
        ),
    ] = None,
    test: Annotated[
        int | None,
        typer.Option(
            help="Held-out sites: the error is measured there, the uncertainty reduced. "
            "[default: 10,000, at most a quarter]",
            rich_help_panel="Data",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", "-q", help="Sites chosen at a time.", rich_help_panel="Sampling")
    ] = _DEFAULTS.q,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Choices to make. [default: 500, or as many as the pool allows]",
            rich_help_panel="Sampling",
        ),
    ] = None,
    initial: Annotated[
        int, typer.Option(help="Random sites to start with.", rich_help_panel="Sampling")
    ] = _DEFAULTS.initial,
    compare: Annotated[
        str | None,
        typer.Option(metavar="random", help="Run random choice beside it.", rich_help_panel="Sampling"),
    ] = None,
    score_every: Annotated[
        int, typer.Option(help="Steps between scores.", rich_help_panel="Sampling")
    ] = _DEFAULTS.score_every,
    seed: Annotated[
        int, typer.Option(help="Of the split and of random choice.", rich_help_panel="Sampling")
    ] = _DEFAULTS.seed,
    kernel: Annotated[
        str, typer.Option(metavar="|".join(KERNELS), help="Kernel.", rich_help_panel="Model")
    ] = _DEFAULTS.kernel,
    grid: Annotated[
        tuple[int, ...] | None,
        typer.Option(
            parser=_grid,
            metavar="N[,N...]",
            help="Grid nodes per input. [default: by kernel and number of inputs]",
            rich_help_panel="Model",
        ),
    ] = None,
    refit: Annotated[
        float,
        typer.Option(
            help="Learn the hyperparameters anew when the observations have grown by this factor; 0: only "
            "at the start.",
            rich_help_panel="Model",
        ),
    ] = _DEFAULTS.refit,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...", rich_help_panel="Model")
    ] = _DEFAULTS.device,
    dtype: Annotated[
        str, typer.Option(metavar="float64|float32", help="Precision.", rich_help_panel="Model")
    ] = _DEFAULTS.dtype,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the results. [default: the first free of bo-stream-run, bo-stream-run-2, ...]",
            rich_help_panel="Files",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in --out, with its settings; --steps may ask for more.",
            rich_help_panel="Files",
        ),
    ] = False,
) -> None:
    """Choose survey sites, a few at a time, where they teach a map the most.

    A Gaussian process (WISKI) starts from a few random sites of a known map, then again and again picks
    the sites that leave the least uncertainty about the held-out ones, looks them up and learns.
    Inputs are scaled to the unit cube by their range, the target is standardised.

    Writes picks.csv, curve.csv, map.png, curve.png, run.json and a checkpoint. Ctrl-C stops after the
    step at hand; --resume goes on to the same choices.

    Examples:

        bo-stream sample

        bo-stream sample survey.csv --x lon lat --y prevalence --compare random --out run

        bo-stream sample --out run --resume
    """
    settings = {
        "q": batch, "steps": steps, "pool": pool, "test": test, "initial": initial, "kernel": kernel,
        "grid": grid, "seed": seed, "device": device, "dtype": dtype, "refit": refit,
        "score_every": score_every,
    }  # fmt: skip
    with _one_line_errors(), _recorded_warnings() as notes:
        if resume:
            campaign = _resumed(ctx, data, out, settings, x, y, compare)
        else:
            campaign = _begun(data, out, settings, x, y, compare)
        folder = _prepared(out, resume)
        _announce(campaign, folder)
        stopped = _run(campaign, folder)
        finals = write_results(campaign, folder, sorted(notes))
    for note in sorted(notes):
        _err.print(f"warning: {note}", style="yellow", markup=False)
    _report(campaign, finals, folder)
    if stopped:
        _out.print(f"\nStopped at your request. Go on with:\n  {_resume_command(folder)}", markup=False)
        raise typer.Exit(STOPPED)

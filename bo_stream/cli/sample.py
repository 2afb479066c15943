"""The command ``bo-stream sample``: its options, and what they mean for a campaign."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

from bo_stream.cli.app import app
from bo_stream.cli.display import (
    ERR,
    OUT,
    announce,
    current_errors,
    final_table,
    notes,
    progress_bar,
    resume_command,
    say_stopping,
    show_numerical_record,
    show_step,
)
from bo_stream.cli.failures import STOPPED, one_line_errors
from bo_stream.cli.options import (
    DeviceOption,
    DtypeOption,
    GridOption,
    KernelOption,
    ModelOption,
    OutOption,
    RefitOption,
    ResumeOption,
    SetOption,
    as_recorded,
    check_new_folder,
    folder_to_resume,
    new_folder,
    option,
    parse_settings,
    was_said,
)
from bo_stream.loops.campaign import Campaign
from bo_stream.loops.errors import UsageError
from bo_stream.loops.results import write_results
from bo_stream.loops.settings import Settings, Strategy
from bo_stream.loops.sitting import StopRequest, sit

_DEFAULT = Settings()


class SpreadNames(TyperCommand):
    """Lets ``--x`` take all names up to the next option, as in ``--x lon lat --y prevalence``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read ``--x lon lat`` as ``--x lon --x lat``."""
        return super().parse_args(ctx, spread("--x", args))


def spread(option: str, args: list[str]) -> list[str]:
    """Repeat an option before each of its values."""
    result: list[str] = []
    inside = False
    for arg in args:
        inside = arg == option or (inside and not arg.startswith("-"))
        if inside and arg != option and result[-1] != option:
            result.append(option)
        result.append(arg)
    return result


@app.command(cls=SpreadNames)
def sample(
    ctx: typer.Context,
    data: Annotated[
        Path | None,
        typer.Argument(
            metavar="DATA",
            show_default=False,
            help="Map to sample: .npz (arrays X and y; names in columns and target), .csv or "
            ".parquet. None: a simulated prevalence map.",
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
    batch: Annotated[
        int, option("Sampling", "Sites chosen at a time.", "--batch", "-q")
    ] = _DEFAULT.q,
    steps: Annotated[
        int | None,
        option(
            "Sampling", "Choices to make (500, or as many as the pool allows; 150 without DATA)."
        ),
    ] = None,
    initial: Annotated[int, option("Sampling", "Random sites to start with.")] = _DEFAULT.initial,
    compare: Annotated[
        str | None, option("Sampling", "Run random choice beside it.", metavar="random")
    ] = None,
    score_every: Annotated[
        int | None, option("Sampling", "Steps between scores (a 25th of all).")
    ] = None,
    seed: Annotated[
        int, option("Sampling", "Of the split, the first sites and random choice.")
    ] = _DEFAULT.seed,
    model: ModelOption = _DEFAULT.model,
    model_set: SetOption = None,
    kernel: KernelOption = _DEFAULT.kernel,
    grid: GridOption = None,
    refit: RefitOption = _DEFAULT.refit,
    device: DeviceOption = _DEFAULT.device,
    dtype: DtypeOption = _DEFAULT.dtype,
    out: OutOption = None,
    resume: ResumeOption = False,
) -> None:
    """Choose sites of a map, a few at a time, where they teach the most.

    A Gaussian process starts from a few random sites. Again and again it picks the sites that
    leave the least uncertainty about the held-out ones, looks them up, and learns. Inputs are
    scaled to the unit cube by their range and the target is standardised.

    Writes picks.csv, curve.csv, map.png, curve.png, run.json and a checkpoint. Ctrl-C stops after
    the step at hand; `--resume` goes on to the same choices.

    - `bo-stream sample`
    - `bo-stream sample survey.csv --x lon lat --y prevalence --compare random --out run`
    - `bo-stream sample --out run --resume`
    """
    options = {
        "q": batch, "steps": steps, "pool": pool, "test": test, "initial": initial,
        "kernel": kernel, "grid": grid, "seed": seed, "device": device, "dtype": dtype,
        "refit": refit, "score_every": score_every, "model": model,
    }  # fmt: skip
    with (
        one_line_errors(),
        warnings.catch_warnings(record=True) as caught,
        ExitStack() as held,
    ):
        warnings.simplefilter("default")
        options["model_options"] = parse_settings(model_set)
        if resume:
            folder = held.enter_context(folder_to_resume(out))
            campaign = Campaign.resume(folder, data, steps)
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

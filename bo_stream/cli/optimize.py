"""The command ``bo-stream optimize``: its options, and what they mean for a campaign."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from bo_stream.cli.app import app
from bo_stream.cli.display import (
    ERR,
    OUT,
    notes,
    progress_bar,
    say_stopping,
    show_numerical_record,
)
from bo_stream.cli.failures import STOPPED, one_line_errors
from bo_stream.cli.optimize_display import (
    announce,
    best_so_far,
    best_table,
    resume_command,
    show,
    summary,
)
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
from bo_stream.loops.errors import UsageError
from bo_stream.loops.optimization import OptimizationSettings, Optimizer
from bo_stream.loops.optimization.acquisition import ACQUISITIONS
from bo_stream.loops.optimization.campaign import OptimizationCampaign
from bo_stream.loops.optimization.evaluation import PointEvaluator
from bo_stream.loops.optimization.objectives import find_objective
from bo_stream.loops.optimization.records import HISTORIES, History
from bo_stream.loops.optimization.results import sit_optimizing, write_optimization
from bo_stream.loops.optimization.settings import Bounds
from bo_stream.loops.optimization.steps import Plan
from bo_stream.loops.optimization.store import named_functions
from bo_stream.loops.sitting import StopRequest

_DEFAULT = OptimizationSettings(bounds=((0.0, 1.0),))
_STEPS = 30
_PLAN = {"total": "steps", "retries": "retries", "workers": "workers", "timeout": "timeout"}
"""Of a plan's attributes, the options: these may change when a run goes on."""


_WORDS = {"q": "--batch", "function": "FUNCTION", "model_options": "--set"}
"""Of settings whose option has another name."""


def _bounds(text: str) -> Bounds:
    try:
        pairs = [tuple(float(part) for part in pair.split(",")) for pair in text.split()]
        return tuple((low, high) for low, high in pairs)
    except ValueError as error:
        raise typer.BadParameter(
            f"expected low,high of each input, as in '0,1 -5,5', got {text!r}"
        ) from error


@app.command()
def optimize(
    ctx: typer.Context,
    function: Annotated[
        str | None,
        typer.Argument(
            metavar="FUNCTION",
            show_default=False,
            help="One of BoTorch's test functions (Branin, Hartmann, Ackley, ...), or your own as "
            "package.module:function, which takes a list of numbers and returns one.",
        ),
    ] = None,
    dim: Annotated[
        int | None, option("Function", "Inputs of a test function (wiski: at most 4).")
    ] = None,
    noise: Annotated[
        float, option("Function", "Standard deviation of a test function's noise.")
    ] = 0.0,
    bounds: Annotated[
        Any,
        option(
            "Function",
            "Of each input of your own function, as in '0,1 -5,5'.",
            parser=_bounds,
            metavar="LOW,HIGH...",
        ),
    ] = None,
    maximize: Annotated[
        bool, option("Function", "Which value to look for.", "--maximize/--minimize")
    ] = _DEFAULT.maximize,
    workers: Annotated[
        int,
        option(
            "Function",
            "Processes that evaluate it at a time; 0: the command's own, which a function that "
            "crashes or hangs takes down.",
        ),
    ] = 1,
    timeout: Annotated[
        float | None, option("Function", "Seconds after which an evaluation has failed.")
    ] = None,
    retries: Annotated[int, option("Function", "Times that a failed evaluation is repeated.")] = 0,
    batch: Annotated[
        int, option("Search", "Points chosen at a time.", "--batch", "-q")
    ] = _DEFAULT.q,
    steps: Annotated[int, option("Search", "Choices to make after the initial points.")] = _STEPS,
    initial: Annotated[int, option("Search", "Sobol points to start with.")] = _DEFAULT.initial,
    acquisition: Annotated[
        str,
        option(
            "Search",
            f"{', '.join(ACQUISITIONS)}, or a builder of your own as package.module:function.",
            metavar="NAME",
        ),
    ] = _DEFAULT.acquisition,
    beta: Annotated[float, option("Search", "Weight of the spread in qUCB.")] = _DEFAULT.beta,
    seed: Annotated[
        int, option("Search", "Of the Sobol points, the search and the noise.")
    ] = _DEFAULT.seed,
    model: ModelOption = _DEFAULT.model,
    model_set: SetOption = None,
    kernel: KernelOption = _DEFAULT.kernel,
    grid: GridOption = None,
    refit: RefitOption = _DEFAULT.refit,
    device: DeviceOption = _DEFAULT.device,
    dtype: DtypeOption = _DEFAULT.dtype,
    out: OutOption = None,
    history: Annotated[
        str, option("Files", "Kind of the history file.", metavar="csv|parquet")
    ] = "csv",
    resume: ResumeOption = False,
) -> None:
    """Find where a function is smallest (or largest), in few evaluations.

    Starts from Sobol points. Again and again it chooses the points that promise most, has them
    evaluated, maybe by several processes at a time, and learns. An evaluation that raises, hangs,
    dies or returns anything but one finite number is recorded and repeated as asked; the model
    never sees it.

    Writes history.csv (or .parquet), trace.png, run.json and a checkpoint. Ctrl-C stops after the
    step at hand; `--resume` goes on to the same candidates. Nothing in the folder is run then: name
    a function of your own again, or it is asked for.

    - `bo-stream optimize Branin --noise 1 --out run`
    - `bo-stream optimize Hartmann --dim 6 --model osgpr --set max_points=256`
    - `bo-stream optimize mine:cost --bounds '0,1 -5,5' --workers 4 -q 4 --timeout 60 --out run`
    - `bo-stream optimize mine:cost --out run --resume --steps 60`
    """
    options = {
        "maximize": maximize, "q": batch, "initial": initial, "acquisition": acquisition,
        "beta": beta, "seed": seed, "kernel": kernel, "grid": grid, "refit": refit,
        "device": device, "dtype": dtype, "model": model,
    }  # fmt: skip
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
            changes = {name: ctx.params[o] for name, o in _PLAN.items() if was_said(ctx, o)}
            trusted = _trusted(folder, (function, acquisition))
            campaign = OptimizationCampaign.resume(folder, trusted, **changes)
            every = {**options, "function": function, "dim": dim, "noise": noise, "bounds": bounds}
            _check_unchanged(campaign, _said(ctx, every))
        else:
            check_new_folder(out)
            plan = Plan(steps, retries, workers, timeout)
            campaign = _begin(function, dim, noise, bounds, options, plan)
            folder = held.enter_context(new_folder(out))
        with campaign.evaluator() as evaluating:
            _sit_and_report(campaign, folder, evaluating, kind, caught)


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
    function: str | None,
    dim: int | None,
    noise: float,
    bounds: Bounds | None,
    options: Mapping[str, Any],
    plan: Plan,
) -> OptimizationCampaign:
    if function is None:
        raise UsageError("Say which FUNCTION to optimise, as in: bo-stream optimize Branin.")
    objective = find_objective(function, dim, noise, bounds, options["seed"])
    settings = OptimizationSettings(bounds=objective.bounds, **options)
    return OptimizationCampaign(objective, Optimizer(settings), plan)


def _said(ctx: typer.Context, values: Mapping[str, object]) -> dict[str, object]:
    parameters = {"q": "batch", "model_options": "model_set"}
    return {n: v for n, v in values.items() if was_said(ctx, parameters.get(n, n))}


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

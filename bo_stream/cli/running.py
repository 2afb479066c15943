"""Steps that both commands share: folder, progress bar, comparison of settings, and report."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bo_stream.cli.app import ERR, OUT, STOPPED, one_line_errors
from bo_stream.cli.options import DEFAULT_FOLDER
from bo_stream.loops.errors import UsageError
from bo_stream.loops.models import checked_model
from bo_stream.loops.run import OPTIMIZATION, SAMPLING, StopRequest, hold_folder
from bo_stream.models.wiski.resolution import GridResolutionWarning
from bo_stream.warnings import NumericalLog

if TYPE_CHECKING:  # each command imports its own
    from bo_stream.loops.optimization.campaign import OptimizationCampaign
    from bo_stream.loops.sampling.campaign import Campaign

C = TypeVar("C")
Caught: TypeAlias = list[warnings.WarningMessage]

_PARAMETERS = {"q": "batch", "model_options": "model_set", "total": "steps"}
"""Parameters of the commands that have another name than the setting."""

_WORDS = {"q": "--batch", "model_options": "--set", "function": "FUNCTION"}
"""Options that have another name than the setting."""


@contextmanager
def reported_problems() -> Iterator[Caught]:
    """Collect warnings, and turn errors that a user can correct into one line."""
    with one_line_errors(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield caught


@contextmanager
def campaign_in_folder(
    out: Path | None, resume: bool, begin: Callable[[], C], go_on: Callable[[Path], C]
) -> Iterator[tuple[C, Path]]:
    """Make a campaign by ``begin``, or by ``go_on`` from a folder, which is locked in the block.

    Raises:
        UsageError: There is no folder to resume from, a new run is given a file or a folder with a
            run, or another process is at work in it.
    """
    if resume:
        if out is None:
            raise UsageError("Say which run to go on with: --out FOLDER --resume.")
        with _naming(out), hold_folder(out):
            yield go_on(out), out
        return
    _check_new_folder(out)
    campaign = begin()
    folder = _fresh_folder() if out is None else out
    with _naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with hold_folder(folder):
            _check_new_folder(folder)
            yield campaign, folder


def _check_new_folder(out: Path | None) -> None:
    if out is None:
        return
    if any((out / kind.name).exists() for kind in (SAMPLING, OPTIMIZATION)):
        raise UsageError(
            f"{out} holds a run already. Go on with it by --resume, or give another --out."
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is not a folder.")


def _fresh_folder() -> Path:
    names = (DEFAULT_FOLDER + (f"-{i}" if i > 1 else "") for i in count(1))
    return next(Path(name) for name in names if _made(Path(name)))


def _made(folder: Path) -> bool:
    with suppress(FileExistsError):
        folder.mkdir()
        return True
    return False


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Say where a write failed: the system does not always."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(folder)) from error


def said(ctx: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings that were given on the command line."""
    return {name: value for name, value in values.items() if _was_said(ctx, name)}


def _was_said(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(_PARAMETERS.get(name, name))
    return source is not None and source.name == "COMMANDLINE"


def check_unchanged(
    former: Mapping[str, Any],
    given: Mapping[str, Any],
    plain: Callable[[Any], Any] = lambda value: value,
) -> None:
    """Check that the settings given for a resumed run equal the former ones under ``plain``.

    Raises:
        UsageError: One is another, or no option of the run's model.
    """
    for name, value in given.items():
        typed = checked_model(former["model"], value) if name == "model_options" else value
        if plain(typed) != plain(former[name]):
            word = _WORDS.get(name, f"--{name.replace('_', '-')}")
            raise UsageError(
                f"The run began with {word} {former[name]}, got {value}. A run goes on with its "
                f"own settings: leave out {word}, or start anew in another folder."
            )


def run_with_bar(
    campaign: Campaign | OptimizationCampaign,
    total: int | None,
    status: Callable[[], str],
    run: Callable[[StopRequest, Callable[[Any], None]], None],
) -> bool:
    """Run a campaign with a progress bar, and return whether the user stopped it before its end.

    Args:
        campaign: The campaign.
        total: Number of steps in all.
        status: Returns the text beside the bar.
        run: Does the steps, and calls its second argument after each event.
    """
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=ERR,
    )

    def say_stopping() -> None:
        bar.console.print("Stopping after this step; Ctrl-C again to stop at once.")

    with bar, StopRequest(say_stopping) as stop:
        task = bar.add_task("", total=total, completed=campaign.steps_done, status=status())
        run(stop, lambda _: bar.update(task, completed=campaign.steps_done, status=status()))
    return stop.made and not campaign.finished


def notes(caught: Caught) -> list[str]:
    """Return the text of the last warning of each kind."""
    return list({(note.category, note.lineno): _note(note) for note in caught}.values())


def _note(warning: warnings.WarningMessage) -> str:
    hint = " Here: --grid." if issubclass(warning.category, GridResolutionWarning) else ""
    return " ".join(str(warning.message).split()) + hint


def show_warnings(caught: Caught) -> None:
    """Print the warnings."""
    for note in notes(caught):
        ERR.print(f"[yellow]warning:[/] {escape(note)}", soft_wrap=True)


def show_numerical_record(logs: Iterable[NumericalLog]) -> None:
    """Print in one line which jitters and fallbacks a run's models used, if any."""
    events = [str(event) for log in logs for event in log]
    if events:
        OUT.print(escape(f"Numerical record: {'; '.join(events)}."), soft_wrap=True)


def show_end(folder: Path, files: str, stopped: bool, resume_command: Sequence[str]) -> None:
    """Say in which folder the files are and, after a stop, by which command to go on.

    Raises:
        Exit: The run was stopped.
    """
    OUT.print(f"{files} are in [bold]{escape(str(folder))}[/].")
    if stopped:
        command = escape(shlex.join(resume_command))
        OUT.print(f"Stopped. To go on: [bold]{command}[/]", soft_wrap=True)
        raise typer.Exit(STOPPED)

"""Steps that the commands share: errors, folder, comparison of settings, progress and report.

Whatever loads torch is imported in the functions: the help pages do without.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeAlias, TypeVar

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bo_stream.cli.app import ERR, OUT, escape
from bo_stream.cli.options import DEFAULT_FOLDER
from bo_stream.errors import UsageError
from bo_stream.executors.engine import WaitingWarning
from bo_stream.loops.models import checked_model

if TYPE_CHECKING:
    from bo_stream.diagnostics.trust import TrustReport
    from bo_stream.loops.run import StopRequest
    from bo_stream.warnings import NumericalLog

C = TypeVar("C")
Caught: TypeAlias = list[warnings.WarningMessage]

_BAD_INPUT = 2
STOPPED = 130


class Stepwise(Protocol):
    """A campaign that goes on step by step."""

    @property
    def steps_done(self) -> int:
        """Number of steps so far."""

    @property
    def finished(self) -> bool:
        """Whether no step is left."""


@contextmanager
def reported_problems() -> Iterator[Caught]:
    """Collect warnings, and turn errors that a user can correct into one line and an exit code.

    A wait for a cluster, which the user alone can end, is also shown at once.
    """
    from botorch.exceptions.errors import BotorchError

    caught: Caught = []

    def keep(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        caught.append(warnings.WarningMessage(message, category, filename, lineno, file, line))
        if issubclass(category, WaitingWarning):
            _show_warning(str(message))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = keep
            yield caught
    except (UsageError, BotorchError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError):
            place = f"{error.filename}: " if error.filename else ""
            text = f"{place}{error.strerror or error}. What was written before is whole."
        ERR.print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)
        raise typer.Exit(_BAD_INPUT) from error
    except KeyboardInterrupt:
        ERR.print("Interrupted. What was written before is whole.")
        raise typer.Exit(STOPPED) from None


@contextmanager
def campaign_in_folder(
    out: Path | None, resume: bool, begin: Callable[[], C], go_on: Callable[[Path], C]
) -> Iterator[tuple[C, Path]]:
    """Make a campaign by ``begin``, or by ``go_on`` from a folder, which is locked in the block.

    Raises:
        UsageError: There is no folder to resume from, a new run is given a file or a folder with a
            run, or another process is at work in it.
    """
    from bo_stream.loops.run import hold_folder

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
    from bo_stream.loops.run import OPTIMIZATION, REPLAY, SAMPLING

    runs = (SAMPLING, OPTIMIZATION, REPLAY)
    if out is not None and any((out / kind.name).exists() for kind in runs):
        raise UsageError(
            f"{out} holds a run already. Go on with it by --resume, or give another --out."
        )
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is not a folder.")


def _fresh_folder(number: int = 1) -> Path:
    folder = Path(DEFAULT_FOLDER if number == 1 else f"{DEFAULT_FOLDER}-{number}")
    try:
        folder.mkdir()
    except FileExistsError:
        return _fresh_folder(number + 1)
    return folder


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Say where a write failed: the system does not always."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(folder)) from error


def said(ctx: typer.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings that were given on the command line."""
    sources = {name: getattr(ctx.get_parameter_source(name), "name", None) for name in values}
    return {name: values[name] for name, source in sources.items() if source == "COMMANDLINE"}


def check_unchanged(
    ctx: typer.Context, previous: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Check that settings given on the command line for a resumed run equal those it began with.

    Raises:
        UsageError: One is another, or no option of the run's model.
    """
    for name, value in said(ctx, values).items():
        typed = checked_model(previous["model"], value) if name == "model_options" else value
        if typed != previous[name]:
            (parameter,) = (each for each in ctx.command.params if each.name == name)
            is_option = parameter.param_type_name == "option"
            word = parameter.opts[0] if is_option else parameter.metavar
            raise UsageError(
                f"The run began with {word} {previous[name]}, got {value}. A run goes on with its "
                f"own settings: leave out {word}, or start anew in another folder."
            )


def run_with_bar(
    campaign: Stepwise,
    total: int | None,
    status: Callable[[], str],
    run: Callable[[StopRequest, Callable[[Any], None]], None],
    stopping: str = "Stopping after this step",
) -> bool:
    """Run a campaign with a progress bar, and return whether the user stopped it before its end.

    Args:
        campaign: The campaign.
        total: Number of steps in all.
        status: Returns the text after the bar.
        run: Does the steps, and calls its second argument after each event.
        stopping: Text shown at a first Ctrl-C.
    """
    from bo_stream.loops.run import StopRequest

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
        bar.console.print(f"{stopping}; Ctrl-C again to stop at once.")

    with bar, StopRequest(say_stopping) as stop:
        task = bar.add_task("", total=total, completed=campaign.steps_done, status=status())

        def show(_: Any = None) -> None:
            bar.update(task, completed=campaign.steps_done, status=status())

        run(stop, show)
        show()
    return stop.made and not campaign.finished


def _show_warning(text: str) -> None:
    ERR.print(f"[yellow]warning:[/] {escape(text)}", soft_wrap=True)


def notes(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """Return the text of the last warning of each kind."""
    from bo_stream.models.wiski.resolution import GridResolutionWarning

    texts = {}
    for each in caught:
        hint = " Here: --grid." if issubclass(each.category, GridResolutionWarning) else ""
        texts[each.category, each.lineno] = " ".join(str(each.message).split()) + hint
    return list(texts.values())


def show_end(
    folder: Path,
    files: str,
    caught: Caught,
    logs: Iterable[NumericalLog],
    stopped: bool,
    command: Sequence[str],
    trust: TrustReport | None = None,
) -> None:
    """Show how a run went, say where its files are and how to go on.

    Args:
        folder: Folder of the run.
        files: Names of the files, as text.
        caught: Warnings of the run.
        logs: Numerical records of its models.
        stopped: Whether the user stopped it.
        command: Words after ``bo-stream`` that resume it, together with ``--out`` and ``--resume``.
        trust: Report on the model, of which alarms are shown.

    Raises:
        Exit: The run was stopped.
    """
    for alarm in () if trust is None else trust.alarms:
        OUT.print(f"[yellow]trust:[/] {escape(str(alarm))}", soft_wrap=True)
    for note in notes(each for each in caught if not issubclass(each.category, WaitingWarning)):
        _show_warning(note)
    events = [str(event) for log in logs for event in log]
    if events:
        OUT.print(escape(f"Numerical record: {'; '.join(events)}."), soft_wrap=True)
    OUT.print(f"{files} are in [bold]{escape(str(folder))}[/].")
    if stopped:
        again = shlex.join(["bo-stream", *command, "--out", str(folder), "--resume"])
        OUT.print(f"Stopped. To go on: [bold]{escape(again)}[/]", soft_wrap=True)
        raise typer.Exit(STOPPED)
